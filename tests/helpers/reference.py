"""Slow twins of the package's fast paths, written as loops over tokens. Imports nothing from the package."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class NaiveRouting:
    """Sums over live tokens, as plain tensors."""

    counts: list[int]
    prob_sum: Tensor
    z_sum: Tensor
    entropy_sum: float
    tokens: int
    top_sum: float = 0.0
    margin_sum: float = 0.0


def naive_expert(x: Tensor, w_in: Tensor, w_out: Tensor, kind: str) -> Tensor:
    """One token through one expert."""
    hidden = w_in @ x
    if kind == "relu2":
        hidden = hidden * hidden * (hidden > 0)
    elif kind == "swiglu":
        half = hidden.shape[0] // 2
        gate, up = hidden[:half], hidden[half:]
        hidden = gate / (1 + torch.exp(-gate)) * up
    else:
        hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
    return w_out @ hidden


def naive_choice(probs: Tensor, top_k: int) -> list[int]:
    """The ``top_k`` largest, lowest index first among equals."""
    values = probs.tolist()
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:top_k]


def naive_moe(
    x: Tensor,
    weights: Mapping[str, Tensor],
    top_k: int,
    rule: str = "normalised",
    kind: str = "swiglu",
    mask: Tensor | None = None,
) -> tuple[Tensor, NaiveRouting]:
    """A whole MoE layer, token by token, expert by expert.

    ``x`` [T, D]; ``weights`` holds ``router.weight`` [E, D], ``experts.w_in`` [E, F, D], ``experts.w_out``
    [E, D, F] with all experts in global order, and optionally ``shared.w_in`` and ``shared.w_out``.
    """
    router = weights["router.weight"]
    num_experts = router.shape[0]
    routing = NaiveRouting([0] * num_experts, torch.zeros(num_experts, dtype=x.dtype), x.new_zeros(()), 0.0, 0)
    rows = []
    for t in range(x.shape[0]):
        if mask is not None and not mask[t]:
            rows.append(torch.zeros_like(x[t]))
            continue
        logits = router @ x[t]
        probs = torch.exp(logits - logits.max()) / torch.exp(logits - logits.max()).sum()
        chosen = naive_choice(probs, top_k)
        total = sum(probs[e] for e in chosen) if rule == "normalised" else 1.0
        y = torch.zeros_like(x[t])
        for e in chosen:
            y = y + probs[e] / total * naive_expert(x[t], weights["experts.w_in"][e], weights["experts.w_out"][e], kind)
            routing.counts[e] += 1
        if "shared.w_in" in weights:
            y = y + naive_expert(x[t], weights["shared.w_in"], weights["shared.w_out"], kind)
        rows.append(y)
        routing.prob_sum = routing.prob_sum + probs
        routing.z_sum = routing.z_sum + torch.log(torch.exp(logits).sum()) ** 2
        routing.entropy_sum -= sum(p * math.log(p) for p in probs.tolist() if p > 0)
        routing.tokens += 1
    return torch.stack(rows) if rows else x, routing


def naive_sum(parts: list[NaiveRouting]) -> NaiveRouting:
    """The routing of all tokens of several parts together."""
    total = NaiveRouting([0] * len(parts[0].counts), torch.zeros_like(parts[0].prob_sum), parts[0].z_sum * 0, 0.0, 0)
    for part in parts:
        total.counts = [a + b for a, b in zip(total.counts, part.counts, strict=True)]
        total.prob_sum = total.prob_sum + part.prob_sum
        total.z_sum = total.z_sum + part.z_sum
        total.entropy_sum += part.entropy_sum
        total.tokens += part.tokens
    return total


def naive_switch_loss(routing: NaiveRouting, top_k: int) -> Tensor:
    """``E * sum_i f_i P_i`` with ``f_i = c_i / (K T)``; zero without tokens."""
    if routing.tokens == 0:
        return routing.prob_sum.sum() * 0
    loss = routing.prob_sum.new_zeros(())
    for i, count in enumerate(routing.counts):
        loss = loss + count / (top_k * routing.tokens) * routing.prob_sum[i] / routing.tokens
    return len(routing.counts) * loss


def naive_z_loss(routing: NaiveRouting) -> Tensor:
    """Mean of ``logsumexp^2``; zero without tokens."""
    return routing.z_sum / max(routing.tokens, 1)


def naive_rms_norm(x: Tensor, gain: Tensor, eps: float = 1e-5) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * gain``."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * gain


def naive_rotary(x: Tensor, theta: float = 10000.0) -> Tensor:
    """One head [S, C]: pair ``(i, i + C/2)`` of position ``t`` turned by ``t * theta^(-2i/C)``."""
    size, width = x.shape
    rows = []
    for t in range(size):
        row = [torch.zeros(())] * width
        for i in range(width // 2):
            # The package keeps its tables in float32.
            angle = torch.tensor(t, dtype=torch.float32) * theta ** (-torch.tensor(2.0 * i) / width)
            c, s = torch.cos(angle).to(x.dtype), torch.sin(angle).to(x.dtype)
            a, b = x[t, i], x[t, i + width // 2]
            row[i], row[i + width // 2] = a * c - b * s, b * c + a * s
        rows.append(torch.stack(row))
    return torch.stack(rows)


def naive_attention(
    x: Tensor, qkv: Tensor, out: Tensor, heads: int, kv_heads: int, mask: Tensor | None = None
) -> Tensor:
    """Causal grouped-query attention of one sequence [S, D], head by head; nobody else sees a masked token."""
    size = x.shape[0]
    width = qkv.shape[0] // (heads + 2 * kv_heads)
    projected = x @ qkv.T
    pieces = [projected[:, i * width : (i + 1) * width] for i in range(heads + 2 * kv_heads)]
    attended = []
    for h in range(heads):
        group = h // (heads // kv_heads)
        q, k = naive_rotary(pieces[h]), naive_rotary(pieces[heads + group])
        v = pieces[heads + kv_heads + group]
        rows = []
        for t in range(size):
            seen = [s for s in range(t + 1) if mask is None or mask[s] or s == t]
            scores = (k[seen] @ q[t]) / math.sqrt(width)
            rows.append(torch.softmax(scores, 0) @ v[seen])
        attended.append(torch.stack(rows))
    return torch.cat(attended, dim=-1) @ out.T


def naive_transformer(
    tokens: Tensor,
    weights: Mapping[str, Tensor],
    *,
    layers: int,
    heads: int,
    kv_heads: int,
    top_k: int,
    mask: Tensor | None = None,
) -> tuple[Tensor, list[NaiveRouting]]:
    """Logits [B, S, V] of a decoder with tied embeddings; the routing of its MoE layers.

    A layer is MoE when ``weights`` has its router.
    """
    streams = [weights["embedding.weight"][row] for row in tokens]
    routings = []
    for index in range(layers):
        own = {
            key.removeprefix(f"layers.{index}."): w for key, w in weights.items() if key.startswith(f"layers.{index}.")
        }
        streams = [
            x
            + naive_attention(
                naive_rms_norm(x, own["attention_norm.weight"]),
                own["attention.qkv.weight"],
                own["attention.out.weight"],
                heads,
                kv_heads,
                None if mask is None else mask[row],
            )
            for row, x in enumerate(streams)
        ]
        x = torch.cat(streams)
        normed = naive_rms_norm(x, own["ffn_norm.weight"])
        if "ffn.router.weight" in own:
            moe = {key.removeprefix("ffn."): w for key, w in own.items() if key.startswith("ffn.")}
            flat_mask = None if mask is None else mask.reshape(-1)
            y, routing = naive_moe(normed, moe, top_k, mask=flat_mask)
            routings.append(routing)
        else:
            y = torch.stack([naive_expert(row, own["ffn.w_in"], own["ffn.w_out"], "swiglu") for row in normed])
        streams = list((x + y).split(tokens.shape[1]))
    hidden = naive_rms_norm(torch.stack(streams), weights["norm.weight"])
    return hidden @ weights["embedding.weight"].T, routings


def naive_top_k_weights(logits: Tensor, top_k: int, rule: str) -> tuple[list[int], Tensor]:
    """One token's experts, best first, and their weights [K]."""
    probs = torch.exp(logits - logits.max()) / torch.exp(logits - logits.max()).sum()
    chosen = naive_choice(probs, top_k)
    total = sum(probs[e] for e in chosen) if rule == "normalised" else 1.0
    return chosen, torch.stack([probs[e] / total for e in chosen])


def naive_sums(logits: Tensor, chosen: list[list[int]], mask: list[bool] | None = None) -> NaiveRouting:
    """The sums over live tokens, from logits [T, E] and each token's experts."""
    routing = NaiveRouting([0] * logits.shape[1], logits.new_zeros(logits.shape[1]), logits.new_zeros(()), 0.0, 0)
    for t, row in enumerate(logits):
        if mask is not None and not mask[t]:
            continue
        total = torch.exp(row).sum()
        probs = torch.exp(row) / total
        routing.prob_sum = routing.prob_sum + probs
        routing.z_sum = routing.z_sum + torch.log(total) ** 2
        routing.entropy_sum -= sum(p * math.log(p) for p in probs.tolist() if p > 0)
        first, *rest = sorted(probs.tolist(), reverse=True)
        routing.top_sum += first
        routing.margin_sum += first - (rest[0] if rest else 0.0)
        routing.tokens += 1
        for e in chosen[t]:
            routing.counts[e] += 1
    return routing


def naive_expert_rows(rows: Tensor, sizes: list[int], w_in: Tensor, w_out: Tensor, kind: str) -> Tensor:
    """Rows [R, D] sorted by expert, each through its own expert; ``sizes`` are the rows of each."""
    owners = [expert for expert, size in enumerate(sizes) for _ in range(size)]
    outputs = [naive_expert(row, w_in[e], w_out[e], kind) for row, e in zip(rows, owners, strict=True)]
    return torch.stack(outputs) if outputs else rows

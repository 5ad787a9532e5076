"""Slow twins of routing, capacity, balance losses and bias updates: the papers' formulas as loops over tokens.

Imports nothing from the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.helpers.reference import naive_expert


@dataclass
class NaiveToken:
    """What one live token chose, and the numbers [E] that losses need."""

    logits: Tensor
    probs: Tensor
    experts: list[int]
    weights: list[Tensor]
    taken: list[bool]
    free: list[int]
    chance: Tensor | None = None

    @property
    def assignments(self) -> list[int]:
        """The experts of the places that are taken."""
        return [e for e, taken in zip(self.experts, self.taken, strict=True) if taken]


Tokens = Sequence[NaiveToken | None]
"""All tokens of a batch; None where one is masked."""


def best(values: Sequence[float], count: int) -> list[int]:
    """Indices of the highest values, the lowest index first among equals."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def naive_scores(logits: Tensor, score: str) -> Tensor:
    """softmax; 1 / (1 + exp(-z)); sqrt(log(1 + exp(z)))."""
    if score == "softmax":
        return torch.exp(logits) / torch.exp(logits).sum()
    return 1 / (1 + torch.exp(-logits)) if score == "sigmoid" else torch.sqrt(torch.log(1 + torch.exp(logits)))


def allowed(values: Sequence[float], number: int, keep: int, top: int) -> list[float]:
    """Minus infinity outside the best groups, whose score is the sum of their ``top`` highest values."""
    size = len(values) // number
    groups = [sum(sorted(values[g * size : (g + 1) * size], reverse=True)[:top]) for g in range(number)]
    kept = best(groups, keep)
    return [value if i // size in kept else -math.inf for i, value in enumerate(values)]


def naive_top_k(
    logits: Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    rule: str = "normalised",
    scale: float = 1.0,
    bias: Sequence[float] | None = None,
    groups: tuple[int, int, int] | None = None,
    experts: list[int] | None = None,
) -> NaiveToken:
    """Choice by score plus bias, weights by score alone; ``experts`` is a choice that was made elsewhere.

    ``free`` is the choice by score alone where there is a bias or a limit to groups, else the one that is executed.
    """
    scores = naive_scores(logits, score)

    if experts is None:
        offsets = [0.0] * len(scores) if bias is None else bias
        values = [s + b for s, b in zip(scores.tolist(), offsets, strict=True)]
        experts = best(values if groups is None else allowed(values, *groups), top_k)
    free = experts if bias is None and groups is None else best(scores.tolist(), top_k)
    total = sum(scores[e] for e in experts) if rule == "normalised" else 1.0
    weights = [scale * scores[e] / total for e in experts]
    return NaiveToken(logits, scores / scores.sum(), experts, weights, [True] * len(experts), free)


def naive_gshard(logits: Tensor, draw: float | None, experts: list[int] | None = None) -> NaiveToken:
    """GShard: the second expert is taken if ``2 g_2 > draw``; always in evaluation (None)."""
    token = naive_top_k(logits, 2, experts=experts)
    second = draw is None or 2 * token.weights[1].item() > draw
    return replace(token, taken=[True, second], free=token.experts[: 1 + second])


def naive_noisy(logits: Tensor, raw_std: Tensor, normal: Tensor | None, top_k: int) -> NaiveToken:
    """Shazeer: top-k of ``h = z + n softplus(r)``; chance ``Phi((z_i - k-th highest other h) / softplus(r_i))``."""
    if normal is None:
        return naive_top_k(logits, top_k)
    std = torch.log(1 + torch.exp(raw_std))
    noisy = logits + normal * std
    chances = []
    for i in range(len(logits)):
        others = sorted((h for j, h in enumerate(noisy) if j != i), key=lambda h: h.item(), reverse=True)
        if len(others) < top_k:
            chances.append(1 + 0 * logits[i])
        else:
            chances.append(0.5 * (1 + torch.erf((logits[i] - others[top_k - 1]) / std[i] / math.sqrt(2))))
    return replace(naive_top_k(noisy, top_k), logits=logits, chance=torch.stack(chances))


def naive_expert_choice(logits: Tensor, top_k: int, live: Sequence[bool] | None = None) -> list[NaiveToken | None]:
    """Every expert takes its ``ceil(K T / E)`` best live tokens; a token's experts are in the order of their ids."""
    live = [True] * len(logits) if live is None else live
    probs = [naive_scores(row, "softmax") for row in logits]
    positions = [t for t in range(len(logits)) if live[t]]
    each = naive_capacity(1.0, top_k, len(positions), logits.shape[1], 0)
    taken_by: list[list[int]] = [[] for _ in probs]
    for e in range(logits.shape[1]):
        for place in best([probs[t][e].item() for t in positions], each):
            taken_by[positions[place]].append(e)
    return [
        NaiveToken(row, p, experts, [p[e] for e in experts], [True] * len(experts), experts) if alive else None
        for row, p, experts, alive in zip(logits, probs, taken_by, live, strict=True)
    ]


def naive_route(
    x: Tensor,
    weights: Mapping[str, Tensor],
    router: Mapping[str, Any],
    top_k: int,
    *,
    live: Sequence[bool] | None = None,
    bias: Sequence[float] | None = None,
    table: Sequence[list[int]] | None = None,
    ids: Sequence[int] | None = None,
    uniform: Sequence[float] | None = None,
    normal: Tensor | None = None,
) -> list[NaiveToken | None]:
    """The choice of every live token by a router of the recipe's ``kind``; draws are given, None in evaluation."""
    kind = router["kind"]
    logits = [weights["router.weight"] @ row for row in x]
    if "router.bias" in weights:
        logits = [z + weights["router.bias"] for z in logits]
    if kind == "expert_choice":
        return naive_expert_choice(torch.stack(logits), top_k, live)
    groups = router.get("groups")
    tokens: list[NaiveToken | None] = []
    for t, z in enumerate(logits):
        if live is not None and not live[t]:
            tokens.append(None)
        elif kind == "gshard":
            tokens.append(naive_gshard(z, None if uniform is None else uniform[t]))
        elif kind == "noisy_topk":
            raw = weights["router.noise_weight"] @ x[t]
            tokens.append(naive_noisy(z, raw, None if normal is None else normal[t], top_k))
        elif kind == "switch":
            tokens.append(naive_top_k(z, 1, rule="raw"))
        else:
            default = {"sigmoid_bias": "sigmoid"}.get(kind, "softmax")
            tokens.append(
                naive_top_k(
                    z,
                    top_k,
                    score=router.get("score", default),
                    rule=router.get("weights") or ("raw" if top_k == 1 else "normalised"),
                    scale=router.get("scale", 1.0),
                    bias=bias,
                    groups=None if groups is None else (groups["number"], groups["keep"], groups.get("top", 2)),
                    experts=None if table is None or ids is None else table[ids[t]],
                )
            )
    return tokens


def naive_capacity(factor: float, top_k: int, tokens: int, choices: int, minimum: int) -> int:
    """The least whole number of places that is not below ``factor K T / E``, nor below the minimum."""
    places = minimum
    while places < factor * top_k * tokens / choices:
        places += 1
    return places


def naive_order(tokens: Tokens, policy: str, draws: Sequence[Sequence[float]] | None = None) -> list[tuple[int, int]]:
    """Who is given a place first, as (token, rank of the choice); ``draws`` [T][K] are for ``random``."""
    live = [(t, token) for t, token in enumerate(tokens) if token is not None]
    ranks = range(max((len(token.experts) for _, token in live), default=0))
    order = [(t, j) for j in ranks for t, token in live if j < len(token.experts)]
    if policy == "probability":
        return sorted(order, key=lambda a: -tokens[a[0]].probs[tokens[a[0]].experts[a[1]]].item())
    if policy == "random" and draws is not None:
        return sorted(order, key=lambda a: (draws[a[0]][a[1]], a))
    if policy == "batch_prioritised":
        return sorted(order, key=lambda a: (a[1], -tokens[a[0]].probs.max().item()))
    return order


def naive_drop(
    tokens: Tokens, order: Sequence[tuple[int, int]], limit: int, num_experts: int, normalise: str = "before"
) -> tuple[list[NaiveToken | None], list[int]]:
    """Fill the places of each expert in the given order: the tokens with what is left, and what each expert dropped.

    Experts from ``num_experts`` on compute nothing and have no limit.
    """
    executed = [None if token is None else replace(token, taken=list(token.taken)) for token in tokens]
    choices = next(len(token.probs) for token in tokens if token is not None)
    filled, dropped = [0] * choices, [0] * choices
    for t, j in order:
        expert = tokens[t].experts[j]
        if not tokens[t].taken[j] or expert >= num_experts:
            continue
        if filled[expert] < limit:
            filled[expert] += 1
        else:
            executed[t].taken[j] = False
            dropped[expert] += 1
    if normalise == "after":
        for before, token in zip(tokens, executed, strict=True):
            if before is not None and any(token.taken):
                whole = sum(w for w, taken in zip(before.weights, before.taken, strict=True) if taken)
                left = sum(w for w, taken in zip(before.weights, token.taken, strict=True) if taken)
                token.weights = [w * whole / left for w in before.weights]
    return executed, dropped


def naive_network(
    x: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    kind: str,
    b_in: Tensor | None = None,
    b_out: Tensor | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """One token through one expert, with biases, gpt-oss's clamped SwiGLU, or factors on the hidden values."""
    if b_in is not None:
        # A bias is a column more, for an input that is always 1.
        x, w_in = torch.cat([x, torch.ones_like(x[:1])]), torch.cat([w_in, b_in[:, None]], dim=1)
    if factors is not None:
        w_out = w_out * factors
    if kind == "swiglu_clamped":
        hidden, half = w_in @ x, w_in.shape[0] // 2
        gate, up = torch.clamp(hidden[:half], max=7.0), torch.clamp(hidden[half:], -7.0, 7.0)
        y = w_out @ (gate / (1 + torch.exp(-1.702 * gate)) * (up + 1))
    else:
        y = naive_expert(x, w_in, w_out, kind)
    return y if b_out is None else y + b_out


def naive_output(
    x: Tensor,
    tokens: Tokens,
    weights: Mapping[str, Tensor],
    num_experts: int,
    kind: str = "swiglu",
    *,
    apply: str = "output",
    factors: Mapping[int, Tensor] | None = None,
) -> Tensor:
    """A layer's output [T, D] for what the tokens chose.

    Choices from ``num_experts`` on give the token back; ``apply`` is ``input`` for Llama 4's weights, which multiply
    what goes in; ``factors`` hold a row for each token that reaches the expert, in the order of the tokens.
    """
    rows = []
    seen = [0] * num_experts
    for row, token in zip(x, tokens, strict=True):
        if token is None:
            rows.append(torch.zeros_like(row))
            continue
        y = torch.zeros_like(row)
        for e, weight, taken in zip(token.experts, token.weights, token.taken, strict=True):
            if not taken:
                continue
            if e >= num_experts:
                y = y + weight * row
                continue
            own = [weights.get(f"experts.{name}") for name in ("w_in", "w_out", "b_in", "b_out")]
            w_in, w_out, b_in, b_out = (None if value is None else value[e] for value in own)
            factor = None if factors is None else factors[e][seen[e]]
            seen[e] += 1
            if apply == "input":
                y = y + naive_network(weight * row, w_in, w_out, kind, b_in, b_out, factor)
            else:
                y = y + weight * naive_network(row, w_in, w_out, kind, b_in, b_out, factor)
        if "shared.w_in" in weights:
            shared = naive_network(row, weights["shared.w_in"], weights["shared.w_out"], kind)
            if "shared_gate.weight" in weights:
                shared = shared / (1 + torch.exp(-(weights["shared_gate.weight"][0] @ row)))
            y = y + shared
        rows.append(y)
    return torch.stack(rows)


def alive(tokens: Tokens) -> list[NaiveToken]:
    """The tokens that count."""
    return [token for token in tokens if token is not None]


def count(lists: Sequence[Sequence[int]], choices: int) -> list[int]:
    """How often each expert is in the lists."""
    return [sum(experts.count(i) for experts in lists) for i in range(choices)]


def mean_probs(tokens: Tokens) -> Tensor:
    """``P_i``, the mean of the full distributions."""
    rows = [token.probs for token in alive(tokens)]
    return sum(rows) / len(rows)


def naive_switch(tokens: Tokens) -> Tensor:
    """``E sum_i f_i P_i``, f the share of all assignments."""
    mean = mean_probs(tokens)
    counts = count([token.assignments for token in alive(tokens)], len(mean))
    return len(mean) * sum(c / sum(counts) * p for c, p in zip(counts, mean, strict=True))


def naive_gshard_loss(tokens: Tokens) -> Tensor:
    """``E^2 mean_i (c_i / T) m_i``, c from first choices."""
    mean = mean_probs(tokens)
    firsts = count([token.experts[:1] for token in alive(tokens)], len(mean))
    parts = [c / len(alive(tokens)) * m for c, m in zip(firsts, mean, strict=True)]
    return len(mean) ** 2 * sum(parts) / len(parts)


def naive_cv(values: Sequence[Tensor]) -> Tensor:
    """Squared coefficient of variation, with the variance of a population."""
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values) / mean**2


def naive_importance(tokens: Tokens) -> Tensor:
    """``CV^2`` of the summed weights."""
    sums = [0 * p for p in mean_probs(tokens)]
    for token in alive(tokens):
        for e, weight, taken in zip(token.experts, token.weights, token.taken, strict=True):
            sums[e] = sums[e] + (weight if taken else 0)
    return naive_cv(sums)


def naive_load(tokens: Tokens) -> Tensor:
    """``CV^2`` of the summed chances to be chosen."""
    return naive_cv(list(sum(token.chance for token in alive(tokens))))


def naive_z(tokens: Tokens) -> Tensor:
    """Mean of ``log(sum_i exp(z_i))^2``."""
    return sum(torch.log(torch.exp(token.logits).sum()) ** 2 for token in alive(tokens)) / len(alive(tokens))


def naive_sequence(tokens: Tokens) -> Tensor:
    """DeepSeek-V3: ``sum_i f_i P_i`` with ``f_i = E / (K L) sum_t 1[i in the top K by scores alone]``."""
    mean = mean_probs(tokens)
    free = [token.free for token in alive(tokens)]
    slots = sum(len(experts) for experts in free)
    return sum(len(mean) / slots * c * p for c, p in zip(count(free, len(mean)), mean, strict=True))


def members(choices: int, num_experts: int, groups: int) -> list[list[int]]:
    """The experts of each device group; zero experts are one group more."""
    size = num_experts // groups
    split = [list(range(g * size, (g + 1) * size)) for g in range(groups)]
    return split if choices == num_experts else [*split, list(range(num_experts, choices))]


def naive_device(tokens: Tokens, num_experts: int, groups: int) -> Tensor:
    """DeepSeek-V2: ``sum_d F_d P_d``, F the mean of ``f_i = E / (K T) c_i`` in the group, P the sum of ``P_i``."""
    mean = mean_probs(tokens)
    counts = count([token.assignments for token in alive(tokens)], len(mean))
    f = [len(mean) / sum(counts) * c for c in counts]
    return sum(
        sum(f[i] for i in group) / len(group) * sum(mean[i] for i in group)
        for group in members(len(mean), num_experts, groups)
    )


def naive_communication(tokens: Tokens, num_experts: int, groups: int, reach: int) -> Tensor:
    """DeepSeek-V2: ``sum_d F_d P_d``, ``F_d = D / (M T) sum_t 1[token t is sent to d]``, P the sum of ``P_i``."""
    mean, total = mean_probs(tokens), 0
    devices = members(len(mean), num_experts, groups)
    for group in devices:
        sent = sum(any(e in group for e in token.assignments) for token in alive(tokens))
        total = total + len(devices) / (reach * len(alive(tokens))) * sent * sum(mean[i] for i in group)
    return total


NAIVE_LOSSES: dict[str, Callable[..., Tensor]] = {
    "switch": naive_switch,
    "gshard": naive_gshard_loss,
    "importance": naive_importance,
    "load": naive_load,
    "z": naive_z,
    "sequence": naive_sequence,
    "device": naive_device,
    "communication": naive_communication,
}


@dataclass
class NaiveBias:
    """A controller's memory: the biases, the sum of errors and the last errors."""

    bias: list[float]
    error_sum: list[float]
    last_error: list[float]


def naive_bias_update(
    state: NaiveBias,
    counts: Sequence[int],
    num_experts: int,
    rule: str,
    rate: float,
    *,
    top_k: int,
    experts_per_token: float | None = None,
    integral: float = 0.0,
    derivative: float = 0.0,
) -> NaiveBias:
    """One update. Choices from ``num_experts`` on are zero experts, which keep the bias 0.

    sign (arXiv 2408.15664): up where an expert has less than its share, and then without the mean of the updates;
    LongCat's: ``mu (K_e / (K N) - T_i / (K T))``, here over its target ``K_e / (K N)``.
    """
    zero, total = len(counts) - num_experts, sum(counts)
    wanted = experts_per_token or top_k * num_experts / len(counts)
    target = wanted / (top_k * num_experts)
    errors = [(target - c / total) / target for c in counts[:num_experts]] + [0.0] * zero
    sums = [a + b for a, b in zip(state.error_sum, errors, strict=True)]
    if rule == "sign":
        moves = [float(c / total < target) - float(c / total > target) for c in counts[:num_experts]] + [0.0] * zero
        moves = moves if zero else [move - sum(moves) / len(moves) for move in moves]
    elif rule == "proportional":
        moves = errors
    else:
        changes = zip(errors, sums, state.last_error, strict=True)
        moves = [e + integral * s + derivative * (e - last) for e, s, last in changes]
    return NaiveBias([b + rate * move for b, move in zip(state.bias, moves, strict=True)], sums, errors)

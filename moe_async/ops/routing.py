"""Choosing experts for tokens, or tokens for experts, and the weights of what was chosen.

Shape letters: T tokens, E choices of the router (experts and zero experts), K experts per token, G groups of experts,
V token ids.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from moe_async.ops.noise import Noise

Score = Literal["softmax", "sigmoid", "sqrt_softplus"]
WeightRule = Literal["normalised", "raw"]


class Selection(NamedTuple):
    """Which experts each token takes, and how much each counts.

    Attributes:
        experts_TK: int64 global expert ids; equal scores pick the lowest id.
        weights_TK: factors of the experts, with gradient.
        probs_TE: the full router distribution, each row summing to 1, with gradient (what balance losses use).
        taken_TK: bool, False where a place of a token is empty; None when all are taken.
        free_TK: int64, the experts that scores alone, without selection bias and groups, would choose; None: those of
            ``experts_TK``.
        chance_TE: probability of being chosen under the router's noise, with gradient; None without learned noise.
    """

    experts_TK: Tensor
    weights_TK: Tensor
    probs_TE: Tensor
    taken_TK: Tensor | None = None
    free_TK: Tensor | None = None
    chance_TE: Tensor | None = None


class Groups(NamedTuple):
    """Group-limited selection: ``number`` equal groups, a token's best ``keep`` by their ``top`` best scores."""

    number: int
    keep: int
    top: int


@torch.library.custom_op("moe_async::highest_k", mutates_args=())
def _highest_k(scores: Tensor, top_k: int) -> Tensor:
    # An operator of its own, so that recomputation can keep its small result instead of a whole sort.
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :top_k].contiguous()


@_highest_k.register_fake
def _(scores: Tensor, top_k: int) -> Tensor:
    return scores.new_empty((*scores.shape[:-1], top_k), dtype=torch.int64)


CHOICE = torch.ops.moe_async.highest_k.default
"""The operator behind `highest_k`: what selective recomputation must save for a token to keep its experts."""


def highest_k(scores_TE: Tensor, top_k: int) -> Tensor:
    """Indices of the ``top_k`` highest scores of each row, best first: int64 [T, K].

    A stable descending sort gives the lowest index first among equal scores on every device; ``torch.topk`` gives
    no such guarantee.
    """
    chosen_TK: Tensor = _highest_k(scores_TE.detach(), min(top_k, scores_TE.shape[-1]))
    return chosen_TK


def log_scores(logits: Tensor, score: Score) -> Tensor:
    """Logarithm of the scores of router logits z, without underflow however small they are.

    ``softmax``: ``log_softmax(z)`` over the last dimension; ``sigmoid``: ``log(1 / (1 + exp(-z)))`` (DeepSeek-AI 2024,
    arXiv 2412.19437, eq. 15); ``sqrt_softplus``: ``log(sqrt(log(1 + exp(z))))`` (DeepSeek-V4).
    """
    if score == "softmax":
        return torch.log_softmax(logits, dim=-1)
    if score == "sigmoid":
        return functional.logsigmoid(logits)
    # Far below zero log(1 + u) = u - u^2/2 + ... with u = exp(z), so its logarithm is z - u/2.
    small = logits < _SMALL
    near = torch.log(functional.softplus(torch.where(small, 0.0, logits)))
    return 0.5 * torch.where(small, logits - 0.5 * torch.exp(torch.where(small, logits, 0.0)), near)


_SMALL = -18.0
_LEAST_STD = 1e-6


def in_best_groups(scores_TE: Tensor, groups: Groups) -> Tensor:
    """Whether each expert is in one of the token's best groups: bool [T, E].

    What is outside must be masked with minus infinity, not zero: with a bias all scores inside may be negative, and
    zero would win. A group's score is the sum of its ``top`` highest; equal groups pick the lowest. Reference:
    DeepSeek-AI 2024, arXiv 2412.19437, 2.1.2.
    """
    scores_TGM = scores_TE.detach().unflatten(-1, (groups.number, -1))
    group_TG = torch.sort(scores_TGM, dim=-1, descending=True).values[..., : groups.top].sum(dim=-1)
    kept_TG = torch.zeros_like(group_TG, dtype=torch.bool).scatter_(-1, highest_k(group_TG, groups.keep), True)
    return kept_TG[..., None].expand_as(scores_TGM).flatten(-2)


def top_k_routing(
    logits_TE: Tensor,
    top_k: int,
    *,
    score: Score = "softmax",
    weights: WeightRule = "normalised",
    scale: float = 1.0,
    bias_E: Tensor | None = None,
    groups: Groups | None = None,
    experts_TK: Tensor | None = None,
) -> Selection:
    """The K experts with the highest score plus bias.

    With scores ``s = score(z)``: K experts are taken by ``s_i + b_i``, inside the best groups where there are any. The
    weights are ``scale * s_i`` (``raw``) or ``scale * s_i / sum_{j taken} s_j`` (``normalised``; with softmax scores
    the same number as a softmax over the K taken logits); the bias is in neither. The distribution of balance losses is
    ``s_i / sum_j s_j`` over *all* experts. Sums and quotients are made of logarithms, so that scores that underflow
    keep their proportion.

    Raw softmax weights are those of OLMoE (and with K = 1 of Switch, arXiv 2101.03961, eq. 2), normalised ones those of
    Mixtral and Qwen3; sigmoid with bias is DeepSeek-V3 (arXiv 2412.19437, eq. 13 to 16). Over one expert normalised
    weights are the constant 1, through which no gradient reaches the router.

    Args:
        logits_TE: router logits, float32 or wider.
        top_k: experts per token, 1 to E.
        score, weights, scale: see above.
        bias_E: added to the scores for the choice alone.
        groups: limits the choice.
        experts_TK: a choice to take instead (a recorded one, or that of a hash table).
    """
    log_TE = log_scores(logits_TE, score)
    probs_TE = log_TE.exp() if score == "softmax" else torch.softmax(log_TE, dim=-1)
    if experts_TK is None:
        experts_TK = _choose(logits_TE, log_TE, top_k, groups, bias_E)
    limited = bias_E is not None or groups is not None
    free_TK = highest_k(logits_TE, top_k) if limited else None
    chosen_TK = log_TE.gather(-1, experts_TK)
    weights_TK = torch.softmax(chosen_TK, dim=-1) if weights == "normalised" else chosen_TK.exp()
    return Selection(experts_TK, scale * weights_TK, probs_TE, free_TK=free_TK)


def _choose(logits_TE: Tensor, log_TE: Tensor, top_k: int, groups: Groups | None, bias_E: Tensor | None) -> Tensor:
    # Without a bias the order of logits is that of scores, and tells apart what underflows.
    order_TE = logits_TE.detach() if bias_E is None else log_TE.detach().exp() + bias_E
    if groups is not None:
        scores_TE = log_TE.detach().exp() if bias_E is None else order_TE
        order_TE = torch.where(in_best_groups(scores_TE, groups), order_TE, -torch.inf)
    return highest_k(order_TE, top_k)


def gshard_routing(logits_TE: Tensor, noise: Noise | None, experts_TK: Tensor | None = None) -> Selection:
    """GShard's top-2: the second expert is taken with probability ``min(1, 2 * g_2)``.

    ``g`` are the two probabilities divided by their sum, before anything is left out: a token without its second expert
    keeps the weight ``g_1`` of the first. Without noise (evaluation) both are always taken. Reference: Lepikhin et al.
    2020, arXiv 2006.16668, algorithm 1.
    """
    both = top_k_routing(logits_TE, 2, experts_TK=experts_TK)
    if noise is None:
        return both
    drawn_T = noise.uniform("second expert", (logits_TE.shape[0],), logits_TE.device)
    second_T = drawn_T.to(logits_TE.dtype) < 2 * both.weights_TK[:, 1].detach()
    return both._replace(taken_TK=torch.stack([torch.ones_like(second_T), second_T], dim=-1))


def noisy_top_k_routing(
    logits_TE: Tensor, raw_std_TE: Tensor, top_k: int, noise: Noise | None, experts_TK: Tensor | None = None
) -> Selection:
    """Top-k of ``h = z + n * softplus(r)`` with n standard normal, and a softmax over the K taken.

    The chance of expert i to be chosen if its own noise were drawn anew is
    ``Phi((z_i - t_i) / softplus(r_i))``, where ``t_i`` is the K-th highest h of the other experts. Without noise
    (evaluation) h is z. Reference: Shazeer et al. 2017, arXiv 1701.06538, eq. 3 to 5, 8 and 9.

    Args:
        logits_TE: router logits z.
        raw_std_TE: the second linear map's output r.
        top_k: experts per token.
        noise: random numbers; None in evaluation.
        experts_TK: a recorded choice.
    """
    if noise is None:
        return top_k_routing(logits_TE, top_k, experts_TK=experts_TK)
    std_TE = functional.softplus(raw_std_TE)
    normal_TE = noise.normal("logits", tuple(logits_TE.shape), logits_TE.device).to(logits_TE.dtype)
    noisy_TE = logits_TE + normal_TE * std_TE
    selection = top_k_routing(noisy_TE, top_k, experts_TK=experts_TK)
    return selection._replace(chance_TE=_chance_to_be_chosen(logits_TE, noisy_TE, std_TE, top_k))


def _chance_to_be_chosen(logits_TE: Tensor, noisy_TE: Tensor, std_TE: Tensor, top_k: int) -> Tensor:
    if top_k == logits_TE.shape[-1]:
        # Everything is chosen whatever the noise; the product keeps the graph.
        return torch.ones_like(logits_TE) + 0 * logits_TE
    order_TE = highest_k(noisy_TE, logits_TE.shape[-1])
    among_TE = torch.zeros_like(noisy_TE, dtype=torch.bool).scatter_(-1, order_TE[:, :top_k], True)
    last_in_T1 = noisy_TE.gather(-1, order_TE[:, top_k - 1 : top_k])
    first_out_T1 = noisy_TE.gather(-1, order_TE[:, top_k : top_k + 1])
    threshold_TE = torch.where(among_TE, first_out_T1, last_in_T1)
    # Noise too small to matter: 1 / std^2 in the gradient must not overflow.
    chance_TE: Tensor = torch.special.ndtr((logits_TE - threshold_TE) / std_TE.clamp(min=_LEAST_STD))
    return chance_TE


def expert_choice_routing(
    logits_TE: Tensor, top_k: int, live_T: Tensor | None, experts_TK: Tensor | None = None
) -> Selection:
    """Each expert takes its ``ceil(K * T / E)`` best tokens by the softmax over experts; the weights are raw.

    A token may be taken by none or by all: ``experts_TK`` is as wide as the most taken token needs, and ``taken_TK``
    tells which places count. **Not causal**: whether a token is taken depends on later tokens. Equal probabilities take
    the earliest token. Reference: Zhou et al. 2022, arXiv 2202.09368, eq. 1 to 3.
    """
    probs_TE = torch.softmax(logits_TE, dim=-1)
    if experts_TK is not None:
        return Selection(experts_TK, probs_TE.gather(-1, experts_TK), probs_TE)
    tokens, num_experts = logits_TE.shape
    live = tokens if live_T is None else int(live_T.sum())
    each = min(live, -(-top_k * live // num_experts))
    ranked_TE = probs_TE.detach() if live_T is None else torch.where(live_T[:, None], probs_TE.detach(), -torch.inf)
    kept_TE = torch.zeros_like(probs_TE, dtype=torch.bool).scatter_(0, highest_k(ranked_TE.T, each).T, True)
    width = max(1, int(kept_TE.sum(dim=-1).max())) if tokens else 1
    experts_TK = torch.sort(kept_TE, dim=-1, descending=True, stable=True).indices[:, :width]
    return Selection(experts_TK, probs_TE.gather(-1, experts_TK), probs_TE, taken_TK=kept_TE.gather(-1, experts_TK))


def hash_table(vocab_size: int, num_experts: int, top_k: int, generator: torch.Generator) -> Tensor:
    """K different random experts for every token id, int64 [V, K] (Roller et al. 2021, arXiv 2106.04426, 3.1).

    The first experts of all ids together are spread evenly.
    """
    first_V = torch.randperm(vocab_size, generator=generator, device="cpu") % num_experts
    # The others follow at distinct random distances around the ring of experts.
    random_VE = torch.rand(vocab_size, max(num_experts - 1, 1), generator=generator, device="cpu")
    distance_VE = random_VE.argsort(dim=-1)[:, : top_k - 1] + 1
    return torch.cat([first_V[:, None], (first_V[:, None] + distance_VE) % num_experts], dim=-1)


class Recorded(NamedTuple):
    """A choice to be replayed.

    Attributes:
        experts_TK: int64.
        taken_TK: bool, False where a place of a token is empty; None when all are taken.
        full_TK: bool, True for what was dropped because the expert was full; None when nothing was.
    """

    experts_TK: Tensor
    taken_TK: Tensor | None
    full_TK: Tensor | None


def record(selection: Selection, full_TK: Tensor | None) -> Tensor:
    """A choice in one tensor, int64 [T, K].

    The expert's id e; ``-1 - e`` where the place is empty; ``-1 - E - e`` where the assignment was dropped.

    Args:
        selection: before any drop.
        full_TK: what was dropped.
    """
    recorded_TK = selection.experts_TK
    if full_TK is not None:
        recorded_TK = torch.where(full_TK, -1 - selection.probs_TE.shape[-1] - selection.experts_TK, recorded_TK)
    if selection.taken_TK is not None:
        recorded_TK = torch.where(selection.taken_TK, recorded_TK, -1 - selection.experts_TK)
    return recorded_TK


def read_record(recorded_TK: Tensor, choices: int) -> Recorded:
    """What `record` wrote; ``choices`` is E.

    Raises:
        ValueError: an entry that `record` does not write.
    """
    wrong = (recorded_TK >= choices) | (recorded_TK < -2 * choices)
    if bool(wrong.any()):
        raise ValueError(
            f"the selection holds {int(recorded_TK[wrong][0])} but there are {choices} experts; entries are 0 to "
            f"{choices - 1}, or {-2 * choices} to -1 for what was not executed."
        )
    full_TK = recorded_TK < -choices
    experts_TK = torch.where(recorded_TK < 0, -1 - recorded_TK, recorded_TK) % choices
    taken_TK = (recorded_TK >= 0) | full_TK
    return Recorded(experts_TK, None if bool(taken_TK.all()) else taken_TK, full_TK if bool(full_TK.any()) else None)

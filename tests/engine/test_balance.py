"""The loads of a whole step, and the forward pass that only counts."""

from types import SimpleNamespace

import torch

from moe_async.comm import World
from moe_async.engine.balance import count_step, step_totals
from moe_async.engine.micro_batch import MicroBatch
from moe_async.ops.balance import load_fractions
from moe_async.ops.sums import routing_sums
from tests.helpers.numerics import assert_close
from tests.helpers.sums import choosing


def sums_with(counts):
    """The sums of two sequences with these assignments in all; the router itself is even."""
    logits = torch.zeros(int(counts.sum()), len(counts), requires_grad=True)
    experts = torch.arange(len(counts)).repeat_interleave(counts)[:, None]
    whole = routing_sums(logits, choosing(experts, torch.softmax(logits, -1)))
    return type(whole)(*(torch.cat([value, torch.zeros_like(value)]) for value in whole))


def test_loads_are_of_the_whole_step_and_random_states_are_put_back():
    drawn = []

    def forward(tokens, token_mask):
        """A model that drops out: what it draws decides how it routes."""
        assert not torch.is_grad_enabled()
        drawn.append(torch.rand(2))
        return SimpleNamespace(routing=[sums_with(tokens.flatten()), sums_with(tokens[0])])

    batches = [MicroBatch(torch.tensor([counts]), torch.zeros(1, 3)) for counts in ([1, 2, 0], [4, 0, 1])]
    torch.manual_seed(3)
    totals = count_step(forward, batches, World())
    assert len(totals) == 2
    for sums in totals:
        assert sums.counts_E.tolist() == sums.first_counts_E.tolist() == [5, 2, 1] and sums.tokens.item() == 8
        fractions = load_fractions(sums.counts_E)
        assert fractions.tolist() == [5 / 8, 2 / 8, 1 / 8] and fractions.dtype == torch.float64
        assert sums.counts_E.dtype == sums.tokens.dtype == torch.int64
        # Thirds in float32, added up in float64.
        assert sums.prob_sum_E.dtype == sums.z_sum.dtype == torch.float64
        assert_close(sums.prob_sum_E, torch.full((3,), 8 / 3, dtype=torch.float64), torch.float32)
        assert not any(value.requires_grad for value in sums)
    assert len(drawn) == 2
    # The pass with gradients draws what the counting pass drew.
    assert torch.equal(torch.rand(2), drawn[0]) and torch.equal(torch.rand(2), drawn[1])


def test_totals_of_forward_passes_made_already_are_those_of_the_counting_pass():
    routings = [[sums_with(torch.tensor(counts))] for counts in ([1, 2, 0], [4, 0, 1])]
    passes = iter(routings)
    batches = [MicroBatch(torch.zeros(1, 1), torch.zeros(1, 1))] * 2
    (counted,) = count_step(lambda *inputs: SimpleNamespace(routing=next(passes)), batches, World())
    (kept,) = step_totals(routings, World())
    assert routings[0][0].prob_sum_E.requires_grad
    for name, value in kept._asdict().items():
        assert not value.requires_grad and torch.equal(value, getattr(counted, name)), name


def test_a_dense_model_has_no_loads():
    assert step_totals([], World()) == step_totals([[], []], World()) == []

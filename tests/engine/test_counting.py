"""The forward pass that only counts."""

from types import SimpleNamespace

import torch

from moe_async.comm import World
from moe_async.engine.counting import count_step
from moe_async.engine.step import MicroBatch


def test_loads_are_of_the_whole_step_and_random_states_are_put_back():
    drawn = []

    def forward(tokens, token_mask):
        """A model that drops out: what it draws decides how it routes."""
        assert not torch.is_grad_enabled()
        drawn.append(torch.rand(2))
        return SimpleNamespace(
            routing=[SimpleNamespace(counts_E=tokens.flatten()), SimpleNamespace(counts_E=tokens[0])]
        )

    batches = [MicroBatch(torch.tensor([counts]), torch.zeros(1, 3)) for counts in ([1, 2, 0], [4, 0, 1])]
    torch.manual_seed(3)
    first, second = count_step(forward, batches, World())
    assert first.tolist() == second.tolist() == [5 / 8, 2 / 8, 1 / 8] and first.dtype == torch.float64
    assert len(drawn) == 2
    # The pass with gradients draws what the counting pass drew.
    assert torch.equal(torch.rand(2), drawn[0]) and torch.equal(torch.rand(2), drawn[1])

"""How often two ways to compute logits choose other experts, and how often scores tie."""

import torch

from moe_async.ops.agreement import routing_agreement


def test_a_hand_written_example():
    reference = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [1.0, 2.0, 3.0], [0.0, 0.0, 1.0]])
    logits = torch.tensor([[2.0, 3.0, 1.0], [3.0, 1.0, 1.0], [3.0, 2.0, 1.0], [0.0, 0.0, 1.0]])
    # The order inside the set does not matter; a tie picks the lowest index, here the same; the third differs.
    assert routing_agreement(logits, reference, 2) == (4, 1, 2)
    assert routing_agreement(reference, reference, 2) == (4, 0, 1)
    assert routing_agreement(logits, reference, 1) == (4, 2, 0)


def test_rounding_to_bfloat16_makes_ties_and_other_choices():
    logits = torch.randn(2000, 64, generator=torch.Generator().manual_seed(0))
    rounded = routing_agreement(logits.bfloat16(), logits, 8)
    # Several percent of the tokens, for 64 experts of which 8 are taken.
    assert 0.02 < rounded.ties / rounded.tokens < 0.08
    assert 0 < rounded.differing <= rounded.ties + 20

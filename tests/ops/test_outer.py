"""Outer optimizers: numbers worked out by hand from the papers' formulas, and those of torch."""

from __future__ import annotations

import pytest
import torch

from moe_async.ops.outer import Outer, outer_step

STATE = {"none": [], "delayed_nesterov": ["count", "gathered", "velocity"]}
"""Names of what each rule keeps, besides ``velocity`` alone."""

DIRECTIONS = ([8.0, -4.0], [4.0, 4.0], [-16.0, 0.0], [2.0, 2.0])


def values_after(outer, *, factors=(1.0,) * 4, state=None):
    """Where the value [10, 20] is after each of the directions."""
    value, state, seen = torch.tensor([10.0, 20.0], dtype=torch.float64), {} if state is None else state, []
    for direction, factor in zip(DIRECTIONS, factors, strict=True):
        given = torch.tensor(direction, dtype=torch.float64)
        outer_step(outer, value, given, state, factor)
        assert given.tolist() == direction, "the direction is left as it is"
        assert sorted(state) == STATE.get(outer.kind, ["velocity"])
        seen.append(value.tolist())
    return seen


def test_none_subtracts_the_direction_whatever_the_rate():
    wanted = [[2.0, 24.0], [-2.0, 20.0], [14.0, 20.0], [12.0, 18.0]]
    assert values_after(Outer()) == wanted
    assert values_after(Outer("none", 0.25, 0.5), factors=(0.5,) * 4) == wanted


def test_sgd_without_momentum():
    assert values_after(Outer("sgd", 0.25)) == [[8.0, 21.0], [7.0, 20.0], [11.0, 20.0], [10.5, 19.5]]


def test_sgd_with_momentum():
    # v: [8, -4], [4+4, -2+4], [4-16, 1], [-6+2, 0.5+2]; the value moves by v / 4.
    state = {}
    assert values_after(Outer("sgd", 0.25, 0.5), state=state) == [[8, 21], [6, 20.5], [9, 20.25], [10, 19.625]]
    assert state["velocity"].tolist() == [-4.0, 2.5]


def test_nesterov():
    # v as above; the value moves by (d + v / 2) / 4: [12, -6], [8, 5], [-22, 0.5], [0, 3.25].
    wanted = [[7.0, 21.5], [5.0, 20.25], [10.5, 20.125], [10.5, 19.3125]]
    assert values_after(Outer("nesterov", 0.25, 0.5)) == wanted


def test_the_schedule_scales_the_rate_and_not_the_velocity():
    state = {}
    halved = values_after(Outer("sgd", 0.25, 0.5), factors=(0.5, 1.0, 0.0, 2.0), state=state)
    assert halved == [[9.0, 20.5], [7.0, 20.0], [7.0, 20.0], [9.0, 18.75]]
    assert state["velocity"].tolist() == [-4.0, 2.5]


def test_delayed_nesterov_at_once():
    # The first of two directions moves the value by d / 2 / 4; after the second v = 0.5 v + (d1 + d2) / 2 = [6, 0], and
    # the value moves by (d / 2 + 0.5 v) / 4 = [5, 2] / 4. Then by [-8, 0] / 4, and with v = [3, 0] + [-7, 1] = [-4, 1]
    # by ([1, 1] + [-2, 0.5]) / 4.
    state = {}
    found = values_after(Outer("delayed_nesterov", 0.25, 0.5, 2), state=state)
    assert found == [[9.0, 20.5], [7.75, 20.0], [9.75, 20.0], [10.0, 19.625]]
    assert state["velocity"].tolist() == [-4.0, 1.0] and state["gathered"].tolist() == [0.0, 0.0]
    assert state["count"].tolist() == [4]


def test_delayed_nesterov_in_equal_parts():
    # As above, but half of 0.5 v in every move: v is [0, 0], [6, 0], [6, 0], [-4, 1] at them.
    found = values_after(Outer("delayed_nesterov", 0.25, 0.5, 2, 0.5))
    assert found == [[9.0, 20.5], [8.125, 20.0], [9.75, 20.0], [9.75, 19.6875]]


def test_delayed_nesterov_applies_all_of_the_velocity_between_two_changes_of_it():
    # Directions of zero: what moves the value is the velocity alone, in parts of which there are `delay`.
    for share in (0.0, 0.25, 1 / 3):
        outer, value = Outer("delayed_nesterov", 1.0, 0.5, 3, share), torch.zeros(1, dtype=torch.float64)
        state = {
            "velocity": torch.tensor([16.0], dtype=torch.float64),
            "gathered": torch.zeros(1, dtype=torch.float64),
            "count": torch.tensor([2]),
        }
        moves = []
        for _ in range(4):
            before = value.clone()
            outer_step(outer, value, torch.zeros_like(value), state, 1.0)
            moves.append(float(before - value))
        # The velocity is 8 from the first step on: 0.5 * 8 in all, then 4 in the fourth.
        assert moves[:3] == pytest.approx([4 * (1 - 2 * share), 4 * share, 4 * share])
        assert moves[3] == pytest.approx(2 * (1 - 2 * share)) and sum(moves[:3]) == pytest.approx(4.0)


def test_state_has_the_type_of_the_value():
    for kind in ("sgd", "nesterov", "delayed_nesterov"):
        value, state = torch.zeros(3, dtype=torch.bfloat16), {}
        outer_step(Outer(kind, 1.0, 0.5), value, torch.ones_like(value), state, 1.0)
        assert all(state[name].dtype == value.dtype for name in state if name != "count")
        assert not value.isnan().any() and bool((value < 0).all())


# Against torch's own optimizers


def torch_optimizer(outer, value):
    if outer.kind == "sgd":
        return torch.optim.SGD([value], lr=outer.lr, momentum=outer.momentum, weight_decay=outer.weight_decay)
    decay = outer.weight_decay
    return torch.optim.AdamW([value], lr=outer.lr, betas=outer.betas, eps=outer.eps, weight_decay=decay)


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize(
    "outer",
    [
        Outer("sgd", 0.1, weight_decay=0.3),
        Outer("sgd", 0.1, 0.9, weight_decay=0.3),
        Outer("adamw", 0.05),
        Outer("adamw", 0.05, weight_decay=0.3, betas=(0.8, 0.95), eps=1e-3),
    ],
)
def test_the_numbers_are_those_of_torch(outer, saved):
    """With a rate that changes; once the state is copied in the middle, as a snapshot does it."""
    draw = torch.Generator().manual_seed(3)
    value = torch.randn(7, generator=draw, dtype=torch.float64)
    reference = value.clone()
    optimizer, state = torch_optimizer(outer, reference), {}
    for step in range(12):
        factor = 1 - step / 20
        direction = torch.randn(7, generator=draw, dtype=torch.float64) * 10.0 ** (step % 4 - 2)
        reference.grad = direction.clone()
        optimizer.param_groups[0]["lr"] = outer.lr * factor
        optimizer.step()
        outer_step(outer, value, direction, state, factor)
        torch.testing.assert_close(value, reference, rtol=0, atol=1e-12)
        if saved:
            state = {name: tensor.clone() for name, tensor in state.items()}
    assert all(tensor.numel() in (1, 7) for tensor in state.values())


def test_the_decay_of_sgd_is_a_part_of_the_gradient():
    # Two of four contributors: half of 0.5 * value is added to the direction.
    value = torch.tensor([8.0, -4.0])
    outer_step(Outer("sgd", 0.5, weight_decay=0.5), value, torch.tensor([2.0, 2.0]), {}, 1.0, portion=0.5)
    assert value.tolist() == [8 - 0.5 * (2 + 2), -4 - 0.5 * (2 - 1)]


def test_the_decay_of_adamw_belongs_to_the_step():
    values = []
    for portion in (1.0, 0.25):
        value = torch.tensor([8.0, -4.0], dtype=torch.float64)
        outer = Outer("adamw", 0.5, weight_decay=0.5, eps=1e-300)
        outer_step(outer, value, torch.tensor([2.0, 2.0], dtype=torch.float64) * portion, {}, 1.0, portion)
        values.append(value.tolist())
    assert values[0] == pytest.approx(values[1], abs=1e-12) and values[0] == pytest.approx([8 * 0.75 - 0.5, -3 - 0.5])

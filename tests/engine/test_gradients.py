"""Reduction, norm and clipping in one process; the distributed claims are in tests/dist."""

import math

import pytest
import torch
from torch import nn

from moe_async.comm import Group, World
from moe_async.engine.delay import DelayedGradients
from moe_async.engine.gradients import ParameterSplit, clip_gradients, keep_finite, prepare_step, reduce_gradients


def split_of(*gradients):
    parameters = [nn.Parameter(torch.zeros(2)) for _ in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else torch.tensor(gradient)
    return ParameterSplit(parameters[:1], parameters[1:])


def test_norm_and_clipping_by_hand():
    split = split_of([3.0, 0.0], [0.0, 4.0])
    assert keep_finite(split, World(), 0.0, together=True).grad_norm == 5.0
    clip_gradients(split, 5.0, 0.0)
    clip_gradients(split, 5.0, 6.0)
    assert split.replicated[0].grad.tolist() == [3.0, 0.0]
    clip_gradients(split, 5.0, 1.0)
    assert split.replicated[0].grad[0].item() == pytest.approx(0.6, rel=1e-6)
    assert split.sharded[0].grad[1].item() == pytest.approx(0.8, rel=1e-6)


def test_a_missing_gradient_becomes_zeros():
    split = split_of(None, None)
    reduce_gradients(split, World())
    assert [p.grad.tolist() for p in (*split.replicated, *split.sharded)] == [[0.0, 0.0]] * 2


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("gradients", [([NAN, 1.0], None), ([1.0, 1.0], [INF, 0.0])], ids=["dense", "expert"])
def test_a_gradient_that_is_not_finite_shows_in_the_norm_and_takes_its_step_with_it(gradients):
    split = split_of(*gradients)
    outcome = keep_finite(split, World(), 1.0, together=True)
    assert not math.isfinite(outcome.grad_norm)
    assert (outcome.applied, outcome.left_out) == (False, ("dense", "expert"))
    assert [p.grad for p in (*split.replicated, *split.sharded)] == [None, None]


@pytest.mark.parametrize("delay", [None, 0, 1])
def test_parts_of_one_step_are_dropped_together(delay):
    split = split_of([NAN, 1.0], [0.0, 4.0])
    parameters = {"dense": split.replicated[0]}
    queue = None if delay is None else DelayedGradients(parameters, delay, 1, Group().start_all_reduce_many)
    first = prepare_step(split, World(), 0.0, queue)
    if delay == 1:
        # The dense ones are not due yet, and then alone.
        assert (first.applied, first.left_out, split.sharded[0].grad.tolist()) == (True, (), [0.0, 4.0])
        first = prepare_step(split, World(), 0.0, queue)
        assert (first.applied, first.left_out) == (True, ("dense",))
        return
    assert (first.applied, first.left_out) == (False, ("dense", "expert"))
    assert split.gradients() == []


@pytest.mark.parametrize(
    ("gradients", "norm", "applied", "left_out", "kept"),
    [
        (([3.0, 0.0], [0.0, 4.0]), 5.0, True, (), [[1.5, 0.0], [0.0, 2.0]]),
        (([NAN, 1.0], [0.0, 5.0]), 5.0, True, ("dense",), [None, [0.0, 2.5]]),
        (([3.0, 4.0], [INF, 0.0]), 5.0, True, ("expert",), [[1.5, 2.0], None]),
        (([NAN, 1.0], [INF, 0.0]), None, False, ("dense", "expert"), [None, None]),
        ((None, [NAN, 1.0]), None, False, ("expert",), [None, None]),
        (([NAN, 1.0], None), None, False, ("dense",), [None, None]),
        ((None, [0.0, 1.0]), 1.0, True, (), [None, [0.0, 1.0]]),
        ((None, None), 0.0, True, (), [None, None]),
    ],
    ids=["finite", "dense", "expert", "both", "no dense yet", "no experts", "only experts", "nothing"],
)
def test_gradients_of_two_steps_are_dropped_apart(gradients, norm, applied, left_out, kept):
    split = split_of(*gradients)
    outcome = keep_finite(split, World(), 2.5, together=False)
    assert (outcome.applied, outcome.left_out) == (applied, left_out)
    assert (outcome.grad_norm if math.isfinite(outcome.grad_norm) else None) == norm
    for parameter, expected in zip((*split.replicated, *split.sharded), kept, strict=True):
        assert (parameter.grad is None) == (expected is None)
        if expected is not None:
            assert parameter.grad.tolist() == pytest.approx(expected, rel=1e-6)

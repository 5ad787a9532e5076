"""Reduction, norm and clipping in one process; the distributed claims are in tests/dist."""

import pytest
import torch
from torch import nn

from moe_async.comm import World
from moe_async.engine.gradients import ParameterSplit, clip_gradients, global_norm, reduce_gradients


def split_of(*gradients):
    parameters = [nn.Parameter(torch.zeros(2)) for _ in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else torch.tensor(gradient)
    return ParameterSplit(parameters[:1], parameters[1:])


def test_norm_and_clipping_by_hand():
    split = split_of([3.0, 0.0], [0.0, 4.0])
    assert global_norm(split, World()) == 5.0
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


def test_a_gradient_that_is_not_finite_shows_in_the_norm():
    assert not torch.tensor(global_norm(split_of([float("nan"), 1.0], None), World())).isfinite()
    assert not torch.tensor(global_norm(split_of([1.0, 1.0], [float("inf"), 0.0]), World())).isfinite()

"""The queue of delayed gradients in one process; what it does to training is in tests/dist."""

import pytest
import torch
from torch import nn

from moe_async.comm import Group
from moe_async.engine.delay import DelayedGradients


class Recorded:
    """A reduction over two ranks with equal gradients, and when it was waited for."""

    def __init__(self, log, number, tensors):
        self.log, self.number, self.sums = log, number, [2 * tensor for tensor in tensors]

    def wait(self):
        self.log.append(self.number)
        return self.sums


def queue_of(delay):
    parameters = {"a": nn.Parameter(torch.zeros(2)), "b": nn.Parameter(torch.zeros(1))}
    log, started = [], []

    def start(tensors):
        started.append(len(started))
        return Recorded(log, started[-1], tensors)

    return DelayedGradients(parameters, delay, 2, start), parameters, log


def step(queue, parameters, value):
    """One step whose gradients are ``value``, and none for the second parameter; what the optimizer finds then."""
    parameters["a"].grad = torch.full((2,), float(value))
    queue.start()
    assert parameters["a"].grad is None
    taken = queue.take(queue.delay)
    found = [None if p.grad is None else p.grad.tolist() for p in parameters.values()]
    assert taken == (found[0] is not None)
    for parameter in parameters.values():
        parameter.grad = None
    return found


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_gradients_come_back_after_the_delay_and_are_waited_for_then(delay):
    queue, parameters, log = queue_of(delay)
    for number in range(6):
        found = step(queue, parameters, number)
        late = number - delay
        assert found == ([None, None] if late < 0 else [[late, late], [0.0]])
        assert log == list(range(late + 1)) and len(queue) == min(number + 1, delay)
    rest = []
    while queue:
        assert queue.take(0)
        rest.append(parameters["a"].grad.tolist()[0])
    assert rest == list(range(6 - delay, 6)) and not queue.take(0) and parameters["a"].grad is None


def test_state_holds_what_is_in_flight_and_leaves_it_there():
    queue, parameters, log = queue_of(2)
    assert queue.state() == []
    for number in range(4):
        step(queue, parameters, number)
    ages = [{name: mean.tolist() for name, mean in means.items()} for means in queue.state()]
    assert ages == [{"a": [3.0, 3.0], "b": [0.0]}, {"a": [2.0, 2.0], "b": [0.0]}]
    assert len(queue) == 2 and sorted(log) == [0, 1, 2, 3]
    other, others, untouched = queue_of(2)
    other.load_state(queue.state())
    for number in range(4, 8):
        assert step(other, others, number) == step(queue, parameters, number) == [[number - 2] * 2, [0.0]]
    # What came from a checkpoint is a mean already, and is not reduced again.
    assert untouched == [0, 1] and sorted(log) == [0, 1, 2, 3, 4, 5]
    other.load_state([])
    assert len(other) == 0


def test_a_process_on_its_own_keeps_its_gradients():
    parameters = {"a": nn.Parameter(torch.zeros(2))}
    queue = DelayedGradients(parameters, 1, 1, Group().start_all_reduce_many)
    for number in range(3):
        parameters["a"].grad = torch.full((2,), float(number))
        queue.start()
        assert queue.take(1) == (number > 0)
        assert number == 0 or parameters["a"].grad.tolist() == [number - 1.0] * 2

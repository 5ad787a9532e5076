"""Finding the layer in which a number stops being finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moe_async.comm import World

if TYPE_CHECKING:
    from moe_async.engine.step import MicroBatch


def find_non_finite(
    module: nn.Module,
    micro_batches: Sequence[MicroBatch],
    loss: Callable[[Any, MicroBatch], Tensor],
    world: World,
) -> str:
    """Where a step's numbers stop being finite, as a phrase; empty when they all are.

    Runs the step's forward passes again and looks at every module's output; then its backward passes and looks at the
    gradients. Every rank calls it with equally many micro-batches; blocks. Weights and gradients stay as they are.

    Args:
        module: the model.
        micro_batches: of the step.
        loss: the training loss of a model output.
        world: this rank's view of the launch.
    """
    outputs, names = [], _Names()
    with names.recording(module):
        for batch in micro_batches:
            outputs.append(module(batch.tokens, batch.token_mask))
    found = _earliest(world, names.first)
    if found:
        return f"the output of {found}"
    losses = [loss(output, batch) for output, batch in zip(outputs, micro_batches, strict=True)]
    if any(world.everyone.gather_objects(not all(bool(one.isfinite()) for one in losses))):
        return "the loss"
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    first: tuple[int, str] | None = None
    for one in losses:
        gradients = torch.autograd.grad(one, list(parameters.values()), allow_unused=True)
        # Backward runs from the last layer to the first, so the last parameter with a bad gradient is where it began.
        for place, (name, gradient) in enumerate(zip(reversed(parameters), reversed(gradients), strict=True)):
            if gradient is not None and not gradient.isfinite().all() and (first is None or place < first[0]):
                first = (place, name)
    found = _earliest(world, first)
    return f"the gradient of {found}" if found else ""


def _earliest(world: World, first: tuple[int, str] | None) -> str:
    candidates = [candidate for candidate in world.everyone.gather_objects(first) if candidate is not None]
    return str(min(candidates)[1]) if candidates else ""


class _Names:
    """Remembers the first module, in the order of execution, whose output is not finite."""

    def __init__(self) -> None:
        self.first: tuple[int, str] | None = None
        self._calls = 0

    @contextmanager
    def recording(self, module: nn.Module) -> Iterator[None]:
        handles = [part.register_forward_hook(self._hook(name)) for name, part in module.named_modules() if name]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Callable[..., None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            self._calls += 1
            if self.first is None and not all(bool(t.isfinite().all()) for t in _tensors(output)):
                self.first = (self._calls, name)

        return look


def _tensors(output: Any) -> Iterable[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for part in output:
            yield from _tensors(part)

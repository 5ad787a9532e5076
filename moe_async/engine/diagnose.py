"""Finding the layer in which a number stops being finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moe_async.comm import World

if TYPE_CHECKING:
    from moe_async.engine.micro_batch import MicroBatch


def find_non_finite(
    module: nn.Module,
    micro_batches: Sequence[MicroBatch],
    loss: Callable[[Any, MicroBatch], Tensor],
    world: World,
) -> str:
    """Where a step's numbers stop being finite, as a phrase; empty when they all are.

    Runs the step's forward passes again without gradients and looks at every module's output; then, one micro-batch at
    a time and without recomputation, its backward passes, and looks at the parameters' gradients. Every rank calls it
    with equally many micro-batches; blocks. Weights and gradients stay as they are.

    Args:
        module: the model.
        micro_batches: of the step.
        loss: the training loss of a model output.
        world: this rank's view of the launch.
    """
    names, good_losses = _Names(), True
    with names.recording(module), torch.no_grad():
        for batch in micro_batches:
            good_losses &= bool(loss(module(batch.tokens, batch.token_mask), batch).isfinite())
    if found := _earliest(world, names.first):
        return f"the output of {found}"
    if not all(world.everyone.gather_objects(good_losses)):
        return "the loss"
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    first: tuple[int, str] | None = None
    with _without_recomputation(module):
        for batch in micro_batches:
            objective = loss(module(batch.tokens, batch.token_mask), batch)
            gradients = torch.autograd.grad(objective, list(parameters.values()), allow_unused=True)
            # Backward runs from the last layer to the first, so the last bad gradient is where it began.
            for place, (name, gradient) in enumerate(zip(reversed(parameters), reversed(gradients), strict=True)):
                if gradient is not None and not gradient.isfinite().all() and (first is None or place < first[0]):
                    first = (place, name)
    found = _earliest(world, first)
    return f"the gradient of {found}" if found else ""


@contextmanager
def _without_recomputation(module: nn.Module) -> Iterator[None]:
    """Hooks that look inside, and `torch.autograd.grad`, do not go together with every kind of recomputation."""
    recomputing = [part for part in module.modules() if isinstance(getattr(part, "recompute", None), str)]
    before = [part.recompute for part in recomputing]
    for part in recomputing:
        part.recompute = "none"  # type: ignore[assignment]
    try:
        yield
    finally:
        for part, value in zip(recomputing, before, strict=True):
            part.recompute = value


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

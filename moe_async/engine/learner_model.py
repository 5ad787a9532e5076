"""A rank's part of what its learner exchanges: values and gradients of its model, and writing back what was taken.

Shape letters: X elements of a fragment, Y those of them that this rank exchanges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moe_async.comm import Group
from moe_async.engine.deepspeed_bridge import DeepSpeedBridge
from moe_async.errors import SyncError
from moe_async.model.keys import exchanged_tensors
from moe_async.moe.classes import expert_ids
from moe_async.sync.fragments import Fragment, Unit
from moe_async.sync.participant import LearnerStep
from moe_async.sync.shares import lengths, put, share


class RankModel:
    """The model of a learner, as the exchange of one of its ranks sees it; on host memory.

    Args:
        bridge: the model under DeepSpeed.
        fragments: everything that is exchanged.
    """

    def __init__(self, bridge: DeepSpeedBridge, fragments: Sequence[Fragment]) -> None:
        self._bridge, self._world = bridge, bridge.world
        self._fragments = {fragment.number: fragment for fragment in fragments}
        topology = self._world.topology
        self._shares = {
            number: [share(fragment, topology, rank) for rank in range(topology.world_size)]
            for number, fragment in self._fragments.items()
        }
        self._ids = expert_ids(bridge.module)
        self._dtype = torch.promote_types(next(bridge.module.parameters()).dtype, torch.float32)
        self._contribution: dict[int, Tensor] = {}

    def part_sizes(self) -> dict[int, list[int]]:
        """Elements of each unit of each fragment that this rank exchanges."""
        return {number: lengths(shares[self._world.rank]) for number, shares in self._shares.items()}

    def step(self, number: int, position: float) -> LearnerStep:
        """Steps are the training loop's."""
        raise SyncError("a learner's steps are made by its training loop; the exchange only hears of them.")

    def hold(self) -> None:
        """Where gradients are sent: hold what the step that was just made contributes, until the next one is made.

        It is sent after values may have been taken, so it is copied to the host at once. Every rank calls it after each
        step; does not block.
        """
        if self._bridge.kept is not None:
            tensors = self._bridge.kept.release()
            self._contribution = {number: self._part(number, tensors) for number in self._fragments}

    def gradient(self, fragment: int) -> Tensor:
        """What the last step contributes [Y], see `moe_async.engine.kept_step`; on the host."""
        return self._contribution[fragment]

    def contribution(self) -> dict[str, Tensor]:
        """What is held, by fragment number; for a learner that is saved before it was sent."""
        return {str(number): part_Y for number, part_Y in self._contribution.items()}

    def load_contribution(self, parts: Mapping[str, Tensor]) -> None:
        """Put back what `contribution` gave."""
        self._contribution = {int(number): part_Y.clone() for number, part_Y in parts.items()}

    @torch.no_grad()
    def read(self, fragment: int) -> Tensor:
        """The local value [Y], a copy on the host."""
        return self._part(fragment, exchanged_tensors(self._bridge.module))

    def _part(self, fragment: int, tensors: Mapping[str, Tensor]) -> Tensor:
        """This rank's part of a fragment's tensors, given by key [Y], a copy on the host."""
        return torch.cat(
            [
                self._unit(unit, tensors)[part.start - start : part.stop - start]
                if part.stop > part.start
                else torch.empty(0, dtype=self._dtype)
                for unit, start, part in self._units(fragment, self._world.rank)
            ]
        )

    def _units(self, fragment: int, rank: int) -> list[tuple[Unit, int, slice]]:
        """Units of a fragment, where each begins, and a rank's part of it."""
        found, start = [], 0
        for unit, part in zip(self._fragments[fragment].units, self._shares[fragment][rank], strict=True):
            found.append((unit, start, part))
            start += unit.elements
        return found

    def _unit(self, unit: Unit, tensors: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([tensors[key.name].reshape(-1).to("cpu", self._dtype) for key in unit.keys])

    @torch.no_grad()
    def write(self, fragment: int, value_Y: Tensor) -> None:
        """Set the local value of a fragment, of which each rank brings its part. Every rank calls it; blocks."""
        whole_X = torch.zeros(self._fragments[fragment].elements, dtype=self._dtype)
        held = torch.zeros_like(whole_X, dtype=torch.bool)
        start = 0
        for dense, group in ((True, self._world.everyone), (False, self._world.expert_data)):
            # Dense units come first, so the part of each kind is in one piece.
            size = sum(lengths(self._kind(fragment, self._world.rank, dense)))
            self._spread(fragment, value_Y[start : start + size], dense, group, whole_X, held)
            start += size
        values = self._fragments[fragment].split(whole_X)
        there = self._fragments[fragment].split(held)
        self._write_tensors({name: value for name, value in values.items() if bool(there[name].all())})

    def _kind(self, fragment: int, rank: int, dense: bool) -> list[slice]:
        return [part for unit, _, part in self._units(fragment, rank) if (unit.expert == "") == dense]

    def _spread(self, fragment: int, part_Y: Tensor, dense: bool, group: Group, whole_X: Tensor, held: Tensor) -> None:
        """Bring together the parts that the ranks of a group have, in the fragment's vector."""
        shares = [self._kind(fragment, rank, dense) for rank in group.ranks]
        sizes = [sum(lengths(slices)) for slices in shares]
        if not sum(sizes):
            return
        rows = group.all_gather_rows(part_Y.to(self._world.device)[:, None], sizes)[:, 0].cpu()
        for slices, part in zip(shares, rows.split(sizes), strict=True):
            put(whole_X, slices, part)
            put(held, slices, torch.ones(part.numel(), dtype=torch.bool))

    def _write_tensors(self, values: Mapping[str, Tensor]) -> None:
        module = self._bridge.module
        for name, parameter in module.named_parameters():
            if name in self._ids:
                named = {i: values.get(f"{name}.{expert}") for i, expert in enumerate(self._ids[name])}
                if any(value is not None for value in named.values()):
                    whole = parameter.detach().clone()
                    for i, value in named.items():
                        if value is not None:
                            whole[i] = value.view_as(whole[i]).to(whole)
                    self._bridge.write_parameter(parameter, whole)
            elif name in values:
                self._bridge.write_parameter(parameter, values[name].view_as(parameter).to(parameter))
        for name, buffer in module.named_buffers():
            if name in values:
                buffer.copy_(values[name].view_as(buffer))

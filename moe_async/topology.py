"""Which rank belongs to which group and owns which expert: integers only, no torch.

Two kinds of groups cover the ranks of a learner (one DeepSpeed world):

* An **expert group** is a run of consecutive ranks that together hold every expert once. Its ranks run in
  lock-step because tokens travel between them by all-to-all.
* An **expert-data group** is the set of ranks, one from each expert group, that hold replicas of the same experts.
  Expert gradients are summed over it.

Worked example, 16 ranks, ``expert_parallel=4``, 8 experts (two on each rank of an expert group)::

    expert groups          [0 1 2 3] [4 5 6 7] [8 9 10 11] [12 13 14 15]
    expert-data groups     [0 4 8 12] [1 5 9 13] [2 6 10 14] [3 7 11 15]
    experts of ranks 0, 4, 8, 12      0 1
    experts of ranks 1, 5, 9, 13      2 3
    experts of ranks 2, 6, 10, 14     4 5
    experts of ranks 3, 7, 11, 15     6 7

Every rank is a data rank too: it reads its own sequences, and dense gradients are averaged over all 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_async.errors import TopologyError


@dataclass(frozen=True)
class Topology:
    """The ranks of one learner, cut into expert groups.

    Args:
        world_size: ranks in the learner.
        expert_parallel: ranks in an expert group; divides ``world_size`` and ``num_experts``.
        num_experts: routed experts of each MoE layer, over all ranks.
        placement: ``placement[slot]`` is the global id of the expert in that slot; rank ``i`` of an expert group holds
            the slots ``i * L .. (i + 1) * L - 1`` with ``L = num_experts / expert_parallel``. Empty: the identity.

    Raises:
        TopologyError: sizes do not divide, or the placement is not a permutation.
    """

    world_size: int = 1
    expert_parallel: int = 1
    num_experts: int = 1
    placement: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("world_size", "expert_parallel", "num_experts"):
            if getattr(self, name) < 1:
                raise TopologyError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.world_size % self.expert_parallel:
            allowed = divisors(self.world_size)
            raise TopologyError(
                f"the expert-parallel size is {self.expert_parallel} but there are {self.world_size} ranks; "
                f"an expert group must divide the ranks. Allowed here: {', '.join(map(str, allowed))} "
                "(--set parallel.expert=...), or start another number of ranks."
            )
        if self.num_experts % self.expert_parallel:
            raise TopologyError(
                f"there are {self.num_experts} experts but the expert-parallel size is {self.expert_parallel}; "
                "the experts must divide evenly over the ranks of an expert group. "
                f"Allowed sizes: {', '.join(map(str, divisors(self.num_experts)))}."
            )
        if not self.placement:
            object.__setattr__(self, "placement", tuple(range(self.num_experts)))
        if sorted(self.placement) != list(range(self.num_experts)):
            raise TopologyError(
                f"placement {self.placement} is not a permutation of the expert ids 0 to {self.num_experts - 1}; "
                "name every expert exactly once."
            )

    @property
    def experts_per_rank(self) -> int:
        """Experts that each rank holds."""
        return self.num_experts // self.expert_parallel

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same expert."""
        return self.world_size // self.expert_parallel

    def expert_groups(self) -> tuple[tuple[int, ...], ...]:
        """All expert groups, each a tuple of global ranks, in order."""
        size = self.expert_parallel
        return tuple(tuple(range(start, start + size)) for start in range(0, self.world_size, size))

    def expert_data_groups(self) -> tuple[tuple[int, ...], ...]:
        """All expert-data groups, each a tuple of global ranks; group ``i`` replicates the experts of index ``i``."""
        size = self.expert_parallel
        return tuple(tuple(range(index, self.world_size, size)) for index in range(size))

    def expert_index(self, rank: int) -> int:
        """Position of ``rank`` in its expert group."""
        return self._checked(rank) % self.expert_parallel

    def replica_index(self, rank: int) -> int:
        """Position of ``rank`` in its expert-data group."""
        return self._checked(rank) // self.expert_parallel

    def expert_group(self, rank: int) -> tuple[int, ...]:
        """The expert group that ``rank`` belongs to."""
        return self.expert_groups()[self.replica_index(rank)]

    def expert_data_group(self, rank: int) -> tuple[int, ...]:
        """The expert-data group that ``rank`` belongs to."""
        return self.expert_data_groups()[self.expert_index(rank)]

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """Global ids of the experts that ``rank`` holds, in the order in which they are stacked there."""
        start = self.expert_index(rank) * self.experts_per_rank
        return self.placement[start : start + self.experts_per_rank]

    def slots(self) -> tuple[int, ...]:
        """``slots()[expert]`` is the slot of that expert: the inverse of ``placement``."""
        inverse = [0] * self.num_experts
        for slot, expert in enumerate(self.placement):
            inverse[expert] = slot
        return tuple(inverse)

    def owners(self, expert: int) -> tuple[int, ...]:
        """All ranks that hold a replica of ``expert``."""
        if not 0 <= expert < self.num_experts:
            raise TopologyError(f"expert {expert} does not exist; the ids are 0 to {self.num_experts - 1}.")
        return self.expert_data_groups()[self.slots()[expert] // self.experts_per_rank]

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise TopologyError(f"rank {rank} does not exist; the ranks are 0 to {self.world_size - 1}.")
        return rank


def divisors(number: int) -> Sequence[int]:
    """All divisors of ``number``, ascending: the sizes that a refused size can be replaced with."""
    return [size for size in range(1, number + 1) if number % size == 0]

"""What the syncer knows of a run before anybody has taken part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from moe_async.sync.merger import Schedule
from moe_async.sync.syncer import SyncGroup


@dataclass(frozen=True)
class RunDescription:
    """What a recipe makes of a run.

    Attributes:
        folder: where the syncer writes, made already.
        learners: expected number of learners.
        num_experts: of each MoE layer.
        groups: what is exchanged under which policy; empty where learners add up among themselves.
        initial: version 0 of every fragment; empty likewise.
        schedule: of the outer learning rate.
        timeout: seconds of silence after which a partner counts as gone.
        joint: learners add up among themselves, and the syncer merges nothing.
    """

    folder: Path
    learners: int
    num_experts: int
    groups: Sequence[SyncGroup]
    initial: Mapping[int, Tensor]
    schedule: Schedule
    timeout: float
    joint: bool = False

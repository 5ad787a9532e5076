"""Process groups and collectives: the only package that imports ``torch.distributed``."""

from moe_async.comm.collectives import Group, Reduction
from moe_async.comm.groups import (
    Launch,
    World,
    leave_process_group,
    make_world,
    read_launch,
    running_group,
    start_process_group,
)

__all__ = [
    "Group",
    "Launch",
    "Reduction",
    "World",
    "leave_process_group",
    "make_world",
    "read_launch",
    "running_group",
    "start_process_group",
]

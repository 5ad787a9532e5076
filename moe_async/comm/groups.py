"""Joining a launch: which ranks there are, and the groups they talk in.

The one place, beside the entry points, that reads the launcher's environment variables.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from moe_async.comm.collectives import Group, Meter
from moe_async.errors import CommunicationError
from moe_async.topology import Topology


@dataclass(frozen=True)
class World:
    """One learner as one of its ranks sees it. The default is a process on its own.

    Attributes:
        topology: the integers.
        rank: this process among all ranks of the learner.
        local_rank: this process among the ranks on this machine; selects the accelerator.
        everyone: all ranks.
        expert: the ranks that hold every expert once together.
        expert_data: the ranks that replicate the experts of this one.
        background: all ranks again, for reductions that run while the other groups are used.
        device: where this rank computes.
    """

    topology: Topology = field(default_factory=Topology)
    rank: int = 0
    local_rank: int = 0
    everyone: Group = field(default_factory=Group)
    expert: Group = field(default_factory=Group)
    expert_data: Group = field(default_factory=Group)
    background: Group = field(default_factory=Group)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def size(self) -> int:
        """Ranks in the learner."""
        return self.topology.world_size


@dataclass(frozen=True)
class Launch:
    """What a launcher says of this process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    address: str = "127.0.0.1"
    port: int | None = None


def read_launch(environment: Mapping[str, str] | None = None) -> Launch:
    """Who this process is, from the variables of the deepspeed launcher, torchrun or Slurm; alone without any.

    Raises:
        CommunicationError: the address or port is missing, a number is none, or the rank does not exist.
    """
    env = os.environ if environment is None else environment
    if "RANK" in env and "WORLD_SIZE" in env:
        launch = _torch_launch(env)
    elif "SLURM_PROCID" in env and _number(env, "SLURM_NTASKS", "1") > 1:
        launch = _slurm_launch(env)
    else:
        return Launch()
    if launch.rank >= launch.world_size:
        raise CommunicationError(
            f"this process is rank {launch.rank} of {launch.world_size}; ranks count from 0, so the launcher must "
            "start more ranks or number them anew."
        )
    if launch.world_size > 1 and not (launch.address and launch.port):
        raise CommunicationError(
            f"this process is rank {launch.rank} of {launch.world_size}, but MASTER_ADDR is {launch.address!r} and "
            f"MASTER_PORT is {env.get('MASTER_PORT', '')!r}; export the address and a free port of the machine that "
            "runs rank 0 on every rank."
        )
    return replace(launch, address=launch.address or "127.0.0.1")


def _torch_launch(env: Mapping[str, str]) -> Launch:
    # torchrun says LOCAL_WORLD_SIZE, the deepspeed launcher LOCAL_SIZE.
    local_size = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in env else "LOCAL_SIZE"
    return Launch(
        rank=_number(env, "RANK"),
        world_size=_number(env, "WORLD_SIZE"),
        local_rank=_number(env, "LOCAL_RANK", "0"),
        local_world_size=_number(env, local_size, env["WORLD_SIZE"]),
        address=env.get("MASTER_ADDR", ""),
        port=_number(env, "MASTER_PORT", "0") or None,
    )


def _slurm_launch(env: Mapping[str, str]) -> Launch:
    # Slurm names no port: one derived from the job is the same on every node and seldom taken.
    port = str(20000 + _number(env, "SLURM_JOB_ID", "0") % 20000)
    # Such as "4(x2),3": tasks on each node in turn. The first is right for all nodes of an even job.
    tasks = re.match(r"\d+", env.get("SLURM_TASKS_PER_NODE", ""))
    return Launch(
        rank=_number(env, "SLURM_PROCID"),
        world_size=_number(env, "SLURM_NTASKS"),
        local_rank=_number(env, "SLURM_LOCALID", "0"),
        local_world_size=int(tasks[0]) if tasks else _number(env, "SLURM_NTASKS"),
        address=env.get("MASTER_ADDR")
        or _first_host(_first_of(env, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")),
        port=_number(env, "MASTER_PORT", port),
    )


def _first_of(env: Mapping[str, str], *names: str) -> str:
    return next((env[name] for name in names if name in env), "")


def _first_host(nodes: str) -> str:
    """The first machine of a Slurm node list, where rank 0 runs: ``node[03-05,9]-ib,other`` gives ``node03-ib``."""
    # The list's first entry, in which every bracket holds numbers and ranges.
    match = re.match(r"(?:\[[^\]]*\]|[^\[,])*", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[0]) if match else ""


def _number(env: Mapping[str, str], name: str, default: str = "") -> int:
    value = env.get(name, default)
    if not value.isdigit():
        raise CommunicationError(
            f"the environment variable {name} is {value!r}; the launcher must set it to a number. "
            "Start with `deepspeed`, `torchrun` or `srun`, or unset RANK and WORLD_SIZE for a single process."
        )
    return int(value)


def _set_launch_environment(launch: Launch) -> None:
    """Give libraries that read torchrun's variables the same answer as ``launch`` (Slurm and single processes)."""
    os.environ.update(
        RANK=str(launch.rank),
        WORLD_SIZE=str(launch.world_size),
        LOCAL_RANK=str(launch.local_rank),
        LOCAL_SIZE=str(launch.local_world_size),
        MASTER_ADDR=launch.address,
        MASTER_PORT=str(launch.port or _free_port()),
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_world(
    topology: Topology,
    launch: Launch | None = None,
    device: torch.device | None = None,
    timeout: timedelta | None = None,
) -> World:
    """Create the groups of ``topology`` over the running process group.

    Every rank of the learner calls it, in the same order among its other calls; blocks. Without a running process
    group the topology must be of one rank.

    Args:
        topology: the integers.
        launch: what the launcher says of this process.
        device: where this rank computes; the CPU by default.
        timeout: after this long a collective of a new group fails whose partner is missing; None: torch's default.

    Raises:
        CommunicationError: the running world has another size than the topology.
    """
    launch, device = launch or Launch(), device or torch.device("cpu")
    running = dist.get_world_size() if dist.is_initialized() else 1
    if running != topology.world_size:
        raise CommunicationError(
            f"the topology has {topology.world_size} ranks but the running process group has {running}; make the "
            "topology for the ranks that were started, and call moe_async.join_world(recipe) under the launcher first."
        )
    if not dist.is_initialized():
        return World(topology, device=device)
    rank, meter = dist.get_rank(), Meter()

    def new_group(ranks: tuple[int, ...]) -> Group:
        # A group of one never communicates, so it needs no process group.
        handle = dist.new_group(list(ranks), timeout=timeout) if len(ranks) > 1 else None
        return Group(ranks, ranks.index(rank) if rank in ranks else 0, handle, device, meter)

    # Every rank takes part in creating every group, in one order: skipping a foreign one hangs.
    expert = [new_group(ranks) for ranks in topology.expert_groups()]
    expert_data = [new_group(ranks) for ranks in topology.expert_data_groups()]
    background = new_group(tuple(range(topology.world_size)))
    return World(
        topology=topology,
        rank=rank,
        local_rank=launch.local_rank,
        everyone=Group(tuple(range(topology.world_size)), rank, dist.group.WORLD, device, meter),
        expert=expert[topology.replica_index(rank)],
        expert_data=expert_data[topology.expert_index(rank)],
        background=background,
        device=device,
    )


def running_group() -> Group:
    """All ranks of the process group that runs in this process, whoever started it; this process alone without one."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Group()
    return Group(tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)


def start_process_group(backend: str, launch: Launch, timeout: timedelta) -> None:
    """Join the launch's process group, unless one is running. Every rank calls it; blocks until all have come.

    Args:
        backend: ``gloo`` on CPUs, the accelerator's own elsewhere.
        launch: who this process is.
        timeout: after this long a collective whose partner is missing fails.
    """
    if not dist.is_initialized():
        _set_launch_environment(launch)
        dist.init_process_group(backend, timeout=timeout)


def leave_process_group() -> None:
    """Leave the process group at the end of a run; safe to call without one."""
    if dist.is_initialized():
        dist.destroy_process_group()

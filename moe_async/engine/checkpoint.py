"""Checkpoints: complete, atomic, one key per expert, nothing executed on load.

A checkpoint is a folder ``step_<n>``:

* ``dense.safetensors``: dense and router parameters, buffers, their optimizer state and their gradients in flight,
  written by rank 0;
* ``experts-<i>.safetensors``: the experts of index ``i`` of the expert groups and their optimizer state, one key per
  global expert id, written by the first replica;
* ``rank-<r>.safetensors``: the random states of rank ``r``, and under ``exchange/`` what it shares with other learners;
* ``manifest.json``: format version, sizes of all files, the recipe, counters and the data position. Written last.

Keys are ``param/<name>``, ``buffer/<name>`` and ``<optimizer key>/<name>``, with ``.<expert id>`` behind an expert's.
``inflight/<age>/<name>`` are mean gradients that a delay has yet to apply, those of the newest step with the age 0.
It is written into a folder aside, which gets its name by a rename once every rank's files are complete, so a checkpoint
is there as a whole or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from moe_async.comm import World
from moe_async.engine.checkpoint_folder import (
    Manifest,
    checkpoint_name,
    file_sizes,
    partial_folder,
    publish,
    read_manifest,
    write_manifest,
)
from moe_async.engine.deepspeed_bridge import DeepSpeedBridge, random_states, set_random_states
from moe_async.errors import CheckpointError
from moe_async.moe.classes import expert_ids

_EXCHANGE = "exchange/"


def save_checkpoint(
    folder: Path,
    step: int,
    bridge: DeepSpeedBridge,
    recipe: str,
    trainer: dict[str, Any],
    keep: int,
    exchange: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write ``folder/step_<step>`` and delete older ones but the newest ``keep - 1``. Every rank calls it; blocks.

    Raises:
        CheckpointError: on every rank, when any rank could not write; older checkpoints are untouched then.
    """
    world = bridge.world
    target = folder / checkpoint_name(step)
    aside = folder / f".{target.name}.partial"

    def prepare() -> None:
        if world.rank == 0:
            partial_folder(folder, step)

    _together(world, f"prepare {aside}", prepare)
    tensors = _collect(bridge)
    own = {f"{_EXCHANGE}{name}": _to_host(tensor) for name, tensor in (exchange or {}).items()}
    tensors[_rank_file(world.rank)].update(own)
    _together(world, f"write {aside}", lambda: _write_tensors(aside, tensors, world))
    names = sorted({name for names in world.everyone.gather_objects(sorted(tensors)) for name in names})

    def complete() -> None:
        if world.rank == 0:
            sizes = file_sizes(aside, names)
            steps = bridge.optimizer_steps()
            expert_parallel = world.topology.expert_parallel
            write_manifest(aside, Manifest(recipe, world.size, expert_parallel, steps, trainer, sizes))
            publish(aside, target, keep)

    _together(world, f"complete {target}", complete)
    return target


def _together(world: World, what: str, action: Callable[[], None]) -> None:
    """Run ``action`` on every rank and fail on all of them when it fails on one: no rank waits for another's rest."""
    error = ""
    try:
        action()
    except (OSError, SafetensorError, CheckpointError) as failure:
        error = f"rank {world.rank}: {failure}"
    failures = [text for text in world.everyone.gather_objects(error) if text]
    if failures:
        raise CheckpointError(
            f"could not {what}: {'; '.join(failures)}. Checkpoints written before are untouched; make room or fix the "
            "permissions, and see that all ranks share the folder (--set log.dir=...)."
        )


def _collect(bridge: DeepSpeedBridge) -> dict[str, dict[str, Tensor]]:
    """The tensors that this rank writes, by file. Every rank calls it; blocks (optimizer state is gathered)."""
    world, ids = bridge.world, expert_ids(bridge.module)
    expert_file = f"experts-{world.expert.index:05d}.safetensors"
    files: dict[str, dict[str, Tensor]] = {_rank_file(world.rank): random_states()}
    if world.rank == 0:
        buffers = bridge.module.named_buffers()
        files["dense.safetensors"] = {f"buffer/{name}": _to_host(value) for name, value in buffers}
        for age, means in enumerate(bridge.delayed.state() if bridge.delayed is not None else ()):
            keys = {f"inflight/{age}/{name}": _to_host(mean) for name, mean in means.items()}
            files["dense.safetensors"].update(keys)
    if ids and world.expert_data.index == 0:
        files[expert_file] = {}
    for name, parameter in bridge.module.named_parameters():
        wanted = files.get(expert_file if name in ids else "dense.safetensors")
        for key, value in _parameter_state(bridge, parameter):
            if wanted is None:
                continue
            if name in ids:
                wanted.update((f"{key}/{name}.{e}", _to_host(value[i])) for i, e in enumerate(ids[name]))
            else:
                wanted[f"{key}/{name}"] = _to_host(value)
    return files


def _parameter_state(bridge: DeepSpeedBridge, parameter: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
    yield "param", parameter.detach()
    if parameter.requires_grad:
        yield from bridge.optimizer_state(parameter)


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _write_tensors(aside: Path, tensors: Mapping[str, dict[str, Tensor]], world: World) -> None:
    if not aside.is_dir():
        raise CheckpointError(f"rank {world.rank} does not see {aside}")
    for name, content in tensors.items():
        save_file(content, aside / name)
        with (aside / name).open("rb") as handle:
            os.fsync(handle.fileno())


class _Tensors:
    """Tensors of a checkpoint by key, whichever file they are in; nothing is read before it is asked for."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path = path
        self._files: dict[str, Any] = {}
        for name in manifest.files:
            if not name.startswith("rank-"):
                handle = _open(path / name)
                self._files.update(dict.fromkeys(handle.keys(), handle))

    def refuse_unknown_parameters(self, model: nn.Module) -> None:
        """Refuse a model that has no place for some parameter of the checkpoint."""
        names = {name for name, _ in model.named_parameters()}
        experts = set(expert_ids(model))
        stored = {key.removeprefix("param/") for key in self._files if key.startswith("param/")}
        plain = {name.rpartition(".")[0] if name.rpartition(".")[0] in experts else name for name in stored}
        if unknown := sorted(plain - names):
            raise CheckpointError(
                f"{self._path} holds {unknown[0]!r} and {len(unknown) - 1} more parameters that this model has not; "
                "build the model with the checkpoint's own recipe."
            )

    def in_flight(self) -> int:
        """Steps whose dense gradients are yet to be applied."""
        return len({key.split("/")[1] for key in self._files if key.startswith("inflight/")})

    def get(self, key: str, shape: torch.Size) -> Tensor:
        if key not in self._files:
            raise CheckpointError(
                f"{self._path} has no tensor {key!r}, which this model needs; build the model with the checkpoint's "
                "own recipe."
            )
        tensor: Tensor = self._files[key].get_tensor(key)
        if tensor.shape != shape:
            raise CheckpointError(
                f"{key!r} in {self._path} has shape {tuple(tensor.shape)} but the model needs {tuple(shape)}; build "
                "the model with the checkpoint's own recipe."
            )
        return tensor

    def parameter(self, kind: str, name: str, parameter: Tensor, ids: Mapping[str, tuple[int, ...]]) -> Tensor:
        """State ``kind`` of a parameter in its shape; experts are put together from their own keys."""
        if name not in ids:
            return self.get(f"{kind}/{name}", parameter.shape)
        return torch.stack([self.get(f"{kind}/{name}.{expert}", parameter.shape[1:]) for expert in ids[name]])


@torch.no_grad()
def load_weights(path: str | Path, model: nn.Module) -> Manifest:
    """Put a checkpoint's weights and buffers into ``model``, which may hold any subset of the experts."""
    path = Path(path)
    manifest = read_manifest(path)
    tensors, ids = _Tensors(path, manifest), expert_ids(model)
    tensors.refuse_unknown_parameters(model)
    for name, parameter in model.named_parameters():
        parameter.copy_(tensors.parameter("param", name, parameter, ids))
    _load_buffers(model, tensors)
    return manifest


@torch.no_grad()
def load_checkpoint(path: Path, bridge: DeepSpeedBridge) -> Manifest:
    """Put a checkpoint's weights, optimizer state, gradients in flight and random states into a model in training.

    Every rank calls it. With another number of ranks than the checkpoint's, the random states start anew.
    """
    manifest = read_manifest(path)
    tensors, ids = _Tensors(path, manifest), expert_ids(bridge.module)
    tensors.refuse_unknown_parameters(bridge.module)
    _load_in_flight(path, tensors, bridge)
    for name, parameter in bridge.module.named_parameters():
        bridge.write_parameter(parameter, tensors.parameter("param", name, parameter, ids))
        if parameter.requires_grad:
            state = {key: tensors.parameter(key, name, parameter, ids) for key in bridge.state_keys(parameter)}
            bridge.write_optimizer_state(parameter, state)
    bridge.write_optimizer_steps(manifest.optimizer_steps)
    _load_buffers(bridge.module, tensors)
    if manifest.world_size == bridge.world.size:
        handle = _open(path / _rank_file(bridge.world.rank))
        names = [key for key in handle.keys() if not key.startswith(_EXCHANGE)]  # noqa: SIM118
        set_random_states({key: handle.get_tensor(key) for key in names})
    return manifest


def _load_in_flight(path: Path, tensors: _Tensors, bridge: DeepSpeedBridge) -> None:
    """Put the gradients of a delay back into its queue; without a place for them they would be lost."""
    steps, delayed = tensors.in_flight(), bridge.delayed
    taken = delayed.delay if delayed is not None else 0
    if steps > taken:
        raise CheckpointError(
            f"{path} holds dense gradients of {steps} steps that are yet to be applied, but the delay is {taken} here; "
            f"resume with a delay of at least that: --set parallel.zero=0 --set 'sync.inside={{delay: {steps}}}'."
        )
    if delayed is not None:
        delayed.load_state(
            [
                {name: tensors.get(f"inflight/{age}/{name}", p.shape) for name, p in delayed.parameters.items()}
                for age in range(steps)
            ]
        )


def load_exchange(path: Path, rank: int) -> dict[str, Tensor]:
    """What a rank shared with other learners when the checkpoint was written; empty for a learner on its own."""
    handle = _open(path / _rank_file(rank))
    names = [key for key in handle.keys() if key.startswith(_EXCHANGE)]  # noqa: SIM118
    return {name.removeprefix(_EXCHANGE): handle.get_tensor(name) for name in names}


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _load_buffers(model: nn.Module, tensors: _Tensors) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(tensors.get(f"buffer/{name}", buffer.shape))


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); use another checkpoint.") from error

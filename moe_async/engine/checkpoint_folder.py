"""The folders of checkpoints: names, manifests, and changes that leave no half-written checkpoint behind.

A checkpoint is the folder ``step_<n>`` with a ``manifest.json`` in it. Any other name, such as one that begins with a
dot, is not a checkpoint: folders get their name by a rename when they are complete, and lose it by a rename before they
are deleted.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moe_async.errors import CheckpointError

FORMAT_VERSION = 3
"""2 had one ``optimizer_steps`` for the whole model and no gradients in flight; it is read too."""
MANIFEST = "manifest.json"
_NAME = re.compile(r"step_(\d+)")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        recipe: the resolved recipe as YAML text.
        world_size, expert_parallel: of the run that wrote it.
        optimizer_steps: updates that the optimizer has counted in each part of the model, ``dense`` and ``expert``.
        trainer: counters and positions of the training loop.
        files: size in bytes of every file.
    """

    recipe: str
    world_size: int
    expert_parallel: int
    optimizer_steps: dict[str, int]
    trainer: dict[str, Any]
    files: dict[str, int]


def checkpoint_name(step: int) -> str:
    """Folder name of the checkpoint after ``step`` optimizer steps."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int:
    """The step in a checkpoint's folder name."""
    return int(path.name.removeprefix("step_"))


def find_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in ``folder``, oldest first."""
    found = [path for path in folder.glob("step_*") if _NAME.fullmatch(path.name) and (path / MANIFEST).is_file()]
    return sorted(found, key=step_of)


def partial_folder(folder: Path, step: int) -> Path:
    """An empty folder to write a checkpoint into; what an earlier crash left behind is removed."""
    for left in [*folder.glob(".step_*.partial"), *folder.glob(".step_*.old")]:
        shutil.rmtree(left, ignore_errors=True)
    aside = folder / f".{checkpoint_name(step)}.partial"
    aside.mkdir(parents=True)
    return aside


def publish(aside: Path, target: Path, keep: int) -> None:
    """Give a complete folder its name, then delete all checkpoints before it but the newest ``keep - 1``."""
    _sync(aside)
    replaced = target.with_name(f".{target.name}.old")
    if target.exists():
        target.rename(replaced)
    aside.rename(target)
    _sync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    older = [path for path in find_checkpoints(target.parent) if step_of(path) < step_of(target)]
    for path in older[: max(len(older) - keep + 1, 0)]:
        _discard(path)


def _discard(path: Path) -> None:
    """Take a checkpoint's name away, then its content: a crash in between leaves no checkpoint with missing files."""
    gone = path.with_name(f".{path.name}.old")
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def abandon_after(folder: Path, step: int) -> list[Path]:
    """Rename checkpoints of later steps to ``abandoned-...``: a run that goes on from ``step`` is another branch."""
    renamed = []
    for path in find_checkpoints(folder):
        if step_of(path) > step:
            number = 1
            while (aside := folder / f"abandoned-{number}-{path.name}").exists():
                number += 1
            renamed.append(path.rename(aside))
    return renamed


def write_manifest(aside: Path, manifest: Manifest) -> None:
    """Write the manifest of a folder whose other files are all there."""
    missing = [name for name in manifest.files if not (aside / name).is_file()]
    if missing:
        raise CheckpointError(f"{', '.join(missing)} written by other ranks are not in {aside}")
    with (aside / MANIFEST).open("w") as handle:
        json.dump({"format_version": FORMAT_VERSION, **asdict(manifest)}, handle, indent=1)
        handle.flush()
        os.fsync(handle.fileno())


def file_sizes(folder: Path, names: Sequence[str]) -> dict[str, int]:
    """Bytes of each file; -1 where one is missing."""
    return {name: (folder / name).stat().st_size if (folder / name).is_file() else -1 for name in names}


def read_manifest(path: Path) -> Manifest:
    """Read and check a checkpoint's manifest.

    Raises:
        CheckpointError: no checkpoint, another format, or a file that is missing or cut short.
    """
    source = path / MANIFEST
    if not source.is_file():
        raise CheckpointError(
            f"{path} is not a complete checkpoint: it has no {MANIFEST}. Give a folder such as "
            "runs/quickstart/checkpoints/step_00000450."
        )
    try:
        document = json.loads(source.read_text())
        version = document.pop("format_version")
        if version not in (2, FORMAT_VERSION):
            raise CheckpointError(
                f"{source} has format version {version}; this release reads versions 2 and {FORMAT_VERSION}. Use the "
                "release of moe_async that wrote it."
            )
        if version == 2:
            document["optimizer_steps"] = dict.fromkeys(("dense", "expert"), document["optimizer_steps"])
        manifest = Manifest(**document)
        wanted = dict(manifest.files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{source} is damaged ({error!r}); use another checkpoint.") from error
    for name, size in file_sizes(path, list(wanted)).items():
        if size != wanted[name]:
            state = "missing" if size < 0 else f"{size} bytes long"
            raise CheckpointError(
                f"{path / name} is {state}; its manifest says {wanted[name]} bytes. Use another checkpoint."
            )
    return manifest


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

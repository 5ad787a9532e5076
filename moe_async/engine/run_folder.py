"""The folder of a run: its name, its files, and which checkpoint a resumed run starts from."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_async.engine.checkpoint_folder import MANIFEST, find_checkpoints, read_manifest
from moe_async.errors import CheckpointError


@dataclass(frozen=True)
class RunFolder:
    """Paths of what a run leaves behind."""

    path: Path

    @property
    def recipe(self) -> Path:
        """The resolved recipe."""
        return self.path / "recipe.yaml"

    @property
    def deepspeed(self) -> Path:
        """The derived DeepSpeed JSON."""
        return self.path / "deepspeed.json"

    @property
    def metrics(self) -> Path:
        """One JSON line per step and per evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def expert_load(self) -> Path:
        """Folder of the record of expert loads, see `moe_async.observe.store`."""
        return self.path / "expert_load"

    @property
    def events(self) -> Path:
        """What this learner sent to the syncer and took from it, JSON Lines."""
        return self.path / "events.jsonl"

    @property
    def summary(self) -> Path:
        """The figures of the closing table."""
        return self.path / "summary.json"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.path / "checkpoints"


def new_run(folder: Path, name: str) -> RunFolder:
    """Make ``folder/name``, or ``name-2`` and so on: a run never writes into another's folder."""
    for number in range(1, 100_000):
        path = folder / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return RunFolder(path)
    raise FileExistsError(f"{folder} holds too many runs called {name}; choose another --set name=...")


def learner_run(folder: Path, run: str, learner: int) -> RunFolder:
    """The folder of one learner in that of a run, which the syncer may have made or be elsewhere."""
    path = folder / run / f"learner-{learner}"
    path.mkdir(parents=True, exist_ok=True)
    return RunFolder(path)


def resumed_run(folder: Path, name: str, resume: str) -> tuple[RunFolder, Path]:
    """The run and the checkpoint that ``resume`` names.

    Args:
        folder: where runs are.
        name: of the run.
        resume: ``latest`` (the newest checkpoint of the newest run called ``name`` that has one), a run's folder, or a
            checkpoint's.

    Raises:
        CheckpointError: there is none.
    """
    if resume == "latest":
        runs = [run for run in _runs_called(folder, name) if find_checkpoints(run / "checkpoints")]
        if not runs:
            raise CheckpointError(
                f"there is no run called {name} with a checkpoint in {folder}, so nothing to resume; start without "
                "--resume, or name the folder of a run or a checkpoint."
            )
        return RunFolder(runs[-1]), _newest_readable(runs[-1])
    path = Path(resume).expanduser().resolve()
    if (path / MANIFEST).is_file():
        if path.parent.name != "checkpoints":
            raise CheckpointError(
                f"{path} is not in the checkpoints folder of a run, so there is no run to go on with; put it into "
                f"{folder / name / 'checkpoints'} and resume from there."
            )
        return RunFolder(path.parent.parent), path
    if not find_checkpoints(path / "checkpoints"):
        raise CheckpointError(
            f"{path} is neither a checkpoint nor a run with one; give a folder such as runs/quickstart or "
            "runs/quickstart/checkpoints/step_00000450."
        )
    return RunFolder(path), _newest_readable(path)


def _newest_readable(run: Path) -> Path:
    """The newest checkpoint of a run whose files are all there; the error of the newest when none is."""
    errors = []
    for path in reversed(find_checkpoints(run / "checkpoints")):
        try:
            read_manifest(path)
        except CheckpointError as error:
            errors.append(error)
        else:
            return path
    raise errors[0]


def _runs_called(folder: Path, name: str) -> list[Path]:
    """Runs called ``name``, oldest first."""
    pattern = re.compile(re.escape(name) + r"(?:-(\d+))?")
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := pattern.fullmatch(path.name):
            found.append((int(match[1] or 1), path))
    return [path for _, path in sorted(found)]


def forget_after(path: Path, step: int) -> None:
    """Drop the JSON Lines of ``path`` that belong to steps after ``step``: a resumed run writes them again."""
    if not path.is_file():
        return
    kept = [line for line in path.read_text().splitlines() if _step_of(line) <= step]
    aside = path.with_suffix(".partial")
    aside.write_text("".join(line + "\n" for line in kept))
    aside.replace(path)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        # A line cut short by a crash belongs to no step worth keeping.
        return float("inf")


def append_line(path: Path, document: dict[str, Any]) -> None:
    """Append one JSON line; a number that is not finite becomes null, which JSON has a word for."""
    with path.open("a") as file:
        file.write(json.dumps(finite(document)) + "\n")


def finite(value: Any) -> Any:
    """JSON values with null in place of numbers that are not finite, at any depth."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

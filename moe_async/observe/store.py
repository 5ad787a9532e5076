"""Loads of experts on disk: a folder that stays small however long the run is.

``meta.json`` says what the axes are; each ``windows-<first step>-<last step>.safetensors`` holds windows of steps that
follow one another, and the sampled expert paths of them. When there are more windows than the folder may hold, they
are rewritten as about half as many that are twice as long: sums stay sums and maxima stay maxima.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from moe_async.errors import LoadError
from moe_async.observe.paths import Paths
from moe_async.observe.windows import FIELDS, Sizes, Windows

FORMAT_VERSION = 1
NO_DOMAIN = "(none)"
"""The label of text without a label."""
BUDGET_BYTES = 2**29
"""Bytes of a folder at most, about: two such records of 48 layers and 256 experts are below 1 GB."""
LEAST_WINDOWS, MOST_WINDOWS = 64, 1024
_FILE_WINDOWS = 128
"""Windows that are read at once, about."""
_META = "meta.json"
_PATHS = "paths."


@dataclass(frozen=True)
class LoadMeta:
    """What the axes of a record are.

    Attributes:
        layers: name of each MoE layer, in the order of the model.
        experts: of each layer, without zero experts.
        zero_experts: choices behind the experts that compute nothing.
        top_k: experts per token of each layer.
        domains: labels of text; the last one is that of tokens without a label.
        rank_experts: of each rank, the experts that it holds; empty where it is not known.
        balanced_by: how the run keeps its experts even, by recipe entry, for advice; empty where it is not known.
    """

    layers: tuple[str, ...]
    experts: tuple[int, ...]
    top_k: tuple[int, ...]
    zero_experts: int = 0
    domains: tuple[str, ...] = (NO_DOMAIN,)
    rank_experts: tuple[tuple[int, ...], ...] = ()
    balanced_by: tuple[str, ...] = ()

    @property
    def sizes(self) -> Sizes:
        """How long the axes are."""
        choices = max(self.experts, default=0) + self.zero_experts
        return Sizes(len(self.layers), choices, len(self.rank_experts), len(self.domains))


@dataclass(frozen=True)
class LoadRecord:
    """What was recorded of a run.

    Attributes:
        meta: what the axes are.
        windows: figures, in the order of steps.
        paths: of sampled tokens.
    """

    meta: LoadMeta
    windows: Windows
    paths: Paths


class LoadStore:
    """Writes a record; one process alone does.

    Args:
        folder: where; made when it is missing.
        meta: what the axes are. A folder that holds a record with other axes is refused.
        every: steps of the first windows.
        budget: bytes of the folder at most, about.

    Attributes:
        window_steps: how many steps a new window shall hold, in all.

    Raises:
        LoadError: the folder holds something else.
    """

    def __init__(self, folder: Path, meta: LoadMeta, every: int = 1, budget: int = BUDGET_BYTES) -> None:
        self.folder, self.meta = folder, meta
        self.most = min(max(budget // max(meta.sizes.window_bytes(), 1), LEAST_WINDOWS), MOST_WINDOWS)
        folder.mkdir(parents=True, exist_ok=True)
        self.window_steps = every
        if (folder / _META).is_file():
            found, self.window_steps = _read_meta(folder)
            _refuse_other(folder, found, meta)
        self._write_meta()
        self._remove_leftovers()
        self._count = sum(_window_count(path) for path in _files(folder))

    @staticmethod
    def fits(folder: Path, meta: LoadMeta) -> bool:
        """Whether a record with these axes may go on in a folder: it holds one, or none at all.

        Raises:
            LoadError: what it holds cannot be read.
        """
        return not (folder / _META).is_file() or not _other_axes(_read_meta(folder)[0], meta)

    def append(self, windows: Windows, paths: Paths) -> None:
        """Add windows that come after those that are there, and the paths of their tokens."""
        if not len(windows):
            return
        _write_file(self.folder, windows, paths)
        self._count += len(windows)
        if self._count > self.most:
            # Checkpoints cut windows short; where those put together are not enough, windows get longer.
            self._pack()
            while 4 * self._count > 3 * self.most:
                self.window_steps *= 2
                self._write_meta()
                self._pack()

    def forget_after(self, step: int) -> None:
        """Drop the windows that reach beyond a step: a resumed run records those steps again."""
        for path in _files(self.folder):
            windows, paths = _read_file(path)
            keep = windows["last_step"] <= step
            if not keep.all():
                if keep.any():
                    _write_file(
                        self.folder, windows.chosen(keep), paths.chosen(paths.step <= windows["last_step"][keep].max())
                    )
                path.unlink()
                self._count -= int((~keep).sum())

    def _pack(self) -> None:
        """Put short windows together, a few files at a time: a record may be larger than memory."""
        self._count = 0
        held: list[Path] = []
        windows = 0
        for path in _files(self.folder):
            held.append(path)
            windows += _window_count(path)
            if windows >= _FILE_WINDOWS:
                self._rewrite(held)
                held, windows = [], 0
        if held:
            self._rewrite(held)

    def _rewrite(self, old: list[Path]) -> None:
        """Put windows that follow one another into one file, and together where they are short."""
        parts = [_read_file(path) for path in old]
        windows = Windows.joined([part for part, _ in parts]).packed(self.window_steps)
        written = _write_file(self.folder, windows, Paths.joined([part for _, part in parts]).thinned())
        for path in old:
            if path != written:
                path.unlink()
        self._count += len(windows)

    def _remove_leftovers(self) -> None:
        """Finish what a killed process had begun."""
        for path in self.folder.glob("*.partial"):
            path.unlink()
        kept = list(_without_overlap(self.folder))
        for path in _files(self.folder):
            if path not in kept:
                path.unlink()

    def _write_meta(self) -> None:
        text = json.dumps({"version": FORMAT_VERSION, "window_steps": self.window_steps, **asdict(self.meta)}, indent=1)
        aside = self.folder / f"{_META}.partial"
        aside.write_text(text + "\n")
        aside.replace(self.folder / _META)


def read_load(folder: Path) -> LoadRecord:
    """The record in a folder.

    Args:
        folder: one that `LoadStore` wrote, or that of a run, whose ``expert_load`` it is.

    Raises:
        LoadError: there is none, or it is damaged or of another version.
    """
    path = folder if (folder / _META).is_file() else folder / "expert_load"
    if not (path / _META).is_file():
        raise LoadError(_nothing_there(folder))
    meta, _ = _read_meta(path)
    parts = [_read_file(file) for file in _without_overlap(path)]
    windows = Windows.joined([Windows.empty(meta.sizes), *(part for part, _ in parts)])
    paths = [Paths.empty(len(meta.layers), max(meta.top_k, default=0)), *(part for _, part in parts)]
    return LoadRecord(meta, windows, Paths.joined(paths))


def _nothing_there(folder: Path) -> str:
    if not folder.exists():
        return f"{folder} does not exist; give the folder of a run, or one that moe_async.record_load wrote."
    learners = sorted(path.parent for path in folder.glob(f"learner-*/expert_load/{_META}"))
    if learners:
        return f"{folder} is a run of several learners; name one of them: {', '.join(map(str, learners))}."
    return (
        f"{folder} holds no record of expert loads (no {_META}, nor expert_load/{_META}); give the folder of a run of "
        "a model with experts, or one that moe_async.record_load wrote."
    )


def _files(folder: Path) -> list[Path]:
    """Files of windows in the order of steps, a longer one before those within it."""
    return sorted(folder.glob("windows-*.safetensors"), key=lambda path: (_range_of(path)[0], -_range_of(path)[1]))


def _range_of(path: Path) -> tuple[int, int]:
    try:
        _, first, last = path.stem.split("-")
        return int(first), int(last)
    except ValueError:
        raise LoadError(f"{path} is not a name that a record of expert loads uses; remove the file.") from None


def _without_overlap(folder: Path) -> Iterator[Path]:
    """The files, without those whose steps a longer one holds: a process was killed before it removed them."""
    end = -1
    for path in _files(folder):
        last = _range_of(path)[1]
        if last > end:
            end = last
            yield path


def _write_file(folder: Path, windows: Windows, paths: Paths) -> Path:
    arrays = {name: _narrow(value, FIELDS[name].real) for name, value in windows.items().items()}
    arrays |= {_PATHS + name: np.ascontiguousarray(value.astype(np.int32)) for name, value in paths.arrays().items()}
    path = folder / f"windows-{windows['first_step'][0]:08d}-{windows['last_step'][-1]:08d}.safetensors"
    aside = path.with_suffix(".partial")
    save_file(arrays, aside)
    aside.replace(path)
    return path


def _narrow(value: np.ndarray[Any, Any], real: bool) -> np.ndarray[Any, Any]:
    """Four bytes a value, where they hold it."""
    if real:
        return np.ascontiguousarray(value.astype(np.float32))
    fits = value.size == 0 or value.max() < 2**32
    return np.ascontiguousarray(value.astype(np.uint32 if fits else np.int64))


def _read_file(path: Path) -> tuple[Windows, Paths]:
    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        paths = {name.removeprefix(_PATHS): value for name, value in arrays.items() if name.startswith(_PATHS)}
        return Windows(arrays), Paths.of(paths)
    except (OSError, SafetensorError, KeyError, TypeError) as error:
        raise LoadError(f"{path} is damaged ({error}). Remove it to read the other steps.") from error


def _window_count(path: Path) -> int:
    try:
        with safe_open(path, framework="numpy") as file:
            return int(file.get_slice("steps").get_shape()[0])
    except (OSError, SafetensorError) as error:
        raise LoadError(f"{path} is damaged ({error}). Remove it to go on without its steps.") from error


def _read_meta(folder: Path) -> tuple[LoadMeta, int]:
    path = folder / _META
    try:
        document = json.loads(path.read_text())
        version, steps = document.pop("version"), document.pop("window_steps")
        if version == FORMAT_VERSION:
            document["rank_experts"] = [tuple(experts) for experts in document["rank_experts"]]
            return LoadMeta(**{name: _as_tuple(value) for name, value in document.items()}), steps
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{path} cannot be read ({error}); it is damaged.") from error
    raise LoadError(f"{path} is of format version {version}; this release reads version {FORMAT_VERSION}.")


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _other_axes(found: LoadMeta, meta: LoadMeta) -> list[str]:
    """Names of what differs between two records' axes."""
    old, new = asdict(found), asdict(meta)
    return [name for name in new if old[name] != new[name] and name != "balanced_by"]


def _refuse_other(folder: Path, found: LoadMeta, meta: LoadMeta) -> None:
    for name in _other_axes(found, meta):
        raise LoadError(
            f"{folder} holds a record whose {name} are {getattr(found, name)}, but now they are {getattr(meta, name)}; "
            "one record holds the steps of one model on one number of ranks. Give another folder."
        )

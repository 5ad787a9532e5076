"""Which layout fits and takes the least time, and what a recipe that does not fit could change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moe_async.errors import RecipeError
from moe_async.plan.hardware import ACCELERATORS, Accelerator
from moe_async.plan.layout import Layout, candidates, layout_of, with_micro_batch
from moe_async.plan.memory import RankMemory, rank_memory
from moe_async.plan.sizes import ModelSizes
from moe_async.plan.speed import LINKS_REACH, PRODUCTS_REACH, StepTime, step_time
from moe_async.recipe import Recipe

_MOST_SEQUENCES = 2**20
_MORE_GPUS = 2**12
"""How many times as many accelerators are tried, at most."""
_SAME = 1.02
"""Layouts whose times differ by less are as good as one another; the simpler one is chosen."""


@dataclass(frozen=True)
class Assumptions:
    """What a plan takes for granted.

    Attributes:
        accelerator: of each rank.
        memory: bytes of it that may be used.
        skew: load of the busiest rank over the mean, in each layer.
        reserve: bytes beside tensors.
        products_reach: share of the peak rate that matrix products reach.
        links_reach: share of their stated rates that links reach.
    """

    accelerator: Accelerator
    memory: int
    skew: float = 1.5
    reserve: int = 4 * 10**9
    products_reach: float = PRODUCTS_REACH
    links_reach: float = LINKS_REACH


@dataclass(frozen=True)
class Planned:
    """A layout with what it needs.

    Attributes:
        layout: the layout.
        memory: of the busiest rank.
        time: of a step.
        fits: whether the memory is enough.
    """

    layout: Layout
    memory: RankMemory
    time: StepTime
    fits: bool


@dataclass(frozen=True)
class Choice:
    """What the planner would choose.

    Attributes:
        best: the layout; None where none fits.
        tried: layouts in all.
        fitting: those of them that fit.
        others: for each entry, the best layout with each other value of it, whether it fits or not.
    """

    best: Planned | None
    tried: int
    fitting: int
    others: dict[str, dict[object, Planned]]


def planned(recipe: Recipe, sizes: ModelSizes, layout: Layout, given: Assumptions) -> Planned:
    """What a layout needs."""
    memory = rank_memory(recipe, sizes, layout, given.skew, given.reserve)
    time = step_time(recipe, sizes, layout, given.accelerator, given.skew, given.products_reach, given.links_reach)
    return Planned(layout, memory, time, memory.total <= given.memory)


def choose(recipe: Recipe, sizes: ModelSizes, gpus: int, given: Assumptions) -> Choice:
    """The fastest layout that fits, the simplest among equals."""
    tried = [planned(recipe, sizes, layout, given) for layout in candidates(recipe, sizes, gpus)]
    best = _best([one for one in tried if one.fits])
    if best is None:
        return Choice(None, len(tried), 0, {})
    others: dict[str, dict[object, Planned]] = {}
    for name, value in best.layout.entries().items():
        for other in dict.fromkeys(one.layout.entries()[name] for one in tried):
            if other != value:
                alike = [one for one in tried if one.layout.entries()[name] == other]
                fitting = _best([one for one in alike if one.fits])
                others.setdefault(name, {})[other] = fitting or min(alike, key=lambda one: one.memory.total)
    return Choice(best, len(tried), sum(one.fits for one in tried), others)


def _best(found: Sequence[Planned]) -> Planned | None:
    if not found:
        return None
    fastest = min(one.time.seconds for one in found)
    return min((one for one in found if one.time.seconds <= fastest * _SAME), key=_complexity)


def _complexity(one: Planned) -> tuple[object, ...]:
    layout = one.layout
    return layout.recompute != "none", layout.zero, layout.expert, layout.accumulation, one.time.seconds


def largest_micro_batch(recipe: Recipe, sizes: ModelSizes, layout: Layout, given: Assumptions) -> int:
    """Sequences of the largest micro-batch that fits, 0 where none does."""

    def fits(sequences: int) -> bool:
        memory = rank_memory(recipe, sizes, with_micro_batch(layout, sequences), given.skew, given.reserve)
        return memory.total <= given.memory

    if not fits(1):
        return 0
    low, high = 1, 2
    while high < _MOST_SEQUENCES and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def what_would_fit(recipe: Recipe, sizes: ModelSizes, own: Planned, given: Assumptions) -> list[str]:
    """Changes, each of which makes a recipe fit: of few entries, of more accelerators, of shorter sequences."""
    ways = []
    gpus = own.layout.gpus
    fitting = [one for layout in candidates(recipe, sizes, gpus) if (one := planned(recipe, sizes, layout, given)).fits]
    if fitting:
        entries = own.layout.entries()
        near = min(fitting, key=lambda one: (len(_changed(entries, one.layout)), one.time.seconds))
        ways.append(f"{_settings(_changed(entries, near.layout))}: {_gb(near.memory.total)} on {gpus} accelerators")
    if not fitting:
        ways += _larger(recipe, sizes, gpus, given)
    more = next(
        (factor for factor in _powers_of_two(_MORE_GPUS) if _fits_on(recipe, sizes, gpus * factor, given)), None
    )
    if more is not None:
        ways.append(f"--gpus {gpus * more}, with the recipe as it is")
    length = recipe.data.seq_len
    while length > 8:
        length //= 2
        shorter = recipe.model_copy(update={"data": recipe.data.model_copy(update={"seq_len": length})})
        if planned(shorter, sizes, own.layout, given).fits:
            ways.append(f"--set data.seq_len={length}")
            break
    return ways


def _larger(recipe: Recipe, sizes: ModelSizes, gpus: int, given: Assumptions) -> list[str]:
    """The accelerator with the least memory on which some layout fits."""
    for other in sorted(ACCELERATORS.values(), key=lambda one: one.memory):
        if other.memory > given.memory:
            best = choose(recipe, sizes, gpus, replace(given, accelerator=other, memory=other.memory)).best
            if best is not None:
                return [f"--gpu {other.name}, as {best.layout}: {_gb(best.memory.total)} of {_gb(other.memory)}"]
    return []


def _fits_on(recipe: Recipe, sizes: ModelSizes, gpus: int, given: Assumptions) -> bool:
    try:
        return planned(recipe, sizes, layout_of(recipe, gpus), given).fits
    except RecipeError:
        return False


def _powers_of_two(most: int) -> list[int]:
    return [2**power for power in range(1, most.bit_length())]


def _changed(before: dict[str, object], layout: Layout) -> dict[str, object]:
    return {name: value for name, value in layout.entries().items() if before[name] != value}


def _settings(entries: dict[str, object]) -> str:
    return " ".join(f"--set {name}={value}" for name, value in entries.items())


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"

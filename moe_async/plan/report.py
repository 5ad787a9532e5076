"""A whole plan: what a recipe needs on so many accelerators, and which layout would be better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moe_async.plan.activations import Load, activations
from moe_async.plan.choice import Assumptions, Choice, Planned, choose, largest_micro_batch, planned, what_would_fit
from moe_async.plan.layout import layout_of
from moe_async.plan.memory import RankMemory, rows_of, syncer_memory
from moe_async.plan.sizes import ModelSizes, model_sizes, widths
from moe_async.plan.speed import Operations, operations
from moe_async.plan.traffic import Transfer, transfers
from moe_async.recipe import Recipe
from moe_async.tables import aligned

_SLOW_REDUCTIONS = 0.2
"""Share of a step in reductions over the network from which several learners are advised."""
_ALSO_SHOWN = ("parallel.expert", "parallel.zero", "train.recompute")


@dataclass(frozen=True)
class Plan:
    """What a recipe needs.

    Attributes:
        recipe: the recipe.
        given: what is taken for granted.
        sizes: of its model.
        own: its own layout.
        activations: bytes that a micro-batch keeps, without and with recomputation.
        transfers: what a mean rank sends in a step.
        operations: of a token.
        syncer: bytes of the syncer's host by consumer.
        micro_batch: sequences of the largest micro-batch that fits the recipe's layout.
        would_fit: changes that make it fit; empty where it does.
        choice: what would be chosen.
    """

    recipe: Recipe
    given: Assumptions
    sizes: ModelSizes
    own: Planned
    activations: dict[str, int]
    transfers: dict[str, Transfer]
    operations: Operations
    syncer: dict[str, int]
    micro_batch: int
    would_fit: list[str]
    choice: Choice


def make_plan(recipe: Recipe, gpus: int, given: Assumptions) -> Plan:
    """Plan a recipe.

    Raises:
        RecipeError: the recipe cannot be launched on so many accelerators.
    """
    sizes = model_sizes(recipe)
    layout = layout_of(recipe, gpus)
    own = planned(recipe, sizes, layout, given)
    load = Load(layout.micro_batch, recipe.data.seq_len, rows_of(recipe, layout, given.skew), layout.expert)
    kept = {mode: activations(sizes, widths(recipe), load, mode).kept for mode in ("none", "block")}
    return Plan(
        recipe=recipe,
        given=given,
        sizes=sizes,
        own=own,
        activations=kept,
        transfers=transfers(recipe, sizes, layout, given.accelerator),
        operations=operations(recipe, sizes),
        syncer=syncer_memory(recipe, sizes),
        micro_batch=largest_micro_batch(recipe, sizes, layout, given),
        would_fit=[] if own.fits else what_would_fit(recipe, sizes, own, given),
        choice=choose(recipe, sizes, gpus, given),
    )


def reasons(plan: Plan) -> list[str]:
    """Why the chosen layout, one sentence for each entry that could be otherwise."""
    best = plan.choice.best
    if best is None:
        return [f"None of {plan.choice.tried} layouts fits {_gb(plan.given.memory)} GB."]
    found = [
        f"{plan.choice.fitting} of {plan.choice.tried} layouts fit; of those that take as long, the one without "
        "recomputation, of the lowest ZeRO stage and with the smallest expert groups is taken."
    ]
    for name in _ALSO_SHOWN:
        told = [_compared(other, best) for other in plan.choice.others.get(name, {}).values()]
        values = plan.choice.others.get(name, {})
        if values:
            joined = "; ".join(f"{value}: {text}" for value, text in zip(values, told, strict=True))
            found.append(f"{name} is {best.layout.entries()[name]}; {joined}.")
    return [*found, _learners(plan, best)]


def _compared(other: Planned, best: Planned) -> str:
    if not other.fits:
        return f"needs {_gb(other.memory.total)} GB at least"
    slower = other.time.seconds / best.time.seconds
    if slower < 1.005:
        return "as fast"
    names = {*other.time.parts, *best.time.parts}
    most = max(names, key=lambda name: other.time.parts.get(name, 0.0) - best.time.parts.get(name, 0.0))
    return f"{slower:.2f} times the time, most of it in {most}"


def _learners(plan: Plan, best: Planned) -> str:
    layout, accelerator = best.layout, plan.given.accelerator
    nodes = -(-layout.ranks // accelerator.node)
    if nodes == 1:
        return f"{_number(layout.learners, 'learner')}: the ranks of a learner share a node, where reductions are fast."
    sent = transfers(plan.recipe, plan.sizes, layout, accelerator)
    slow = sum(
        one.network / accelerator.network / plan.given.links_reach
        for name, one in sent.items()
        if name in ("dense gradients", "expert gradients") and one.exposed
    )
    share = slow / best.time.seconds
    told = f"reductions over the network take {share:.0%} of a step"
    if share < _SLOW_REDUCTIONS:
        return f"{_number(layout.learners, 'learner')}: {told}, too little to gain by more learners."
    return (
        f"More learners, such as one of {accelerator.node} ranks for each node: {told}; learners exchange weights "
        "every so many steps instead (sync.between; docs/synchronisation.md says what that does to the loss)."
    )


def plan_lines(plan: Plan) -> list[str]:
    """The plan for people."""
    given, own, sizes = plan.given, plan.own, plan.sizes
    lines = [
        f"{plan.recipe.name} on {own.layout.gpus} x {given.accelerator.title}",
        f"parameters: {sizes.total:,} in all, {sizes.active:,} active for a token",
        f"layout: {own.layout}",
        "",
        *_memory_lines(plan, own.memory),
        "",
        *_traffic_lines(plan),
        "",
        *_time_lines(plan),
        "",
    ]
    lines += _fit_lines(plan)
    best = plan.choice.best
    if best is not None:
        changed = {name: value for name, value in best.layout.entries().items() if own.layout.entries()[name] != value}
        lines += ["", f"it would choose: {best.layout}"]
        lines.append(
            f"  {best.time.seconds:.3g} s a step ({own.time.seconds / best.time.seconds:.2f} times as fast), "
            f"MFU {best.time.mfu:.1%}, {_gb(best.memory.total)} GB"
        )
        settings = " ".join(f"--set {name}={value}" for name, value in changed.items())
        lines.append(f"  {settings or 'as the recipe has it'}")
    lines += ["", "why:", *(f"  {reason}" for reason in reasons(plan))]
    return [*lines, "", _assumptions(plan)]


def _memory_lines(plan: Plan, memory: RankMemory) -> list[str]:
    names = dict.fromkeys([*memory.backward, *memory.step])
    rows: list[tuple[str, ...]] = [("GB on the busiest rank", "backward pass", "optimizer step")]
    rows += [(name, _gb(memory.backward.get(name, 0)), _gb(memory.step.get(name, 0))) for name in names]
    rows.append(("beside tensors", _gb(memory.reserve), _gb(memory.reserve)))
    totals = (sum(moment.values()) + memory.reserve for moment in (memory.backward, memory.step))
    rows.append((f"total, of {_gb(plan.given.memory)}", *map(_gb, totals)))
    lines = aligned(rows)
    none, block = (_gb(plan.activations[mode]) for mode in ("none", "block"))
    lines.append(f"a micro-batch keeps {none} GB without recomputation, {block} GB with it")
    sequences = plan.micro_batch
    largest = f"{sequences} x {plan.recipe.data.seq_len} tokens" if sequences else "none does"
    lines.append(f"largest micro-batch that fits this layout: {largest}")
    if plan.syncer:
        parts = ", ".join(f"{name} {_gb(size)}" for name, size in plan.syncer.items() if size)
        lines.append(f"the syncer's host: {_gb(sum(plan.syncer.values()))} GB ({parts})")
    return lines


def _traffic_lines(plan: Plan) -> list[str]:
    if not plan.transfers:
        return ["nothing is sent between ranks"]
    rows = [("GB that a rank sends in a step", "in its node", "to other nodes", "the step waits")]
    rows += [
        (name, _gb(one.node), _gb(one.network), "yes" if one.exposed else "no") for name, one in plan.transfers.items()
    ]
    return aligned(rows)


def _time_lines(plan: Plan) -> list[str]:
    time, layout = plan.own.time, plan.own.layout
    tokens = layout.micro_batch * layout.accumulation * layout.gpus * plan.recipe.data.seq_len
    model = 3 * plan.operations.total
    rows = [("expected step", "s")]
    rows += [(name, f"{seconds:.3g}") for name, seconds in time.parts.items()]
    rows.append(("sum", f"{time.seconds:.3g}"))
    lines = aligned(rows)
    lines += [f"beside it, {name}: {seconds:.3g} s" for name, seconds in time.hidden.items()]
    lines.append(
        f"{_digits(model / 1e9)} GFLOP a token forward and backward, {_digits(model * tokens / 1e15)} PFLOP a step; "
        f"{time.tokens_per_second:,.0f} tokens/s, MFU {time.mfu:.1%}"
    )
    return lines


def _fit_lines(plan: Plan) -> list[str]:
    memory = plan.own.memory
    if plan.own.fits:
        return [f"fits {_gb(plan.given.memory)} GB"]
    largest = ", ".join(f"{name} {_gb(size)} GB" for name, size in memory.largest())
    needs = f"{_gb(memory.total)} GB of {_gb(plan.given.memory)} in the {memory.moment}"
    lines = [f"does not fit: {needs}; most of it: {largest}"]
    if not plan.would_fit:
        return [*lines, "  nothing was found that makes it fit"]
    return [*lines, *(f"  would fit: {way}" for way in plan.would_fit)]


def _assumptions(plan: Plan) -> str:
    given = plan.given
    return (
        f"Taken for granted: the busiest rank has {given.skew:g} times the mean load of experts; matrix products reach "
        f"{given.products_reach:.0%} of the stated {given.accelerator.bf16 / 1e12:.0f} (bfloat16) and "
        f"{given.accelerator.float32 / 1e12:.0f} (float32) TFLOP/s, links {given.links_reach:.0%} of "
        f"{given.accelerator.link / 1e9:.0f} GB/s in a node of {given.accelerator.node} and "
        f"{given.accelerator.network / 1e9:.0f} GB/s between nodes. Activations are those of unfused operations."
    )


def plan_document(plan: Plan) -> dict[str, Any]:
    """The plan for scripts: bytes, seconds and operations."""
    own = plan.own
    return {
        "recipe": plan.recipe.name,
        "accelerator": plan.given.accelerator.name,
        "parameters": {"total": plan.sizes.total, "active": plan.sizes.active},
        **_planned_document(own),
        "memory_limit": plan.given.memory,
        "activations_kept": plan.activations,
        "largest_micro_batch": plan.micro_batch,
        "syncer_bytes": plan.syncer,
        "sent_bytes": {
            name: {"node": one.node, "network": one.network, "exposed": one.exposed}
            for name, one in plan.transfers.items()
        },
        "flop_per_token_forward": vars(plan.operations) | {"total": plan.operations.total},
        "would_fit": plan.would_fit,
        "choice": None if plan.choice.best is None else _planned_document(plan.choice.best),
        "why": reasons(plan),
        "assumptions": {
            "skew": plan.given.skew,
            "reserve": plan.given.reserve,
            "products_reach": plan.given.products_reach,
            "links_reach": plan.given.links_reach,
        },
    }


def _planned_document(one: Planned) -> dict[str, Any]:
    return {
        "layout": vars(one.layout) | {"ranks": one.layout.ranks},
        "memory_bytes": {
            "backward": one.memory.backward,
            "step": one.memory.step,
            "reserve": one.memory.reserve,
            "total": one.memory.total,
            "moment": one.memory.moment,
        },
        "fits": one.fits,
        "step_seconds": one.time.parts | {"total": one.time.seconds},
        "hidden_seconds": one.time.hidden,
        "tokens_per_second": one.time.tokens_per_second,
        "mfu": one.time.mfu,
    }


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}".capitalize()


def _digits(value: float) -> str:
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def _gb(size: float) -> str:
    if size >= 1e8 or not size:
        return f"{size / 1e9:.1f}"
    return f"{size / 1e9:.4f}" if size >= 1e5 else "<0.0001"

"""The figures at the end of a run, and the table that shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_async.engine.evaluate import Evaluation
from moe_async.engine.loop import Trainer
from moe_async.model.build import count_parameters


def build_summary(
    trainer: Trainer, trigram: tuple[float, dict[str, float]], seconds: float, first_step_seconds: float | None
) -> dict[str, Any]:
    """What summary.json holds. Needs an evaluation at the end; without one at the start its figures are None.

    Args:
        trainer: after its run.
        trigram: bits per byte of the trigram model, overall and by domain.
        seconds: wall time of this process since its start.
        first_step_seconds: wall time until the first optimizer step was done.
    """
    start, end = trainer.first_evaluation, trainer.last_evaluation
    assert end is not None
    recipe, engine = trainer.recipe, trainer.engine
    total, active = count_parameters(recipe)
    layers = recipe.moe.moe_layers(recipe.model.layers) if recipe.moe else ()
    return {
        "name": recipe.name,
        "step": engine.global_step,
        "tokens": trainer.tokens,
        "heldout_bits_per_byte": end.bits_per_byte,
        "heldout_bits_per_byte_start": None if start is None else start.bits_per_byte,
        "trigram_bits_per_byte": trigram[0],
        "by_domain": _domains(start, end, trigram[1]),
        "tokens_per_second": trainer.tokens_per_second,
        "params_total": total,
        "params_active": active,
        "dropped": trainer.dropped,
        "skipped_steps": trainer.skipped,
        "layers": [
            {
                "layer": layer,
                "max_over_mean": balance.max_over_mean,
                "cv": balance.cv,
                "dead": balance.dead,
            }
            # Empty where no step of this run is in the window.
            for layer, balance in zip(layers, trainer.load.balance(), strict=False)
        ],
        "world_size": trainer.world.size,
        "expert_parallel": trainer.world.topology.expert_parallel,
        "zero": recipe.parallel.zero,
        "precision": recipe.train.precision,
        "seconds": seconds,
        "first_step_seconds": first_step_seconds,
        "checkpoint": str(trainer.saved_path) if trainer.saved_path else None,
    }


def _domains(
    start: Evaluation | None, end: Evaluation, trigram: dict[str, float]
) -> dict[str, dict[str, float | None]]:
    return {
        domain: {
            "heldout_bits_per_byte_start": None if start is None else start.by_domain[domain],
            "heldout_bits_per_byte": bits,
            "trigram_bits_per_byte": trigram[domain],
        }
        for domain, bits in end.by_domain.items()
    }


def format_summary(summary: dict[str, Any]) -> str:
    """The closing table as plain text."""
    rows = [
        ("", "start", "end", "trigram"),
        ("held-out bits per byte", *_bits(summary)),
        *((f"  {domain}", *_bits(values)) for domain, values in summary["by_domain"].items()),
    ]
    lines = [f"{name:<26}{start:>9}{end:>9}{trigram:>9}" for name, start, end, trigram in rows]
    share = summary["params_active"] / summary["params_total"]
    lines += [
        "",
        f"{'tokens':<26}{summary['tokens']:>9,} in {summary['step']} steps"
        + ("" if summary["tokens_per_second"] is None else f", {summary['tokens_per_second']:,.0f} tokens/s"),
        f"{'parameters':<26}{summary['params_total']:>9,}, {summary['params_active']:,} active per token ({share:.0%})",
        f"{'dropped assignments':<26}{summary['dropped']:>9,}",
    ]
    if summary["skipped_steps"]:
        lines.append(f"{'skipped steps':<26}{summary['skipped_steps']:>9,} (a loss or gradient was not finite)")
    if summary["layers"]:
        lines += ["", f"{'balance of experts':<26}{'max/mean':>9}{'cv':>9}{'dead':>9}"]
        lines += [
            f"{'  layer ' + str(layer['layer']):<26}{layer['max_over_mean']:>9.2f}{layer['cv']:>9.2f}{layer['dead']:>9}"
            for layer in summary["layers"]
        ]
    return "\n".join(lines)


def format_learners(learners: Mapping[str, dict[str, Any]]) -> str:
    """The table of what each learner of a run did.

    Args:
        learners: of each by number, what `moe_async.sync.figures.LearnerFigures.summary` says.
    """
    names = list(learners)
    rows: list[tuple[str, list[str]]] = [
        ("", [f"learner {name}" for name in names]),
        ("rounds", [f"{learners[name]['rounds']:,}" for name in names]),
        ("steps", [f"{learners[name]['steps']:,}" for name in names]),
        ("tokens", [f"{learners[name]['tokens']:,}" for name in names]),
        ("time computing", [f"{learners[name]['busy']:.0%}" for name in names]),
        ("MB sent", [f"{learners[name]['bytes_sent'] / 1e6:,.1f}" for name in names]),
        ("MB received", [f"{learners[name]['bytes_received'] / 1e6:,.1f}" for name in names]),
    ]
    for kind in ("clock_gap", "version_lag", "data_age", "drift"):
        cells = [_quantiles(learners[name]["staleness"].get(kind)) for name in names]
        rows.append((f"{kind.replace('_', ' ')} (median/p95/max)", cells))
    return "\n".join(f"{title:<34}" + "".join(f"{cell:>16}" for cell in cells) for title, cells in rows)


def _quantiles(figures: dict[str, float] | None) -> str:
    return "-" if figures is None else f"{figures['median']:g}/{figures['p95']:g}/{figures['max']:g}"


def _bits(values: dict[str, Any]) -> tuple[str, str, str]:
    keys = ("heldout_bits_per_byte_start", "heldout_bits_per_byte", "trigram_bits_per_byte")
    start, end, trigram = ("-" if values[key] is None else f"{values[key]:.3f}" for key in keys)
    return start, end, trigram

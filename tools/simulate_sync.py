"""Policies between learners side by side, simulated in one process: the recipe's real model, given times.

    python tools/simulate_sync.py recipes/experiments/policies-sgd.yaml --learners 8 --straggler 0:5x
    moe-async simulate-sync recipes/quickstart.yaml --stub --learners 100 --fail 1/h --bandwidth 1Gbit --steps 3600 \\
        --policy diloco:every=50 --policy decoupled:every=50,expert.every=200

A policy is written NAME[:key=value,...] with the entries of sync.between. They hold for all classes; those that begin
with expert. or router. hold for these alone, outer.lr and the like go one level deeper, and optim.lr and the like give
a policy its own optimizer. `recipe` is what the recipe says.

Each learner trains its copy of the model on its own text, as in a launch of one rank; steps, links and failures take
the virtual time that the options say. Two tables compare the policies after the same time (--seconds) and after the
same tokens (--steps of a learner, on average, all of them merged). Columns: held-out bits per byte of the shared
weights, tokens a second of all learners, share of time that they computed (busy), steps merged over steps that they
make when nothing ever disturbs them (goodput), MB on each learner's link up and down, staleness as median/95 %/max
(gap: steps ahead of the slowest; lag: versions; age: steps until one's own update comes back; drift: local steps in an
update), and updates that were discarded. Times are what the options say of steps, links and failures, and no more.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from moe_async.data import load_corpus, make_tokenizer
from moe_async.engine.simulate import Machine, Measure, Outcome, Simulation
from moe_async.errors import MoeAsyncError, SyncError
from moe_async.recipe import Recipe, load_recipe
from moe_async.recipe.policies import gradient_policies
from moe_async.recipe.policy_text import policy_overrides
from moe_async.sync.quantities import parse_bandwidth, parse_factor, parse_rate, parse_seconds, parse_share
from moe_async.sync.timing import Link, Links, StepTimes, Transient, read_step_times

POINTS = 12
"""Evaluations along each curve of a plot."""

Value = TypeVar("Value")


def default_policies(recipe: Recipe, learners: int, sgd: bool) -> list[str]:
    """What is compared when nothing is said; those of gradients only where the optimizer is SGD: a rate of AdamW for
    one learner is none for gradients that come one by one."""
    every = max(recipe.train.steps // 20, 1)
    given = ["recipe"] if recipe.sync.between is not None else []
    gradients = ["bsp", f"m_sync:count={max(learners - 1, 1)}", "ssp:bound=3", "asp"] if sgd else []
    deltas = [f"{name}:every={every}" for name in ("local_sgd", "diloco", "delayed_nesterov", "decoupled")]
    return [*given, *gradients, *deltas]


def policy_recipe(parsed: argparse.Namespace, policy: str, seed: int) -> Recipe:
    """The recipe as one run of one policy trains it.

    Raises:
        MoeAsyncError: the policy is not valid, or does not fit the recipe.
    """
    plain = load_recipe(parsed.recipe, parsed.overrides)
    overrides = [
        *parsed.overrides, "parallel.expert=1", "parallel.zero=0", "sync.inside=blocking",
        f"sync.learners={parsed.learners}", f"train.steps={parsed.steps or plain.train.steps}",
        f"train.seed={plain.train.seed + seed}", f"data.seed={plain.data.seed + seed}",
    ]  # fmt: skip
    if parsed.sgd_lr is not None and policy.partition(":")[0] in gradient_policies():
        overrides += [f"optim.lr={parsed.sgd_lr}", f"optim.momentum={parsed.sgd_momentum}"]
        if plain.optim.kind != "sgd":
            # A decay beside the gradient is another one within it.
            overrides += ["optim.kind=sgd", "optim.weight_decay=0"]
    return load_recipe(parsed.recipe, [*overrides, *policy_overrides(policy, plain.moe is not None)])


def machine_of(parsed: argparse.Namespace, seed: int) -> Machine:
    """What the options say of steps, links and failures."""
    link = Link(parsed.bandwidth, parsed.latency)
    times = StepTimes(
        parsed.step_seconds,
        dict(parsed.straggler),
        parsed.jitter,
        parsed.transient,
        read_step_times(parsed.times) if parsed.times else {},
        seed,
    )
    strangers = [learner for learner in {**times.factors, **times.given} if learner >= parsed.learners]
    if strangers:
        raise SyncError(
            f"times are given for learner {strangers[0]}, but the {parsed.learners} learners count from 0 to "
            f"{parsed.learners - 1}. Use one of these, or more --learners."
        )
    return Machine(times, Links(link, link), parsed.fail, parsed.downtime, parsed.noticed, seed)


def simulate(parsed: argparse.Namespace) -> dict[str, list[Outcome]]:
    """The runs of each policy, one for each seed."""
    plain = load_recipe(parsed.recipe, parsed.overrides)
    sgd = plain.optim.kind == "sgd" or parsed.sgd_lr is not None
    policies = parsed.policy or default_policies(plain, parsed.learners, sgd)
    # What is wrong with the last policy is said before the first one runs.
    recipes = {(policy, seed): policy_recipe(parsed, policy, seed) for policy in policies for seed in seeds(parsed)}
    machines = {seed: machine_of(parsed, seed) for seed in seeds(parsed)}
    corpus = None if parsed.stub else load_corpus(plain.data, make_tokenizer(plain.data.tokenizer))
    points = POINTS if parsed.plot else 0
    results: dict[str, list[Outcome]] = {}
    with tqdm(total=100, unit="%", leave=False, disable=not sys.stderr.isatty()) as bar:
        simulations = {
            (policy, seed): Simulation(
                recipe, machines[seed], corpus, points, lambda share: bar.update(round(100 * share) - bar.n)
            )
            for (policy, seed), recipe in recipes.items()
        }
        for (policy, seed), simulation in simulations.items():
            tqdm.write(f"{policy}, seed {seed} ...", file=sys.stderr)
            bar.reset()
            seconds = parsed.seconds or simulation.steps * parsed.step_seconds
            results.setdefault(policy, []).append(simulation.run(seconds))
    return results


def seeds(parsed: argparse.Namespace) -> range:
    """The seeds of the runs of each policy, added to those of the recipe."""
    return range(parsed.seed, parsed.seed + parsed.seeds)


def tables(results: Mapping[str, Sequence[Outcome]]) -> str:
    """Both tables, in Markdown: means over seeds, and the standard deviation of losses where there are several."""
    seconds = [outcome.at_time.seconds for outcomes in results.values() for outcome in outcomes]
    tokens = [outcome.at_tokens.tokens for outcomes in results.values() for outcome in outcomes]
    parts = [
        f"After {min(seconds):.6g} s of virtual time:",
        "",
        _table({policy: [outcome.at_time for outcome in outcomes] for policy, outcomes in results.items()}),
        "",
        f"After equal tokens ({min(tokens):.4g} to {max(tokens):.4g}), all merged:",
        "",
        _table({policy: [outcome.at_tokens for outcome in outcomes] for policy, outcomes in results.items()}),
    ]
    return "\n".join(parts)


KINDS = {"clock_gap": "gap", "version_lag": "lag", "data_age": "age", "drift": "drift"}


def _table(results: Mapping[str, Sequence[Measure]]) -> str:
    heads = ["policy", "bits per byte", "seconds", "steps", "tokens/s", "busy", "goodput", "MB up", "MB down"]
    heads += [*KINDS.values(), "discards"]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for policy, measures in results.items():
        losses = [measure.loss for measure in measures if measure.loss is not None]
        cells = [
            policy,
            _with_spread(losses) if losses else "-",
            f"{mean(one.seconds for one in measures):.6g}",
            f"{mean(one.steps for one in measures):.1f}",
            f"{mean(one.tokens_per_second for one in measures):.5g}",
            f"{mean(one.utilisation for one in measures):.2f}",
            f"{mean(one.goodput for one in measures):.2f}",
            f"{mean(one.up for one in measures) / 1e6:.4g}",
            f"{mean(one.down for one in measures) / 1e6:.4g}",
            *(_staleness([one.staleness[kind] for one in measures]) for kind in KINDS),
            f"{mean(one.discards for one in measures):.5g}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _with_spread(values: Sequence[float]) -> str:
    spread = f" ± {stdev(values):.4f}" if len(values) > 1 else ""
    return f"{mean(values):.4f}{spread}"


def _staleness(figures: Sequence[Mapping[str, float] | None]) -> str:
    """Median, 95th percentile and maximum: the first two are means over seeds, the last the largest of all."""
    there = [one for one in figures if one is not None]
    if not there:
        return "-"
    middle, high = (mean(one[name] for one in there) for name in ("median", "p95"))
    return f"{middle:.3g}/{high:.3g}/{max(one['max'] for one in there):g}"


def check_plotting() -> None:
    """Refuse to draw without matplotlib, before anything runs.

    Raises:
        SyncError: it is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise SyncError(
            "--plot needs matplotlib, which is not installed. Run pip install 'moe_async[tools]', or "
            "pip install -e '.[tools]' in the project's folder; or leave --plot out."
        ) from error


def plot(results: Mapping[str, Sequence[Outcome]], path: Path) -> None:
    """Loss against virtual time and against tokens (of the first seed), and what became of the time."""
    from matplotlib.figure import Figure

    curves = any(outcomes[0].course for outcomes in results.values())
    figure = Figure(figsize=(15 if curves else 6, 4.5), layout="constrained")
    axes = figure.subplots(1, 3 if curves else 1, squeeze=False)[0]
    if curves:
        for axis, column, label in ((axes[0], 0, "virtual seconds"), (axes[1], 1, "tokens of all learners")):
            for policy, outcomes in results.items():
                course = outcomes[0].course
                axis.plot([point[column] for point in course], [point[2] for point in course], label=policy)
            axis.set(xlabel=label, ylabel="held-out bits per byte")
        axes[0].legend(fontsize="small")
    names = list(results)
    places = range(len(names))
    for offset, key in ((-0.2, "utilisation"), (0.2, "goodput")):
        values = [mean(getattr(outcome.at_time, key) for outcome in results[name]) for name in names]
        axes[-1].barh([place + offset for place in places], values, height=0.4, label=key)
    axes[-1].set(xlim=(0, 1.05), xlabel="share of undisturbed learners, at equal time")
    axes[-1].set_yticks(list(places), names)
    axes[-1].invert_yaxis()
    axes[-1].legend(fontsize="small")
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate and print. Exit code 1 when a recipe, a policy or a file is not valid."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    for name, least in (("learners", 1), ("steps", 1), ("seeds", 1), ("seed", 0), ("jitter", 0), ("sgd_momentum", 0)):
        value = getattr(parsed, name)
        if value is not None and not value >= least:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")
    for name in ("seconds", "step_seconds", "sgd_lr"):
        value = getattr(parsed, name)
        if value is not None and not value > 0:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be more than 0")
    # The models are small: more threads would only get in one another's way.
    torch.set_num_threads(1)
    try:
        if parsed.plot:
            check_plotting()
        results = simulate(parsed)
        if parsed.plot:
            plot(results, parsed.plot)
    except (MoeAsyncError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(_as_json(results, parsed.seed), indent=1) if parsed.json else tables(results))
    return 0


def _as_json(results: Mapping[str, Sequence[Outcome]], first_seed: int) -> dict[str, list[dict[str, Any]]]:
    return {
        policy: [{"seed": seed, **dataclasses.asdict(outcome)} for seed, outcome in enumerate(outcomes, first_seed)]
        for policy, outcomes in results.items()
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="simulate-sync", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("recipe", type=Path, help="the recipe that all policies train")
    add("--policy", action="append", metavar="NAME[:key=value,...]",
        help="a policy to compare; may be given several times (default: all that fit the optimizer)")  # fmt: skip
    add("--learners", type=int, default=8, help="how many train together (default 8)")
    add("--steps", type=int, help="steps of a learner, on average (default: the recipe's)")
    add("--seconds", type=_quantity(parse_seconds), metavar="TIME",
        help="when policies are compared, such as 10min (default: --steps times --step-seconds)")  # fmt: skip
    add("--step-seconds", type=float, default=1.0, metavar="S", help="time of a step (default 1)")
    add("--straggler", type=_quantity(_straggler), action="append", default=[], metavar="L:5x",
        help="learner L takes five times as long all the time; may be given several times")  # fmt: skip
    add("--transient", type=_quantity(_transient), metavar="10%:6x",
        help="a tenth of all steps take six times as long")  # fmt: skip
    add("--jitter", type=float, default=0.0, help="relative standard deviation of the time of a step (default 0)")
    add("--times", type=Path, metavar="FILE.csv",
        help="seconds of each step of some learners: columns learner,seconds")  # fmt: skip
    add("--bandwidth", type=_quantity(parse_bandwidth), default=float("inf"), metavar="1Gbit",
        help="of each learner's link, in each direction, a second (default: no limit)")  # fmt: skip
    add("--latency", type=_quantity(parse_seconds), default=0.0, metavar="20ms", help="of each link (default none)")
    add("--fail", type=_quantity(parse_rate), default=0.0, metavar="1/h", help="failures of a learner (default none)")
    add("--downtime", type=_quantity(parse_seconds), default=60.0, metavar="60s",
        help="from a failure until the learner is back (default 60s)")  # fmt: skip
    add("--noticed", type=_quantity(parse_seconds), default=1.0, metavar="1s",
        help="from a failure until the syncer counts the learner out (default 1s)")  # fmt: skip
    add(
        "--sgd-lr",
        type=float,
        metavar="LR",
        help="under bsp, m_sync, ssp and asp the optimizer at the syncer is SGD with this rate instead of the recipe's",
    )
    add("--sgd-momentum", type=float, default=0.9, metavar="M", help="beside --sgd-lr (default 0.9)")
    add("--seed", type=int, default=0, help="added to the recipe's seeds; that of times and failures (default 0)")
    add("--seeds", type=int, default=1, help="runs of each policy, with seeds counting up (default 1)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="replace a recipe entry")
    add("--stub", action="store_true", help="no model and no loss: times and bytes of thousands of learners")
    add("--plot", type=Path, metavar="OUT.png", help="draw the results (needs matplotlib)")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def _quantity(parse: Callable[[str], Value]) -> Callable[[str], Value]:
    """A parser whose errors argparse shows."""

    def convert(text: str) -> Value:
        try:
            return parse(text)
        except SyncError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def _straggler(text: str) -> tuple[int, float]:
    learner, colon, factor = text.partition(":")
    if not (learner.isdecimal() and colon):
        raise SyncError(f"{text!r} names no learner and its factor. Write it like 0:5x.")
    return int(learner), parse_factor(factor)


def _transient(text: str) -> Transient:
    chance, colon, factor = text.partition(":")
    if not colon:
        raise SyncError(f"{text!r} has no share of steps and their factor. Write it like 10%:6x.")
    return Transient(parse_share(chance), parse_factor(factor))


if __name__ == "__main__":
    sys.exit(main())

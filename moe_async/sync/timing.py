"""Given times for the virtual clock: how long steps take, how fast links are, and who fails when.

Everything random follows from a seed and from who and which step it is for, so that no other event changes it.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moe_async.errors import SyncError


@dataclass(frozen=True)
class Transient:
    """Steps that now and then take longer.

    Attributes:
        chance: of each step, 0 to 1.
        factor: on its time.
    """

    chance: float
    factor: float


@dataclass(frozen=True)
class StepTimes:
    """Seconds that each step of each learner takes.

    Attributes:
        seconds: of a step, where nothing else is said.
        factors: on it, for some learners: persistent stragglers (5: five times as slow) or faster machines.
        jitter: relative standard deviation, drawn for each step.
        transient: stragglers that come and go; None: none.
        given: seconds of the steps of some learners, from the first on; the last goes on for ever. Neither factors nor
            jitter change them.
        seed: of what is drawn.
    """

    seconds: float = 1.0
    factors: Mapping[int, float] = field(default_factory=dict)
    jitter: float = 0.0
    transient: Transient | None = None
    given: Mapping[int, Sequence[float]] = field(default_factory=dict)
    seed: int = 0

    def of(self, learner: int, number: int) -> float:
        """Seconds of a learner's ``number``-th step (from 1)."""
        if learner in self.given:
            row = self.given[learner]
            return row[min(number, len(row)) - 1]
        time = self.seconds * self.factors.get(learner, 1.0)
        if self.jitter or self.transient:
            # A generator of its own for every step: who else computes does not matter.
            draw = random.Random(f"{self.seed}/{learner}/{number}")
            time *= max(draw.gauss(1.0, self.jitter), 0.05)
            if self.transient and draw.random() < self.transient.chance:
                time *= self.transient.factor
        return time


def read_step_times(path: Path) -> dict[int, list[float]]:
    """Step times from a CSV file with the columns ``learner`` and ``seconds``, a line per step in order.

    Raises:
        SyncError: a column is missing, or a value is not a number above zero.
    """
    rows: dict[int, list[float]] = {}
    with path.open(newline="") as file:
        for number, line in enumerate(csv.DictReader(file), 2):
            try:
                learner, seconds = int(line["learner"]), float(line["seconds"])
            except (KeyError, TypeError, ValueError) as error:
                raise SyncError(
                    f"line {number} of {path} is {line}; each line needs a learner's number and the seconds of a step, "
                    "under the headings learner,seconds."
                ) from error
            if not seconds > 0 or learner < 0:
                raise SyncError(f"line {number} of {path}: learners count from 0 and a step takes more than 0 seconds.")
            rows.setdefault(learner, []).append(seconds)
    if not rows:
        raise SyncError(f"{path} has no lines; give learner,seconds with one line per step.")
    return rows


@dataclass(frozen=True)
class Link:
    """One direction between a learner and the syncer; messages follow one another on it.

    Attributes:
        bandwidth: bytes per second.
        latency: seconds from the last byte sent to its arrival.
    """

    bandwidth: float = float("inf")
    latency: float = 0.0


@dataclass(frozen=True)
class Links:
    """The network: a link in each direction for every learner.

    Attributes:
        up, down: where nothing else is said.
        ups, downs: of some learners.
        header_bytes: of a message besides its payload.
    """

    up: Link = field(default_factory=Link)
    down: Link = field(default_factory=Link)
    ups: Mapping[int, Link] = field(default_factory=dict)
    downs: Mapping[int, Link] = field(default_factory=dict)
    header_bytes: int = 256

    def to_syncer(self, learner: int) -> Link:
        """The link on which a learner sends."""
        return self.ups.get(learner, self.up)

    def to_learner(self, learner: int) -> Link:
        """The link on which a learner receives."""
        return self.downs.get(learner, self.down)


@dataclass(frozen=True)
class Failure:
    """A learner dies at a time and comes back, or joins late.

    Attributes:
        learner: who.
        at: seconds; what it had sent by then arrives.
        back: seconds until it asks to join again; None: it stays away.
        noticed: seconds until the syncer counts it out. Neither happens before the last of what it had sent has come.
    """

    learner: int
    at: float
    back: float | None = None
    noticed: float = 1.0


def random_failures(
    learners: int, rate: float, until: float, back: float, noticed: float = 1.0, seed: int = 0
) -> list[Failure]:
    """Failures as they come by chance: each learner on average ``rate`` times a second, not while it is away."""
    failures = []
    for learner in range(learners if rate > 0 else 0):
        draw = random.Random(f"{seed}/failures/{learner}")
        time = draw.expovariate(rate)
        while time < until:
            failures.append(Failure(learner, time, back, noticed))
            time += back + draw.expovariate(rate)
    return sorted(failures, key=lambda failure: (failure.at, failure.learner))

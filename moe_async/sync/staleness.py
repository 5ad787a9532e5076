"""The four kinds of staleness, by learner.

* clock gap: steps that a learner was ahead of the slowest when its update was merged;
* version lag: versions that the fragment gained between the one an update began with and the merge;
* data age: the learner's own steps between sending an update and taking a value that contains it;
* drift: local steps in an update.

They do not bound one another.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

KINDS = ("clock_gap", "version_lag", "data_age", "drift")


@dataclass
class StalenessTally:
    """Counts how often each value was seen: ``counts[learner][kind][value]``."""

    counts: dict[int, dict[str, Counter[int]]] = field(default_factory=dict)
    discards: Counter[int] = field(default_factory=Counter)

    def _of(self, learner: int) -> dict[str, Counter[int]]:
        return self.counts.setdefault(learner, {kind: Counter() for kind in KINDS})

    def add_update(self, learner: int, clock_gap: int, version_lag: int, drift: int) -> None:
        """An update was merged."""
        counts = self._of(learner)
        counts["clock_gap"][clock_gap] += 1
        counts["version_lag"][version_lag] += 1
        counts["drift"][drift] += 1

    def add_age(self, learner: int, age: int) -> None:
        """A learner took a value that contains one of its updates."""
        self._of(learner)["data_age"][age] += 1

    def add_discard(self, learner: int) -> None:
        """An update was discarded."""
        self.discards[learner] += 1

    def summary(self, learner: int) -> dict[str, dict[str, float] | None]:
        """Median, 95th percentile and maximum of each kind; None where nothing was seen."""
        return {kind: _figures(counts) for kind, counts in self._of(learner).items()}

    def by_learner(self) -> dict[str, Any]:
        """The `summary` of every learner, and how many of its updates were discarded, by number as text (JSON)."""
        return {
            "staleness": {str(learner): self.summary(learner) for learner in self.counts},
            "discarded": {str(learner): count for learner, count in self.discards.items()},
        }

    def overall(self) -> dict[str, dict[str, float] | None]:
        """As `summary`, over all learners."""
        totals: dict[str, Counter[int]] = {kind: Counter() for kind in KINDS}
        for counts in self.counts.values():
            for kind, counter in counts.items():
                totals[kind].update(counter)
        return {kind: _figures(counts) for kind, counts in totals.items()}

    def merged_steps(self) -> int:
        """Local steps in all merged updates; a step counts once for each fragment that it was sent in."""
        return sum(steps * times for counts in self.counts.values() for steps, times in counts["drift"].items())

    def state_dict(self) -> dict[str, Any]:
        """The counts as JSON values."""
        return {
            "counts": {
                str(learner): {kind: [list(item) for item in counter.items()] for kind, counter in kinds.items()}
                for learner, kinds in self.counts.items()
            },
            "discards": [list(item) for item in self.discards.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` gave."""
        self.counts = {
            int(learner): {kind: Counter(dict(map(tuple, items))) for kind, items in kinds.items()}
            for learner, kinds in state["counts"].items()
        }
        self.discards = Counter(dict(map(tuple, state["discards"])))


def _figures(counts: Counter[int]) -> dict[str, float] | None:
    if not counts:
        return None
    return {"median": quantile(counts, 0.5), "p95": quantile(counts, 0.95), "max": max(counts)}


def quantile(counts: Counter[int], share: float) -> float:
    """The smallest value that at least ``share`` of all observations do not exceed."""
    total, below = sum(counts.values()), 0
    for value in sorted(counts):
        below += counts[value]
        if below >= share * total:
            return value
    raise ValueError("there are no observations")

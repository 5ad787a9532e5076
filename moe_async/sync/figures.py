"""What one learner did in a run, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class LearnerFigures:
    """Of one learner, in all its lives.

    Attributes:
        rounds: updates sent.
        steps: made.
        tokens: label tokens seen.
        busy: seconds spent computing steps that were finished.
        waited: seconds spent waiting between steps.
        away: seconds between failing and coming back.
        lost_steps: steps whose contribution died with the learner.
        sent, received: bytes.
    """

    rounds: int = 0
    steps: int = 0
    tokens: int = 0
    busy: float = 0.0
    waited: float = 0.0
    away: float = 0.0
    lost_steps: int = 0
    sent: int = 0
    received: int = 0

    def summary(self, seconds: float, staleness: Mapping[str, Any], discarded: int) -> dict[str, Any]:
        """What summary.json says.

        Args:
            seconds: of the run.
            staleness: median, 95th percentile and maximum of each kind.
            discarded: updates that were not merged.
        """
        return {
            "rounds": self.rounds,
            "steps": self.steps,
            "tokens": self.tokens,
            "busy": self.busy / seconds if seconds else 0.0,
            "waited": self.waited / seconds if seconds else 0.0,
            "bytes_sent": self.sent,
            "bytes_received": self.received,
            "discarded": discarded,
            "lost_steps": self.lost_steps,
            "staleness": dict(staleness),
        }

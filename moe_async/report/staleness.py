"""How old learners' updates were when they were merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moe_async.errors import LoadError
from moe_async.sync.event_log import read_entries

KINDS = ("clock gap", "version lag", "drift")
"""The three figures that a merge has for each update: steps ahead of the slowest learner, versions that the fragment
gained under way, and steps that the update holds."""
_MOST_POINTS = 400


def staleness_of(events: Path) -> dict[str, Any] | None:
    """By learner: updates, mean and largest of each kind, and the kinds by number of the merge.

    None where there is no log of a syncer, or no merge in it.
    """
    if not events.is_file():
        return None
    found: dict[int, list[tuple[int, list[float]]]] = {}
    merges = (event for event in read_entries(events) if event.get("event") == "merge")
    try:
        for number, event in enumerate(merges, 1):
            for update, (gap, lag, drift) in zip(event["updates"], event["staleness"], strict=True):
                found.setdefault(int(update["learner"]), []).append((number, [gap, lag, drift]))
    except (KeyError, TypeError, ValueError) as error:
        raise LoadError(f"{events} holds a merge that cannot be read ({error!r}); restore the file.") from error
    if not found:
        return None
    return {
        "kinds": list(KINDS),
        "learners": [_of_learner(learner, updates) for learner, updates in sorted(found.items())],
    }


def _of_learner(learner: int, updates: list[tuple[int, list[float]]]) -> dict[str, Any]:
    columns = list(zip(*(values for _, values in updates), strict=True))
    size = max(-(-len(updates) // _MOST_POINTS), 1)
    shown = updates[::size]
    return {
        "learner": learner,
        "updates": len(updates),
        "mean": [sum(column) / len(column) for column in columns],
        "max": [max(column) for column in columns],
        "merge": [number for number, _ in shown],
        "values": [[values[kind] for _, values in shown] for kind in range(len(columns))],
    }

"""Loads as characters, by hand."""

import numpy as np

from moe_async.observe.heatmap import LEGEND, heatmap, sharing


def test_shades_by_hand():
    # Over the fair share of 10: 0, 0.1, 1, 1.9, 2.0 and 1.
    rows = heatmap(["a", "layer 1"], [np.array([0, 1, 10, 19, 20, 10]), np.array([5, 5])])
    assert rows == ["a        ·▁▅██▅", "layer 1  ▅▅"]
    assert "· no load" in LEGEND


def test_neighbours_share_a_character_where_experts_are_many():
    counts = np.ones(64)
    counts[9] = 64
    (row,) = heatmap(["l"], [counts], width=19)
    assert sharing(64, ["l"], 19) == 4
    assert len(row) == 19 and row[3 + 9 // 4] == "█" and row.count("█") == 1


def test_a_narrow_terminal_still_shows_something():
    assert heatmap(["a long label"], [np.array([1, 1])], width=4) == ["a long label  ▅"]

"""Windows become longer ones without another look at the steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_async.observe.windows import FIELDS, Windows
from tests.observe.loads import equal, meta_of, windows_of

RULES = {
    "sum": lambda values: values.sum(axis=0),
    "max": lambda values: values.max(axis=0),
    "min": lambda values: values.min(axis=0),
    "last": lambda values: values[-1],
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_figure_of_a_merged_window_is_that_of_its_steps(name):
    windows = windows_of(meta_of(), 7)
    merged = windows.merged(3)[name]
    wanted = [RULES[FIELDS[name].merge](windows[name][start : start + 3]) for start in (0, 3, 6)]
    np.testing.assert_allclose(merged, np.stack(wanted), rtol=1e-12)


@settings(max_examples=50, deadline=None)
@given(number=st.integers(1, 20), first=st.integers(1, 5), second=st.integers(1, 5))
def test_merging_twice_is_merging_once(number, first, second):
    windows = windows_of(meta_of(ranks=0), number)
    twice, once = windows.merged(first).merged(second), windows.merged(first * second)
    for name in FIELDS:
        np.testing.assert_allclose(twice[name], once[name], rtol=1e-12)


def test_joined_windows_are_those_of_the_parts():
    meta = meta_of()
    windows = windows_of(meta, 5)
    parts = [windows.chosen(slice(0, 2)), Windows.empty(meta.sizes), windows.chosen(slice(2, None))]
    assert equal(Windows.joined(parts), windows)
    assert len(windows.total()) == 1 and windows.total()["steps"][0] == 5


def test_no_windows_stay_none():
    assert not len(Windows.empty(meta_of().sizes).merged(2))

"""One table of tolerances; no test has a tolerance of its own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

TOLERANCE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 2e-5, "atol": 2e-6},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None, what: str = "") -> None:
    """Equal up to the table's tolerance for ``dtype`` (by default that of ``actual``)."""
    limits = TOLERANCE[dtype or actual.dtype]
    torch.testing.assert_close(
        actual.double(), expected.double(), **limits, msg=lambda text: f"{what}: {text}" if what else text
    )


def assert_all_close(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> None:
    """The same names with close values."""
    assert sorted(actual) == sorted(expected)
    for name, value in actual.items():
        assert_close(value, expected[name], dtype, name)

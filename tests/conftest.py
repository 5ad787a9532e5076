"""Options and fixtures that the whole test suite shares."""

from __future__ import annotations

import pytest
import torch

# Tensors are small here, and threads that wait for one another are slow on a busy machine.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the one flag that may rewrite golden files."""
    parser.addoption("--update-golden", action="store_true", help="rewrite the files in tests/golden and pass")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be rewritten instead of compared."""
    return bool(request.config.getoption("--update-golden"))

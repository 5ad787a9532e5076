"""What a fresh interpreter loads: imports of this process are too many to tell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The folder that holds the package and the tests."""


def loaded_after(statement: str, *names: str) -> list[str]:
    """Those of the modules ``names`` that a new Python has loaded after it ran ``statement``, in the given order."""
    program = f"{statement}\nimport sys\nprint(*(name for name in {names!r} if name in sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()

"""The measurement of delays from the shell to its figures. What they are is not asserted: speed is no test."""

import json
import subprocess
import sys

import pytest

from tests.helpers.launch import ROOT, environment
from tools import bench_delay


def test_it_measures_every_row_without_a_link_to_limit():
    command = [sys.executable, str(ROOT / "tools" / "bench_delay.py"), "--late", "--compute", "0.01", "--steps", "2"]
    done = subprocess.run(
        [*command, "--megabytes", "0.1", "--delays", "0", "2", "--json"],
        env=environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert list(figures["seconds_a_step"]) == ["compute alone", "delay 0", "delay 2"] == list(figures["ratio"])
    assert figures["link"] == "late reducer" and figures["megabits_per_second"] is None
    text = bench_delay.table(figures)
    assert "no link could be limited here, so reductions were made to end late" in text and "delay 2" in text
    assert "link limited to 158 Mbit/s" in bench_delay.table(figures | {"link": "tbf", "megabits_per_second": 158.2})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "1"], "--ranks is 1; it must be at least 2"),
        (["--share", "0"], "--share is 0.0; it must be greater than 0"),
        (["--delays", "1", "-1"], "--delays has -1; a delay is 0 or more"),
    ],
)
def test_wrong_arguments_say_so(arguments, message, capsys):
    with pytest.raises(SystemExit):
        bench_delay.main(arguments)
    assert message in capsys.readouterr().err

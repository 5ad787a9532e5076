"""`tools/local_ranks.py`: what starts a recipe on this machine."""

from __future__ import annotations

import pytest

from tools.local_ranks import main

ONE, SEVERAL = "recipes/quickstart-sync.yaml", "recipes/quickstart.yaml"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([ONE], "2"),
        ([SEVERAL], "2"),
        (["--command", ONE], f"deepspeed --num_gpus 2 --module moe_async.train --recipe {ONE}"),
        (["--command", "--ranks", "1", ONE], f"deepspeed --num_gpus 1 --module moe_async.train --recipe {ONE}"),
        (["--command", SEVERAL], f"python -m moe_async.launch {SEVERAL} --ranks 2"),
        (["--command", "--ranks", "4", SEVERAL], f"python -m moe_async.launch {SEVERAL} --ranks 4"),
    ],
)
def test_the_line(capsys, monkeypatch, arguments, line):
    monkeypatch.setattr("tools.local_ranks.accelerator_count", lambda: 0)
    assert main(arguments) == 0
    assert capsys.readouterr().out == line + "\n"


def test_accelerators_are_shared_among_learners(capsys, monkeypatch):
    monkeypatch.setattr("tools.local_ranks.accelerator_count", lambda: 8)
    assert main(["--command", SEVERAL]) == 0
    assert capsys.readouterr().out == f"python -m moe_async.launch {SEVERAL} --ranks 4\n"


def test_a_recipe_that_is_not_there(capsys):
    assert main(["--command", "nothing.yaml"]) == 1
    assert "error: nothing.yaml does not exist" in capsys.readouterr().err

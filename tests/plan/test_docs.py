"""The plans of docs/planning.md are what the tool prints."""

import re
import shlex
from pathlib import Path

import pytest

from tools.plan import main

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "planning.md").read_text()
SHOWN = re.findall(r"```console\n\$ python tools/plan\.py (.*?)\n(.*?)\n```", TEXT, flags=re.DOTALL)
TABLE = re.findall(r"^\| (\d+) \|(.*)\|$", TEXT, flags=re.MULTILINE)


def test_three_models_are_planned():
    assert [re.search(r"models/(\S+)\.yaml", command)[1] for command, _ in SHOWN] == [
        "olmoe-1b-7b", "qwen3-30b-a3b", "deepseek-v3-like",
    ]  # fmt: skip
    assert [gpus for gpus, _ in TABLE] == ["16", "32", "64"]


@pytest.mark.parametrize(("command", "output"), SHOWN)
def test_a_plan_is_shown_as_it_is(command, output, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    main(shlex.split(command))
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == output.splitlines()


@pytest.mark.parametrize(("gpus", "row"), TABLE)
def test_the_table_of_choices(gpus, row, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    main(["recipes/models/qwen3-30b-a3b.yaml", "--gpus", gpus])
    expert, zero, batches, memory, seconds, _, mfu = (cell.strip() for cell in row.split("|"))
    number, size = batches.split(" x ")
    text = capsys.readouterr().out
    chosen = (
        f"it would choose: {gpus} ranks, expert groups of {expert}, ZeRO {zero}, {number} micro-batches of {size}, "
    )
    assert f"{chosen}recompute block\n  {seconds} s a step" in text and f"MFU {mfu}, {memory} GB" in text

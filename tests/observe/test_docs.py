"""The examples of docs/tools.md are run as they stand there."""

import re
from pathlib import Path

import torch

import moe_async
from moe_async.observe import read_load, read_traces

TEXT = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()


def block(language):
    (text,) = re.findall(rf"-->\n```{language}\n(.*?)```", TEXT, flags=re.DOTALL)
    return text


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = moe_async.MoELayer(8, 4, 2)

    def forward(self, x):
        return self.layer(x).hidden


def test_the_loop(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = Model()
    batches = [("code", torch.randn(2, 5, 8)), ("prose", torch.randn(2, 5, 8))]
    exec(block("python"), {"model": model, "batches": batches, "optimizer": torch.optim.SGD(model.parameters(), 0.1)})
    assert read_load(tmp_path / "loads").windows["domain_tokens"].tolist() == [[10, 0, 0], [0, 10, 0]]


def test_the_lines_of_traces(tmp_path):
    lines = block("json").splitlines()
    for number, line in enumerate(lines):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(line)
        assert read_traces(path).windows["counts"].sum() > 0
    assert len(lines) == 3

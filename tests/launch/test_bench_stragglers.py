"""What the measurement of slow learners and links predicts. What it measures is not asserted: speed is no test."""

import shutil

import pytest

from moe_async.comm.namespaces import PAYLOAD_SHARE, Star
from moe_async.errors import MoeAsyncError
from moe_async.model.build import count_parameters
from tools import bench_stragglers
from tools.bench_stragglers import Bench


def test_a_slow_learner_holds_up_those_who_wait():
    bench = Bench(paces=(5.0, 1.0, 1.0, 1.0), steps=8, megabytes=0.01, bandwidth=None)
    assert bench.predict("local_sgd:every=2") == pytest.approx(4 / 5 / 3.2)
    assert bench.predict("decoupled:every=2") == pytest.approx(1.0, abs=0.01)


def test_a_round_takes_its_steps_and_the_way_there_and_back(tmp_path):
    bench = Bench(paces=(1.0, 1.0), steps=8, megabytes=1.0, bandwidth=500_000.0)
    policy = "local_sgd:every=2"
    recipe = bench.recipe(tmp_path, policy)
    way = (4 * count_parameters(recipe).total + 256) / (500_000 * PAYLOAD_SHARE)
    # The last round's way back comes after the last step.
    assert bench.predict(policy) == pytest.approx(8 / (8 + 4 * 2 * way), rel=0.02)


def test_links_that_cannot_be_limited_say_so(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda program: None)
    with pytest.raises(MoeAsyncError, match="links can be limited only with the programs ip and tc"), Star(1, 1e6):
        pass
    assert bench_stragglers.main(["--bandwidth", "8Mbit"]) == 1
    assert "error: links can be limited only with" in capsys.readouterr().err
    assert bench_stragglers.main(["--bandwidth", "8"]) == 1
    assert "'8' is not a bandwidth" in capsys.readouterr().err

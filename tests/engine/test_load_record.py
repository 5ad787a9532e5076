"""Where the record of a run goes on, and where it begins anew."""

import numpy as np

from moe_async.engine.load_record import open_store
from moe_async.observe import read_load
from moe_async.observe.recorder import LoadRecorder
from moe_async.observe.store import LoadStore
from tests.observe.loads import figures_of, meta_of


def record_steps(store, first, last):
    recorder = LoadRecorder(store)
    for step in range(first, last + 1):
        recorder.add(step, figures_of(store.meta, np.full((2, 4), step)))
    recorder.flush()


def test_a_resumed_run_records_its_steps_again(tmp_path):
    folder, meta = tmp_path / "expert_load", meta_of(ranks=2)
    record_steps(LoadStore(folder, meta), 1, 10)
    store, aside = open_store(folder, meta, 6)
    assert aside is None
    assert read_load(folder).windows["last_step"].tolist() == [1, 2, 3, 4, 5, 6]
    record_steps(store, 7, 8)
    assert read_load(folder).windows["counts"][:, 0, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_on_other_ranks_the_record_so_far_is_put_aside(tmp_path):
    folder = tmp_path / "expert_load"
    record_steps(LoadStore(folder, meta_of(ranks=2)), 1, 10)
    for number, ranks in ((1, 4), (2, 2)):
        store, aside = open_store(folder, meta_of(ranks=ranks), 6)
        assert aside == tmp_path / f"expert_load-{number}"
        assert not len(read_load(folder).windows)
        record_steps(store, 7, 9)
    # Nothing is lost: steps that the resumed run does again are in what was put aside as well.
    assert read_load(tmp_path / "expert_load-1").windows["last_step"].tolist() == list(range(1, 11))
    assert read_load(tmp_path / "expert_load-2").windows["last_step"].tolist() == [7, 8, 9]
    assert len(read_load(folder).meta.rank_experts) == 2

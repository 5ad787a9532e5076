"""The engine as people use it: their own loops, gradients that are not finite, and calls in the wrong order."""

import signal
from datetime import timedelta

import pytest
import torch

from moe_async.comm import make_world
from moe_async.data import load_corpus, make_tokenizer
from moe_async.engine.start import initialize
from moe_async.engine.micro_batch import MicroBatch
from moe_async.engine.step import IGNORED_LABEL, next_token_loss_sum
from moe_async.engine.stop import StopFlag
from moe_async.errors import EngineError, MoeAsyncError
from moe_async.model import build_model
from moe_async.recipe import Recipe
from moe_async.topology import Topology
from moe_async.engine.start import check_same_text
from tests.helpers.numerics import assert_all_close
from tests.helpers.small import SMALL, small_recipe
from tests.helpers.spawn import run_ranks
from tests.helpers.texts import tiny_document, write_texts

VOCAB, ROWS, LENGTH = 32, 2, 6


def micro_batch(seed):
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    return MicroBatch(tokens, (tokens * 3 + 1) % VOCAB)


def make_engine(stage, precision="float32", expert=2, **train):
    recipe = small_recipe(
        parallel={"expert": expert, "zero": stage},
        train={"steps": 10, "global_batch": 8, "precision": precision, **train},
    )
    world = make_world(Topology(2, expert, 4))
    return initialize(build_model(recipe, world), recipe, world)


def both_loops(rank, stage):
    """The same two steps by `train_step` and by the three calls; all micro-batches are of one size."""
    batches = [[micro_batch(100 * step + 10 * rank + a) for a in range(2)] for step in range(2)]
    weights = []
    for own in (False, True):
        engine = make_engine(stage, accumulation=2)
        for step in batches:
            if not own:
                engine.train_step(step)
                continue
            outcomes = []
            for batch in step:
                logits, routing = engine(batch.tokens)
                loss = next_token_loss_sum(logits, batch.labels) / batch.label_tokens()
                engine.backward(loss + engine.balance_loss(routing))
                outcomes.append(engine.step())
            assert outcomes[0] is None and outcomes[1].applied
        weights.append({name: p.detach().clone() for name, p in engine.module.named_parameters()})
    return weights


def at_stages(rank, function, cases):
    """Many cases in one launch: starting processes costs more than the cases."""
    return [function(rank, *case) for case in cases]


def test_forward_backward_step_equal_train_step():
    for stages in run_ranks(2, at_stages, both_loops, [(0,), (1,)]):
        for train_step, three_calls in stages:
            assert_all_close(three_calls, train_step)


def one_and_four(rank, precision, stage):
    """Two steps over the same eight rows, as one micro-batch and as four."""
    batches = [[micro_batch(10 * step + a) for a in range(4)] for step in range(2)]
    whole = [[MicroBatch(torch.cat([b.tokens for b in four]), torch.cat([b.labels for b in four]))] for four in batches]
    results = []
    for accumulation, steps in ((1, whole), (4, batches)):
        recipe = small_recipe(
            # The Switch loss with its scope of a micro-batch depends on the cut; nothing else does.
            moe={**SMALL["moe"], "balance": [{"loss": "z", "coefficient": 0.1}]},
            parallel={"expert": 1, "zero": stage},
            train={"steps": 10, "global_batch": 8, "precision": precision, "accumulation": accumulation},
        )
        world = make_world(Topology(1, 1, 4))
        engine = initialize(build_model(recipe, world), recipe, world)
        reports = [engine.train_step(step) for step in steps]
        weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        results.append((weights, [(r.lm_loss, r.balance["z"], r.grad_norm) for r in reports]))
    return results


def test_one_micro_batch_equals_four():
    cases = [("float64", 0), ("float32", 1), ("float32", 2)]
    (results,) = run_ranks(1, at_stages, one_and_four, cases)
    for (precision, _), ((one, one_figures), (four, four_figures)) in zip(cases, results, strict=True):
        assert_all_close(four, one)
        for figures, expected in zip(four_figures, one_figures, strict=True):
            assert figures == pytest.approx(expected, rel=1e-12 if precision == "float64" else 2e-5)


def not_finite(rank, stage):
    engine = make_engine(stage)
    before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    head = engine.module.embedding.register_forward_hook(
        lambda module, inputs, output: output * (float("nan") if rank == 1 else 1.0)
    )
    skipped = engine.train_step([micro_batch(rank)])
    unchanged = all(torch.equal(p, before[name]) for name, p in engine.module.named_parameters())
    head.remove()
    applied = engine.train_step([micro_batch(rank)])
    return skipped.applied, unchanged, applied.applied, applied.lm_loss, engine.global_step


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all():
    for stages in run_ranks(2, at_stages, not_finite, [(0,), (1,), (2,)]):
        for skipped, unchanged, applied, loss, steps in stages:
            assert not skipped and unchanged and applied and 0 < loss < 10 and steps == 2


def wrong_calls(rank):
    engine = make_engine(1)
    messages = []
    for call in (
        lambda: engine.train_step([]),
        lambda: engine.train_step([micro_batch(0), micro_batch(1)]),
        lambda: engine.train_step([MicroBatch(*[torch.full((1, 4), v) for v in (0, IGNORED_LABEL)])]),
    ):
        with pytest.raises(EngineError) as error:
            call()
        messages.append(str(error.value))
    engine.backward(next_token_loss_sum(engine(micro_batch(0).tokens).logits, micro_batch(0).labels))
    with pytest.raises(EngineError) as error:
        engine.train_step([micro_batch(0)])
    messages.append(str(error.value))

    recipe = small_recipe(parallel={"expert": 2, "zero": 0}, train={"steps": 1, "global_batch": 8})
    with pytest.raises(EngineError) as error:
        initialize(build_model(recipe), recipe, make_world(Topology(2, 2, 4)))
    messages.append(str(error.value))
    with pytest.raises(EngineError) as error:
        make_engine(0, precision="float64").bridge.__class__(
            build_model(small_recipe()).double(),
            recipe.optim,
            {"zero_optimization": {"stage": 1}},
            make_world(Topology(2, 2, 4)),
        )
    messages.append(str(error.value))

    balance = [{"loss": "switch", "coefficient": 0.1, "scope": "step"}]
    whole = small_recipe(moe={**SMALL["moe"], "balance": balance}, train={"steps": 1, "global_batch": 8})
    engine = initialize(build_model(whole), whole, make_world(Topology(2, 1, 4)))
    with pytest.raises(EngineError) as error:
        engine.balance_loss(())
    messages.append(str(error.value))

    silent = make_engine(0)
    silent.module.register_forward_hook(lambda module, inputs, output: output._replace(routing=()))
    with pytest.raises(EngineError) as error:
        silent.train_step([micro_batch(0)])
    messages.append(str(error.value))

    def drop_tokens(module, arguments):
        return (arguments[0], torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) > 0)

    partial = make_engine(1)
    partial.module.layers[1].ffn.register_forward_pre_hook(drop_tokens)
    with pytest.raises(EngineError) as error:
        partial.train_step([micro_batch(0)])
    messages.append(str(error.value))
    return messages


def plain_data_parallelism(rank):
    """With experts on every rank, a model built without a world fits every rank."""
    recipe = small_recipe(
        parallel={"expert": 1, "zero": 1}, train={"steps": 10, "global_batch": 4, "precision": "float32"}
    )
    return (
        initialize(build_model(recipe), recipe, make_world(Topology(2, 1, 4))).train_step([micro_batch(rank)]).applied
    )


def test_data_parallelism_takes_a_model_of_one_process():
    assert run_ranks(2, plain_data_parallelism) == [True, True]


def test_wrong_calls_say_what_to_do():
    expected = (
        "got 0 micro-batches but the recipe's train.accumulation is 1",
        "got 2 micro-batches",
        "no micro-batch of this step has a label token",
        "in the middle of a step. After backward, finish the step with step()",
        "built for the expert group of ranks [0] but rank 0 is in [0, 1]",
        "--set parallel.zero=0 for float64",
        "a term of scope step or previous: its loads are those of all micro-batches",
        "the balance loss switch has no gradient",
        "the MoE layers routed [22] tokens in this step but its micro-batches hold 24",
    )
    for messages in run_ranks(2, wrong_calls):
        for message, part in zip(messages, expected, strict=True):
            assert part in message


def presets(rank, precision, stage):
    engine = make_engine(stage, precision=precision)
    seen = {}
    layer = engine.module.layers[1].ffn
    layer.experts.register_forward_hook(
        lambda module, inputs, output: seen.update(rows=(inputs[0].dtype, output.dtype))
    )
    layer.router.register_forward_hook(lambda module, inputs, output: seen.update(router=output[0].dtype))
    engine.module.layers[0].attention.qkv.register_forward_hook(
        lambda module, inputs, output: seen.update(dense=output.dtype)
    )
    report = engine.train_step([micro_batch(rank)])
    seen["parameters"] = {p.dtype for p in engine.module.parameters()}
    assert report.applied
    return seen


PRESETS = [
    ("selective", 1, torch.bfloat16, torch.float32, torch.float32),
    ("selective", 2, torch.bfloat16, torch.float32, torch.float32),
    ("bf16", 0, torch.bfloat16, torch.bfloat16, torch.float32),
    ("bf16", 1, torch.bfloat16, torch.bfloat16, torch.float32),
    ("float32", 1, torch.float32, torch.float32, torch.float32),
    ("float64", 0, torch.float64, torch.float64, torch.float64),
]


def test_dtypes_of_each_preset_in_training():
    for ranks in run_ranks(2, at_stages, presets, [preset[:2] for preset in PRESETS]):
        for seen, (_, _, rows, dense, wide) in zip(ranks, PRESETS, strict=True):
            assert seen == {"rows": (rows, rows), "router": wide, "dense": dense, "parameters": {wide}}


def read_text(rank, texts, change):
    if change and rank == 1:
        texts = texts.with_name("other")
    recipe = Recipe.model_validate(tiny_document(texts, texts.parent / "runs"))
    try:
        check_same_text(load_corpus(recipe.data, make_tokenizer("bytes")), make_world(Topology(2, 2, 4)))
    except MoeAsyncError as error:
        return str(error)
    return None


def test_ranks_that_read_other_text_are_told_apart(tmp_path):
    write_texts(tmp_path / "texts")
    write_texts(tmp_path / "other", documents=59)
    assert run_ranks(2, read_text, tmp_path / "texts", False) == [None, None]
    for message in run_ranks(2, read_text, tmp_path / "texts", True):
        assert "ranks [1] read other text than rank 0" in message


def flags_and_timeouts(rank):
    import torch.distributed as dist

    timeouts, plain = [], dist.new_group
    dist.new_group = lambda ranks, timeout=None: timeouts.append(timeout) or plain(ranks, timeout=timeout)
    world = make_world(Topology(2, 2, 4), timeout=timedelta(minutes=3))
    dist.new_group = plain
    flag = StopFlag()
    before = flag.agreed(world)
    if rank == 1:
        flag.on_signal(signal.SIGTERM, None)
    return before, flag.agreed(world), flag.reason, timeouts


def test_all_ranks_stop_when_one_is_told_and_groups_have_the_given_timeout():
    assert run_ranks(2, flags_and_timeouts) == [(False, True, "SIGTERM", [timedelta(minutes=3)] * 2)] * 2


def test_labels_of_masked_tokens_do_not_count():
    tokens = torch.arange(6).view(1, 6)
    batch = MicroBatch(tokens, tokens + 1, tokens < 4)
    assert batch.targets().tolist() == [[1, 2, 3, 4, IGNORED_LABEL, IGNORED_LABEL]]
    assert (batch.label_tokens(), batch.routed_tokens()) == (4, 4)

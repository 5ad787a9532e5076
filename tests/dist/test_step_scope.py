"""The balance loss of a whole step, exactly: what a trainer gets only if every micro-batch knows the step's loads.

Two MoE layers, four unequal and partly masked micro-batches, expert-parallel size 2, router jitter, each way of
recomputation and of getting the loads. The gradients equal those of one batch of all tokens, in float64.
"""

import itertools

import pytest
import torch

from moe_async.comm import make_world
from moe_async.engine.start import initialize
from moe_async.engine.micro_batch import MicroBatch
from moe_async.engine.step import IGNORED_LABEL
from moe_async.model import build_model
from moe_async.moe.classes import expert_ids
from moe_async.ops.noise import Noise
from moe_async.topology import Topology
from tests.helpers.numerics import assert_close
from tests.helpers.reference import naive_attention, naive_choice, naive_expert, naive_rms_norm
from tests.helpers.small import SMALL, small_recipe
from tests.helpers.spawn import run_ranks

DIM, EXPERTS, TOP_K, VOCAB, JITTER, SEED = 8, 4, 2, 32, 0.3, 77
SHAPES = [(1, 7), (2, 4), (3, 2), (2, 6)]
COEFFICIENTS = {"switch": 0.5, "importance": 0.4, "z": 0.1}
MODES = [*itertools.product(("count", "keep"), ("none", "block", "reentrant")), ("previous", "none")]


def micro_batch(index):
    rows, length = SHAPES[index]
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(0, VOCAB, (rows, length), generator=generator)
    live = torch.ones(rows, length, dtype=torch.bool)
    if index in (1, 3):
        live[-1, length // 2 :] = False
    labels = torch.where(live, (tokens * 3 + 1) % VOCAB, IGNORED_LABEL)
    return MicroBatch(tokens, labels, None if live.all() else live)


def recipe_of(loads, recompute, accumulation=2):
    scope = "previous" if loads == "previous" else "step"
    return small_recipe(
        moe={
            **SMALL["moe"], "layers": "all", "router": {"kind": "topk", "jitter": JITTER},
            "step_loads": "count" if loads == "previous" else loads,
            "balance": [
                {"loss": loss, "coefficient": value, "scope": scope} for loss, value in COEFFICIENTS.items()
            ],
        },
        parallel={"expert": 2, "zero": 0},
        optim={"kind": "sgd", "lr": 1.0, "weight_decay": 0.0, "clip": 0.0, "schedule": {"kind": "constant"}},
        train={
            "steps": 9, "global_batch": 8, "accumulation": accumulation,
            "precision": "float64", "recompute": recompute,
        },
    )  # fmt: skip


def one_step(rank):
    results = []
    for loads, recompute in MODES:
        recipe = recipe_of(loads, recompute)
        world = make_world(Topology(2, 2, EXPERTS))
        engine = initialize(build_model(recipe, world), recipe, world)
        mine = [micro_batch(rank), micro_batch(2 + rank)]
        start = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        torch.manual_seed(SEED)
        if loads == "previous":
            # A first step gives it loads of other tokens; then back to the weights and the noise of the others.
            engine.train_step(mine[::-1])
            for name, parameter in engine.module.named_parameters():
                parameter.data.copy_(start[name])
            torch.manual_seed(SEED)
        report = engine.train_step(mine)
        # Plain SGD with rate 1: the change of a weight is its gradient.
        grads = {name: start[name] - p.detach() for name, p in engine.module.named_parameters()}
        results.append((grads, expert_ids(engine.module), report.balance, torch.get_rng_state()))
    return results


def jitter_factors():
    """By micro-batch and layer. Each rank draws one key a layer and micro-batch, from the same random state."""
    torch.manual_seed(SEED)
    factors = {}
    for turn, layer in itertools.product(range(2), range(2)):
        noise = Noise.draw(0)
        for rank in range(2):
            rows, length = SHAPES[2 * turn + rank]
            drawn = Noise(noise.key, rank).uniform("jitter", (rows * length, DIM), torch.device("cpu"))
            factors[2 * turn + rank, layer] = 1 - JITTER + 2 * JITTER * drawn.double()
    return factors


def one_batch():
    """All tokens of the step together: gradients and balance losses."""
    model = build_model(small_recipe(moe={**SMALL["moe"], "layers": "all"}))
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    factors, batches = jitter_factors(), [micro_batch(index) for index in range(4)]
    labels = sum(batch.label_tokens() for batch in batches)
    counts, probs, gates = ([[0.0] * EXPERTS for _ in range(2)] for _ in range(3))
    lm, z, tokens = 0.0, 0.0, 0
    for index, batch in enumerate(batches):
        streams = [weights["embedding.weight"][row] for row in batch.tokens]
        for layer in range(2):
            own = {
                k.removeprefix(f"layers.{layer}."): w for k, w in weights.items() if k.startswith(f"layers.{layer}.")
            }
            position = 0
            for row, stream in enumerate(streams):
                mask = None if batch.token_mask is None else batch.token_mask[row]
                stream = stream + naive_attention(
                    naive_rms_norm(stream, own["attention_norm.weight"]), own["attention.qkv.weight"],
                    own["attention.out.weight"], 4, 2, mask,
                )  # fmt: skip
                outputs = []
                for t, x in enumerate(naive_rms_norm(stream, own["ffn_norm.weight"])):
                    factor = factors[index, layer][position]
                    position += 1
                    if mask is not None and not mask[t]:
                        outputs.append(torch.zeros_like(x))
                        continue
                    logits = own["ffn.router.weight"] @ (x * factor)
                    p = torch.exp(logits) / torch.exp(logits).sum()
                    chosen = naive_choice(p, TOP_K)
                    total, y = sum(p[e] for e in chosen), 0.0
                    for e in chosen:
                        y = y + p[e] / total * naive_expert(
                            x, own["ffn.experts.w_in"][e], own["ffn.experts.w_out"][e], "swiglu"
                        )
                        counts[layer][e] += 1
                        gates[layer][e] = gates[layer][e] + p[e] / total
                    for e in range(EXPERTS):
                        probs[layer][e] = probs[layer][e] + p[e]
                    z = z + torch.log(torch.exp(logits).sum()) ** 2
                    tokens += layer == 0
                    outputs.append(y)
                streams[row] = stream + torch.stack(outputs)
        for row, stream in enumerate(streams):
            logits = naive_rms_norm(stream, weights["norm.weight"]) @ weights["embedding.weight"].T
            for t in range(stream.shape[0]):
                if batch.labels[row, t] != IGNORED_LABEL:
                    lm = lm - torch.log_softmax(logits[t], -1)[batch.labels[row, t]] / labels
    losses = {"switch": 0.0, "importance": 0.0, "z": z / tokens}
    for layer in range(2):
        for e in range(EXPERTS):
            losses["switch"] = (
                losses["switch"] + EXPERTS * counts[layer][e] / (TOP_K * tokens) * probs[layer][e] / tokens
            )
        mean = sum(gates[layer]) / EXPERTS
        losses["importance"] = losses["importance"] + sum((g - mean) ** 2 for g in gates[layer]) / EXPERTS / mean**2
    (lm + sum(COEFFICIENTS[name] * loss for name, loss in losses.items())).backward()
    return {name: w.grad for name, w in weights.items()}, {name: loss.item() for name, loss in losses.items()}


@pytest.fixture(scope="module")
def results():
    return run_ranks(2, one_step, timeout=120), one_batch()


@pytest.mark.parametrize("mode", range(len(MODES) - 1), ids=lambda index: "-".join(MODES[index]))
def test_scope_step_has_the_gradients_of_one_large_batch(results, mode):
    by_rank, (expected, losses) = results
    for rank in by_rank:
        grads, ids, balance, _ = rank[mode]
        assert balance == pytest.approx(losses, rel=1e-12)
        for name, grad in grads.items():
            assert_close(grad, expected[name][list(ids.get(name, [])) or slice(None)], what=name)


def test_scope_previous_has_others(results):
    by_rank, (expected, _) = results
    grads, _, _, _ = by_rank[0][-1]
    for name in ("layers.0.ffn.router.weight", "layers.1.ffn.router.weight", "embedding.weight"):
        difference = (grads[name] - expected[name]).norm() / expected[name].norm()
        assert difference > 1e-3, name


def test_counting_and_recomputing_draw_nothing_twice(results):
    by_rank, _ = results
    states = [state for rank in by_rank for _, _, _, state in rank]
    assert all(torch.equal(state, states[0]) for state in states)

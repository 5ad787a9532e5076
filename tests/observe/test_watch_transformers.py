"""record_load on transformers' blocks writes what counting by hand gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
)

import moe_async
from moe_async.errors import LoadError
from moe_async.observe import read_load

SEQUENCES, LENGTH, EXPERTS, TOP_K = 2, 9, 8, 3
TOKENS = SEQUENCES * LENGTH
COMMON = {
    "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 50, "num_experts_per_tok": TOP_K,
}  # fmt: skip


def softmax_choice(logits_TE, router):
    return np.argsort(-logits_TE, axis=1)[:, :TOP_K]


def grouped_sigmoid_choice(logits_TE, router):
    """DeepSeek-V3: the better of two groups by the sum of its two best biased scores, then the best of it."""
    scores_TE = 1 / (1 + np.exp(-logits_TE)) + router.e_score_correction_bias.double().numpy()
    groups = scores_TE.reshape(len(scores_TE), 2, EXPERTS // 2)
    best = np.sort(groups, axis=2)[:, :, -2:].sum(axis=2).argmax(axis=1)
    outside = np.arange(EXPERTS)[None] // (EXPERTS // 2) != best[:, None]
    return np.argsort(-np.where(outside, -np.inf, scores_TE), axis=1)[:, :TOP_K]


KINDS = {
    "olmoe": (OlmoeForCausalLM, lambda: OlmoeConfig(**COMMON, num_experts=EXPERTS), softmax_choice, 3),
    "gpt_oss": (GptOssForCausalLM, lambda: GptOssConfig(**COMMON, num_local_experts=EXPERTS), softmax_choice, 3),
    "deepseek_v3": (
        DeepseekV3ForCausalLM,
        lambda: DeepseekV3Config(
            **{**COMMON, "head_dim": 4}, n_routed_experts=EXPERTS, moe_intermediate_size=8, n_shared_experts=1,
            n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4,
            qk_nope_head_dim=4, v_head_dim=8,
        ),
        grouped_sigmoid_choice,
        2,
    ),
}  # fmt: skip


def make_model(kind):
    torch.manual_seed(0)
    model_class, config, choice, layers = KINDS[kind]
    model = model_class(config()).float()
    routers = [module for name, module in model.named_modules() if name.endswith((".mlp.gate", ".mlp.router"))]
    routers = [module for module in routers if module.weight.shape[0] == EXPERTS]
    assert len(routers) == layers
    with torch.no_grad():
        for router in routers:
            # Clear choices: the initial weights are nearly ties.
            router.weight.normal_()
            if kind == "deepseek_v3":
                router.e_score_correction_bias.uniform_(-0.3, 0.3)
            if kind == "gpt_oss":
                router.bias.normal_()
    return model, routers, choice


def taken_by(routers):
    """What each router takes, kept by hooks of the test."""
    taken = {}
    for place, router in enumerate(routers):
        router.register_forward_pre_hook(lambda module, inputs, place=place: taken.update({place: inputs[0].detach()}))
    return taken


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("kind", KINDS)
def test_counts_of_each_step(kind, implementation, tmp_path):
    model, routers, choice = make_model(kind)
    model.set_experts_implementation(implementation)
    taken = taken_by(routers)
    model.gradient_checkpointing_enable()
    model.train()
    counts, probs, chosen = [], [], []
    with moe_async.record_load(model, tmp_path, domains=("code", "prose"), sampled_tokens=TOKENS) as watch:
        watch.label(("prose", "code"))
        for step in (1, 2):
            ids = torch.randint(0, 50, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(step))
            model(input_ids=ids, labels=ids).loss.backward()
            logits = [
                taken[place].flatten(0, -2).double().numpy() @ router.weight.detach().double().numpy().T
                + (router.bias.detach().double().numpy() if kind == "gpt_oss" else 0.0)
                for place, router in enumerate(routers)
            ]
            chosen = [choice(values, router) for values, router in zip(logits, routers, strict=True)]
            counts.append([np.bincount(experts.ravel(), minlength=EXPERTS) for experts in chosen])
            probs.append([torch.from_numpy(values).softmax(dim=-1).sum(dim=0).numpy() for values in logits])
    record = read_load(tmp_path)
    assert record.meta.experts == (EXPERTS,) * len(routers) and record.meta.top_k == (TOP_K,) * len(routers)
    assert record.meta.layers[-1] == "model.layers.2.mlp"
    assert np.array_equal(record.windows["counts"], counts)
    np.testing.assert_allclose(record.windows["prob"], probs, rtol=1e-4)
    assert record.windows["domain_tokens"].tolist() == [[LENGTH, LENGTH, 0]] * 2
    prose = np.bincount(chosen[0][:LENGTH].ravel(), minlength=EXPERTS)
    assert np.array_equal(record.windows["domain_counts"][1, 0, 1], prose)
    assert (record.windows["bias"] != 0).any() == (kind == "deepseek_v3")
    # The tokens' ids are found among what the model is called with.
    assert (record.paths.token >= 0).all() and len(record.paths) == 2 * TOKENS


def test_labels_that_do_not_fit_the_batch(tmp_path):
    model, _, _ = make_model("olmoe")
    with (
        pytest.raises(LoadError, match=r"18 tokens, which are not 4 equally long sequences"),
        moe_async.record_load(model.train(), tmp_path, domains=("a",)) as watch,
    ):
        watch.label(("a",) * 4)
        model(torch.zeros(SEQUENCES, LENGTH, dtype=torch.int64))

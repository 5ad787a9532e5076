"""The DeepSpeed JSON of a recipe, and the options that a recipe may not pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_async.errors import RecipeError
from moe_async.recipe import deepspeed_config
from tests.recipe.minimal import error_of, load_minimal, write_recipe


@pytest.mark.parametrize(("zero", "clipping"), [(0, 0.0), (1, 0.5), (2, 0.5)])
def test_the_whole_json_at_each_zero_stage(tmp_path: Path, zero: int, clipping: float) -> None:
    recipe = load_minimal(tmp_path, f"parallel.zero={zero}", "optim.clip=0.5", "train.accumulation=2")

    assert deepspeed_config(recipe, 4) == {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": clipping,
        "zero_optimization": {"stage": zero},
    }


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_no_clipping_is_written_out(tmp_path: Path, zero: int) -> None:
    # DeepSpeed clips at 1.0 where the key is absent.
    assert (
        deepspeed_config(load_minimal(tmp_path, f"parallel.zero={zero}", "optim.clip=0"), 1)["gradient_clipping"] == 0
    )


def test_sgd_is_allowed_under_zero(tmp_path: Path) -> None:
    sgd = deepspeed_config(load_minimal(tmp_path, "optim.kind=sgd"), 1)

    assert sgd["zero_allow_untested_optimizer"] is True


def test_extra_options_merge_deeply_and_win(tmp_path: Path) -> None:
    recipe = load_minimal(
        tmp_path,
        "optim.kind=sgd",
        "deepspeed={steps_per_print: 50, zero_optimization: {overlap_comm: true}}",
    )

    config = deepspeed_config(recipe, 2)

    assert config["zero_optimization"] == {"stage": 1, "overlap_comm": True}
    assert (config["steps_per_print"], config["zero_allow_untested_optimizer"]) == (50, True)
    assert json.loads(json.dumps(config)) == config


def test_the_json_shares_nothing_with_the_recipe(tmp_path: Path) -> None:
    recipe = load_minimal(tmp_path, "deepspeed={comms_logger: {enabled: true, ops: [a]}}")

    deepspeed_config(recipe, 1)["comms_logger"]["ops"].append("b")

    assert recipe.deepspeed == {"comms_logger": {"enabled": True, "ops": ["a"]}}


def test_a_world_that_does_not_fit_gives_no_json(tmp_path: Path) -> None:
    recipe = load_minimal(tmp_path, "parallel.expert=2")

    with pytest.raises(RecipeError, match=r"--set parallel\.expert=1"):
        deepspeed_config(recipe, 1)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"bf16": {"enabled": True}}, "bf16", "train.precision"),
    ({"bf16": {"enabled": False}}, "bf16", "router"),
    ({"bfloat16": {}}, "bfloat16", "train.precision"),
    ({"fp16": {"enabled": True}}, "fp16", "train.precision"),
    ({"amp": {"enabled": True}}, "amp", "train.precision"),
    ({"torch_autocast": {"enabled": True}}, "torch_autocast", "train.precision"),
    ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types", "float32"),
    ({"optimizer": {"type": "Adam"}}, "optimizer", "optim.kind"),
    ({"scheduler": {"type": "WarmupLR"}}, "scheduler", "optim.schedule"),
    ({"train_batch_size": 8}, "train_batch_size", "train.global_batch"),
    ({"train_micro_batch_size_per_gpu": 8}, "train_micro_batch_size_per_gpu", "train.global_batch"),
    ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps", "train.accumulation"),
    ({"gradient_clipping": 1.0}, "gradient_clipping", "optim.clip"),
    ({"communication_data_type": "bf16"}, "communication_data_type", "exact"),
    ({"prescale_gradients": True}, "prescale_gradients", "exact"),
    ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor", "exact"),
    ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op", "exact"),
    ({"sparse_gradients": True}, "sparse_gradients", "exact"),
    ({"checkpoint": {"load_universal": True}}, "checkpoint", "train.checkpoint_every"),
    ({"expert_parallel": {"enabled": True}}, "expert_parallel", "parallel.expert"),
    ({"use_data_before_expert_parallelism": True}, "use_data_before_expert_parallelism", "parallel.expert"),
    ({"curriculum_learning": {"enabled": True}}, "curriculum_learning", "data sections"),
    ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage", "parallel.zero"),
    ({"zero_optimization": {"stage": 1}}, "zero_optimization.stage", "stage 3 is not supported"),
    ({"zero_optimization": True}, "zero_optimization", "parallel.zero"),
    *(
        ({"zero_optimization": {option: value}}, f"zero_optimization.{option}", "Allowed inside: allgather_bucket_size")
        for option, value in {
            "offload_optimizer": {"device": "cpu"},
            "cpu_offload": True,
            "zero_quantized_gradients": True,
            "compute_grad_norm": False,
            "contiguous_gradients": False,
            "reduce_scatter": False,
            "not_an_option": 1,
        }.items()
    ),
    ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation", "Allowed: comms_logger"),
    ({"step_per_print": 5}, "step_per_print", "steps_per_print"),
    ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel", "not supported"),
    ({"zero_allow_untested_optimizer": False}, "zero_allow_untested_optimizer", "optim.kind"),
]


@pytest.mark.parametrize(
    ("options", "name", "instead"), REFUSED, ids=[f"{name}={o[name.split('.')[0]]}" for o, name, _ in REFUSED]
)
def test_an_option_that_breaks_a_contract_fails_at_load(
    tmp_path: Path, options: dict[str, Any], name: str, instead: str
) -> None:
    message = error_of(write_recipe(tmp_path), [f"deepspeed={json.dumps(options)}"])

    assert message.startswith("1 error in ")
    assert f"deepspeed.{name} is not allowed: " in message
    assert instead in message


def test_all_refused_options_come_at_once(tmp_path: Path) -> None:
    options = {"fp16": {}, "steps_per_print": 1, "zero_optimization": {"stage": 2, "offload_optimizer": {}}}

    message = error_of(write_recipe(tmp_path), [f"deepspeed={json.dumps(options)}"])

    assert message.startswith("3 errors in ")
    assert "steps_per_print" not in message

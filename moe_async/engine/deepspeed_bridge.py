"""The bridge to DeepSpeed: the only module that imports it.

What DeepSpeed does and what the bridge does itself:

* ZeRO 1 and 2: DeepSpeed reduces, measures, clips and skips overflows; all of them are exact with sharded experts.
* ZeRO 0: DeepSpeed's clipping norm leaves out what other ranks hold, its reduction refuses float64 and knows no delay,
  and it applies a NaN. The bridge turns them off and does them itself (`moe_async.engine.gradients`, `delay`).
* Expert parameters are marked just before ``deepspeed.initialize``, because marks do not survive copies and casts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moe_async.comm import World
from moe_async.engine.delay import DelayedGradients
from moe_async.engine.gradients import ParameterSplit, StepOutcome, keep_finite, prepare_step
from moe_async.engine.kept_step import KeptStep
from moe_async.engine.muon import hidden_matrices
from moe_async.engine.optimizer import make_optimizer, parameter_groups, prime_state, stateless
from moe_async.errors import EngineError
from moe_async.moe.classes import classify

if TYPE_CHECKING:
    from moe_async.recipe import OptimSection


def _deepspeed() -> Any:
    """DeepSpeed, imported on first use: `import moe_async` stays quick and works where only tools are wanted."""
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.WARNING)
    # The optional shared-memory collectives would be compiled for most of a minute on the first run.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _accelerator() -> Any:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()


def communication_backend() -> str:
    """Name of the back-end for collectives between this machine's accelerators; ``gloo`` on CPUs."""
    accelerator = _accelerator()
    return "gloo" if accelerator.device_name() == "cpu" else str(accelerator.communication_backend_name())


def select_device(local_rank: int) -> torch.device:
    """The device of the rank with this place on the machine, made current."""
    accelerator = _accelerator()
    if accelerator.device_name() == "cpu":
        return torch.device("cpu")
    if local_rank >= accelerator.device_count():
        raise EngineError(
            f"local rank {local_rank} has no accelerator of its own: this machine has {accelerator.device_count()} "
            f"of kind {accelerator.device_name()}. Start at most that many ranks (--num_gpus)."
        )
    accelerator.set_device(local_rank)
    return torch.device(accelerator.device_name(local_rank))


def accelerator_count() -> int:
    """Accelerators on this machine, 0 when it computes on CPUs."""
    accelerator = _accelerator()
    return 0 if accelerator.device_name() == "cpu" else int(accelerator.device_count())


def random_states() -> dict[str, Tensor]:
    """States of the random generators that training draws from, by name."""
    states = {"cpu": torch.get_rng_state()}
    if accelerator_count():
        states["accelerator"] = _accelerator().get_rng_state()
    return states


def set_random_states(states: Mapping[str, Tensor]) -> None:
    """Put back what `random_states` gave; an accelerator's state is ignored on a machine without one."""
    torch.set_rng_state(states["cpu"])
    if accelerator_count() and "accelerator" in states:
        _accelerator().set_rng_state(states["accelerator"])


class DeepSpeedBridge:
    """A model under DeepSpeed, with exact expert gradients, norm and clipping at ZeRO 0, 1 and 2.

    Every rank makes one, after joining the process group; blocks.

    Args:
        model: this rank's model, on its device; parameters float32 (float64 only at ZeRO 0).
        optim: the recipe's ``optim`` section.
        config: the derived DeepSpeed JSON.
        world: this rank's view of the launch.
        delay: steps by which gradients of dense layers and routers are late (ZeRO 0); None: a blocking reduction.
        sends_gradients: a step applies nothing, for the optimizer is at the syncer (ZeRO 0).

    Attributes:
        kept: what a step contributes then; None where it is applied.
    """

    def __init__(
        self,
        model: nn.Module,
        optim: OptimSection,
        config: dict[str, Any],
        world: World,
        delay: int | None = None,
        sends_gradients: bool = False,
    ) -> None:
        self.world = world
        self.clip = optim.clip
        self.stage = int(config["zero_optimization"]["stage"])
        self.classes = classify(model)
        dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
        if self.stage and dtypes != {torch.float32}:
            raise EngineError(
                f"parameters are {sorted(map(str, dtypes))} but ZeRO {self.stage} keeps its own float32 partition; "
                "use --set parallel.zero=0 for float64, and float32 parameters otherwise."
            )
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        replicated = {name: p for name, p in named.items() if self.classes[name] != "expert"}
        self.split = ParameterSplit(
            replicated=list(replicated.values()),
            sharded=[p for name, p in named.items() if self.classes[name] == "expert"],
        )
        self.delayed: DelayedGradients | None = None
        if delay is not None:
            if self.stage:
                raise EngineError(
                    f"a delay of {delay} steps was asked for at ZeRO {self.stage}, which leaves a rank with a piece of "
                    "each reduced gradient; use --set parallel.zero=0, or --set sync.inside=blocking."
                )
            reduce = world.background.start_all_reduce_many
            self.delayed = DelayedGradients(replicated, delay, world.size, reduce)
        self.kept: KeptStep | None = None
        if sends_gradients:
            self.kept = KeptStep(model)
            optim = stateless(optim)
        group_name = expert_group_name(world.topology.expert_parallel)
        muon = hidden_matrices(model, self.classes) if optim.kind == "muon" else {}
        groups = parameter_groups(named, self.classes, optim, group_name, muon)
        self._engine = self._initialise(model, make_optimizer(optim, groups), config)
        self._state_keys = prime_state(self._base_optimizer, optim)
        if self.stage:
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _initialise(self, model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Any:
        deepspeed = _deepspeed()
        deepspeed.init_distributed(dist_backend=communication_backend(), verbose=False)
        size = self.world.topology.expert_parallel
        if self.split.sharded:
            for parameter in self.split.sharded:
                parameter.allreduce = False  # type: ignore[attr-defined]
                parameter.group_name = expert_group_name(size)  # type: ignore[attr-defined]
            model.add_module("deepspeed_marker", _make_marker(self.world))
        try:
            engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        finally:
            # DeepSpeed looks for the marker once; the user's model stays as it was.
            model._modules.pop("deepspeed_marker", None)
        if self.stage == 0:
            engine.enable_backward_allreduce = False
        return engine

    @property
    def module(self) -> nn.Module:
        """The model itself."""
        model: nn.Module = self._engine.module
        return model

    @property
    def accumulation(self) -> int:
        """Micro-batches in a step."""
        return int(self._engine.gradient_accumulation_steps())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self._engine(*args, **kwargs)

    def train(self, mode: bool) -> None:
        """Switch the model between training and evaluation."""
        self._engine.train(mode)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss`` over the accumulation steps. DeepSpeed's reduction averages over ranks."""
        self._engine.backward(loss)

    def step(self) -> StepOutcome | None:
        """End a micro-batch; at the end of the step reduce, clip and update. None inside the step. Blocks there."""
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()
            return None
        if self.stage == 0:
            outcome = prepare_step(self.split, self.world, self.clip, self.delayed)
            if self.kept is not None:
                # DeepSpeed then counts a step in which no parameter has a gradient.
                self.kept.hold()
            self._engine.step()
            return outcome
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        applied = bool(self._engine.was_step_applied())
        left_out = () if applied else tuple(self.split.parts())
        return StepOutcome(float(norm) if norm is not None else math.nan, applied, left_out)

    def spoil(self, objective: Tensor) -> Tensor:
        """An objective whose gradients are not finite, so that no stage applies anything of this step.

        A weight's gradient that is not finite makes every ZeRO stage skip the step; through a loss it would be lost in
        a micro-batch without labels. With a delay dense and expert gradients are dropped apart, so both are spoilt.
        """
        chosen = [part[0] for part in self.split.parts().values() if part]
        for parameter in chosen if self.delayed is not None else chosen[:1]:
            objective = objective + torch.nan * parameter.sum()
        return objective

    def drain(self) -> list[StepOutcome]:
        """Apply the gradients in flight, oldest first, each as a step of dense layers and routers alone. Blocks."""
        outcomes = []
        while self.delayed:
            for parameter in self.split.sharded:
                parameter.grad = None
            self.delayed.take(0)
            outcomes.append(keep_finite(self.split, self.world, self.clip, together=False))
            self._base_optimizer.step()
            self._base_optimizer.zero_grad()
        return outcomes

    def set_learning_rate(self, rate: float) -> None:
        """Set the rate for the next step, in every group times the factor of its class."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"]

    @property
    def _base_optimizer(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self._engine.optimizer.optimizer if self.stage else self._engine.optimizer
        return optimizer

    def optimizer_steps(self) -> dict[str, int]:
        """Updates that the optimizer's own bias correction has counted in each part (`ParameterSplit.parts`).

        They differ with a delay, where a part may have nothing to apply. 0 where the optimizer counts none.
        """
        return {part: max((int(step) for step in steps), default=0) for part, steps in self._counters().items()}

    def optimizer_state(self, parameter: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
        """The full optimizer state of one parameter, key by key, each in the parameter's shape.

        Every rank that holds the parameter calls it at the same time; blocks at ZeRO 1 and 2.
        """
        from deepspeed.utils import safe_get_full_optimizer_state

        for key in self.state_keys(parameter):
            if self.stage:
                yield key, safe_get_full_optimizer_state(parameter, key)
            else:
                yield key, self._base_optimizer.state[parameter][key]

    def write_parameter(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set a parameter and, at ZeRO 1 and 2, its float32 master: one alone is lost or not seen. Does not block."""
        from deepspeed.utils import safe_set_full_fp32_param

        with torch.no_grad():
            parameter.copy_(value)
        if self.stage:
            safe_set_full_fp32_param(parameter, parameter.detach().clone())

    def write_optimizer_state(self, parameter: nn.Parameter, state: Mapping[str, Tensor]) -> None:
        """Set the full optimizer state of one parameter, given in its shape. Does not block."""
        from deepspeed.utils import safe_set_full_optimizer_state

        for key in self.state_keys(parameter):
            if self.stage:
                safe_set_full_optimizer_state(parameter, state[key].to(parameter.device), key)
            else:
                self._base_optimizer.state[parameter][key].copy_(state[key])

    def write_optimizer_steps(self, steps: Mapping[str, int]) -> None:
        """Set what the optimizer's bias correction counts in each part."""
        for part, counters in self._counters().items():
            for counter in counters:
                counter.fill_(steps[part])

    def _counters(self) -> dict[str, list[Tensor]]:
        """The optimizer's counters of updates, by part of the parameters."""
        found: dict[str, list[Tensor]] = {part: [] for part in self.split.parts()}
        for group in self._base_optimizer.param_groups:
            states = [self._base_optimizer.state[parameter] for parameter in group["params"]]
            found["expert" if group.get("moe") else "dense"] += [state["step"] for state in states if "step" in state]
        return found

    def state_keys(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """Names of the optimizer's tensors for a parameter."""
        if self.stage:
            return self._state_keys
        return tuple(key for key in self._state_keys if key in self._base_optimizer.state[parameter])


def expert_group_name(expert_parallel: int) -> str:
    """DeepSpeed's name of the expert groups; it accepts no other for an optimizer group of experts."""
    return f"ep_size_{expert_parallel}"


def _make_marker(world: World) -> nn.Module:
    """A module that tells DeepSpeed to make its expert groups: it looks for instances of its own MoE layer."""
    from deepspeed.moe.layer import MoE
    from deepspeed.utils import groups

    topology = world.topology
    name = expert_group_name(topology.expert_parallel)

    class Marker(MoE):  # type: ignore[misc]
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.num_experts = topology.num_experts
            self.num_local_experts = topology.experts_per_rank
            self.ep_size = topology.expert_parallel
            self.expert_group_name = name

        def set_deepspeed_parallelism(self, *args: Any, **kwargs: Any) -> None:
            if name not in groups._get_expert_parallel_group_dict():
                groups._create_expert_and_data_parallel(topology.expert_parallel)

    return Marker()


def deepspeed_expert_groups(expert_parallel: int) -> tuple[list[int], list[int]]:
    """The global ranks of DeepSpeed's own expert group and expert-data group of this rank."""
    from deepspeed import comm
    from deepspeed.utils import groups

    name = expert_group_name(expert_parallel)
    return (
        list(comm.get_all_ranks_from_group(groups._get_expert_parallel_group(name))),
        list(comm.get_all_ranks_from_group(groups._get_expert_data_parallel_group(name))),
    )

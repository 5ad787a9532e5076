"""Learners of a simulated run: many with the recipe's real model and text in one process, or stand-ins without any."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from moe_async.comm import World
from moe_async.data import Corpus, TrainStream, heldout_batches
from moe_async.engine.balance import BalanceLosses
from moe_async.engine.evaluate import evaluate
from moe_async.engine.local_bridge import LocalBridge
from moe_async.engine.micro_batch import MicroBatch
from moe_async.engine.step import Engine
from moe_async.model import build_model
from moe_async.model.keys import exchanged_tensors, expert_modules
from moe_async.moe import MoELayer
from moe_async.sync.fragments import Fragment, Key, Unit
from moe_async.sync.participant import LearnerStep
from moe_async.sync.syncer import SyncGroup

if TYPE_CHECKING:
    from moe_async.engine.deepspeed_bridge import DeepSpeedBridge
    from moe_async.recipe import Recipe


class SimulatedLearner:
    """A learner of one rank, as a `moe_async.sync.participant.LearnerModel`.

    Steps, losses, learning rates and windows of text are those that the learner would have in a launch.

    Args:
        recipe: of the run.
        corpus: its text.
        fragments: everything that is exchanged.
        learner, learners: which of how many.
        sends_gradients: whether the optimizer is at the syncer.
        clock: steps at which it begins.
    """

    def __init__(
        self,
        recipe: Recipe,
        corpus: Corpus,
        fragments: Sequence[Fragment],
        learner: int,
        learners: int,
        sends_gradients: bool = False,
        clock: int = 0,
    ) -> None:
        model = build_model(recipe)
        for layer in model.modules():
            if isinstance(layer, MoELayer):
                layer.check_finite = False
        self._train, self._learner, self._learners = recipe.train, learner, learners
        self._fragments = {fragment.number: fragment for fragment in fragments}
        self._experts = expert_modules(model)
        self._tensors = exchanged_tensors(model)
        local = LocalBridge(model, recipe, sends_gradients)
        self._kept = local.kept
        self._contribution: dict[str, Tensor] = {}
        # The engine asks of its bridge no more than this one has.
        bridge = cast("DeepSpeedBridge", local)
        balance = BalanceLosses(recipe.moe, torch.device("cpu"))
        self._engine = Engine(bridge, recipe.optim, balance, recipe.train.steps)
        self._engine.global_step = clock
        self._stream = TrainStream(corpus, recipe.data.seq_len, recipe.data.seed)
        self._stream.skip(clock * recipe.train.global_batch * learners)

    def step(self, number: int, position: float) -> LearnerStep:
        """Make a step, or compute the gradient of one."""
        engine = self._engine
        engine.ahead = position - engine.global_step
        batches = self._stream.next_step(
            self._train.global_batch * self._learners, self._learner, self._learners, self._train.accumulation
        )
        with torch.random.fork_rng(devices=[]):
            # Many learners share this process's random state; none may depend on when the others compute.
            torch.manual_seed(random.Random(f"{self._train.seed}/{self._learner}/{number}").getrandbits(63))
            report = engine.train_step([MicroBatch(batch.tokens, batch.labels) for batch in batches])
        if self._kept is not None:
            self._contribution = self._kept.release()
        tokens = {
            f"{prefix}.{expert}": count
            for prefix, counts in zip(self._experts, report.counts_LE.tolist(), strict=True)
            for expert, count in enumerate(counts)
        }
        return LearnerStep(report.label_tokens, tokens, report.lm_loss)

    def read(self, fragment: int) -> Tensor:
        """The local value [X] of a fragment, a copy."""
        return self._fragments[fragment].flatten(self._tensors)

    def write(self, fragment: int, value_X: Tensor) -> None:
        """Set the local value of a fragment."""
        write_values(self._tensors, self._fragments[fragment], value_X)

    def gradient(self, fragment: int) -> Tensor:
        """What the last step contributes [X], see `moe_async.engine.kept_step`."""
        return self._fragments[fragment].flatten(self._contribution)


@torch.no_grad()
def write_values(tensors: Mapping[str, Tensor], fragment: Fragment, value_X: Tensor) -> None:
    """Copy a fragment's value into the tensors of its keys."""
    for name, part in fragment.split(value_X).items():
        tensors[name].copy_(part.view_as(tensors[name]))


class SharedModel:
    """A model for looking at the shared values of a run.

    Args:
        recipe: of the run.
        corpus: its text.
        fragments: everything that is exchanged.
    """

    def __init__(self, recipe: Recipe, corpus: Corpus, fragments: Sequence[Fragment]) -> None:
        self._model = build_model(recipe).eval()
        self._tensors = exchanged_tensors(self._model)
        self._fragments = {fragment.number: fragment for fragment in fragments}
        self._corpus = corpus
        self._heldout = heldout_batches(corpus, recipe.data.seq_len, rank=0, world_size=1, batch_size=64)

    def bits_per_byte(self, values: Mapping[int, Tensor]) -> float:
        """Held-out loss under the values [X] of all fragments."""
        for number, value_X in values.items():
            write_values(self._tensors, self._fragments[number], value_X)
        return evaluate(self._model, self._heldout, self._corpus, World()).bits_per_byte


class StubLearner:
    """Stands in for a learner where only times and bytes matter: one number for each fragment, which never changes.

    Args:
        fragments: their numbers.
        tokens: label tokens of a step.
    """

    def __init__(self, fragments: Sequence[int], tokens: int) -> None:
        self._values = {number: torch.zeros(1) for number in fragments}
        self._tokens = tokens

    def step(self, number: int, position: float) -> LearnerStep:
        """Pretend to make a step."""
        return LearnerStep(self._tokens, {}, 0.0)

    def read(self, fragment: int) -> Tensor:
        """A number [1] in place of a fragment."""
        return self._values[fragment]

    def write(self, fragment: int, value_X: Tensor) -> None:
        """Set it."""
        self._values[fragment] = value_X

    def gradient(self, fragment: int) -> Tensor:
        """Zero."""
        return torch.zeros(1)


def stub_groups(groups: Sequence[SyncGroup], element_size: int) -> tuple[list[SyncGroup], dict[int, list[int]]]:
    """The groups with one number in place of each fragment, and the bytes that this stands for on a link."""
    stubs, sizes = [], {}
    for group in groups:
        fragments = []
        for fragment in group.fragments:
            fragments.append(Fragment(fragment.number, (Unit("", (Key(f"stub {fragment.number}", 1),)),)))
            sizes[fragment.number] = [fragment.elements * element_size]
        stubs.append(SyncGroup(group.name, group.plan, tuple(fragments)))
    return stubs, sizes

"""The learner's side of a policy: when to send, when to wait, what to take. A state machine without tensors or I/O.

Between two steps the learner's driver does, in this order: take what may be taken, wait while `must_wait`, send what
`due_updates` gives, wait again while `must_wait`. Every rank of a learner follows the decisions of one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moe_async.sync.messages import Publication, UpdateHeader, UpdateId
from moe_async.sync.settings import PolicyPlan, PolicySettings


@dataclass
class Position:
    """Where a learner believes the run to be, in steps that the learners have made on average.

    Since the last news the others are taken to have been as fast, relative to this one, as in the whole run before it.

    Attributes:
        progress: of the last news.
        heard_at: the learner's own steps in it.
    """

    progress: float
    heard_at: int

    def at(self, clock: int) -> float:
        """The position when this learner has made ``clock`` steps."""
        pace = self.progress / self.heard_at if self.heard_at and self.progress else 1.0
        return self.progress + pace * (clock - self.heard_at)

    def hear(self, progress: float, seen: int) -> None:
        """Take in news, unless they are older than what is known."""
        if progress >= self.progress:
            self.progress, self.heard_at = progress, seen


@dataclass
class _FragmentState:
    """One fragment, as far as its learner knows."""

    units: int
    version: int = 0
    sequence: int = 0
    local_steps: int = 0
    tokens: list[int] | None = None
    loss: float = 0.0


class LearnerPolicy:
    """Decides for one learner on the fragments of one group of parameters.

    Args:
        plan: the policy, or two in turn; the syncer has the same.
        units: number of units of each fragment, by fragment number in the order of their turns.
        learner, incarnation: who this is.
        clock: steps at which it begins.
        position: where it believes the run to be, shared by all policies of a learner; None: one of its own.
    """

    def __init__(
        self,
        plan: PolicyPlan,
        units: Mapping[int, int],
        learner: int,
        incarnation: int = 0,
        clock: int = 0,
        position: Position | None = None,
    ) -> None:
        self.plan = plan
        self.learner = learner
        self.incarnation = incarnation
        self.clock = clock
        self.phase = 0
        self._position = position or Position(float(clock), clock)
        self._fragments = {fragment: _FragmentState(count) for fragment, count in units.items()}
        self._in_flight: dict[int, list[tuple[int, int]]] = {fragment: [] for fragment in units}
        self._released = clock
        self._inbox: list[Publication] = []
        self.final = False

    @property
    def settings(self) -> PolicySettings:
        """The policy that holds now."""
        return self.plan.phases[self.phase]

    def position(self) -> float:
        """Steps that the learners of the run have made on average, by what this one knows; see `Position`."""
        return self._position.at(self.clock)

    def step_done(self, tokens: Mapping[int, Sequence[int]], loss: float) -> None:
        """A step is over.

        Args:
            tokens: that each unit of each fragment saw.
            loss: its mean language-model loss.
        """
        self.clock += 1
        for fragment, state in self._fragments.items():
            before = state.tokens or [0] * state.units
            state.tokens = [a + b for a, b in zip(before, tokens[fragment], strict=True)]
            state.loss += loss
            state.local_steps += 1

    def drained(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """The weights have changed after the last step, by gradients that a delay held back.

        Args:
            tokens: of the last step, of each unit that changed; 0 for the others.
        """
        for fragment, state in self._fragments.items():
            if not state.local_steps and any(tokens[fragment]):
                state.tokens, state.local_steps = list(tokens[fragment]), 1

    def due_updates(self) -> list[UpdateHeader]:
        """Updates that are to be sent after the step that was just made, counted as sent from now on."""
        return [self._send(fragment) for fragment in self._due()]

    def owes(self) -> bool:
        """Whether `due_updates` has something to give."""
        return bool(self._due())

    def _due(self) -> list[int]:
        return [fragment for place, fragment in enumerate(self._fragments) if self.settings.due(place, self.clock)]

    def last_updates(self) -> list[UpdateHeader]:
        """What is left to be sent when no further step follows, as final updates."""
        self.final = True
        return [self._send(fragment) for fragment, state in self._fragments.items() if state.local_steps]

    def _send(self, fragment: int) -> UpdateHeader:
        state = self._fragments[fragment]
        header = UpdateHeader(
            UpdateId(self.learner, self.incarnation, state.sequence, fragment),
            base_version=state.version,
            clock=self.clock,
            local_steps=state.local_steps,
            tokens=tuple(state.tokens or [0] * state.units),
            loss=state.loss / max(state.local_steps, 1),
            final=self.final,
        )
        self._in_flight[fragment].append((state.sequence, self.clock))
        state.sequence += 1
        state.local_steps, state.tokens, state.loss = 0, None, 0.0
        return header

    def receive(self, publication: Publication) -> None:
        """A publication has come; it is taken between two steps."""
        self._inbox.append(publication)

    def takes(self, adopt: bool = False) -> list[Publication]:
        """Publications to be taken now, in this order; they count as taken from now on.

        With ``adopt`` also those whose version this learner has: a newcomer has not taken any.
        """
        ready = [entry for entry in self._inbox if self._may_take(entry)]
        self._inbox = [entry for entry in self._inbox if entry not in ready]
        taken = []
        for entry in ready:
            state = self._fragments[entry.fragment]
            if entry.incarnation != self.incarnation or entry.version < state.version:
                continue
            flights = self._in_flight[entry.fragment]
            repeated = entry.version == state.version and not any(flight[0] <= entry.settled for flight in flights)
            state.version = entry.version
            self.phase = max(self.phase, entry.phase)
            self._in_flight[entry.fragment] = [flight for flight in flights if flight[0] > entry.settled]
            self._released = max(self._released, entry.seen)
            # A value that comes again, as after a lost connection, would undo what was learnt since it was taken. It
            # tells of others' steps since then, but not of this learner's: its place in the run, and with it the
            # learning rate, would depend on when the connection came back.
            if adopt or not repeated or self.settings.contribution == "grad":
                self._position.hear(entry.progress, entry.seen)
                taken.append(entry)
        return taken

    def _may_take(self, entry: Publication) -> bool:
        overlap = self.settings.overlap
        if overlap is None:
            return True
        # The result of an update is taken a fixed number of steps after it was sent, however early it came.
        settles = [sent for sequence, sent in self._in_flight[entry.fragment] if sequence <= entry.settled]
        return not settles or self.clock >= max(settles) + overlap

    def must_wait(self) -> bool:
        """Whether the next step has to wait for a publication."""
        settings = self.settings
        if settings.clock_bound is not None:
            return any(flight[1] > self._released for flights in self._in_flight.values() for flight in flights)
        for flights in self._in_flight.values():
            if settings.overlap is not None and any(self.clock >= sent + settings.overlap for _, sent in flights):
                return True
            if settings.ahead is not None and len(flights) > settings.ahead:
                return True
        return False

    def flights(self, fragment: int) -> list[tuple[int, int]]:
        """Updates of a fragment that are neither merged nor discarded: sequence number, and steps when it was sent."""
        return list(self._in_flight[fragment])

    def inbox(self) -> list[Publication]:
        """Publications that have come and are not taken yet."""
        return list(self._inbox)

    def state_dict(self) -> dict[str, Any]:
        """Everything the next decisions depend on, as JSON values."""
        return {
            "incarnation": self.incarnation,
            "clock": self.clock,
            "phase": self.phase,
            "position": asdict(self._position),
            "released": self._released,
            "final": self.final,
            "fragments": {str(fragment): asdict(state) for fragment, state in self._fragments.items()},
            "in_flight": {
                str(fragment): [list(entry) for entry in flights] for fragment, flights in self._in_flight.items()
            },
            "inbox": [asdict(entry) for entry in self._inbox],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` gave."""
        self.incarnation, self.clock, self.phase = state["incarnation"], state["clock"], state["phase"]
        self._position.progress, self._position.heard_at = state["position"].values()
        self._released, self.final = state["released"], state["final"]
        self._fragments = {int(fragment): _FragmentState(**entry) for fragment, entry in state["fragments"].items()}
        self._in_flight = {
            int(fragment): [(sequence, clock) for sequence, clock in flights]
            for fragment, flights in state["in_flight"].items()
        }
        self._inbox = [Publication(**entry) for entry in state["inbox"]]

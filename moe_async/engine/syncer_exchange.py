"""The learner's side of the exchange with the syncer, between two steps.

Every rank has a `SyncerExchange` and a link of its own, over which it moves its part of each fragment. The policies are
state machines, so every rank runs a copy of them; all that the ranks have to agree on is how many messages of the
syncer have come to all of them, and that is agreed at each boundary. So decisions are the same on all ranks, dense
weights stay equal, and no rank waits for the syncer while another is in an all-to-all.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_async.comm.session import Header
from moe_async.engine.learner_exchange import LearnerExchange, LearnerParts
from moe_async.engine.seat import given_seat, rank_hello
from moe_async.errors import CommunicationError, PlaceTakenError, SyncError
from moe_async.sync.messages import Publication

_READY: Header = {"kind": "ready"}
_SLICE_SECONDS = 0.2
"""How long a rank waits for its own link before it asks the others how they are."""

_RETRY_SECONDS = 1.0
_GIVE_UP_TIMEOUTS = 10
"""A learner that cannot go on without the syncer waits for it for so many of its time limits."""


class SyncerExchange(LearnerExchange):
    """The form in which the syncer merges what learners send it.

    Args:
        parts: what it works with.
        hello: what rank 0 says when it has to come back.

    Attributes:
        closing: the syncer's last message; empty before it.
    """

    via: ClassVar[str] = "syncer"

    def __init__(self, parts: LearnerParts, hello: Header) -> None:
        super().__init__(parts)
        self.closing: Header = {}
        self._hello = hello
        self._delivered = 0
        self._newcomer = True
        self._welcome_clock: int | None = None
        self._first: list[tuple[Publication, Tensor]] = []
        self._offline_since: float | None = None
        self._back = threading.Event()
        self._given = parts.seat
        self._finishing: Header | None = None
        self._common = 0
        self._stopping = False

    @property
    def over(self) -> bool:
        """Whether the syncer has closed the run for this learner."""
        return bool(self.closing)

    @property
    def reports(self) -> bool:
        """Whether the syncer has chosen this learner to evaluate what came out."""
        return bool(self.closing.get("reporter", 0) == self.seat.learner)

    def start(self) -> bool:
        """Wait for the shared values, and take them. Blocks. False when told to stop meanwhile.

        Raises:
            SyncError: the syncer went away.
        """
        if self._world.rank == 0:
            self.link.send(_READY)
        self.link.post_again()
        if self._participant is not None:
            # A learner that was saved goes on within the boundary at which it stopped.
            return self._boundary()
        if not self._arrive():
            return False
        self._began = time.monotonic()
        return True

    def _arrive(self) -> bool:
        """Wait for the shared values, and begin a life with them. False when told to stop meanwhile."""
        wanted = {fragment.number for group in self.groups for fragment in group.fragments}
        while self._welcome_clock is None or {entry[0].fragment for entry in self._first} != wanted:
            self._check_patience()
            if not self._wait():
                return False
        self._begin(self._welcome_clock)
        self._newcomer = self.to_send = False
        for publication, value_Y in self._first:
            self.participant.receive(publication, value_Y)
        self._first.clear()
        self._take(adopt=True)
        return True

    def _boundary(self) -> bool:
        """Take, send and wait between two steps. False when told to stop."""
        began = time.monotonic()
        self._agree()
        goes_on = self._until_free()
        if goes_on and self.to_send:
            self._send(last=False)
            self.to_send = False
            goes_on = self._until_free()
        self.figures.waited += time.monotonic() - began
        return goes_on

    def finish(self) -> bool:
        """Send what is left, wait until all learners have, and take what came out. Blocks. False when told to stop.

        Raises:
            SyncError: the syncer is gone for good.
        """
        self._send(last=True)
        self.to_send = False
        self._finishing = {"kind": "finish"}
        if self._offline_since is None:
            # On a new connection it goes out behind what is sent again.
            self.link.send(self._finishing)
        while not self.closing or self._newcomer:
            # One that was counted out meanwhile has nothing more to send, but gets what came out.
            if self._newcomer and not self._arrive():
                return False
            self._check_patience()
            if not self._wait() and not self.closing:
                return False
        self._take(adopt=True)
        return True

    def pause(self) -> None:
        """Leave in order to come back: nobody shall count this learner out for the moment. Every rank calls it."""
        self.link.send({"kind": "pause"})
        self.link.leave()

    def tensors(self) -> dict[str, Tensor]:
        """This rank's views of the fragments, and its updates that are not acknowledged."""
        if not self.joined:
            return {}
        updates = self.link.outbox()
        headers = json.dumps([header for header, _ in updates]).encode()
        under_way = {f"update/{place}": payload for place, (_, payload) in enumerate(updates)}
        return super().tensors() | under_way | {"outbox": torch.frombuffer(bytearray(headers), dtype=torch.uint8)}

    def continues(self, state: Mapping[str, Any]) -> bool:
        """Whether the syncer takes this learner for the one that was saved, see `moe_async.engine.join.join_run`."""
        return bool(state["incarnation"] == self.seat.incarnation)

    def restore(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Put back what `state_dict` and `tensors` gave; the newest values come when they are merged."""
        super().restore(state, tensors)
        headers = json.loads(tensors["outbox"].numpy().tobytes())
        self._newcomer = False
        self.link.load_outbox([(header, tensors[f"update/{place}"]) for place, header in enumerate(headers)])

    def _traffic(self) -> Sequence[int]:
        return self.link.bytes

    def _merged(self) -> tuple[Mapping[str, Any], int]:
        learner = str(self.seat.learner)
        return self.closing.get("staleness", {}).get(learner, {}), self.closing.get("discarded", {}).get(learner, 0)

    # Sending and taking.

    def _send(self, last: bool) -> None:
        for header, contribution_Y in self.participant.contribute(last):
            sizes = self.model.part_sizes()[header.id.fragment]
            parts = zip(contribution_Y.split(sizes), header.tokens, strict=True)
            live = torch.cat([part for part, count in parts if count] or [contribution_Y[:0]])
            message = {"kind": "update", "header": asdict(header)}
            self.link.post(header.id.fragment, header.id.sequence, message, live)
            self.figures.rounds += 1
            if self._log is not None:
                self._log.send(header, time.monotonic() - self._began)

    def _until_free(self) -> bool:
        """Take what may be taken until no policy makes this learner wait."""
        while True:
            if self._newcomer and not self._arrive():
                return False
            self._take()
            if not self.participant.sync.must_wait():
                return True
            self._check_patience()
            if not self._wait():
                return False

    def _new_publications(self) -> list[tuple[Publication, Tensor]]:
        """Messages that have come to all ranks, in their order."""
        found = []
        for header, payload in self.link.next(self._common - self._delivered):
            if header["kind"] == "welcome":
                self._welcome_clock = header["clock"]
            elif header["kind"] == "final":
                self.closing = header
            else:
                fields = {key: value for key, value in header.items() if key != "kind"}
                found.append((Publication(**fields), payload))
        self._delivered = self._common
        return found

    # Agreeing with the other ranks.

    def _wait(self) -> bool:
        """Wait a little for messages. False when the run shall stop."""
        if self._offline_since is None:
            self.link.wait(self._delivered, _SLICE_SECONDS)
        else:
            # A link that is lost ends any waiting for news at once.
            time.sleep(_SLICE_SECONDS)
        self._agree()
        return not self._stopping

    def _agree(self) -> None:
        """Find out how many messages have come to all ranks, take them in, and bring lost links back."""
        back = self._world.rank != 0 or self._back.is_set()
        mine = [-self.link.received, self.link.lost, bool(self._stop.reason), not back, bool(self.link.refusal)]
        state = torch.tensor(mine, dtype=torch.int64, device=self._world.device)
        least, lost, stop, not_back, refused = self._world.everyone.all_reduce(state, op="max").tolist()
        self._common = -least
        self._stopping = bool(stop)
        for publication, value_Y in self._new_publications():
            if self._newcomer:
                self._first.append((publication, value_Y))
            else:
                self.participant.receive(publication, value_Y)
        if refused:
            raise SyncError(f"the syncer put this learner out: {self.link.refusal or 'rank 0 says why'}")
        if self.closing:
            return
        if lost and self._offline_since is None:
            self._go_offline()
        elif self._offline_since is not None and not not_back:
            self._reconnect()

    def _go_offline(self) -> None:
        """Some rank has lost its link: all give theirs up, and the first one knocks in the background."""
        self._offline_since = self._offline_since or time.monotonic()
        self.link.disconnect()
        self._delivered = self._common = 0
        self._back.clear()
        if self._world.rank == 0:
            threading.Thread(target=self._come_back, name="come-back", daemon=True).start()

    def _come_back(self) -> None:
        """On rank 0, in a thread: knock until the syncer gives the seat back, or says that it will not."""
        own = {"learner": self.seat.learner, "incarnation": self.seat.incarnation}
        while not self.link.refusal:
            try:
                self.link.connect({**self._hello, **own, "clock": None if self._newcomer else self.clock})
                self._given = given_seat(self.link.reply())
                self._back.set()
                return
            except (CommunicationError, PlaceTakenError):
                time.sleep(_RETRY_SECONDS)
            except SyncError:
                return

    def _reconnect(self) -> None:
        """Rank 0 has the seat back: the others connect, and all send again what was not acknowledged."""
        given = self._world.everyone.broadcast_object(self._given)
        if given.incarnation != self.seat.incarnation:
            self._begin_anew()
        self.seat = given
        problem = ""
        if self._world.rank:
            try:
                self.link.connect(rank_hello(self.seat, self._world))
            except CommunicationError as error:
                problem = str(error)
        if any(self._world.everyone.gather_objects(problem)):
            self._go_offline()
            return
        self._offline_since = None
        if self._world.rank == 0:
            self.link.send(_READY)
        self.link.post_again()
        if self._finishing is not None:
            self.link.send(self._finishing)

    def _begin_anew(self) -> None:
        """This learner gets another life: the others have gone on without it, or it had not joined yet.

        What it had not sent is lost. Until the newest values are there it stays what it was, also in a checkpoint.
        """
        self._newcomer, self._welcome_clock = True, None
        self._first.clear()
        self.link.forget()

    def _check_patience(self) -> None:
        """Do not wait for ever for a syncer without which this learner cannot go on."""
        limit = _GIVE_UP_TIMEOUTS * self.link.timeout
        if self._offline_since is not None and time.monotonic() - self._offline_since > limit:
            raise SyncError(
                f"the syncer at {self.link.host}:{self.link.port} has been gone for more than {limit:.0f} s. Start it "
                "again with the same --listen and --folder, and this learner with --resume; sync.timeout says how long "
                "a learner waits."
            )

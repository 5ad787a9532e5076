"""What a checkpoint keeps of a learner's exchange: its policies, its views, and what was not sent or acknowledged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from moe_async.engine.exchange import Exchange
from moe_async.sync.figures import LearnerFigures
from moe_async.sync.participant import Participant
from moe_async.sync.syncer import LearnerSync

_PARTICIPANT, _CONTRIBUTION = "participant/", "contribution/"


def exchange_state(exchange: Exchange) -> dict[str, Any]:
    """As JSON values, the same on every rank; empty for a learner that has not joined yet."""
    if not exchange.joined:
        return {}
    return {
        "learner": exchange.seat.learner,
        "incarnation": exchange.seat.incarnation,
        "clock": exchange.clock,
        "to_send": exchange.to_send,
        "sync": exchange.participant.sync.state_dict(),
        "figures": asdict(exchange.figures),
        "ages": exchange.ages.state_dict(),
    }


def exchange_tensors(exchange: Exchange) -> dict[str, Tensor]:
    """This rank's views of the fragments, its updates that are not acknowledged, and a gradient that was not sent."""
    if not exchange.joined:
        return {}
    found = {f"{_PARTICIPANT}{name}": tensor for name, tensor in exchange.participant.tensors().items()}
    if exchange.to_send:
        found |= {f"{_CONTRIBUTION}{name}": tensor for name, tensor in exchange.model.contribution().items()}
    updates = exchange.link.outbox()
    headers = json.dumps([header for header, _ in updates]).encode()
    found["outbox"] = torch.frombuffer(bytearray(headers), dtype=torch.uint8)
    return found | {f"update/{place}": payload for place, (_, payload) in enumerate(updates)}


def restore_exchange(exchange: Exchange, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Put back what `exchange_state` and `exchange_tensors` gave, after the model has its weights."""
    sync = LearnerSync(exchange.groups, exchange.seat.learner, exchange.seat.incarnation, state["clock"])
    participant = Participant(sync, exchange.model, exchange.model.part_sizes())
    sync.load_state_dict(state["sync"])
    own = {name.removeprefix(_PARTICIPANT): tensors[name] for name in tensors if name.startswith(_PARTICIPANT)}
    participant.load_tensors(own)
    unsent = {name.removeprefix(_CONTRIBUTION): tensors[name] for name in tensors if name.startswith(_CONTRIBUTION)}
    exchange.model.load_contribution(unsent)
    headers = json.loads(tensors["outbox"].numpy().tobytes())
    exchange.link.load_outbox([(header, tensors[f"update/{place}"]) for place, header in enumerate(headers)])
    exchange.figures = LearnerFigures(**state["figures"])
    exchange.ages.load_state_dict(state["ages"])
    exchange.to_send = state["to_send"]
    exchange.resume(participant)

"""How the profile of a checkpoint is written: a table for people, a document for scripts.

Shape letters: C domains, E choices of the router.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from moe_async.data import Tokenizer
from moe_async.engine.profile import CheckpointProfile
from moe_async.observe.profile import LayerProfile, Profile
from moe_async.observe.specialise import Preference
from moe_async.tables import aligned

_HEAD = ("layer", "information", "by chance", "strongest pair", "same experts", "by chance")
EXPLAINED = (
    "information: mutual information between the expert and the domain of an assignment, in bits; by chance: the same "
    "with labels shuffled over sequences, and its standard deviation. strongest pair: experts that serve tokens "
    "together, how many times as often as by chance, and how many tokens. same experts: share of a token's experts "
    "that both checkpoints chose; by chance: if each chose by its loads alone."
)


def profile_document(found: CheckpointProfile) -> dict[str, Any]:
    """Everything, as JSON-able values: the summary's entries as `expert_load summary --json` gives them."""
    profile = found.profile
    layers = []
    for layer in profile.layers:
        document = asdict(layer)
        document["preferred"] = [
            [asdict(one) | {"text": token_text(found.tokenizer, one.token)} for one in expert]
            for expert in layer.preferred
        ]
        layers.append(document)
    return {
        "checkpoint": str(found.checkpoint),
        "step": found.step,
        "against": None if found.against is None else str(found.against),
        "tokens": found.tokens,
        "summary": asdict(profile.summary),
        "verdicts": list(map(asdict, profile.verdicts)),
        "domains": list(profile.domains),
        "loads": list(map(list, profile.loads)),
        "specialisation": layers,
    }


def profile_lines(found: CheckpointProfile, layer: str | None = None) -> list[str]:
    """A table of all layers, and of the experts of one of them."""
    profile = found.profile
    text = ", ".join(f"{name} {number}" for name, number in found.tokens.items())
    lines = [f"{found.checkpoint}, step {found.step}; tokens: {text}"]
    if found.against is not None:
        lines.append(f"against {found.against}")
    lines += ["", *aligned([_HEAD, *map(_row, profile.layers)])]
    if layer is not None:
        lines += ["", *_experts(found, next(one for one in profile.layers if one.layer == layer))]
    else:
        lines += ["", f'--layer "{profile.layers[0].layer}" shows its experts.']
    return lines


def _row(layer: LayerProfile) -> tuple[str, ...]:
    information, stability = layer.information, layer.stability
    return (
        layer.layer,
        f"{information.bits:.4f}" if information else "-",
        f"{information.baseline:.4f} ± {information.spread:.4f}" if information else "-",
        _strongest_pair(layer),
        f"{stability.agreement:.1%}" if stability else "-",
        f"{stability.chance:.1%}" if stability else "-",
    )


def _strongest_pair(layer: LayerProfile) -> str:
    if not layer.strongest:
        return "-"
    pair = layer.strongest[0]
    return f"{pair.first} and {pair.second}, x{pair.lift:.2f} ({pair.count})"


def _experts(found: CheckpointProfile, layer: LayerProfile) -> list[str]:
    profile = found.profile
    loads = _loads(profile, layer)
    experts = next(one.experts for one in profile.summary.layers if one.layer == layer.layer)
    rows: list[tuple[str, ...]] = [("expert", "load", *profile.domains)]
    for expert, load in enumerate(loads):
        # Behind the experts stand those that give a token back as it is.
        name = str(expert) if expert < experts else f"zero {expert - experts}"
        rows.append((name, f"{load:.2f}", *(f"{shares[expert]:.1%}" for shares in layer.domain_shares)))
    table = aligned(rows)
    tokens = ["  preferred tokens", *(_tokens(found.tokenizer, expert) for expert in layer.preferred)]
    return [
        f"{layer.layer}: load over the fair share; of each domain, the share that the expert gets",
        *(line + text for line, text in zip(table, tokens, strict=True)),
    ]


def _loads(profile: Profile, layer: LayerProfile) -> list[float]:
    place = [one.layer for one in profile.layers].index(layer.layer)
    return list(profile.loads[place])


def _tokens(tokenizer: Tokenizer, preferred: tuple[Preference, ...]) -> str:
    return "  " + " ".join(f"{token_text(tokenizer, one.token)}x{one.lift:.1f}" for one in preferred)


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token as it can be shown in a line: its text in quotes, or its id where it has none."""
    if token < 0 or token >= tokenizer.vocab_size:
        return f"#{token}"
    if token == tokenizer.end_of_document:
        return "<end>"
    text = tokenizer.decode([token])
    return f"#{token}" if not text or "\ufffd" in text else repr(text)

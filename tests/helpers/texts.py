"""Small seeded texts and recipes over them, so that no test depends on the text of an installation."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import yaml

WORDS = {
    "plants": "root leaf stem seed flower soil water sun grows under over slowly green and the a",
    "code": "def return for in range if else x y z = + ( ) : print value",
}


def write_texts(folder: Path, documents: int = 60) -> Path:
    """Two domains of small documents: ``folder/plants/*.txt`` and ``folder/code/*.txt``."""
    for domain, words in WORDS.items():
        (folder / domain).mkdir(parents=True)
        chance = random.Random(domain)
        for number in range(documents):
            text = " ".join(chance.choice(words.split()) for _ in range(60)) + "\n"
            (folder / domain / f"{number:03}.txt").write_text(text)
    return folder


def tiny_document(texts: Path, runs: Path, **changes: Any) -> dict[str, Any]:
    """A recipe that trains in seconds; ``section__entry=value`` replaces an entry."""
    document: dict[str, Any] = {
        "name": "tiny",
        "model": {"dim": 16, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_dim": 32},
        "moe": {
            "layers": "all", "num_experts": 4, "top_k": 2, "expert_dim": 16,
            "balance": [{"loss": "switch", "coefficient": 0.01}, {"loss": "z", "coefficient": 0.001}],
        },
        "parallel": {"expert": 2, "zero": 1},
        "optim": {"kind": "adamw", "lr": 0.01, "schedule": {"kind": "cosine", "warmup": 2}},
        "data": {
            "source": [{"path": str(texts / "plants")}, {"path": str(texts / "code"), "weight": 2.0}],
            "seq_len": 16, "heldout": 0.2, "heldout_bytes": 1500,
        },
        "train": {"steps": 8, "global_batch": 8, "accumulation": 2, "precision": "selective"},
        "log": {"dir": str(runs), "every": 2, "sample_tokens": 5, "prompts": ["the ", "def"]},
    }  # fmt: skip
    for key, value in changes.items():
        section, entry = key.split("__")
        document[section][entry] = value
    return document


def write_recipe(path: Path, document: dict[str, Any]) -> Path:
    """The recipe as a file."""
    path.write_text(yaml.safe_dump(document))
    return path

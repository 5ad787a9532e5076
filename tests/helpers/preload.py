"""What the processes of a distributed test begin with: the server that they are forked from imports it once."""

from __future__ import annotations

import importlib
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
# A pool of threads does not survive a fork.
importlib.import_module("torch").set_num_threads(1)
for name in (
    "torch._dynamo",
    "deepspeed.moe.layer",
    "moe_async.engine.join",
    "moe_async.engine.start",
    "moe_async.model",
):
    importlib.import_module(name)

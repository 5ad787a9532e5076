"""What is recorded of experts, and the analyses over it. Works in people's own loops too."""

from moe_async.observe.figures import LayerFigures, LoadSummary, summarise
from moe_async.observe.load import LoadWindow
from moe_async.observe.store import LoadMeta, LoadRecord, LoadStore, read_load
from moe_async.observe.tally import StepFigures, StepTally
from moe_async.observe.traces import read_traces
from moe_async.observe.verdicts import Verdict, verdicts
from moe_async.observe.watch import LoadWatch, record_load

__all__ = [
    "LayerFigures",
    "LoadMeta",
    "LoadRecord",
    "LoadStore",
    "LoadSummary",
    "LoadWatch",
    "LoadWindow",
    "StepFigures",
    "StepTally",
    "Verdict",
    "read_load",
    "read_traces",
    "record_load",
    "summarise",
    "verdicts",
]

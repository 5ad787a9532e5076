"""What is recorded of experts, and the analyses over it. Works in people's own loops too."""

from moe_async.observe.load import LoadWindow
from moe_async.observe.store import LoadMeta, LoadRecord, LoadStore, read_load
from moe_async.observe.tally import StepFigures, StepTally

__all__ = ["LoadMeta", "LoadRecord", "LoadStore", "LoadWindow", "StepFigures", "StepTally", "read_load"]

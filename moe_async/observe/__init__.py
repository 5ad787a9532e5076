"""What is recorded of experts, and the analyses over it. Works in people's own loops too."""

from moe_async.observe.load import LoadRecorder, LoadWindow

__all__ = ["LoadRecorder", "LoadWindow"]

"""Named exceptions. Each message says what was given, what is allowed and what to do."""

from __future__ import annotations


class MoeAsyncError(Exception):
    """Base of every error that this package raises on purpose."""


class RecipeError(MoeAsyncError, ValueError):
    """A recipe, an override or a combination of recipe entries is not valid."""


class TopologyError(MoeAsyncError, ValueError):
    """Ranks, experts and group sizes do not fit together."""


class DataError(MoeAsyncError, ValueError):
    """A text source cannot be read, or yields too little text."""


class CommunicationError(MoeAsyncError, RuntimeError):
    """A process group cannot be joined, or ranks disagree about what they exchange."""


class CheckpointError(MoeAsyncError, RuntimeError):
    """A checkpoint cannot be written, is incomplete, or does not fit the model."""


class EngineError(MoeAsyncError, RuntimeError):
    """The engine is used in a way that its contracts do not allow."""


class SyncError(MoeAsyncError, RuntimeError):
    """Learners and the syncer do not fit together, or their exchange cannot go on."""


class PlaceTakenError(SyncError):
    """A learner's place in a run is taken, for now."""


class LoadError(MoeAsyncError, RuntimeError):
    """A record of expert loads cannot be read or written, or a model's routers cannot be watched."""

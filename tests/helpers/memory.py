"""Bytes of tensors, measured: what a graph keeps, and what lives at the worst moment."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages of all tensors that operations make, in this thread, from their making to their end.

    Attributes:
        live: bytes now.
        peak: the most so far; may be set back to ``live``.
    """

    def __init__(self, apart: Iterable[Tensor] = ()) -> None:
        """``apart``: tensors whose storages do not count."""
        super().__init__()
        self.live = self.peak = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in apart}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at what came out."""
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self.live -= size
        self._seen.discard(key)


class KeptBytes:
    """A context in which what operations save for the backward pass is counted, each storage once.

    Attributes:
        bytes: so far.
    """

    def __init__(self, apart: Iterable[Tensor] = ()) -> None:
        """``apart``: tensors whose storages do not count, such as parameters."""
        self._apart = {tensor.untyped_storage().data_ptr() for tensor in apart}
        self._seen: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    @property
    def bytes(self) -> int:
        return sum(self._seen.values())

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._apart:
            self._seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    def __enter__(self) -> KeptBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

"""The most memory that tensors held at once while something ran, counted exactly, on any device.

Every operator's result is a storage; `PeakMemory` adds a storage's bytes when it first sees it and takes them off when the
storage is freed. What an operator uses inside itself is not seen. Tensors that were there before count from when they are
first touched by a result that shares their storage, which is to say not at all: the figure is what the work added.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """``with PeakMemory() as seen: …`` then ``seen.peak`` (bytes at once) and ``seen.largest`` (elements of one tensor)."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.largest = 0
        self._held: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {_key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and _key(tensor) not in before:
                self._add(tensor)
        return out

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.largest = max(self.largest, storage.nbytes() // max(1, tensor.element_size()))
        key = storage._cdata
        if key in self._held or not storage.nbytes():
            return
        self._held.add(key)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key, storage.nbytes())

    def _free(self, key: int, n_bytes: int) -> None:
        self._held.discard(key)
        self.now -= n_bytes


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def peak_bytes(work: Any) -> int:
    """The most bytes that ``work()`` held at once in tensors of its own."""
    with PeakMemory() as seen:
        work()
    return seen.peak


__all__ = ["PeakMemory", "peak_bytes"]

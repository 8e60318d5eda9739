"""What a method sends and what it holds: counters of traffic, and of the elements of exchange buffers alive.

`LiveElements` hands out the buffers, so it knows them; giving one back frees its memory at once, whoever still holds a
view. What it counts is therefore what is there.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor


class Traffic:
    """Operations and bytes that this rank sent, by kind of operation (``"all-to-all"``, ``"ring"``, …)."""

    def __init__(self) -> None:
        self.operations: dict[str, int] = defaultdict(int)
        self.bytes: dict[str, int] = defaultdict(int)

    def add(self, kind: str, n_bytes: int) -> None:
        self.operations[kind] += 1
        self.bytes[kind] += n_bytes

    def reset(self) -> None:
        self.operations.clear()
        self.bytes.clear()


class LiveElements:
    """Elements of exchange buffers that are alive now, and the most there were."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, bool]] = {}
        self.now = 0
        """In exchange buffers: projections, sent and received queries, keys, values and outputs."""
        self.output = 0
        """In outputs of all heads under way, which are no exchange buffers."""
        self.peak = 0
        self.peak_with_output = 0

    def empty(self, shape: tuple[int, ...], like: Tensor, *, dtype: torch.dtype | None = None, output: bool = False) -> Tensor:
        """A new buffer, with the device (and dtype, unless given) of `like`."""
        return self.adopt(torch.empty(shape, dtype=dtype or like.dtype, device=like.device), output=output)

    def adopt(self, made: Tensor, *, output: bool = False) -> Tensor:
        """Count a tensor that a kernel made; one that is counted already stays as it is."""
        place = made.untyped_storage().data_ptr()
        if made.numel() and place not in self._held:
            self._held[place] = (made.numel(), output)
            self._change(made.numel(), output)
        return made

    def free(self, *buffers: Tensor) -> None:
        """Give buffers back: their memory goes now. One given back before is passed over.

        Raises ValueError for memory that isn't counted here.
        """
        for buffer in buffers:
            if buffer.untyped_storage().nbytes():
                self._forget(buffer)
                buffer.untyped_storage().resize_(0)

    def hand_over(self, buffer: Tensor) -> Tensor:
        """Stop counting a tensor that somebody else (autograd) keeps from now on."""
        if buffer.numel():
            self._forget(buffer)
        return buffer

    def reset(self) -> None:
        """Forget the peaks."""
        self.peak, self.peak_with_output = self.now, self.now + self.output

    def drop_all(self) -> None:
        """Forget every buffer, after a failure in the middle of an exchange."""
        self._held.clear()
        self.now = self.output = 0

    def _forget(self, buffer: Tensor) -> None:
        place = buffer.untyped_storage().data_ptr()
        if place not in self._held:
            raise ValueError(f"a buffer of {buffer.numel()} elements isn't counted here")
        n, output = self._held.pop(place)
        self._change(-n, output)

    def _change(self, n: int, output: bool) -> None:
        if output:
            self.output += n
        else:
            self.now += n
        self.peak = max(self.peak, self.now)
        self.peak_with_output = max(self.peak_with_output, self.now + self.output)

"""What every store of one layer's keys and values can do, and the growing buffer they all append to.

New tokens go into a dense `Buffer`, the tail. `keep` turns everything held so far into the store's own form, the
prefix. Entries always stand in ascending position; their rotary phase is never touched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longspan.kernels import attend, decode_attend
from longspan.kernels.block_sparse_cpu import attend_few_rows
from longspan.registry import Refused

SLACK = 256
"""Most entries a buffer reserves when it grows, so that decoding copies it once in that many tokens."""
LEAST_SLACK = 16
PENDING = 64
"""Steps after which positions are joined even if nobody asked."""


@dataclass
class View:
    """All held entries, padded to a common length: what scores look at."""

    k: Float[Tensor, "B H S D"]
    v: Float[Tensor, "B H S D"]
    valid: Bool[Tensor, "B H S"]
    positions: Int[Tensor, "B H S"]


def kept_last(mask: Bool[Tensor, "B H S"], longest: int) -> Int[Tensor, "B H m"]:
    """Columns of the kept entries in their order, `longest` per head; dead columns stand before those of shorter heads.

    So padded heads look like left-padded text: what is next to each other was kept next to each other.
    """
    return mask.to(torch.int8).argsort(dim=-1, stable=True)[..., mask.shape[-1] - longest :]


class Buffer:
    """Keys and values in order of arrival, (B,H,capacity,D), with positions and an optional mask of real tokens.

    The `kept` entries at the front (those of the last compression) have positions of their own in every head.
    """

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None
        self.length = 0
        self.kept = 0
        self.kept_positions: Int[Tensor, "B H m"] | None = None
        self.kept_valid: Bool[Tensor, "B H m"] | None = None
        self.valid: Bool[Tensor, "B n"] | None = None
        self._positions: tuple[Int[Tensor, "B t"], ...] = ()

    @property
    def positions(self) -> Int[Tensor, "B n"] | None:
        """Rotary positions of what came after the kept entries."""
        # Joined when asked for: decoding rarely does, and layers share the pieces.
        if len(self._positions) > 1:
            self.positions = torch.cat(self._positions, 1)
        return self._positions[0] if self._positions else None

    @positions.setter
    def positions(self, value: Int[Tensor, "B n"] | None) -> None:
        self._positions = () if value is None else (value.to(torch.int32, copy=True),)

    @property
    def keys(self) -> Float[Tensor, "B H S D"]:
        assert self.k is not None
        return self.k[:, :, : self.length]

    @property
    def values(self) -> Float[Tensor, "B H S D"]:
        assert self.v is not None
        return self.v[:, :, : self.length]

    def append(self, k: Tensor, v: Tensor, positions: Int[Tensor, "B T"], valid: Bool[Tensor, "B T"] | None) -> None:
        """Add T tokens to every head of every row. The caller doesn't write into `positions` afterwards."""
        T = k.shape[2]
        self._append_kv(k, v, T)
        fresh = self.length - self.kept - T
        if valid is not None and self.valid is None and fresh:
            self.valid = torch.ones(k.shape[0], fresh, dtype=torch.bool, device=k.device)
        if valid is None and self.valid is not None:
            valid = torch.ones(k.shape[0], T, dtype=torch.bool, device=k.device)
        if valid is not None:
            self.valid = valid.clone() if self.valid is None else torch.cat([self.valid, valid], 1)
        self._positions = (*self._positions, positions)
        if T > 1 or len(self._positions) > PENDING:
            self.positions = torch.cat(self._positions, 1)

    def _append_kv(self, k: Tensor, v: Tensor, T: int) -> None:
        need = self.length + T
        if self.k is None or self.v is None:
            # The prompt's tensors are adopted as they are unless they are slices of something larger.
            self.k, self.v = _own(k), _own(v)
        else:
            if need > self.k.shape[2]:
                capacity = need + min(SLACK, max(LEAST_SLACK, need // 4))
                self.k, self.v = (_grown(old, self.length, capacity) for old in (self.k, self.v))
            elif self.k.is_inference() and not torch.is_inference_mode_enabled():
                # What inference mode made can't be written into outside of it.
                self.k, self.v = self.k.clone(), self.v.clone()
            self.k[:, :, self.length : need] = k
            self.v[:, :, self.length : need] = v
        self.length = need

    def replace(self, k: Tensor, v: Tensor, positions: Int[Tensor, "B H m"], valid: Bool[Tensor, "B H m"] | None) -> None:
        """Hold exactly these kept entries."""
        self.k, self.v, self.length, self.kept = k, v, k.shape[2], k.shape[2]
        self.kept_positions, self.kept_valid = positions.to(torch.int32), valid
        self.positions = self.valid = None

    def all_positions(self) -> Int[Tensor, "B H S"]:
        B, H = self.keys.shape[:2]
        parts = [p for p in (self.kept_positions,) if p is not None]
        if self.positions is not None:
            parts.append(self.positions[:, None].expand(B, H, -1))
        return torch.cat(parts, -1) if parts else torch.zeros(B, H, 0, dtype=torch.int32, device=self.keys.device)

    def all_valid(self) -> Bool[Tensor, "B H S"] | None:
        """Mask of real entries, or None when every one is real."""
        if self.kept_valid is None and self.valid is None:
            return None
        B, H = self.keys.shape[:2]
        fresh = self.length - self.kept
        ones = lambda *s: torch.ones(*s, dtype=torch.bool, device=self.keys.device)  # noqa: E731
        kept = ones(B, H, self.kept) if self.kept_valid is None else self.kept_valid
        tail = ones(B, fresh) if self.valid is None else self.valid
        return torch.cat([kept, tail[:, None].expand(B, H, fresh)], -1)

    def crop(self, n: int) -> None:
        """Drop the newest `n` tokens."""
        if n > self.length - self.kept:
            raise Refused(f"can't take back {n} tokens: only the {self.length - self.kept} read since the last "
                          "compression are still whole; ask for fewer, or compress later.")
        if n:
            self.length -= n
            assert self.positions is not None
            self.positions = self.positions[:, :-n]
            self.valid = None if self.valid is None else self.valid[:, :-n]

    def select(self, rows: Int[Tensor, " R"]) -> None:
        """Keep these rows, in this order (beams; a row may repeat)."""
        for name in ("k", "v", "kept_positions", "kept_valid", "positions", "valid"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.index_select(0, rows.to(tensor.device)))

    def tensors(self) -> dict[str, Tensor]:
        """The live tensors by name."""
        names = ("k", "v", "kept_positions", "kept_valid", "positions", "valid")
        return {n: t for n in names if (t := getattr(self, n)) is not None}

    def state(self) -> dict[str, Tensor]:
        """Compact copies for saving."""
        found = self.tensors()
        if self.k is not None:
            found |= {"k": self.keys.contiguous(), "v": self.values.contiguous()}
        return found | {"counts": torch.tensor([self.length, self.kept])}

    def load(self, state: dict[str, Tensor]) -> None:
        self.length, self.kept = (int(n) for n in state["counts"])
        for name in ("k", "v", "kept_positions", "kept_valid", "positions", "valid"):
            setattr(self, name, state.get(name))


def _own(x: Tensor) -> Tensor:
    """`x` itself if it fills its storage, else a copy: a slice would keep the whole storage alive."""
    return x if x.numel() * x.element_size() == x.untyped_storage().nbytes() else x.contiguous().clone()


def _grown(old: Tensor, length: int, capacity: int) -> Tensor:
    B, H, _, D = old.shape
    new = old.new_empty(B, H, capacity, D)
    new[:, :, :length] = old[:, :, :length]
    return new


class LayerStore(ABC):
    """Keys and values of one layer."""

    def __init__(self) -> None:
        self.tail = Buffer()

    def bind(self, layer: int, parts: Any) -> None:  # noqa: B027
        """Learn which layer of which model this is, before anything is appended. Most stores don't care."""

    def append(self, k: Tensor, v: Tensor, positions: Int[Tensor, "B T"], valid: Bool[Tensor, "B T"] | None) -> None:
        self.tail.append(k, v, positions, valid)

    @abstractmethod
    def attend(self, q: Float[Tensor, "B Hq T D"], positions: Int[Tensor, "B T"], *, scale: float,
               window: int | None = None, softcap: float | None = None) -> Float[Tensor, "B Hq T D"]:
        """Attention of the newest T tokens (already appended) over everything held."""

    @abstractmethod
    def view(self) -> View:
        """Everything held, for scoring."""

    @abstractmethod
    def keep(self, mask: Bool[Tensor, "B H S"], keys: Float[Tensor, "B H S D"] | None = None) -> None:
        """Hold only the marked entries of `view`, with other keys if given; the rest of the memory is freed."""

    @abstractmethod
    def lengths(self) -> Int[Tensor, "B H"]:
        """Real entries held per row and head."""

    def width(self) -> int:
        """Columns of `view`."""
        return self.tail.length

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The live tensors."""

    @abstractmethod
    def select(self, rows: Int[Tensor, " R"]) -> None:
        """Keep these rows, in this order."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]: ...

    @abstractmethod
    def load(self, state: dict[str, Tensor]) -> None: ...

    @property
    def untouched(self) -> bool:
        """Whether nothing was evicted or re-coded yet."""
        return self.tail.kept == 0

    def crop(self, n: int) -> None:
        self.tail.crop(n)

    def nbytes(self) -> int:
        """Bytes of the storages behind the live tensors, each counted once."""
        seen = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.tensors().values()}
        return sum(seen.values())


def attend_buffer(buffer: Buffer, q: Tensor, positions: Tensor, scale: float, window: int | None,
                  softcap: float | None, *, return_lse: bool = False) -> tuple[Tensor, Tensor | None]:
    """Dense attention over a buffer whose last T entries are the queries' own tokens: (out, lse)."""
    valid, T = buffer.all_valid(), q.shape[2]
    if T == 1 and window is None and buffer.kept_valid is None:
        assert buffer.k is not None and buffer.v is not None
        seen = valid if valid is None else valid[:, 0]
        return decode_attend(q, None, buffer.k, buffer.v, buffer.length, seen, scale, softcap=softcap,
                             return_lse=return_lse)
    if valid is not None and T > 1 and buffer.length == T and window is None:
        return _attend_rows(buffer, q, scale, softcap)
    if valid is None and window is None and softcap is None:
        few = attend_few_rows(q, buffer.keys, buffer.values, scale)
        if few is not None:
            return few
    mask = None if valid is None else valid[:, :, None]
    if window is not None:
        near = positions[:, None, :, None] - buffer.all_positions()[:, :, None, :] < window
        mask = near if mask is None else near & mask
    return attend(q, buffer.keys, buffer.values, scale=scale, causal=True, mask=mask, softcap=softcap,
                  return_lse=return_lse)


def _attend_rows(buffer: Buffer, q: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
    """A padded prompt row by row: no T x T mask is built, and pads cost nothing. Pad rows give zeros."""
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:3], -torch.inf, device=q.device)
    assert buffer.valid is not None
    for row, real in enumerate(buffer.valid):
        at = real.nonzero()[:, 0]
        if len(at) == 0:
            continue
        # Padding on one side leaves a slice, which needs no copy.
        part: slice | Tensor = slice(int(at[0]), int(at[-1]) + 1)
        if int(at[-1]) + 1 - int(at[0]) != len(at):
            part = at
        q1, k1, v1 = (t[row : row + 1, :, part] for t in (q, buffer.keys, buffer.values))
        o, s = attend(q1, k1, v1, scale=scale, causal=True, softcap=softcap)
        out[row, :, part], lse[row, :, part] = o[0], s[0]
    return out, lse

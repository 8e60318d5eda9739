"""Quantised store: what a compression keeps is coded with few bits; tokens read since then stay as they are.

Keys have channels that are large in every token, so they get one scale per channel and run of `group` tokens; values
have no such channels and get one scale per token and run of `group` channels (KIVI, arXiv:2402.02750). Codes are
unsigned, value = code * scale + low, packed 8/bits to a byte. The layout is the ragged one, so heads may keep
different numbers; a run of tokens never spans two heads.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from longspan.cache.base import Held, Store
from longspan.cache.stores.ragged import RaggedLayer, offset_bytes
from longspan.registry import Refused, knob, method


def pack_codes(codes: UInt8[Tensor, "N D"], bits: int) -> UInt8[Tensor, "N Dp"]:
    """8/bits codes to a byte along the last axis, lowest bits first."""
    per = 8 // bits
    if per == 1:
        return codes
    parts = codes.view(*codes.shape[:-1], -1, per)
    shifts = torch.arange(per, device=codes.device, dtype=torch.uint8) * bits
    return (parts << shifts).sum(-1).to(torch.uint8)


def unpack_codes(packed: UInt8[Tensor, "N Dp"], bits: int) -> UInt8[Tensor, "N D"]:
    """The inverse of `pack_codes`."""
    per = 8 // bits
    if per == 1:
        return packed
    shifts = torch.arange(per, device=packed.device, dtype=torch.uint8) * bits
    return ((packed[..., None] >> shifts) & (2**bits - 1)).flatten(-2)


def grid(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Lowest value and step of a run as they are stored, in float16 (a constant run has step 0 and is nearly exact)."""
    low16 = low.to(torch.float16)
    return low16, ((high - low16.float()).clamp(min=0) / (2**bits - 1)).to(torch.float16)


def quantise(x: Float[Tensor, "... n"], low: Tensor, step: Tensor, bits: int) -> UInt8[Tensor, "... n"]:
    """Nearest codes of `x` on the grid that will be read back (`low` and `step` broadcast)."""
    wide = step.float()
    codes = torch.where(wide > 0, (x - low.float()) / wide.clamp(min=torch.finfo(torch.float32).tiny), 0.0)
    return codes.round().clamp(0, 2**bits - 1).to(torch.uint8)


class QuantisedLayer(RaggedLayer):
    """A ragged layer whose prefix is coded."""

    def __init__(self, bits: int, group: int) -> None:
        super().__init__()
        self.bits, self.group = bits, group
        self.codes: dict[str, Tensor] = {}
        self.dtype = torch.float32

    def store_flat(self, k: Tensor, v: Tensor) -> None:
        if k.shape[-1] % self.group and self.group < k.shape[-1]:
            raise Refused(f"quantised(group={self.group}): the head dimension {k.shape[-1]} is not a multiple of it; "
                          f"expected a divisor such as {_divisor(k.shape[-1], self.group)}.")
        self.dtype = k.dtype
        k_codes, k_low, k_step = self._code_keys(k.float())
        v_codes, v_low, v_step = self._code_values(v.float())
        self.codes = {
            "k_codes": pack_codes(k_codes, self.bits), "k_low": k_low, "k_step": k_step,
            "v_codes": pack_codes(v_codes, self.bits), "v_low": v_low, "v_step": v_step,
        }

    def _runs(self) -> tuple[Int[Tensor, " N"], int]:
        """For every entry the number of its run of `group` tokens, and how many runs there are."""
        assert self.offsets is not None
        counts = self.offsets.diff()
        runs = (counts + self.group - 1) // self.group
        first = torch.cat([runs.new_zeros(1), runs.cumsum(0)])
        segment = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        within = torch.arange(int(self.offsets[-1]), device=counts.device) - self.offsets[:-1][segment]
        return first[:-1][segment] + within // self.group, int(first[-1])

    def _code_keys(self, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        run, n = self._runs()
        index = run[:, None].expand_as(k)
        low = k.new_full((n, k.shape[1]), torch.inf).scatter_reduce(0, index, k, "amin")
        high = k.new_full((n, k.shape[1]), -torch.inf).scatter_reduce(0, index, k, "amax")
        low, step = grid(low, high, self.bits)
        return quantise(k, low[run], step[run], self.bits), low, step

    def _code_values(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        runs = v.view(len(v), -1, min(self.group, v.shape[1]))
        low, step = grid(runs.amin(-1), runs.amax(-1), self.bits)
        return quantise(runs, low[..., None], step[..., None], self.bits).view_as(v), low, step

    def flat(self) -> tuple[Tensor, Tensor]:
        """The prefix decoded to the model's dtype."""
        c = self.codes
        run, _ = self._runs()
        k = unpack_codes(c["k_codes"], self.bits) * c["k_step"].float()[run] + c["k_low"].float()[run]
        codes = unpack_codes(c["v_codes"], self.bits)
        runs = codes.view(len(codes), c["v_low"].shape[1], -1)
        v = runs * c["v_step"].float()[..., None] + c["v_low"].float()[..., None]
        return k.to(self.dtype), v.reshape(codes.shape).to(self.dtype)

    def prefix_tensors(self) -> dict[str, Tensor]:
        return self.codes

    def state(self) -> dict[str, Tensor]:
        return super().state() | {"full_dtype": torch.zeros((), dtype=self.dtype)}

    def load(self, state: dict[str, Tensor]) -> None:
        super().load(state)
        self.codes = {n: t for n, t in state.items() if n[:2] in ("k_", "v_")}
        self.dtype = state["full_dtype"].dtype


def _divisor(n: int, near: int) -> int:
    return max(d for d in range(1, n + 1) if n % d == 0 and d <= near)


@method("quantised", kind="store", paper="arXiv:2402.02750", capabilities=("ragged", "lossy", "rollback"),
        summary="Kept entries in 8, 4 or 2 bits: keys per channel, values per token; new tokens stay exact.")
class Quantised(Store):
    """Codes with one scale per run; about bits/16 of the bytes of a 16-bit cache plus the scales."""

    bits: int = knob(8, "bits per number", choices=(8, 4, 2))  # type: ignore[arg-type]
    group: int = knob(32, "tokens (keys) or channels (values) that share a scale", low=1, high=1024)

    def make(self) -> QuantisedLayer:
        return QuantisedLayer(self.bits, self.group)

    def entry_bytes(self, head_dim: int, itemsize: int) -> float:
        scales = 4 * head_dim / self.group + 4 * max(1, head_dim / self.group)
        return 2 * head_dim * self.bits / 8 + scales

    def layer_bytes(self, kept: float, held: Held) -> float:
        # The last run of a head's keys is rarely full and has scales all the same; where lengths differ, it is half full.
        runs = math.ceil(kept / self.group) if held.even else kept / self.group + (self.group - 1) / (2 * self.group)
        rest = held.heads * (runs - kept / self.group) * 4 * held.head_dim
        return super().layer_bytes(kept, held) + rest + offset_bytes(held.heads)

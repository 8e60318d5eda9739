"""α-entmax attention on a GPU, in Triton: α = 1.5 and 2, causal, memory linear in the length (AdaSplash-2, arXiv:2604.15180).

Five programs. *Threshold*, one for each block of queries: a pass over the keys for the row maximum, one for the histogram, and
a few that refine tau; the last of them also marks which tiles of 64 queries and 64 keys can hold any probability, 32 tiles to
a word. *Output* visits marked tiles only and also averages the values with the weights u = p^(2-α), which is all that the
derivative needs of a row. *dQ* and *dK, dV* visit the same tiles, the latter one block of keys at a time, adding up the query
heads that share a key head.

The histogram lives in registers: a thread's cell is one 64-bit word of b counters, and every block of keys raises one of them,
so b counters of 64/b bits hold 2^(64/b) - 1 blocks. Scores are held relative to the row maximum, y = z - (max - 1), where
only y > 0 counts; masked ones are -1. Importing this module never needs Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longspan.kernels.block_sparse_triton import available

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

TILE = 64
WORD = 32
"""Tiles to a word of the block mask."""
BINS = (8, 4, 2)
STEPS = 2
"""Refinements before the last pass, which takes one more."""


def bins_for(length: int) -> int:
    """The most bins whose packed counters can't overflow over `length` keys. Raises ValueError when none can hold them."""
    for bins in BINS:
        if -(-length // TILE) < 2 ** (64 // bins):
            return bins
    raise ValueError(f"{length} keys overflow the packed counters of a histogram of {BINS[-1]} bins")


@dataclass(frozen=True, eq=False)
class Kept:
    """What the derivative needs of the forward pass."""

    top: Float[Tensor, "B H N"]
    """max z of each row"""
    tau: Float[Tensor, "B H N"]
    """The threshold, relative to top - 1."""
    mean: Float[Tensor, "B H N D"]
    """The values averaged with u = p^(2-α)."""
    words: Int[Tensor, "B H NQ W"]
    """The block mask: bit j % 32 of word j // 32 is tile j."""

    def empty_tiles(self) -> float:
        """The share of causal tiles that are skipped."""
        n = self.words.shape[2]
        bits = (self.words[..., None] >> torch.arange(WORD, device=self.words.device)) & 1
        return 1.0 - float(bits.sum()) / (self.words.shape[0] * self.words.shape[1] * n * (n + 1) / 2)


def entmax_forward_triton(
    q: Float[Tensor, "B H N D"], k: Float[Tensor, "B G N D"], v: Float[Tensor, "B G N D"], alpha: float, scale: float, *,
    varlen: Int[Tensor, " B"] | None = None, bins: int | None = None, steps: int = STEPS, skip: bool = True,
) -> tuple[Float[Tensor, "B H N D"], Kept]:  # fmt: skip
    """Causal attention with α-entmax weights; rows from `varlen` on are 0. With `skip` off every tile is visited.

    Raises:
        ValueError: Triton can't run here, alpha is neither 1.5 nor 2, or the histogram's counters would overflow.
    """
    _check(alpha)
    B, H, N, D = q.shape
    bins = bins_for(N) if bins is None else bins
    if bins not in BINS or 2 ** (64 // bins) <= -(-N // TILE):
        raise ValueError(f"{N} keys overflow a histogram of {bins} packed counters; expected at most {bins_for(N)} bins")
    q, k, v = (t.contiguous() for t in (q, k, v))
    n = -(-N // TILE)
    lengths = _lengths(varlen, B, N, q.device)
    top, tau = (q.new_zeros(B, H, N, dtype=torch.float32) for _ in range(2))
    words = torch.zeros(B, H, n, -(-n // WORD), dtype=torch.int32, device=q.device)
    out, mean = torch.zeros_like(q), q.new_zeros(B, H, N, D, dtype=torch.float32)
    shape = {"D": D, "DIM": max(16, 1 << (D - 1).bit_length()), "TILE": TILE, "POWER": _power(alpha)}
    heads = (H, H // k.shape[1], k.shape[1], N, words.shape[3])
    grid = (n, B * H)
    threshold_kernel[grid](q, k, lengths, top, tau, words, scale * (alpha - 1), *heads, BINS=bins, STEPS=steps, **shape)
    if not skip:
        words.fill_(-1)
    output_kernel[grid](q, k, v, lengths, top, tau, words, out, mean, scale * (alpha - 1), *heads, **shape)
    return out, Kept(top, tau, mean, words)


def entmax_backward_triton(
    grad: Float[Tensor, "B H N D"], q: Float[Tensor, "B H N D"], k: Float[Tensor, "B G N D"], v: Float[Tensor, "B G N D"],
    kept: Kept, alpha: float, scale: float, *, varlen: Int[Tensor, " B"] | None = None,
) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B G N D"], Float[Tensor, "B G N D"]]:  # fmt: skip
    """Gradients of queries, keys and values: dS = u (dP - dO.mean), with the tiles the forward pass marked."""
    _check(alpha)
    B, H, N, D = q.shape
    q, k, v, grad = (t.contiguous() for t in (q, k, v, grad))
    delta = (grad.float() * kept.mean).sum(-1)
    lengths = _lengths(varlen, B, N, q.device)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    shape = {"D": D, "DIM": max(16, 1 << (D - 1).bit_length()), "TILE": TILE, "POWER": _power(alpha)}
    heads = (H, H // k.shape[1], k.shape[1], N, kept.words.shape[3])
    n, z_scale = -(-N // TILE), scale * (alpha - 1)
    common = (lengths, kept.top, kept.tau, kept.words, grad, delta)
    query_grad_kernel[n, B * H](q, k, v, *common, dq, z_scale, scale, *heads, **shape)
    key_grad_kernel[n, B * k.shape[1]](q, k, v, *common, dk, dv, z_scale, scale, *heads, **shape)
    return dq, dk, dv


def _check(alpha: float) -> None:
    if alpha not in (1.5, 2.0):
        raise ValueError(f"the fused entmax knows alpha 1.5 and 2, got {alpha}; use backend 'reference'")
    if not available():
        raise ValueError("backend 'triton' needs the triton package and a GPU; use backend 'cpu' or 'reference'")


def _power(alpha: float) -> int:
    return round(1 / (alpha - 1))


def _lengths(varlen: Tensor | None, batch: int, length: int, device: torch.device) -> Int[Tensor, " B"]:
    if varlen is None:
        return torch.full((batch,), length, dtype=torch.int32, device=device)
    return varlen.to(torch.int32).contiguous()


if triton is not None:

    @triton.jit
    def _tile(base, block, N, D: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr):
        """Rows block * TILE … of a contiguous (N, D) matrix, zeros beyond."""
        rows, channels = block * TILE + tl.arange(0, TILE), tl.arange(0, DIM)
        inside = (rows[:, None] < N) & (channels[None, :] < D)
        return tl.load(base + rows[:, None].to(tl.int64) * D + channels[None, :], mask=inside, other=0.0)

    @triton.jit
    def _put(base, block, values, N, D: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr):
        rows, channels = block * TILE + tl.arange(0, TILE), tl.arange(0, DIM)
        inside = (rows[:, None] < N) & (channels[None, :] < D)
        tl.store(base + rows[:, None].to(tl.int64) * D + channels[None, :], values.to(base.dtype.element_ty), mask=inside)

    @triton.jit
    def _above(q, k, top, i, j, length, z_scale, TILE: tl.constexpr):
        """y = z - (top - 1) of a tile, -1 where a query may not look."""
        rows, keys = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
        z = tl.dot(q, tl.trans(k), input_precision="ieee") * z_scale
        seen = (keys[None, :] <= rows[:, None]) & (keys[None, :] < length)
        return tl.where(seen, z - top[:, None] + 1.0, -1.0)

    @triton.jit
    def _histogram_root(cell, BINS: tl.constexpr, POWER: tl.constexpr, ROWS: tl.constexpr):
        """The root of f with every element at its bin's left edge and the maximum at 1."""
        BITS: tl.constexpr = 64 // BINS
        s0 = tl.full((ROWS,), 1.0, tl.float32)
        s1 = tl.full((ROWS,), 1.0, tl.float32)
        s2 = tl.full((ROWS,), 1.0, tl.float32)
        going = s0 > 0
        for step in tl.static_range(BINS):
            count = tl.sum((cell >> (BITS * (BINS - 1 - step))) & ((1 << BITS) - 1), 1).to(tl.float32)
            if step == 0:
                count = count - 1.0  # the maximum counts at its exact value
            edge = (BINS - 1 - step) / BINS
            n0, n1, n2 = s0 + count, s1 + count * edge, s2 + count * edge * edge
            below = n1 - n0 * edge
            if POWER == 2:
                below = n0 * edge * edge - 2.0 * n1 * edge + n2
            going = going & (below < 1.0)
            s0, s1, s2 = tl.where(going, n0, s0), tl.where(going, n1, s1), tl.where(going, n2, s2)
        if POWER == 2:
            return (s1 - tl.sqrt(tl.maximum(s1 * s1 - s0 * (s2 - 1.0), 0.0))) / s0
        return (s1 - 1.0) / s0

    @triton.jit
    def _step(t, low, high, a0, a1, a2, POWER: tl.constexpr):
        """One Halley (α = 1.5) or Newton (α = 2) step inside the bracket, which it narrows first."""
        f = a0 - 1.0
        if POWER == 1:
            f = a1 - 1.0
        low, high = tl.where(f > 0, t, low), tl.where(f < 0, t, high)
        new = t + f / a2
        if POWER == 2:
            new = t + 2.0 * f * a1 / (4.0 * a1 * a1 - f * a2)
        inside = (new > low - 1e-5) & (new < high + 1e-5)
        return tl.where(inside, new, (low + high) * 0.5), low, high

    @triton.jit
    def threshold_kernel(q, k, lengths, top_out, tau_out, words, z_scale, H, GROUP, G, N, W, BINS: tl.constexpr,
                         STEPS: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, POWER: tl.constexpr):
        """top, tau and the block mask of one block of queries."""
        i, head = tl.program_id(0), tl.program_id(1)
        length = tl.load(lengths + head // H)
        rows = i * TILE + tl.arange(0, TILE)
        qs = _tile(q + head.to(tl.int64) * N * D, i, N, D, DIM, TILE)
        keys = k + ((head // H) * G + (head % H) // GROUP).to(tl.int64) * N * D
        if i * TILE < length:
            zero = tl.zeros((TILE,), tl.float32)
            top = tl.full((TILE,), -1e30, tl.float32)
            for j in range(0, i + 1):
                z = _above(qs, _tile(keys, j, N, D, DIM, TILE), zero, i, j, length, z_scale, TILE) - 1.0
                at = j * TILE + tl.arange(0, TILE)
                seen = (at[None, :] <= rows[:, None]) & (at[None, :] < length)
                top = tl.maximum(top, tl.max(tl.where(seen, z, -1e30), 1))
            cell = tl.zeros((TILE, TILE), tl.int64)
            one = tl.full((TILE, TILE), 1, tl.int64)
            for j in range(0, i + 1):
                y = _above(qs, _tile(keys, j, N, D, DIM, TILE), top, i, j, length, z_scale, TILE)
                index = tl.minimum((tl.maximum(y, 0.0) * BINS).to(tl.int64), BINS - 1)
                cell += tl.where(y >= 0, one << (index * (64 // BINS)), 0)
            low = _histogram_root(cell, BINS, POWER, TILE)
            high = tl.minimum(low + 1.0 / BINS, 1.0)
            t = (low + high) * 0.5
            for _ in range(STEPS):
                a0, a1, a2 = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
                for j in range(0, i + 1):
                    u = _above(qs, _tile(keys, j, N, D, DIM, TILE), top, i, j, length, z_scale, TILE) - t[:, None]
                    above = tl.maximum(u, 0.0)
                    a0 += tl.sum(above * above, 1)
                    a1 += tl.sum(above, 1)
                    a2 += tl.sum((u > 0).to(tl.float32), 1)
                t, low, high = _step(t, low, high, a0, a1, a2, POWER)
            # The last pass marks tiles by a bound below what it will find, so that no tile of the support is left out.
            bound = tl.minimum(low, t) - 1e-6
            a0, a1, a2 = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
            for w in range(0, i // 32 + 1):
                word = tl.zeros((), tl.int32)
                for j in range(w * 32, tl.minimum(w * 32 + 32, i + 1)):
                    y = _above(qs, _tile(keys, j, N, D, DIM, TILE), top, i, j, length, z_scale, TILE)
                    real = rows < length
                    holds = tl.max(tl.where((y > bound[:, None]) & real[:, None], 1, 0))
                    word = word | (holds << (j % 32))
                    u = y - t[:, None]
                    above = tl.maximum(u, 0.0)
                    a0 += tl.sum(above * above, 1)
                    a1 += tl.sum(above, 1)
                    a2 += tl.sum((u > 0).to(tl.float32), 1)
                tl.store(words + (head.to(tl.int64) * tl.num_programs(0) + i) * W + w, word)
            t, low, high = _step(t, low, high, a0, a1, a2, POWER)
            t = tl.maximum(t, bound)
            place = head.to(tl.int64) * N + rows
            tl.store(top_out + place, top, mask=rows < N)
            tl.store(tau_out + place, t, mask=rows < N)

    @triton.jit
    def output_kernel(q, k, v, lengths, top_in, tau_in, words, out, mean, z_scale, H, GROUP, G, N, W, D: tl.constexpr,
                      DIM: tl.constexpr, TILE: tl.constexpr, POWER: tl.constexpr):
        """Outputs of one block of queries, and the values averaged with u."""
        i, head = tl.program_id(0), tl.program_id(1)
        length = tl.load(lengths + head // H)
        rows = i * TILE + tl.arange(0, TILE)
        place = head.to(tl.int64) * N
        shared = ((head // H) * G + (head % H) // GROUP).to(tl.int64) * N * D
        qs = _tile(q + place * D, i, N, D, DIM, TILE)
        top = tl.load(top_in + place + rows, mask=rows < N, other=0.0)
        tau = tl.load(tau_in + place + rows, mask=rows < N, other=0.0)
        sums, averages = tl.zeros((TILE, DIM), tl.float32), tl.zeros((TILE, DIM), tl.float32)
        total = tl.zeros((TILE,), tl.float32)
        marks = words + (head.to(tl.int64) * tl.num_programs(0) + i) * W
        for j in range(0, i + 1):
            if (tl.load(marks + j // 32) >> (j % 32)) & 1:
                y = _above(qs, _tile(k + shared, j, N, D, DIM, TILE), top, i, j, length, z_scale, TILE)
                vs = _tile(v + shared, j, N, D, DIM, TILE)
                u = tl.maximum(y - tau[:, None], 0.0)
                p = u
                if POWER == 2:
                    p = u * u
                else:
                    u = (u > 0).to(tl.float32)
                sums = tl.dot(p.to(vs.dtype), vs, sums, input_precision="ieee")
                averages = tl.dot(u.to(vs.dtype), vs, averages, input_precision="ieee")
                total += tl.sum(u, 1)
        real = (rows < length)[:, None]
        _put(out + place * D, i, tl.where(real, sums, 0.0), N, D, DIM, TILE)
        averages = averages / tl.where(total > 0, total, 1.0)[:, None]
        _put(mean + place * D, i, tl.where(real, averages, 0.0), N, D, DIM, TILE)

    @triton.jit
    def _weights(q, k, v, grad, top, tau, delta, i, j, length, z_scale, TILE: tl.constexpr, POWER: tl.constexpr):
        """p and dS of a tile."""
        y = _above(q, k, top, i, j, length, z_scale, TILE)
        u = tl.maximum(y - tau[:, None], 0.0)
        p = u
        if POWER == 2:
            p = u * u
        else:
            u = (u > 0).to(tl.float32)
        dp = tl.dot(grad, tl.trans(v), input_precision="ieee")
        return p, u * (dp - delta[:, None])

    @triton.jit
    def query_grad_kernel(q, k, v, lengths, top_in, tau_in, words, grad, delta_in, dq, z_scale, scale, H, GROUP, G, N, W,
                          D: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, POWER: tl.constexpr):
        """dQ of one block of queries."""
        i, head = tl.program_id(0), tl.program_id(1)
        length = tl.load(lengths + head // H)
        rows = i * TILE + tl.arange(0, TILE)
        place = head.to(tl.int64) * N
        shared = ((head // H) * G + (head % H) // GROUP).to(tl.int64) * N * D
        qs, gs = _tile(q + place * D, i, N, D, DIM, TILE), _tile(grad + place * D, i, N, D, DIM, TILE)
        top = tl.load(top_in + place + rows, mask=rows < N, other=0.0)
        tau = tl.load(tau_in + place + rows, mask=rows < N, other=0.0)
        delta = tl.load(delta_in + place + rows, mask=rows < N, other=0.0)
        found = tl.zeros((TILE, DIM), tl.float32)
        marks = words + (head.to(tl.int64) * tl.num_programs(0) + i) * W
        for j in range(0, i + 1):
            if (tl.load(marks + j // 32) >> (j % 32)) & 1:
                ks, vs = _tile(k + shared, j, N, D, DIM, TILE), _tile(v + shared, j, N, D, DIM, TILE)
                _, ds = _weights(qs, ks, vs, gs, top, tau, delta, i, j, length, z_scale, TILE, POWER)
                found = tl.dot(ds.to(ks.dtype), ks, found, input_precision="ieee")
        _put(dq + place * D, i, tl.where((rows < length)[:, None], found * scale, 0.0), N, D, DIM, TILE)

    @triton.jit
    def key_grad_kernel(q, k, v, lengths, top_in, tau_in, words, grad, delta_in, dk, dv, z_scale, scale, H, GROUP, G, N, W,
                        D: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, POWER: tl.constexpr):
        """dK and dV of one block of keys, added up over the query heads that share it."""
        j, shared_head = tl.program_id(0), tl.program_id(1)
        row, n = shared_head // G, tl.num_programs(0)
        length = tl.load(lengths + row)
        shared = shared_head.to(tl.int64) * N * D
        ks, vs = _tile(k + shared, j, N, D, DIM, TILE), _tile(v + shared, j, N, D, DIM, TILE)
        for_keys, for_values = tl.zeros((TILE, DIM), tl.float32), tl.zeros((TILE, DIM), tl.float32)
        for member in range(0, GROUP):
            head = row * H + (shared_head % G) * GROUP + member
            place = head.to(tl.int64) * N
            for i in range(j, n):
                if (tl.load(words + (head.to(tl.int64) * n + i) * W + j // 32) >> (j % 32)) & 1:
                    rows = i * TILE + tl.arange(0, TILE)
                    real = rows < length
                    qs, gs = _tile(q + place * D, i, N, D, DIM, TILE), _tile(grad + place * D, i, N, D, DIM, TILE)
                    top = tl.load(top_in + place + rows, mask=rows < N, other=0.0)
                    tau = tl.load(tau_in + place + rows, mask=rows < N, other=0.0)
                    delta = tl.load(delta_in + place + rows, mask=rows < N, other=0.0)
                    p, ds = _weights(qs, ks, vs, gs, top, tau, delta, i, j, length, z_scale, TILE, POWER)
                    p, ds = tl.where(real[:, None], p, 0.0), tl.where(real[:, None], ds, 0.0)
                    for_values = tl.dot(tl.trans(p).to(gs.dtype), gs, for_values, input_precision="ieee")
                    for_keys = tl.dot(tl.trans(ds).to(qs.dtype), qs, for_keys, input_precision="ieee")
        _put(dk + shared, j, for_keys * scale, N, D, DIM, TILE)
        _put(dv + shared, j, for_values, N, D, DIM, TILE)

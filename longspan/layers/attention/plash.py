"""PLASH: linear-time attention through learned prototypes of the past, exact in a window, with a bound for every output.

Keys spread over M learned prototypes; a prototype is the mean of its keys and of their values, with their mass, and sketches
give it back some second-order structure (`prototypes`, `prototype_sketches`; "PLASH: Provably Linear-Time Attention with
Selective Higher-Order Feature Sketching", ICML 2026). In a language model a prototype may know the past alone, so documents are
read in chunks of C tokens. Sums of (1, k, v, sketches) over finished chunks make the prototypes of the next ones; a query of
chunk t attends, in one softmax, to

    its own chunk up to itself, the whole chunk t - 1, the first n_exact keys, and the prototypes of all else up to chunk t - 2.

Cost is O(N (M + 2C) d), and what is remembered has a fixed size. Chunks are counted by a token's index in its document
(`chunk_grid`), so cutting the text anywhere changes nothing. Up to 2C tokens this is softmax attention. Keys arrive rotated,
so prototypes mix positions; the window doesn't.

Every call reports, for each token, how far the joined heads can be from what softmax attention over the same queries, keys and
values would give (`BOUND`); `PlashAttention.attention` returns it for each head. It speaks of one layer, given its input.
Its derivation is in `prototype_bound`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from longspan.kernels import attend, merge
from longspan.layers.attention.base import AttentionModule
from longspan.layers.attention.chunk_grid import Grid, lay_out, take
from longspan.layers.attention.prototype_bound import bound, deviation, drifted, log_masses, spread, value_change
from longspan.layers.attention.prototype_sketches import Enrichment
from longspan.layers.attention.prototypes import EPS, assign, centres, pool, read_out, refuse_nan
from longspan.layers.base import Mixer
from longspan.layers.context import Context
from longspan.layers.state import MixerState
from longspan.registry import Refused, knob, method

BOUND = "plash-bound"
"""What each layer reports of its tokens (B,T): the norm by which the joined heads can differ from softmax attention."""
FEW_TOKENS = 8
"""Calls of up to so many tokens read each query alone, longer ones whole chunks of queries."""


@dataclass(eq=False)
class PlashState(MixerState):
    """Sums of what left the window, the window, and the first keys: the same size however long the text is."""

    window: Float[Tensor, "B slots G E"]
    """Keys and values side by side of the chunk before the current one and of the current one: 2C slots."""
    exact: Float[Tensor, "B G n E"]
    sums: Float[Tensor, "B G M S"]
    far: Float[Tensor, "B G M"]
    """Bound on the distance of any pooled key from its prototype."""
    far_values: Float[Tensor, "B G"]
    """Bound on the distance of any pooled value from their mean."""
    count: Int[Tensor, " B"]
    """Tokens of the current document read."""


@dataclass(frozen=True, eq=False)
class Past:
    """What stands for everything before the window of each chunk of the grid."""

    exact: Float[Tensor, "B chunks G n E"]
    sums: Float[Tensor, "B chunks G M S"]
    far: Float[Tensor, "B chunks G M"]
    far_values: Float[Tensor, "B chunks G"]


class PlashAttention(AttentionModule):
    """Prototypes for the distant past, exact attention in the window, one softmax over both."""

    optimiser_settings = {"u": {"weight_decay": 0.0}, "b": {"weight_decay": 0.0}}

    def __init__(self, knobs: Plash, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, layer: int):
        super().__init__(dim, n_heads, n_kv_heads, head_dim)
        self.knobs = knobs
        self.u = nn.Parameter(torch.randn(n_kv_heads, knobs.M, head_dim))
        self.b = nn.Parameter(torch.zeros(n_kv_heads, knobs.M))
        self.enrichment = Enrichment(n_kv_heads, (head_dim, head_dim), knobs.chosen_degrees, knobs.D_s, knobs.seed + layer,
                                     knobs.gate)

    def forward(  # type: ignore[override]
        self, x: Float[Tensor, "B T C"], ctx: Context, state: MixerState | None = None
    ) -> tuple[Float[Tensor, "B T C"], PlashState]:
        assert state is None or isinstance(state, PlashState)
        q, new, _ = self.read(x, ctx, None)
        out, limit, state = self.attention(q, new.k, new.v, ctx, state)
        if limit is not None:
            ctx.report(BOUND, limit.square().sum(1).sqrt())
        return self.output(out.to(x.dtype), x), state

    def attention(
        self,
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B G T D"],
        v: Float[Tensor, "B G T D"],
        ctx: Context,
        state: PlashState | None = None,
    ) -> tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T"] | None, PlashState]:
        """Outputs of rotated queries and keys, each one's bound (None with ``certificate=False``), and the new state.

        Outputs of padding are 0, and so are its bounds. Raises `Refused` when a real key is NaN.
        """
        C, T = self.knobs.C, q.shape[2]
        numbers = 1 + 2 * self.head_dim + self.enrichment.numbers(self.enrichment.active())
        state = self._fresh(k, numbers) if state is None else state
        if state.sums.shape[-1] != numbers:
            raise ValueError(f"the state sums {state.sums.shape[-1]} numbers of every key, now {numbers} are needed: gates "
                             "opened or closed, or training was switched on or off, within a text; start it afresh")
        grid = lay_out(T, C, state.count, ctx.valid, ctx.starts)
        new = torch.cat((k, v), -1).transpose(1, 2)
        rows = torch.cat((state.window.to(new.dtype), new, torch.zeros_like(new[:, :1])), 1)
        slots = take(rows, grid.source)
        chunks = slots.unflatten(1, (grid.chunks, C)).transpose(2, 3)
        refuse_nan(chunks[..., : self.head_dim])
        with torch.autocast(q.device.type, enabled=False):
            past = self._past(chunks, grid, state)
            if T <= FEW_TOKENS:
                out, limit = self._each(q, chunks, past, grid)
            else:
                out, limit = self._by_chunks(q, chunks, past, grid)
            if ctx.valid is not None:
                out = out.masked_fill(~ctx.valid[:, None, :, None], 0.0)
                limit = None if limit is None else limit.masked_fill(~ctx.valid[:, None], 0.0)
        exact, sums, far, far_values = (take(t, grid.last[:, None])[:, 0] for t in
                                        (past.exact, past.sums, past.far, past.far_values))
        return out, limit, PlashState(take(slots, grid.kept()), exact, sums, far, far_values, grid.count)

    # -------------------------------------------------------------------------------------------------- what is pooled

    def _fresh(self, k: Tensor, numbers: int) -> PlashState:
        B, G, D, knobs = len(k), k.shape[1], self.head_dim, self.knobs
        wide = torch.promote_types(k.dtype, torch.float32)
        return PlashState(k.new_zeros(B, 2 * knobs.C, G, 2 * D), k.new_zeros(B, G, knobs.n_exact, 2 * D),
                          k.new_zeros(B, G, knobs.M, numbers, dtype=wide), k.new_zeros(B, G, knobs.M, dtype=wide),
                          k.new_zeros(B, G, dtype=wide), torch.zeros(B, dtype=torch.long, device=k.device))

    def _past(self, chunks: Float[Tensor, "B chunks G C E"], grid: Grid, state: PlashState) -> Past:
        """What each chunk of the grid knows of the chunks before its window, from the kept state on."""
        exact = [torch.zeros_like(state.exact), state.exact.to(chunks.dtype)]
        sums = [torch.zeros_like(state.sums), state.sums]
        far, far_values = torch.zeros_like(state.far), torch.zeros_like(state.far_values)
        leaving = grid.chunks - 2  # chunks that leave the window of a later chunk of the grid
        if not leaving:
            return Past(torch.stack(exact, 1), torch.stack(sums, 1), torch.stack((far, state.far), 1),
                        torch.stack((far_values, state.far_values), 1))
        k, v, P = self._assigned(chunks[:, :leaving], grid)
        added = pool(P, k, v, self.enrichment.features(k, v, self.enrichment.active()))
        for n in range(2, grid.chunks):
            live, second = grid.age[:, n] >= 2, grid.age[:, n] == 2
            sums.append(torch.where(live[:, None, None, None], sums[-1] + added[:, n - 2], 0.0))
            first = chunks[:, n - 2, :, : self.knobs.n_exact]
            exact.append(torch.where(second[:, None, None, None], first, exact[-1]))
        joined = torch.stack(sums, 1)
        return Past(torch.stack(exact, 1), joined, *self._distances(k, v, P, joined, state))

    def _assigned(self, chunks: Float[Tensor, "B n G C E"], grid: Grid) -> tuple[Tensor, Tensor, Float[Tensor, "B n G C M"]]:
        """Keys, values and weights of chunks that leave the window; the first keys of a document have prototypes of their own."""
        n, knobs, wide = chunks.shape[1], self.knobs, torch.promote_types(chunks.dtype, torch.float32)
        k, v = chunks.to(wide).split(self.head_dim, -1)
        own = (grid.age[:, :n, None] == 0) & (torch.arange(knobs.C, device=k.device) < knobs.n_exact)
        counted: Bool[Tensor, "B n C"] = grid.filled[:, :n] & ~own
        repeats = k.shape[2] // self.n_kv_heads  # position schemes of a query head each repeat the keys
        u, b = (t.repeat_interleave(repeats, 0) for t in (self.u, self.b))
        return k, v, assign(k, u, b, topr=knobs.topr, tau=knobs.tau_a, mask=counted[:, :, None], eps=knobs.eps)

    @torch.no_grad()
    def _distances(self, k: Tensor, v: Tensor, P: Tensor, sums: Float[Tensor, "B chunks G M S"], state: PlashState
                   ) -> tuple[Float[Tensor, "B chunks G M"], Float[Tensor, "B chunks G"]]:
        """Bounds on the distance of pooled keys and values from means that move from chunk to chunk."""
        far, far_values = [torch.zeros_like(state.far), state.far], [torch.zeros_like(state.far_values), state.far_values]
        if not self.knobs.certificate:
            return torch.stack(far[1:] * sums.shape[1], 1), torch.stack(far_values[1:] * sums.shape[1], 1)
        means, middle = centres(sums, (k.shape[-1], v.shape[-1]))[0], _mean_value(sums, self.head_dim)
        new = spread(k, P, means.k[:, 2:])
        counted = (P > 0).any(-1)
        new_values = (v - middle[:, 2:, :, None]).norm(dim=-1).masked_fill(~counted, 0.0).amax(-1)
        moved, moved_values = means.k.diff(dim=1).norm(dim=-1), middle.diff(dim=1).norm(dim=-1)
        held = means.mass > 0
        for n in range(2, sums.shape[1]):
            live = held[:, n]
            far.append(drifted(far[-1], moved[:, n - 1], new[:, n - 2], held[:, n - 1]).masked_fill(~live, 0.0))
            far_values.append(drifted(far_values[-1], moved_values[:, n - 1], new_values[:, n - 2], held[:, n - 1].any(-1))
                              .masked_fill(~live.any(-1), 0.0))
        return torch.stack(far, 1), torch.stack(far_values, 1)

    # ---------------------------------------------------------------------------------------------------------- reading

    def _each(self, q: Tensor, chunks: Tensor, past: Past, grid: Grid) -> tuple[Tensor, Tensor | None]:
        """Every query a block of its own."""
        out, limit = self._blocks(q.transpose(1, 2)[:, :, :, None], grid.chunk, grid.offset, chunks, past, grid)
        return out[:, :, :, 0].transpose(1, 2), None if limit is None else limit[:, :, :, 0].transpose(1, 2)

    def _by_chunks(self, q: Tensor, chunks: Tensor, past: Past, grid: Grid) -> tuple[Tensor, Tensor | None]:
        """The queries of a chunk are a block; slots without a query hold zeros and are left out again."""
        C, T, blocks = grid.size, q.shape[2], int(grid.chunk.max())
        source = grid.source[:, C : (blocks + 1) * C] - 2 * C
        rows = torch.cat((q, torch.zeros_like(q[:, :, :1])), 2).transpose(1, 2)
        blocked = take(rows, torch.where((source >= 0) & (source < T), source, T)).unflatten(1, (blocks, C)).transpose(2, 3)
        at = torch.arange(1, blocks + 1, device=q.device).expand(len(q), -1)
        out, limit = self._blocks(blocked, at, None, chunks, past, grid)
        slot = (grid.chunk - 1) * C + grid.offset
        out = take(out.transpose(2, 3).flatten(1, 2), slot).transpose(1, 2)
        return out, None if limit is None else take(limit.transpose(2, 3).flatten(1, 2), slot).transpose(1, 2)

    def _blocks(
        self,
        q: Float[Tensor, "B blocks H W D"],
        at: Int[Tensor, "B blocks"],
        offset: Int[Tensor, "B blocks"] | None,
        chunks: Float[Tensor, "B chunks G C E"],
        past: Past,
        grid: Grid,
    ) -> tuple[Float[Tensor, "B blocks H W D"], Float[Tensor, "B blocks H W"] | None]:
        """Blocks of queries, each within chunk `at`: a whole chunk of them, or one at slot `offset`."""
        shape, D = q.shape[:2], self.head_dim
        age = take(grid.age[..., None], at).flatten()
        q = q.flatten(0, 1)
        own = take(chunks, at).flatten(0, 1)
        upto = None if offset is None else torch.arange(grid.size, device=q.device) <= offset.flatten()[:, None]
        see = None if upto is None else upto[:, None, None]
        parts = [attend(q, own[..., :D], own[..., D:], causal=upto is None, mask=see)]
        older, summary = torch.zeros_like(own[..., :0, :]), None
        seen = q.new_zeros(len(q), 0, dtype=torch.bool)
        if bool((age >= 1).any()):
            older = torch.cat((take(past.exact, at), take(chunks, at - 1)), 3).flatten(0, 1)
            seen = torch.cat(((age >= 2)[:, None].expand(-1, self.knobs.n_exact), (age >= 1)[:, None].expand(-1, grid.size)), 1)
            parts.append(attend(q, older[..., :D], older[..., D:], causal=False, mask=seen[:, None, None]))
        if bool((age >= 2).any()):
            summary = [take(t, at).flatten(0, 1) for t in (past.sums, past.far, past.far_values)]
        out, limit = self._summarised(q, parts, summary, (own, upto, older, seen))
        return out.unflatten(0, shape), None if limit is None else limit.unflatten(0, shape)

    def _summarised(self, q: Tensor, parts: list[tuple[Tensor, Tensor]], summary: list[Tensor] | None, window: tuple
                    ) -> tuple[Tensor, Tensor | None]:
        """The window's parts and the prototypes in one softmax, and the bound."""
        exact = None if not self.knobs.certificate else q.new_zeros(q.shape[:3], dtype=parts[0][1].dtype)
        if summary is None:
            return merge(parts)[0], exact
        sums, far, far_values = summary
        centre, means = centres(sums, (self.head_dim, self.head_dim))
        read = self.enrichment.enriched(centre, means, self.enrichment.active())
        pooled = read_out(q, read, mass=self.knobs.mass)
        wide = pooled[0].dtype
        out, lse = merge([*((o.to(wide), e) for o, e in parts), pooled])
        if exact is None:
            return out, None
        with torch.no_grad():
            share = (pooled[1] - lse).exp()
            extra = 0.0 if self.knobs.mass else log_masses(centre)
            values = self._values(_mean_value(sums, self.head_dim), far_values, *window)
            values = values.repeat_interleave(q.shape[1] // values.shape[1], 1)
            limit = bound(q, deviation(far, centre, read, self.knobs.mass), extra, values, value_change(centre, read), share)
        return out, limit.masked_fill(share == 0, 0.0)

    def _values(self, middle: Tensor, far: Tensor, own: Tensor, upto: Tensor | None, older: Tensor, seen: Tensor
                ) -> Float[Tensor, "n G W"]:
        """R_V of every query: the farthest of the values it stands for or sees from the mean of the pooled ones."""
        D, middle = self.head_dim, middle[:, :, None]
        distance = lambda rows: (rows[..., D:].to(middle.dtype) - middle).norm(dim=-1)  # noqa: E731
        before = torch.maximum(far, distance(older).masked_fill(~seen[:, None], 0.0).amax(-1))
        mine = distance(own)
        mine = mine.cummax(-1).values if upto is None else mine.masked_fill(~upto[:, None], 0.0).amax(-1, keepdim=True)
        return torch.maximum(before[..., None], mine)


def _mean_value(sums: Float[Tensor, "*B M S"], dim: int) -> Float[Tensor, "*B D"]:
    """The mean of all pooled values; 0 where there are none."""
    total = sums.sum(-2)
    return total[..., 1 + dim : 1 + 2 * dim] / total[..., :1].clamp(min=EPS)


@method("plash", kind="mixer", system="plash", paper="PLASH, ICML 2026", capabilities=("trains",),
        summary="Learned prototypes of the distant past and an exact window in one softmax, with an error bound.")
class Plash(Mixer):
    """Linear-time attention: keys that leave a window are pooled into prototypes; each token's error is bounded."""

    M: int = knob(64, "prototypes a key head", low=1)
    topr: int = knob(2, "prototypes a key belongs to; 1 is hard assignment", low=1)
    C: int = knob(256, "tokens of a chunk; the window is the own and the previous one", low=1)
    n_exact: int = knob(4, "first keys of a document that are never pooled", low=0)
    D_s: int = knob(64, "buckets of a sketch", low=2)
    degrees: str = knob("2", "degrees that are sketched, 2 or more, such as 2,3; empty for none")
    gate: float = knob(0.0, "weight of the sketches before training", low=0.0)
    mass: bool = knob(True, "let a prototype weigh as much as the keys it holds")
    tau_a: float | None = knob(None, "temperature of the assignment; None for the root of the head's width", low=1e-6)
    eps: float = knob(EPS, "least weight of a key in a prototype", low=0.0, high=0.1)
    seed: int = knob(0, "of the sketches' hashes", low=0)
    certificate: bool = knob(True, "report how far each output can be from softmax attention")

    positions: ClassVar[frozenset[str]] = frozenset({"rotate"})

    @property
    def chosen_degrees(self) -> tuple[int, ...]:
        """The degrees as numbers."""
        parts = [part.strip() for part in self.degrees.split(",") if part.strip()]
        if not all(part.isdecimal() and int(part) >= 2 for part in parts) or len(set(parts)) < len(parts):
            raise Refused(f"plash(degrees={self.degrees!r}): expected different whole numbers from 2 on, such as '2' or '2,3'; a "
                          "mean holds the first degree already.")
        return tuple(map(int, parts))

    def check(self) -> None:
        self.chosen_degrees  # noqa: B018
        if self.topr > self.M:
            raise Refused(f"plash(topr={self.topr}, M={self.M}): expected at most M prototypes a key, such as topr={self.M}.")
        if self.n_exact > self.C:
            raise Refused(f"plash(n_exact={self.n_exact}, C={self.C}): expected at most a chunk, such as n_exact={self.C}.")
        if self.topr > 1 and self.eps * self.topr > 0.5:
            raise Refused(f"plash(eps={self.eps}, topr={self.topr}): no key could be placed; expected eps of {0.5 / self.topr:g} "
                          "or less.")

    def build(self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, layer: int, n_layers: int) -> PlashAttention:
        return PlashAttention(self, dim, n_heads, n_kv_heads, head_dim, layer)

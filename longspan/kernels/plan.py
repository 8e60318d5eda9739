"""Read plans: which query-key pairs attention computes, the one language between selectors and executors.

The T queries stand at the last T of S key slots (so a prompt may be read in chunks) and are cut into query blocks of
`q_block` rows; the keys are cut into key blocks of `k_block` slots, counted from slot 0. Per batch row, head and query
block a plan lists key blocks in compressed rows (CSR); per batch row and head (or also per query block) it may list
single key columns, as vertical patterns need. A pair is computed when its key is listed either way and, for causal
plans, not after the query. Everything below the block is exact: the diagonal block is cut at the diagonal, and a column
inside a listed block is read once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

RECALL_ROWS = 256
"""Query rows whose full attention `recall` holds at once."""


@dataclasses.dataclass(frozen=True, eq=False)
class ReadPlan:
    """The query-key pairs to compute. B and H may be 1, or H the number of key heads: they broadcast to the queries'.

    `offsets` (B,H,NQ+1) int64 are positions in `blocks` (int32, ascending in each row): query block u of (b, h) reads
    ``blocks[offsets[b,h,u]:offsets[b,h,u+1]]``. `column_offsets` (B,H,G+1), with G = 1 (the same columns for all query
    blocks) or NQ, are positions in `columns` (int32, ascending in each row) likewise. With ``causal=False`` every
    query of a block sees the whole of the listed keys.

    Raises ValueError for shapes that don't fit, block or column numbers out of range or not ascending.
    """

    q_len: int
    k_len: int
    q_block: int
    k_block: int
    offsets: Int[Tensor, "B H NQ+1"]
    blocks: Int[Tensor, " n"]
    column_offsets: Int[Tensor, "B H G+1"] | None = None
    columns: Int[Tensor, " m"] | None = None
    causal: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.q_len <= self.k_len or min(self.q_block, self.k_block) < 1:
            raise ValueError(f"a plan needs 1 <= T <= S and blocks of at least 1, got T={self.q_len}, S={self.k_len}, "
                             f"q_block={self.q_block}, k_block={self.k_block}")
        if self.offsets.ndim != 3 or self.offsets.shape[2] != self.n_q_blocks + 1:
            raise ValueError(f"offsets: expected (B, H, {self.n_q_blocks + 1}), got {tuple(self.offsets.shape)}")
        _check_rows("blocks", self.offsets, self.blocks, self.n_k_blocks)
        if (self.column_offsets is None) != (self.columns is None):
            raise ValueError("columns and column_offsets come together")
        if self.column_offsets is not None and self.columns is not None:
            groups = self.column_offsets.shape[-1] - 1
            if self.column_offsets.shape[:-1] != self.offsets.shape[:2] or groups not in (1, self.n_q_blocks):
                raise ValueError(f"column_offsets: expected ({self.batch}, {self.heads}, 2 or {self.n_q_blocks + 1}), "
                                 f"got {tuple(self.column_offsets.shape)}")
            _check_rows("columns", self.column_offsets, self.columns, self.k_len)

    # ------------------------------------------------------------------------------------------------ constructors

    @classmethod
    def from_mask(cls, block_mask: Bool[Tensor, "B H NQ NK"], *, q_len: int, k_len: int, q_block: int, k_block: int,
                  columns: Bool[Tensor, "B H S"] | Bool[Tensor, "B H NQ S"] | None = None,
                  causal: bool = True) -> ReadPlan:
        """The plan that reads the blocks where `block_mask` is true, and the `columns` where that is true.

        Blocks that lie wholly after their queries are dropped.
        """
        n_q, n_k = -(-q_len // q_block), -(-k_len // k_block)
        if block_mask.ndim != 4 or block_mask.shape[2:] != (n_q, n_k) or block_mask.dtype != torch.bool:
            raise ValueError(f"block_mask: expected Bool (B, H, {n_q}, {n_k}), got {block_mask.dtype} "
                             f"{tuple(block_mask.shape)}")
        if causal:
            block_mask = block_mask & visible_blocks(q_len, k_len, q_block, k_block, device=block_mask.device)
        offsets, blocks = _compress(block_mask)
        column_offsets = listed = None
        if columns is not None:
            columns = columns if columns.ndim == 4 else columns[:, :, None]
            column_offsets, listed = _compress(columns)
        return cls(q_len, k_len, q_block, k_block, offsets, blocks, column_offsets, listed, causal)

    @classmethod
    def dense(cls, *, q_len: int, k_len: int, q_block: int = 128, k_block: int = 128, batch: int = 1, heads: int = 1,
              causal: bool = True, device: torch.device | str | None = None) -> ReadPlan:
        """The plan of density 1: every pair (every causal pair)."""
        n_q, n_k = -(-q_len // q_block), -(-k_len // k_block)
        mask = torch.ones(batch, heads, n_q, n_k, dtype=torch.bool, device=device)
        return cls.from_mask(mask, q_len=q_len, k_len=k_len, q_block=q_block, k_block=k_block, causal=causal)

    def to(self, device: torch.device | str) -> ReadPlan:
        """The same plan with its tensors on `device`."""
        starts, columns = (None if x is None else x.to(device) for x in (self.column_offsets, self.columns))
        return ReadPlan(self.q_len, self.k_len, self.q_block, self.k_block, self.offsets.to(device),
                        self.blocks.to(device), starts, columns, self.causal)

    # -------------------------------------------------------------------------------------------------------- shape

    @property
    def batch(self) -> int:
        return self.offsets.shape[0]

    @property
    def heads(self) -> int:
        return self.offsets.shape[1]

    @property
    def n_q_blocks(self) -> int:
        return -(-self.q_len // self.q_block)

    @property
    def n_k_blocks(self) -> int:
        return -(-self.k_len // self.k_block)

    @property
    def first_limit(self) -> int:
        """The last key slot the first query may read; query i may read up to ``first_limit + i``."""
        return self.k_len - self.q_len if self.causal else self.k_len - 1

    @property
    def counts(self) -> Int[Tensor, "B H NQ"]:
        """Listed key blocks per query block."""
        return self.offsets.diff(dim=-1)

    def __repr__(self) -> str:
        columns = f", {self.columns.numel()} columns" if self.columns is not None else ""
        return (f"ReadPlan(T={self.q_len}, S={self.k_len}, blocks {self.q_block}x{self.k_block}, B={self.batch}, "
                f"H={self.heads}, {self.blocks.numel()} blocks{columns}, density {self.density:.3f})")

    # -------------------------------------------------------------------------------------------------------- masks

    @functools.cached_property
    def block_map(self) -> Bool[Tensor, "B H NQ NK"]:
        """Which key blocks are listed."""
        return _expand(self.offsets, self.blocks, self.n_k_blocks)

    @property
    def column_map(self) -> Bool[Tensor, "B H G S"] | None:
        """Which single columns are listed, or None."""
        if self.column_offsets is None or self.columns is None:
            return None
        return _expand(self.column_offsets, self.columns, self.k_len)

    def token_mask(self, start: int = 0, stop: int | None = None) -> Bool[Tensor, "B H rows S"]:
        """The pairs computed by query rows `start` to `stop` (all by default), as a mask over tokens."""
        rows = torch.arange(start, self.q_len if stop is None else stop, device=self.offsets.device)
        keys = torch.arange(self.k_len, device=self.offsets.device)
        u = rows // self.q_block
        mask = self.block_map[:, :, u][..., keys // self.k_block]
        columns = self.column_map
        if columns is not None:
            mask = mask | (columns if columns.shape[2] == 1 else columns[:, :, u])
        return mask & (keys <= (self.first_limit + rows)[:, None])

    # ----------------------------------------------------------------------------------------------------- counters

    @functools.cached_property
    def pairs_per_head(self) -> Int[Tensor, "B H"]:
        """Query-key pairs computed, each once."""
        device = self.offsets.device
        begin = torch.arange(self.n_q_blocks, device=device) * self.q_block
        first = self.first_limit + begin
        last = self.first_limit + (begin + self.q_block).clamp(max=self.q_len)  # one past the last row's limit
        row, key = _rows(self.offsets), self.blocks.long()
        u, left = row % self.n_q_blocks, key * self.k_block
        pairs = _pairs(first[u], last[u], left, (left + self.k_block).clamp(max=self.k_len))
        total = _sum_rows(pairs, row // self.n_q_blocks, self.batch * self.heads)
        for at, head, key in self._column_reads():
            fresh = ~self.block_map.flatten(0, 1)[head, at, key // self.k_block]
            seen = (last[at] - torch.maximum(key, first[at])).clamp(min=0) * fresh
            total += _sum_rows(seen, head, total.numel())
        return total.view(self.batch, self.heads)

    def _column_reads(self) -> Iterator[tuple[Tensor | int, Tensor, Tensor]]:
        """(query block, flat head, key) of the column entries; shared columns come one query block at a time."""
        if self.column_offsets is None or self.columns is None:
            return
        groups, row, key = self.column_offsets.shape[-1] - 1, _rows(self.column_offsets), self.columns.long()
        if groups == self.n_q_blocks:
            yield row % groups, row // groups, key
        else:
            yield from ((u, row, key) for u in range(self.n_q_blocks))

    @property
    def pairs(self) -> int:
        """Query-key pairs computed over the plan's batch rows and heads."""
        return int(self.pairs_per_head.sum())

    @property
    def full_pairs(self) -> int:
        """Pairs that one head of dense attention computes."""
        limits = self.first_limit + torch.arange(1, self.q_len + 1)
        return int(limits.clamp(max=self.k_len).sum())

    @property
    def density_per_head(self) -> Float[Tensor, "B H"]:
        """Pairs computed over pairs that dense attention computes."""
        return self.pairs_per_head.double() / self.full_pairs

    @property
    def density(self) -> float:
        """`density_per_head`, over all heads together."""
        return self.pairs / (self.full_pairs * self.batch * self.heads)

    def recall(self, q: Float[Tensor, "B Hq T D"], k: Float[Tensor, "B Hkv S D"], *, scale: float | None = None,
               valid: Bool[Tensor, "B S"] | None = None, first_row: int = 0) -> Float[Tensor, "B Hq"]:
        """Share of the true attention weight that the plan's pairs hold, averaged over query rows from `first_row` on.

        `scale` defaults to 1/sqrt(D); `valid` is false for padding, whose keys and queries don't count. Float32, in
        strips of rows, so long inputs fit.
        """
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        keys = repeat_heads(k, q.shape[1]).float()
        limit = self.first_limit + torch.arange(self.q_len, device=q.device)
        slots = torch.arange(self.k_len, device=q.device)
        own = torch.ones_like(q[:, 0, :, 0], dtype=torch.bool) if valid is None else valid[:, self.k_len - self.q_len:]
        kept = q.new_zeros(q.shape[:2], dtype=torch.float32)
        for start in range(first_row, self.q_len, RECALL_ROWS):
            rows = slice(start, min(start + RECALL_ROWS, self.q_len))
            logits = q[:, :, rows].float() @ keys.mT * scale
            see = slots <= limit[rows, None]
            see = see[None, None] if valid is None else see & valid[:, None, None]
            weights = logits.masked_fill(~see, -torch.inf).softmax(-1)
            read = repeat_heads(self.token_mask(rows.start, rows.stop), q.shape[1])
            share = weights.masked_fill(~read, 0.0).sum(-1)
            kept += share.masked_fill(~own[:, None, rows], 0.0).sum(-1)
        return kept / own[:, first_row:].sum(-1, keepdim=True).clamp(min=1)


# ------------------------------------------------------------------------------------------------------ block geometry


def visible_blocks(q_len: int, k_len: int, q_block: int, k_block: int, *,
                   device: torch.device | str | None = None) -> Bool[Tensor, "NQ NK"]:
    """Key blocks of which at least one key is not after the query block's last row."""
    _, last = query_slots(q_len, k_len, q_block, device=device)
    return torch.arange(-(-k_len // k_block), device=device) * k_block <= last[:, None]


def forced_blocks(q_len: int, k_len: int, q_block: int, k_block: int, *, sink: int = 1, window: int = 1,
                  first: Int[Tensor, " B"] | int = 0, device: torch.device | str | None = None
                  ) -> Bool[Tensor, "NQ NK"] | Bool[Tensor, "B 1 NQ NK"]:
    """Visible key blocks that hold one of the first `sink` keys or, for any query of the block, of its last `window`.

    ``window=1`` is the diagonal, 0 nothing. `first` is the first slot that isn't padding, one number or one per batch
    row: the sink starts there.
    """
    begin, last = query_slots(q_len, k_len, q_block, device=device)
    left = torch.arange(-(-k_len // k_block), device=device) * k_block
    right = left + k_block - 1
    local = (right > (begin - window)[:, None]) & (left <= last[:, None]) & (window > 0)
    start = first[:, None, None, None] if isinstance(first, Tensor) else first
    sinks = (left < start + sink) & (right >= start) & (sink > 0)
    return (local | sinks) & (left <= last[:, None])


def query_slots(q_len: int, k_len: int, q_block: int, *, device: torch.device | str | None = None
                ) -> tuple[Int[Tensor, " NQ"], Int[Tensor, " NQ"]]:
    """First and last key slot of each query block's rows."""
    begin = torch.arange(0, q_len, q_block, device=device)
    return k_len - q_len + begin, k_len - q_len + (begin + q_block).clamp(max=q_len) - 1


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """(B,H,...) -> (B,heads,...): each of the H heads stands heads/H times in a row."""
    return x if x.shape[1] in (1, heads) else x.repeat_interleave(heads // x.shape[1], 1)


# --------------------------------------------------------------------------------------------------- compressed rows


def _compress(mask: Bool[Tensor, "B H R N"]) -> tuple[Tensor, Tensor]:
    counts = mask.sum(-1)
    ends = counts.flatten().cumsum(0).view_as(counts)
    starts = ends[..., :1] - counts[..., :1]
    return torch.cat((starts, ends), -1), mask.nonzero()[:, -1].int()


def _expand(offsets: Tensor, items: Tensor, size: int) -> Tensor:
    b, h, rows = offsets.shape
    mask = torch.zeros(b * h * (rows - 1), size, dtype=torch.bool, device=offsets.device)
    mask[_rows(offsets), items.long()] = True
    return mask.view(b, h, rows - 1, size)


def _rows(offsets: Tensor) -> Tensor:
    """The flat row of each item."""
    counts = offsets.diff(dim=-1).flatten()
    return torch.repeat_interleave(torch.arange(counts.numel(), device=offsets.device), counts)


def _sum_rows(values: Tensor, rows: Tensor, n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.long, device=values.device).index_add_(0, rows, values)


def _pairs(first: Tensor, last: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Pairs of rows with limits first, first+1, …, last-1 and keys left … right-1 not after the limit."""
    size = right - left

    def before(limit: Tensor) -> Tensor:  # rows with a limit below `limit`, the limits counted from 0
        n = (limit - left).clamp(min=0)
        inside = torch.minimum(n, size)
        return inside * (inside + 1) // 2 + (n - inside) * size

    return before(last) - before(first)


def _check_rows(name: str, offsets: Tensor, items: Tensor, size: int) -> None:
    """Compressed rows must lie one after the other and hold ascending numbers below `size`."""
    if offsets.dtype != torch.int64 or items.dtype != torch.int32 or items.ndim != 1:
        raise ValueError(f"{name}: expected int64 offsets and int32 numbers in one row, got {offsets.dtype}, "
                         f"{items.dtype} {tuple(items.shape)}")
    flat = offsets.flatten(0, 1)
    joined = bool((offsets.diff(dim=-1) >= 0).all()) and bool((flat[1:, 0] == flat[:-1, -1]).all())
    if not joined or int(flat[0, 0]) != 0 or int(flat[-1, -1]) != items.numel():
        raise ValueError(f"{name}: offsets must run from 0 to {items.numel()} without gaps")
    if not items.numel():
        return
    if int(items.min()) < 0 or int(items.max()) >= size:
        raise ValueError(f"{name}: expected numbers in 0..{size - 1}, got {int(items.min())}..{int(items.max())}")
    same_row = _rows(offsets).diff() == 0
    if bool((same_row & (items.diff() <= 0)).any()):
        raise ValueError(f"{name}: expected ascending numbers in each row, each once")

"""What selectors share: the context they read, the interface they fill, and the arithmetic over blocks.

Blocks are counted from the chunk's first query and from key slot 0. Padding (``valid`` false) never enters a mean, a
softmax or a plan. Ties are always broken by the lower index, so a plan depends on nothing but its input.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longspan.kernels.plan import ReadPlan, forced_blocks, repeat_heads, visible_blocks
from longspan.registry import Method

WIDENED = 1 << 19
"""Elements that are widened to float32 at once, so that they fit a core's cache."""


@dataclasses.dataclass(frozen=True)
class ReadContext:
    """One layer's attention call. The T queries stand at the last T of S slots; q and k are rotated already.

    `valid` is false for padding slots. `q_pre_rope` gives the queries before rotary positions, for those who ask.
    """

    q: Float[Tensor, "B Hq T D"]
    k: Float[Tensor, "B Hkv S D"]
    v: Float[Tensor, "B Hkv S D"]
    scale: float
    layer: int = 0
    n_layers: int = 1
    valid: Bool[Tensor, "B S"] | None = None
    q_pre_rope: Callable[[], Float[Tensor, "B Hq T D"]] | None = None
    parts: Any = None
    """The model's `Parts`, for methods that have settings of their own for every model."""

    @property
    def q_len(self) -> int:
        return self.q.shape[2]

    @property
    def k_len(self) -> int:
        return self.k.shape[2]

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def causal_pairs(self) -> float:
        """Pairs that dense attention computes, over all rows and heads."""
        rows, keys = self.q_len, self.k_len
        return self.q.shape[0] * self.heads * (rows * (keys - rows) + rows * (rows + 1) / 2)

    @property
    def valid_queries(self) -> Bool[Tensor, "B T"] | None:
        return None if self.valid is None else self.valid[:, self.k_len - self.q_len:]


class Selector(Method):
    """Chooses the query-key pairs of a prompt. Subclasses implement `select` and may raise `dense_until`."""

    block: int

    def plan(self, x: ReadContext) -> ReadPlan:
        """The pairs to compute for `x`: dense when there is too little to choose from.

        Raises ValueError for shapes that don't fit and for NaN or infinite queries or keys.
        """
        check_context(x)
        if x.q_len <= 2 * self.block or x.k_len <= self.dense_until:
            return dense_plan(x, self.block)
        return self.select(x)

    @property
    def dense_until(self) -> int:
        """Up to this many keys the plan is dense, whatever the knobs say."""
        return 0

    def select(self, x: ReadContext) -> ReadPlan:
        """The plan of a prompt that is long enough; override this."""
        raise NotImplementedError


class TokenSubset(Method):
    """Chooses, per query head, which tokens take part in a layer at all. Subclasses implement `choose`."""

    def choose(self, x: ReadContext) -> Int[Tensor, "B Hq N"] | None:
        """Slots that take part, ascending in every row and head; None where all do.

        Called for whole prompts (T = S). Raises ValueError for NaN or infinite scores.
        """
        raise NotImplementedError


def check_context(x: ReadContext) -> None:
    """Raise ValueError for shapes that don't fit together, an empty prompt, NaN or infinity."""
    q, k = x.q, x.k
    fits = q.ndim == k.ndim == 4 and x.v.shape[:3] == k.shape[:3] and q.shape[::3] == k.shape[::3]
    if not fits or q.shape[1] % k.shape[1] or not 1 <= q.shape[2] <= k.shape[2]:
        raise ValueError(f"expected q (B,Hq,T,D), k and v (B,Hkv,S,D) with Hq a multiple of Hkv and 1 <= T <= S, got q "
                         f"{tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(x.v.shape)}")
    if x.valid is not None and (x.valid.shape != (k.shape[0], k.shape[2]) or x.valid.dtype != torch.bool):
        raise ValueError(f"valid: expected Bool {(k.shape[0], k.shape[2])}, got {x.valid.dtype} {tuple(x.valid.shape)}")
    for name, values in (("q", q), ("k", k)):
        # Sums run in float32 whatever the dtype; asking for a float32 result would make a float32 copy first. The sum of
        # float16 numbers may be too large for float16.
        total = values.sum(dtype=torch.float32 if values.dtype == torch.float16 else None)
        if not bool(torch.isfinite(total)):
            raise ValueError(f"{name} holds NaN or infinite numbers")


# ------------------------------------------------------------------------------------------------------------- plans


def dense_plan(x: ReadContext, block: int) -> ReadPlan:
    """Every causal pair of `x`."""
    return ReadPlan.dense(q_len=x.q_len, k_len=x.k_len, q_block=block, k_block=block, device=x.q.device)


def plan_from_blocks(x: ReadContext, chosen: Bool[Tensor, "#B #H NQ NK"], block: int, *, sink: int = 1,
                     window: int = 1, columns: Bool[Tensor, "B H S"] | None = None) -> ReadPlan:
    """The plan of the `chosen` blocks, with the sink and the last `window` keys of every query forced into it."""
    mask = (chosen | forced(x, block, sink=sink, window=window)) & readable(x, block)
    return ReadPlan.from_mask(mask, q_len=x.q_len, k_len=x.k_len, q_block=block, k_block=block, columns=columns)


def forced(x: ReadContext, block: int, *, sink: int = 1, window: int = 1) -> Bool[Tensor, "#B 1 NQ NK"]:
    """Blocks with the first `sink` tokens (after left padding) or the last `window` of each query, its own included."""
    first = 0 if x.valid is None else x.valid.int().argmax(-1)
    mask = forced_blocks(x.q_len, x.k_len, block, block, sink=sink, window=window, first=first, device=x.q.device)
    return mask if mask.ndim == 4 else mask[None, None]


def readable(x: ReadContext, block: int) -> Bool[Tensor, "#B 1 NQ NK"]:
    """Blocks with at least one key that is no padding and not after the query block's last row."""
    seen = visible_blocks(x.q_len, x.k_len, block, block, device=x.q.device)[None, None]
    return seen if x.valid is None else seen & in_blocks(x.valid, block).any(-1)[:, None, None]


# ------------------------------------------------------------------------------------------------------------- blocks


def in_blocks(x: Tensor, block: int) -> Tensor:
    """(..., L) -> (..., N, block): the last axis cut into blocks, the last one filled up with zeros."""
    return F.pad(x, (0, -x.shape[-1] % block)).unflatten(-1, (-1, block))


def pooled(x: Float[Tensor, "B H L D"], block: int, valid: Bool[Tensor, "B L"] | None = None
           ) -> Float[Tensor, "B H N D"]:
    """Block means in float32 over the rows that are no padding; blocks of padding alone become 0."""
    real = torch.ones(1, x.shape[2], dtype=torch.bool, device=x.device) if valid is None else valid
    return block_sums(x, block, valid) / in_blocks(real, block).sum(-1).clamp(min=1)[:, None, :, None]


def block_sums(x: Float[Tensor, "B H L D"], block: int, valid: Bool[Tensor, "B L"] | None = None
               ) -> Float[Tensor, "B H N D"]:
    """Sums over blocks of rows in float32, without the rows that are padding.

    On a CPU a few blocks at a time: a sum whose dtype isn't the input's widens its input first, here within the caches.
    """
    B, H, L, D = x.shape
    step = max(1, WIDENED // (B * H * block * D)) * block if x.device.type == "cpu" else L
    sums = []
    for start in range(0, L, step):
        rows = x[:, :, start : start + step]
        if valid is not None:
            rows = rows.masked_fill(~valid[:, None, start : start + step, None], 0.0)
        if rows.shape[2] % block:
            rows = F.pad(rows, (0, 0, 0, -rows.shape[2] % block))
        sums.append(rows.unflatten(2, (-1, block)).sum(3, dtype=torch.float32))
    return torch.cat(sums, 2)


def pooled_map(x: ReadContext, block: int) -> Float[Tensor, "B Hq NQ NK"]:
    """softmax_v(mean(Q_u) . mean(K_v) * scale) over the readable blocks of each row."""
    queries = pooled(x.q, block, x.valid_queries)
    keys = repeat_heads(pooled(x.k, block, x.valid), x.heads)
    return masked_softmax(queries @ keys.mT * x.scale, readable(x, block))


def masked_softmax(logits: Tensor, mask: Tensor) -> Tensor:
    """Softmax over the last axis where `mask` is true; rows without any become 0."""
    return torch.nan_to_num(logits.masked_fill(~mask, -torch.inf).softmax(-1), nan=0.0)


def keep_top_p(weights: Float[Tensor, "... N"], p: float, first: Bool[Tensor, "... N"] | None = None
               ) -> Bool[Tensor, "... N"]:
    """The smallest set, `first` and then by falling weight, that holds at least `p` of each row's sum.

    p = 1 keeps everything; a row that sums to 0 keeps only `first`.
    """
    if p >= 1:
        return torch.ones_like(weights, dtype=torch.bool)
    return keep_mass(weights, p * weights.sum(-1), first)


def keep_mass(weights: Float[Tensor, "... N"], mass: Float[Tensor, ...], first: Bool[Tensor, "... N"] | None = None
              ) -> Bool[Tensor, "... N"]:
    """The smallest set, `first` and then by falling weight, that holds `mass` of each row; all where a row has less."""
    lifted = weights if first is None else weights.masked_fill(first, torch.inf)
    ranked, order = lifted.sort(dim=-1, descending=True, stable=True)
    if first is not None:
        ranked = weights.gather(-1, order)
    kept = ranked.cumsum(-1) - ranked < mass[..., None]
    kept = torch.empty_like(kept).scatter_(-1, order, kept)
    return kept if first is None else kept | first


def keep_top_k(weights: Float[Tensor, "... N"], k: int | Tensor) -> Bool[Tensor, "... N"]:
    """The `k` largest of each row: one number, or a tensor (...) with one per row."""
    if isinstance(k, Tensor):
        order = weights.sort(dim=-1, descending=True, stable=True).indices
        rank = torch.arange(weights.shape[-1], device=weights.device)
        return torch.zeros_like(weights, dtype=torch.bool).scatter(-1, order, (rank < k[..., None]).expand_as(order))
    if not 0 < k < weights.shape[-1]:
        return torch.full_like(weights, k > 0, dtype=torch.bool)
    # Finding the k-th largest is much faster than sorting; of those equal to it the first ones are taken.
    least = weights.topk(k, dim=-1).values[..., -1:]
    above, level = weights > least, weights == least
    return above | (level & (level.cumsum(-1) <= k - above.sum(-1, keepdim=True)))


# --------------------------------------------------------------------------------------------------------- exact rows


def attention_rows(x: ReadContext, at: Int[Tensor, " n"], seen: int, keys: Float[Tensor, "B Hkv D S"] | None = None
                   ) -> Float[Tensor, "B Hq n seen"]:
    """Exact attention weights of the query rows `at` over the first `seen` keys, float32; rows of padding are 0.

    `keys` are those of `x` in float32, transposed, for callers that ask more than once.
    """
    B, heads, _, D = x.q.shape
    keys = x.k.float().mT if keys is None else keys
    queries = (x.q[:, :, at].float() * x.scale).reshape(B, x.k.shape[1], -1, D)
    logits = (queries @ keys[..., :seen]).view(B, heads, len(at), seen)
    own = x.k_len - x.q_len + at
    first = int(own[0]) + 1  # earlier keys are open to every row
    logits[..., first:].masked_fill_(torch.arange(first, seen, device=at.device) > own[:, None], -torch.inf)
    if x.valid is None:
        return logits.softmax(-1)
    weights = logits.masked_fill_(~x.valid[:, None, None, :seen], -torch.inf).softmax(-1)
    return torch.nan_to_num(weights, nan=0.0).masked_fill(~x.valid[:, None, own, None], 0.0)


def last_rows_attention(x: ReadContext, rows: int) -> Float[Tensor, "B Hq rows S"]:
    """Exact attention weights of the last `rows` queries (all of them if there are fewer), float32.

    Rows of padding are 0.
    """
    return attention_rows(x, torch.arange(max(0, x.q_len - rows), x.q_len, device=x.q.device), x.k_len)


def diagonal_sums(attention: Float[Tensor, "B H rows S"]) -> Float[Tensor, "B H S"]:
    """Sums of the last rows' attention along each diagonal; entry o adds what queries give to the key o before them."""
    rows, S = attention.shape[-2:]
    # Read with rows one longer than they are, each row starts one key later than the one above: diagonals are columns.
    padded = F.pad(attention, (rows, 0))
    b, h, r, one = padded.stride()
    sheared = padded.as_strided((*attention.shape[:2], rows, S), (b, h, r + one, one), 1)
    return sheared.sum(-2).flip(-1)

"""Reading a prompt's rows: a selector says which pairs, token subsets say which tokens, one executor computes them.

A subset gathers, per head, the queries, keys and values of its tokens; they keep their order, so the plain causal rule
stays right, and rotary phases, which are in them already. Whatever stands below (another subset, a selector, dense
attention) sees a shorter prompt with as many key heads as query heads. The result is written back to the full length:
tokens left out get 0, that is no attention update in this layer, and may be chosen again in the next.

How many tokens a subset keeps may differ between the rows of a batch, so each row is then read by itself, without its
padding: it gets what it would get alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longspan.kernels.attend import attend
from longspan.kernels.block_sparse import block_sparse_attention
from longspan.kernels.gather import put_tokens, take_tokens
from longspan.prefill.base import ReadContext, Selector, TokenSubset, check_context, dense_plan

DENSE_BLOCK = 128
Slots = slice | Tensor
Read = tuple[Float[Tensor, "B Hq T D"], float]


@dataclass
class PairCount:
    """Query-key pairs computed while reading prompts, against causal attention's."""

    computed: float = 0.0
    causal: float = 0.0

    @property
    def density(self) -> float:
        return self.computed / self.causal if self.causal else 1.0


def read_rows(x: ReadContext, selector: Selector | None, subsets: Sequence[TokenSubset] = ()) -> Read:
    """Attention of the rows of `x` as selector and subsets have it, and the number of query-key pairs computed.

    Subsets apply one inside the other, the last one first. Rows that follow on what was read before (T < S: a question
    about a text, a later piece of a prompt) have no subsets: which tokens take part is chosen for whole prompts. Where
    nothing is left out, the result is the plain model's, bit for bit. Padding rows are 0.

    Raises ValueError for shapes that don't fit together, for NaN or infinity, and for a subset's tokens out of order.
    """
    check_context(x)
    return _read(x, selector, tuple(subsets), short=False)


def _read(x: ReadContext, selector: Selector | None, subsets: tuple[TokenSubset, ...], short: bool) -> Read:
    """`short`: some tokens were left out already."""
    if subsets and x.q_len == x.k_len:
        return _with_subset(x, selector, subsets, short)
    if selector is None and not short:
        return _dense(x)
    plan = dense_plan(x, DENSE_BLOCK) if selector is None else selector.plan(x)
    if selector is None and x.q.device.type != "cpu":
        out, _ = attend(x.q, x.k, x.v, scale=x.scale, return_lse=False)
    else:
        out = block_sparse_attention(x.q, x.k, x.v, plan, scale=x.scale, valid=x.valid)
    # A plan may speak for all rows and heads at once, so its share counts, not its own number of pairs.
    return out, plan.density * x.causal_pairs


def _dense(x: ReadContext) -> Read:
    """The very call of attention that the model makes without a recipe."""
    if x.valid is not None:
        return _row_by_row(x, [_dense] * len(x.q))
    return attend(x.q, x.k, x.v, scale=x.scale, return_lse=False)[0], x.causal_pairs


# ----------------------------------------------------------------------------------------------------------- subsets


def _with_subset(x: ReadContext, selector: Selector | None, subsets: tuple[TokenSubset, ...], short: bool) -> Read:
    """Attention among the tokens that the last of `subsets` chooses, row by row where it chooses any."""
    *rest, subset = subsets
    others = tuple(rest)
    rows = [subset.choose(row) for row, _, _ in _rows(x)]
    if all(kept is None for kept in rows):
        return _read(x, selector, others, short)

    def reader(kept: Int[Tensor, "1 Hq N"] | None) -> Callable[[ReadContext], Read]:
        if kept is None:
            return lambda row: _read(row, selector, others, short)
        return lambda row: _within(row, kept, selector, others)

    return _row_by_row(x, [reader(kept) for kept in rows])


def _within(x: ReadContext, kept: Int[Tensor, "B Hq N"], selector: Selector | None, subsets: tuple[TokenSubset, ...]
            ) -> Read:
    """Attention among the `kept` tokens of every head, at its full length."""
    _check_kept(kept, x)
    if not kept.shape[-1]:
        return torch.zeros_like(x.q), 0.0
    q, k, v = (take_tokens(t, kept) for t in (x.q, x.k, x.v))
    before = x.q_pre_rope
    unrotated = None if before is None else lambda: take_tokens(before(), kept)
    out, pairs = _read(replace(x, q=q, k=k, v=v, valid=None, q_pre_rope=unrotated), selector, subsets, short=True)
    return put_tokens(out, kept, x.q_len), pairs


def _check_kept(kept: Tensor, x: ReadContext) -> None:
    """Tokens out of order would be read against the causal rule."""
    if kept.ndim != 3 or kept.shape[:2] != x.q.shape[:2] or kept.dtype != torch.int64:
        raise ValueError(f"a subset chose {kept.dtype} {tuple(kept.shape)}; expected int64 {(*x.q.shape[:2], 'N')}")
    if not bool((kept.diff(dim=-1) > 0).all()):
        raise ValueError("a subset chose tokens out of order or twice; expected ascending slots in every row and head")


# -------------------------------------------------------------------------------------------------------- single rows


def _rows(x: ReadContext) -> Iterator[tuple[ReadContext, Slots, int]]:
    """Every row of the batch alone, without padding: the row, its own queries' places among T, and its number.

    Rows without a token among the T are left out.
    """
    if x.valid is None and len(x.q) == 1:
        yield x, slice(None), 0
        return
    for b in range(len(x.q)):
        keys, queries = (slice(None), slice(None)) if x.valid is None else _real(x.valid[b], x.q_len)
        if isinstance(queries, Tensor) and not len(queries):
            continue
        before, own = x.q_pre_rope, slice(b, b + 1)
        unrotated = None if before is None else _part(before, own, queries)
        yield replace(x, q=x.q[own, :, queries], k=x.k[own, :, keys], v=x.v[own, :, keys], valid=None,
                      q_pre_rope=unrotated), queries, b


def _part(before: Callable[[], Tensor], row: slice, queries: Slots) -> Callable[[], Tensor]:
    return lambda: before()[row, :, queries]


def _real(valid: Tensor, q_len: int) -> tuple[Slots, Slots]:
    """Places of the real keys among S and of the real queries among T; slices, which need no copy, where they can be."""
    return _places(valid), _places(valid[len(valid) - q_len :])


def _places(real: Tensor) -> Slots:
    at = real.nonzero()[:, 0]
    whole = len(at) and int(at[-1]) + 1 - int(at[0]) == len(at)
    return slice(int(at[0]), int(at[-1]) + 1) if whole else at


def _row_by_row(x: ReadContext, readers: Sequence[Callable[[ReadContext], Read]]) -> Read:
    """Each row of `_rows` read by its own reader."""
    found = [(queries, b, reader(row)) for (row, queries, b), reader in zip(_rows(x), readers)]
    if len(found) == len(x.q) == 1 and found[0][2][0].shape == x.q.shape:
        return found[0][2]
    B, heads, T, D = x.q.shape
    out = x.q.new_zeros(B, T, heads, D).transpose(1, 2)  # the layout that the output projection reads
    for queries, b, (part, _) in found:
        out[b, :, queries] = part[0]
    return out, sum(pairs for _, _, (_, pairs) in found)


__all__ = ["put_tokens", "read_rows", "take_tokens"]

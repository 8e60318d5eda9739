"""Reading a prompt's rows: a selector says which pairs, token subsets say which tokens, one executor computes them.

A subset gathers, per head, the queries, keys and values of its tokens; they keep their order, so the plain causal rule
stays right, and rotary phases, which are in them already. Whatever stands below (another subset, a selector, dense
attention) sees a shorter prompt with as many key heads as query heads. The result is written back to the full length:
tokens left out get 0, that is no attention update in this layer, and may be chosen again in the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longspan.kernels.block_sparse import block_sparse_attention
from longspan.kernels.plan import repeat_heads
from longspan.prefill.base import ReadContext, Selector, TokenSubset, check_context, dense_plan

DENSE_BLOCK = 128


def read_rows(x: ReadContext, selector: Selector | None, subsets: Sequence[TokenSubset] = ()
              ) -> tuple[Float[Tensor, "B Hq T D"], float]:
    """Attention of the rows of `x` as selector and subsets have it, and the number of query-key pairs computed.

    Subsets apply one inside the other, the last one first. A prompt that comes in pieces (T < S) has no subsets: which
    tokens take part is only known at its end.
    """
    if subsets and x.q_len == x.k_len:
        kept = subsets[-1].choose(x)
        if kept is not None:
            return _within(x, kept, selector, subsets[:-1])
        return read_rows(x, selector, subsets[:-1])
    if selector is None:
        check_context(x)
        plan = dense_plan(x, DENSE_BLOCK)
    else:
        plan = selector.plan(x)
    out = block_sparse_attention(x.q, x.k, x.v, plan, scale=x.scale, valid=x.valid)
    # A plan may speak for all rows and heads at once, so its share counts, not its own number of pairs.
    return out, plan.density * x.causal_pairs


def _within(x: ReadContext, kept: Int[Tensor, "B Hq N"], selector: Selector | None, subsets: Sequence[TokenSubset]
            ) -> tuple[Float[Tensor, "B Hq T D"], float]:
    """Attention among the `kept` tokens of every head, at its full length."""
    if not kept.shape[-1]:
        return torch.zeros_like(x.q), 0.0
    q, k, v = (take_tokens(repeat_heads(t, x.heads), kept) for t in (x.q, x.k, x.v))
    out, pairs = read_rows(replace(x, q=q, k=k, v=v, valid=None, q_pre_rope=None), selector, subsets)
    return put_tokens(out, kept, x.q_len), pairs


def take_tokens(t: Float[Tensor, "B H S D"], kept: Int[Tensor, "B H N"]) -> Float[Tensor, "B H N D"]:
    """The rows `kept` of every head."""
    return t.gather(2, kept[..., None].expand(-1, -1, -1, t.shape[-1]))


def put_tokens(t: Float[Tensor, "B H N D"], kept: Int[Tensor, "B H N"], length: int) -> Float[Tensor, "B H L D"]:
    """Rows written back to where `kept` took them from; the others are 0."""
    whole = t.new_zeros(*t.shape[:2], length, t.shape[-1])
    return whole.scatter(2, kept[..., None].expand(-1, -1, -1, t.shape[-1]), t)


__all__ = ["put_tokens", "read_rows", "take_tokens"]

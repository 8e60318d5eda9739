"""The queries of a sequence's last tokens, when nobody noted them while the prompt was read.

The tokens are read once more at their own positions, over the keys of all that came before them and their own new ones.
Then everything is taken back: the cache is what it was, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from longspan.cache import AnyPolicy, RecipeCache, fork
from longspan.cache.watch import QueryWindow
from longspan.decoding.base import Target
from longspan.decoding.sparse_verify import attend_selected
from longspan.models.call import LayerCall
from longspan.models.hook import cache_keyword
from longspan.registry import Method, Refused


def check_whole(target: Target, method: Method) -> RecipeCache:
    """The target's cache, which must hold every token of its one row.

    Raises:
        Refused: another kind of cache, one that evicts, padding, or a batch.
    """
    cache = target.cache
    if not isinstance(cache, RecipeCache):
        raise Refused(f"{method}: the target's cache is a {type(cache).__name__}; expected one made by a recipe's run.")
    if cache.policies or not all(layer.store.untouched for layer in cache.policy_layers):
        what = cache.policies[0] if cache.policies else "something"
        raise Refused(f"{method} works beside a cache that keeps everything, and {what} changes it; leave that out of the "
                      "recipe.")
    rows = max((layer.store.lengths().shape[0] for layer in cache.policy_layers if layer.seen), default=1)
    if rows > 1 or any(layer.pads is not None for layer in cache.policy_layers):
        raise Refused(f"{method} works on one sequence without padding, and this cache holds {rows} rows"
                      f"{'' if rows > 1 else ', padded'}; expected the tokens of one text alone.")
    return cache


@contextmanager
def reading(cache: RecipeCache, reads: Any) -> Iterator[None]:
    """Let `reads` answer the cache's attention calls inside the block."""
    before = cache.reads
    cache.reads = reads
    try:
        yield
    finally:
        cache.reads = before


@torch.inference_mode()
def recent_queries(target: Target, rows: int) -> dict[int, Float[Tensor, "1 Hq w D"]]:
    """Queries of the last `rows` tokens (all, if there are fewer) that the target's cache has read, by layer.

    Layers that keep a sliding window of their own give none. Costs one forward over those tokens.
    """
    cache, N = target.cache, target.cache.get_seq_length()
    rows = min(rows, N)
    found: dict[int, Tensor] = {}

    def look(call: LayerCall, q: Tensor, positions: Tensor, store: Any) -> Tensor:
        found[call.layer] = q
        before = torch.arange(N - rows, device=q.device)
        window = call.window if call.window is not None and call.window < N else None
        return attend_selected(q, store.tail.keys, store.tail.values, before, positions, scale=call.scale, window=window,
                               softcap=call.softcap)

    point = cache.snapshot()
    try:
        with reading(cache, look):
            ids = torch.tensor([target.ids[N - rows : N]], device=target.device)
            at = torch.arange(N - rows, N, device=target.device)[None]
            target.model(input_ids=ids, position_ids=at, **{cache_keyword(target.model): cache}, use_cache=True,
                         logits_to_keep=1)
    finally:
        cache.restore(point)
    return found


@torch.inference_mode()
def compressed_twin(target: Target, policy: AnyPolicy) -> RecipeCache:
    """A cache compressed by `policy`, made of the target's: nothing but the policy's query window is read again."""
    cache, rows = target.cache, policy.window_rows()
    queries = recent_queries(target, rows) if rows else {}
    point, N = cache.snapshot(), cache.get_seq_length()
    try:
        for layer in cache.policy_layers:
            if layer.layer in queries:
                q = queries[layer.layer]
                at = torch.arange(N - q.shape[2], N, device=q.device)[None]
                layer.watch = QueryWindow(rows)
                layer.watch.load({"q": q, "positions": at, "valid": torch.ones_like(at, dtype=torch.bool)})
        return fork(cache, policy)
    finally:
        cache.restore(point)

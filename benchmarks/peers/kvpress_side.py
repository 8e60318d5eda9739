"""The comparison's other side: kvpress, in an environment of its own. See `side` for the protocol."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import kvpress
import side
import torch
from torch import Tensor
from transformers import DynamicCache

PRESSES = {"snapkv": kvpress.SnapKVPress, "knorm": kvpress.KnormPress, "streaming-llm": kvpress.StreamingLLMPress,
           "tova": kvpress.TOVAPress, "keydiff": kvpress.KeyDiffPress}
"""With their defaults: SnapKV watches 64 queries and pools over 5, StreamingLLM keeps 4 sinks."""


@contextlib.contextmanager
def method(model: Any, ids: Tensor, name: str, ratio: float, record: bool) -> Iterator[side.Opened]:
    cache = DynamicCache()
    if name == side.DENSE:
        yield side.Opened(cache)
        return
    press = PRESSES[name](compression_ratio=ratio)
    seen = _spy(press) if record else []
    with press(model):
        yield side.Opened(cache, lambda: _kept(seen, cache))


def _spy(press: Any) -> list[tuple[Tensor, Tensor]]:
    """Note the scores of every layer and the keys they are for."""
    seen: list[tuple[Tensor, Tensor]] = []
    score = press.score

    def noting(module: Any, hidden: Tensor, keys: Tensor, *rest: Any) -> Tensor:
        found = score(module, hidden, keys, *rest)
        seen.append((found, keys))
        return found

    press.score = noting
    return seen


def _kept(seen: list[tuple[Tensor, Tensor]], cache: DynamicCache) -> dict[str, Tensor]:
    """Which entries a press kept: its own top-k over again, checked against the keys that the cache really holds."""
    kept = []
    for (scores, keys), layer in zip(seen, cache.layers, strict=True):
        index = scores.topk(layer.keys.shape[2], dim=-1).indices
        if not torch.equal(keys.gather(2, index[..., None].expand(*index.shape, keys.shape[-1])), layer.keys):
            raise RuntimeError("the cache doesn't hold the keys that the press's scores choose.")
        kept.append(index[0].sort(-1).values.int())
    return {"kept": torch.stack(kept), "scores": torch.stack([scores[0].float() for scores, _ in seen])}


if __name__ == "__main__":
    side.main(method, {"kvpress": version("kvpress")})

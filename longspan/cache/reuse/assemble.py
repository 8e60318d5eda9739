"""Joining caches of documents that were read alone into the cache of one context.

Rotary positions add up: a key turned to position p and turned on by d stands at p + d. So the keys of a document that
begins at position g of the context are turned on by g, once, and its values are taken as they are. Where the model
scales its rotations (YaRN), the scale is already in the stored keys and is divided out of the second turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longspan.cache.reuse.document import DocumentCache, rotary_digest, settle
from longspan.models.parts import Parts
from longspan.registry import Refused


@dataclass(frozen=True, eq=False)
class Piece:
    """One stretch of a context with its cache. Pieces follow each other without a gap."""

    cache: DocumentCache
    known: bool = True
    """Whether its cache was there before this request. What was not is recomputed whole, at no cost to the budget."""
    is_document: bool = True
    """False for words between documents, which are recomputed as well."""


@dataclass(frozen=True, eq=False)
class Assembled:
    """A context joined from caches: nothing in a document has seen what stands before it."""

    ids: Int[Tensor, " N"]
    k: Float[Tensor, "L H N D"]
    v: Float[Tensor, "L H N D"]
    prefix: int
    """Tokens at the front whose cache is exact."""
    documents: tuple[tuple[int, int], ...]
    """Where documents start and end, the prefix apart."""
    eligible: Bool[Tensor, " N"]
    """What a method may choose: tokens of documents whose cache was known."""
    stale: Bool[Tensor, " N"]
    """What is recomputed whatever the method chooses."""
    rotary: str = ""

    def __len__(self) -> int:
        return len(self.ids)


def assemble(parts: Parts, model: str, prefix: DocumentCache | None, pieces: Sequence[Piece]) -> Assembled:
    """Join a prefix and pieces in the order given.

    Args:
        model: fingerprint of the model that goes on from here.
        prefix: stands first and was read alone, so that its cache is exact.

    Raises:
        Refused: nothing to join, or a cache was made by another model, in another dtype, or with other rotary positions.
    """
    caches = [*([prefix] if prefix is not None else []), *(p.cache for p in pieces)]
    if not caches:
        raise Refused("there is nothing to join; expected at least one document.")
    settle(parts.model)
    rotary = rotary_digest(parts)
    for cache in caches:
        _check(cache, parts, model, rotary)
    starts = torch.tensor([0, *(len(c) for c in caches)]).cumsum(0).tolist()
    device = parts.decoder.get_input_embeddings().weight.device
    k = torch.cat([moved(parts, c.k.to(device), start) for c, start in zip(caches, starts)], 2)
    v = torch.cat([c.v.to(device) for c in caches], 2)
    N, first = starts[-1], 0 if prefix is None else len(prefix)
    eligible, stale = (torch.zeros(N, dtype=torch.bool, device=device) for _ in range(2))
    documents = []
    for piece, start in zip(pieces, starts[1 if prefix is not None else 0 :]):
        own = slice(start, start + len(piece.cache))
        (eligible if piece.known and piece.is_document else stale)[own] = True
        if piece.is_document:
            documents.append((own.start, own.stop))
    ids = torch.cat([c.ids.to(device) for c in caches])
    return Assembled(ids, k, v, first, tuple(documents), eligible, stale, rotary)


def moved(parts: Parts, k: Float[Tensor, "L H n D"], distance: int) -> Float[Tensor, "L H n D"]:
    """Keys turned on by `distance` positions; norms are kept, whatever the model scales its rotations by."""
    if not distance:
        return k
    found = torch.empty_like(k)
    where = torch.full((1,), distance, device=k.device)
    for layer in range(len(k)):
        cos, sin = (t.float() for t in parts.rope(where, layer))
        length = (cos.square() + sin.square()).sqrt()
        found[layer] = parts.rotate(k[layer], cos / length, sin / length)
    return found


def _check(cache: DocumentCache, parts: Parts, model: str, rotary: str) -> None:
    """Refuse what doesn't belong to this model as it is now."""
    wanted = (parts.n_layers, parts.n_kv_heads, len(cache.ids), parts.head_dim)
    for name, found in (("keys", cache.k), ("values", cache.v)):
        if tuple(found.shape) != wanted:
            raise Refused(f"a document's {name} are {tuple(found.shape)} (layers, heads, tokens, channels), expected {wanted}; "
                          "read the document again.")
    if cache.model != model:
        raise Refused("a document's cache was made by another model than the one that is asked; read the document again.")
    if cache.k.dtype != parts.dtype or cache.v.dtype != parts.dtype:
        raise Refused(f"a document's cache holds {str(cache.k.dtype)[6:]} numbers, but the model runs in "
                      f"{str(parts.dtype)[6:]}; read the document again.")
    if cache.rotary != rotary:
        raise Refused("a document's cache was made with other rotary parameters than the model has now; read the document "
                      "again.")

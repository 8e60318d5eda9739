"""The model of what a context-parallel layer costs each rank: elements held, bytes and operations sent.

One set of formulas covers all methods, since each exchanges heads over one group (`Deal`: stages of U query heads, Ukv
key heads a round) and passes keys on around another (a ring): Ulysses is one stage without a ring, a ring alone has a head
group of one rank. With w = B s d, the elements of one head in one piece of the sequence:

forward, exchange buffers    2 (U + 2 Ukv) w for queries, keys and values sent and received, and 2 U w for outputs
forward, with the output     + H w, which stages fill one after the other; Ulysses' only stage needs none besides its own
all-to-all, forward          (2 H + 2 He) w (P - 1)/P elements in 2 nu + 2 rounds operations, whatever U is
ring, forward                2 Ukv w (R - 1) elements a stage in R - 1 operations, and 4 Ukv w held

(arXiv:2602.21196 for the forward figures; those of the backward pass, which computes and exchanges q, k, v again, are ours
and are held against what is counted.) The elements hold for one row (B = 1) and the fused CPU kernel, whose outputs lie in memory
like its queries; one rank receives in the buffer it sends, so there the factors 2 of exchanges are 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from longspan.parallel.heads import Deal


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer and of the sequence over all ranks."""

    length: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    batch: int = 1
    element_bytes: int = 4


@dataclass(frozen=True)
class Account:
    """Costs of one layer for one rank."""

    forward_elements: int
    """Most elements of exchange buffers at one time."""
    forward_with_output: int
    backward_elements: int
    saved_elements: int
    """Kept from forward to backward: input, output, log-sum-exps, and queries, keys, values where they are kept."""
    forward_bytes: int
    backward_bytes: int
    forward_operations: int
    backward_operations: int
    pairs: int
    """Query-key pairs of the causal half, all heads, that this rank computes in forward; twice that for no mask."""
    flops: int
    """Of attention over those pairs, forward and backward (4 d and 10 d a pair), and of all projections."""

    @property
    def bytes(self) -> int:
        return self.forward_bytes + self.backward_bytes

    @property
    def operations(self) -> int:
        return self.forward_operations + self.backward_operations


def account(shape: Shape, deal: Deal, ring: int = 1, *, recompute: bool = True, staged: bool = True) -> Account:
    """The costs of one layer.

    Args:
        deal: how heads are dealt over the ranks that exchange them.
        ring: ranks around which keys travel; the sequence lies on ``deal.ranks * ring`` ranks.
        recompute: whether queries, keys and values are computed and exchanged again in backward, rather than kept.
        staged: whether the output of all heads is held beside the buffers of a stage.
    """
    P = deal.ranks
    piece = shape.length // (P * ring)
    w = shape.batch * piece * shape.head_dim
    return Account(
        *(w * n for n in _held(deal, ring, recompute, staged)),
        saved_elements=shape.batch * piece * (shape.width + deal.heads)
        + w * (deal.heads if recompute else 3 * deal.heads + 2 * deal.effective),
        **_sent(shape, deal, ring, w, recompute), **_work(shape, P * ring, recompute))


def _held(deal: Deal, ring: int, recompute: bool, staged: bool) -> tuple[int, int, int]:
    """Peaks of forward, forward with output, and backward, in heads of one piece."""
    U, keys = deal.stage, deal.ranks * deal.keys_per_rank
    both = 2 if deal.ranks > 1 else 1  # one rank receives in the buffer it sends
    ring_forward, ring_backward = (4, 8 if ring == 2 else 10) if ring > 1 else (0, 0)
    moved, back, around = both * (U + 2 * keys), both * U, ring_forward * keys
    forward = moved + max(back, around)
    if staged:
        with_output = forward + deal.heads
    else:  # made when the outputs are back, in the place of what was sent unless that is kept
        with_output = moved + max(around, back + (0 if recompute and both == 2 else deal.heads))
    held = (3 * both * U + 2 * both * keys) if recompute else both * U
    sums = 2 * keys if deal.stages_per_round > 1 else 0
    return forward, with_output, held + sums + max(U + 2 * keys, ring_backward * keys)


def _sent(shape: Shape, deal: Deal, ring: int, w: int, recompute: bool) -> dict[str, int]:
    P, keys = deal.ranks, deal.ranks * deal.keys_per_rank
    once = 2 * (deal.heads + deal.effective) * w * shape.element_bytes // P * (P - 1)
    operations = (2 * deal.stages + 2 * deal.rounds) if P > 1 else 0
    again = 2 if recompute else 1
    around = 2 * keys * w * deal.stages
    sums_bytes = max(4, shape.element_bytes)
    return {
        "forward_bytes": once + around * (ring - 1) * shape.element_bytes,
        "backward_bytes": again * once
        + around * ((ring - 1) * shape.element_bytes + (ring * sums_bytes if ring > 1 else 0)),
        "forward_operations": operations + deal.stages * (ring - 1),
        "backward_operations": again * operations + (deal.stages * (2 * ring - 1) if ring > 1 else 0),
    }


def _work(shape: Shape, ranks: int, recompute: bool) -> dict[str, int]:
    """Arithmetic of one rank of an evenly loaded group."""
    pairs = shape.batch * shape.heads * shape.length * (shape.length + 1) // (2 * ranks)
    rows = shape.batch * shape.length // ranks
    qkv = 2 * rows * shape.width * shape.head_dim * (shape.heads + 2 * shape.kv_heads)
    o = 2 * rows * shape.width * shape.head_dim * shape.heads
    return {"pairs": pairs, "flops": 14 * shape.head_dim * pairs + (4 if recompute else 3) * qkv + 3 * o}

"""The contract of context parallelism: an attention layer whose sequence lies in pieces on several ranks.

A method says which positions each rank holds (`places`) and computes the layer from the rank's piece of hidden states,
``y = attention(x, weights, comm)``, as one autograd function: forward and backward exchange what they need. `account`
is the model of what that costs, in elements, bytes and operations; tests hold it against what is counted.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longspan.layers.positions.base import inverse_frequencies
from longspan.parallel.account import Account, Shape
from longspan.parallel.comm import Communicator
from longspan.parallel.engine import Engine, WholeSequence
from longspan.parallel.heads import Deal
from longspan.registry import Method, Refused


@dataclass(frozen=True, eq=False)
class Weights:
    """The four projections of an attention layer, laid out like those of `nn.Linear`: heads are runs of rows of q, k, v
    and of columns of o. With tensor parallelism: the local heads'."""

    q: Float[Tensor, "Hd D"]
    k: Float[Tensor, "Hkvd D"]
    v: Float[Tensor, "Hkvd D"]
    o: Float[Tensor, "D Hd"]
    head_dim: int

    def __post_init__(self) -> None:
        d, width = self.head_dim, self.q.shape[-1]
        fits = d > 0 and self.q.shape[0] % d == 0 and self.k.shape[0] % d == 0
        fits = fits and self.k.shape == self.v.shape and self.k.shape[-1] == width and self.o.shape == self.q.shape[::-1]
        if not fits:
            shapes = ", ".join(str(tuple(w.shape)) for w in (self.q, self.k, self.v, self.o))
            raise ValueError(f"weights expect q (H d, D), k and v (Hkv d, D), o (D, H d) with d={d}, got {shapes}")

    @property
    def heads(self) -> int:
        return self.q.shape[0] // self.head_dim

    @property
    def kv_heads(self) -> int:
        return self.k.shape[0] // self.head_dim

    def map(self, change: Callable[[Tensor], Tensor]) -> Weights:
        """Every tensor changed alike."""
        return Weights(change(self.q), change(self.k), change(self.v), change(self.o), self.head_dim)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.o


@dataclass(frozen=True, eq=False)
class Job:
    """What a method's autograd function is told besides tensors."""

    comm: Communicator
    """The ranks over which heads are exchanged."""
    engine: Engine
    head_dim: int
    heads: int
    kv_heads: int
    turn: tuple[Tensor, Tensor] | None
    """Cosine and sine of this rank's positions (s,1,d/2); None without rotary positions."""
    settings: dict[str, Any] = field(default_factory=dict)

    def with_settings(self, **settings: Any) -> Job:
        return replace(self, settings=settings)


class ContextParallel(Method):
    """Attention over a sequence that lies in equal pieces on the ranks of a group."""

    def places(self, length: int, ranks: int) -> list[Int[Tensor, " s"]]:
        """Positions each rank holds, in its order. Contiguous pieces unless a method says otherwise.

        Raises `Refused` for a length that doesn't divide.
        """
        if length % ranks:
            raise Refused(f"S={length} positions don't divide over P={ranks} ranks; expected a multiple, such as "
                          f"S={-(-length // ranks) * ranks} with a masked tail.")
        return list(torch.arange(length).chunk(ranks))

    def shard(self, x: Float[Tensor, "B S *rest"], comm: Communicator) -> Float[Tensor, "B s *rest"]:
        """This rank's piece of the whole `x`."""
        return x[:, self.places(x.shape[1], comm.size)[comm.rank].to(x.device)].contiguous()

    def attention(
        self, x: Float[Tensor, "B s D"], weights: Weights, comm: Communicator, *, theta: float | None = 10_000.0,
        causal: bool = True, documents: tuple[int, ...] = (), dropout: float = 0.0,
    ) -> Float[Tensor, "B s D"]:
        """This rank's piece of the layer's output. Every rank calls this at the same time with its own piece.

        Args:
            x: hidden states at this rank's `places`, contiguous.
            weights: the same on all ranks. Their gradients are this rank's share: add them up over ranks, as for any
                data-parallel training (`sum_gradients`).
            theta: base of the rotary positions, None for none.
            documents: where packed documents end, counted over the whole sequence (the last is S); none: one document.

        Raises:
            Refused: what can't be divided, dropout, pieces or dtypes that differ between ranks.
            PeerLost: another rank died or is stuck.
        """
        self._check_input(x, weights, documents, comm.size, dropout)
        if theta is not None and not theta > 0:
            raise Refused(f"theta={theta}: expected a base above 0 for rotary positions, such as 10000, or None for none.")
        _agree(x, weights, comm, (theta or 0.0, causal, documents, str(self)))
        place = self.places(x.shape[1] * comm.size, comm.size)[comm.rank].to(x.device)
        engine, group = self.engine(comm, causal, documents), self.head_group(comm)
        job = Job(group, engine, weights.head_dim, weights.heads, weights.kv_heads, turns(place, weights, theta))
        try:
            return self.run(x, weights, job)
        except BaseException:
            comm.live.drop_all()
            raise

    def engine(self, comm: Communicator, causal: bool, documents: tuple[int, ...]) -> Engine:
        """How queries meet all keys once heads are exchanged."""
        return WholeSequence(causal, documents)

    def head_group(self, comm: Communicator) -> Communicator:
        """The ranks over which heads are exchanged."""
        return comm

    def run(self, x: Float[Tensor, "B s D"], weights: Weights, job: Job) -> Float[Tensor, "B s D"]:
        """The layer, differentiable."""
        raise NotImplementedError(f"{type(self).__name__} must define run().")

    def account(self, shape: Shape, ranks: int) -> Account:
        """What the layer costs each rank, by the model. Raises `Refused` where the method can't run."""
        raise NotImplementedError(f"{type(self).__name__} must define account().")

    def check_heads(self, heads: int, kv_heads: int, ranks: int) -> None:
        """Refuse numbers of heads that the method can't divide; anything goes by default."""

    def _check_input(self, x: Tensor, weights: Weights, documents: tuple[int, ...], ranks: int, dropout: float) -> None:
        name = self.card.name
        if dropout:
            raise Refused(f"{name}: dropout={dropout} in attention would draw differently on every rank; expected 0.")
        if x.ndim != 3 or x.shape[-1] != weights.q.shape[-1]:
            raise ValueError(f"{name} expects x (B, s, {weights.q.shape[-1]}), got {tuple(x.shape)}")
        if not x.is_contiguous():
            raise Refused(f"{name}: x with strides {x.stride()} isn't contiguous; expected x.contiguous().")
        if any(w.dtype != x.dtype for w in weights.tensors()):
            found = sorted({str(t.dtype) for t in (x, *weights.tensors())})
            raise Refused(f"{name}: x and weights have the dtypes {', '.join(found)}; expected one, such as {x.dtype}.")
        length = x.shape[1] * ranks
        if documents and (list(documents) != sorted({*documents}) or documents[0] < 1 or documents[-1] != length):
            raise Refused(f"{name}: documents={documents} must end at growing positions, the last at S={length}.")
        self.check_heads(weights.heads, weights.kv_heads, ranks)


class HeadExchange(ContextParallel):
    """A method whose ranks see the whole sequence (of a group) for some heads, dealt out in stages."""

    def deal(self, heads: int, kv_heads: int, ranks: int) -> Deal:
        """Which rank attends which heads when. Refuses numbers that don't divide."""
        raise NotImplementedError(f"{type(self).__name__} must define deal().")

    def account_of(self, shape: Shape, deal: Deal, ring: int) -> Account:
        """`account` for heads dealt so, with keys that travel around `ring` groups."""
        raise NotImplementedError(f"{type(self).__name__} must define account_of().")

    def account(self, shape: Shape, ranks: int) -> Account:
        return self.account_of(shape, self.deal(shape.heads, shape.kv_heads, ranks), 1)

    def check_heads(self, heads: int, kv_heads: int, ranks: int) -> None:
        self.deal(heads, kv_heads, ranks)


def turns(place: Int[Tensor, " s"], weights: Weights, theta: float | None) -> tuple[Tensor, Tensor] | None:
    """Cosine and sine (s,1,d/2) for rotary positions at `place`, in float32 or wider; angles are float64."""
    if theta is None:
        return None
    dtype = torch.promote_types(weights.q.dtype, torch.float32)
    angles = place[:, None, None] * inverse_frequencies(weights.head_dim, theta, place.device)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def sum_gradients(weights: Weights, comm: Communicator) -> None:
    """Add the weights' gradients up over all ranks, in place."""
    for name, w in zip("qkvo", weights.tensors()):
        if w.grad is not None:
            comm.sum_(w.grad, f"gradient of {name}")


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_FIELDS = ("batch rows", "length of their piece", "width", "rows of wq", "rows of wk", "head dimension", "dtype",
           "whether gradients are wanted", "theta, causal, documents or method")


def _agree(x: Tensor, weights: Weights, comm: Communicator, setting: tuple[Any, ...]) -> None:
    """Refuse a call that isn't the same on all ranks, before an exchange would go wrong."""
    if x.dtype not in _DTYPES:
        raise Refused(f"dtype {x.dtype}: expected a floating type, such as {_DTYPES[0]}.")
    grads = int(torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights.tensors())))
    own = [*x.shape, weights.q.shape[0], weights.k.shape[0], weights.head_dim, _DTYPES.index(x.dtype), grads,
           zlib.crc32(repr(setting).encode())]
    every = comm.gather(own, "shapes", x.device)
    for index, name in enumerate(_FIELDS):
        values = [found[index] for found in every]
        if len(set(values)) == 1:
            continue
        shown = ", ".join(str(_DTYPES[v]) if name == "dtype" else str(v) for v in values)
        if index > 6:
            raise Refused(f"the {comm.size} ranks disagree about {name}; expected the same on all of them.")
        raise Refused(f"the {comm.size} ranks disagree about {name}: {shown}; expected the same on all of them.")

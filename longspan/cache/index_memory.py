"""The arithmetic and the weights of IndexMem (arXiv:2605.25475): an indexer and a latent memory for each layer.

Indexer, of queries before rotation Q_s and layer inputs X (after the norm)::

    q_s = RMSNorm(U_q flatten(Q_s))            H_i heads of d_i numbers
    k_t = RMSNorm(U_k X_t)                     d_i numbers, one key for all heads
    a_s = G X_s / sqrt(H_i d_i)                a signed gate for each head
    A[s,t] = a_s . ReLU(q_s k_t),   imp_t = max over the rows s >= t of A[s,t]

Memory, with phi(x) = W x on queries and keys before rotation::

    write of the evicted set E:  M <- lam M + eta sum phi(k_i) v_i',   b <- lam b + eta sum phi(k_i)^2
    read of a query head:        g(q) phi(q)' M / (phi(q)^2 . b + eps),   g(q) = sigmoid(w.q + c)

Weights are trained once for a model (`longspan.training.index_memory`) and found again by `longspan.models.profiles`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longspan.models import profiles
from longspan.models.parts import Parts
from longspan.registry import Refused

FAMILY = "index-memory"
"""Both methods keep their weights in one file a model, under this name."""
TRAINER = "longspan.training.index_memory"
SINKS = 4
"""First positions that training leaves out, since they attract attention whatever they hold."""
ROWS, COLUMNS = 128, 1024
"""Query rows and keys that are scored at once."""
WRITE_BLOCK = 2048
"""Entries that are written at once."""


def norm(x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
    """Root mean square 1 along the last axis."""
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


# ------------------------------------------------------------------------------------------------------------- indexer


@dataclass(frozen=True, eq=False)
class Indexer:
    """The indexer of one layer: U_q, U_k and G, none with a bias."""

    query: Float[Tensor, "Hi di HqD"]
    key: Float[Tensor, "di C"]
    gate: Float[Tensor, "Hi C"]

    def queries(self, q: Float[Tensor, "B Hq T D"]) -> Float[Tensor, "B T Hi di"]:
        """q_s of query rows before rotation, in float32."""
        flat = q.transpose(1, 2).flatten(2).float()
        return norm((flat @ self.query.flatten(0, 1).T).unflatten(-1, self.query.shape[:2]))

    def keys(self, hidden: Float[Tensor, "B T C"]) -> Float[Tensor, "B T di"]:
        """k_t, rounded to the dtype of `hidden`: what is cached is what is scored, however the text is cut."""
        return norm(hidden.float() @ self.key.T).to(hidden.dtype)

    def gates(self, hidden: Float[Tensor, "B T C"]) -> Float[Tensor, "B T Hi"]:
        """a_s, in float32."""
        return hidden.float() @ self.gate.T * self.query.shape[:2].numel() ** -0.5


def index_scores(q: Float[Tensor, "B T Hi di"], gates: Float[Tensor, "B T Hi"],
                 k: Float[Tensor, "B S di"]) -> Float[Tensor, "B T S"]:
    """A of every row and key, without the causal mask."""
    hits = (q.flatten(1, 2) @ k.float().mT).unflatten(1, q.shape[1:3]).relu()
    return (gates[..., None] * hits).sum(2)


Block = Callable[[slice, slice], Float[Tensor, "B t s"]]
"""Makes a matrix's part of some rows and columns."""
Seen = Callable[[slice, slice], Bool[Tensor, "B t s"]]
"""Says where a row may see a column."""


def pooled_max(block: Block, allowed: Seen, T: int, S: int, *, rows: int = ROWS, columns: int = COLUMNS) -> Float[Tensor, "B S"]:
    """Maximum over the rows of a T x S matrix that is made block by block and never held; memory O(S).

    The rows are those of the last T columns, so that later columns aren't asked about.

    Returns:
        The maximum of every column; -inf where no row sees it, NaN where one that does holds NaN.
    """
    best: Tensor | None = None
    for top in range(0, T, rows):
        r = slice(top, min(top + rows, T))
        for left in range(0, min(S, S - T + r.stop), columns):
            c = slice(left, min(left + columns, S))
            most = block(r, c).masked_fill(~allowed(r, c), -torch.inf).amax(1)
            if best is None:
                best = most.new_full((len(most), S), -torch.inf)
            best[:, c] = torch.maximum(best[:, c], most)
    assert best is not None, "pooled_max() of no rows"
    return best


def deciding_rows(block: Block, allowed: Seen, T: int, S: int, *, rows: int = ROWS) -> Int[Tensor, "B S"]:
    """The row that holds each column's maximum, for gradients: only these pairs are computed again."""
    best, at = None, None
    for top in range(0, T, rows):
        r = slice(top, min(top + rows, T))
        c = slice(0, S)
        most, row = block(r, c).masked_fill(~allowed(r, c), -torch.inf).max(1)
        if best is None or at is None:
            best, at = most, row
        else:
            at = torch.where(most > best, row + top, at)
            best = torch.maximum(best, most)
    assert at is not None, "deciding_rows() of no rows"
    return at


def paired_scores(q: Float[Tensor, "B S Hi di"], gates: Float[Tensor, "B S Hi"],
                  k: Float[Tensor, "B S di"]) -> Float[Tensor, "B S"]:
    """A of row i and key i only."""
    return (gates * (q * k[:, :, None].float()).sum(-1).relu()).sum(-1)


# -------------------------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True, eq=False)
class Memory:
    """The slow weights of one layer's memory: phi's matrix W and the gate's w and c."""

    weight: Float[Tensor, "dm D"]
    gate_weight: Float[Tensor, " D"]
    gate_bias: Float[Tensor, ""]

    def features(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... dm"]:
        return x.float() @ self.weight.T

    def gate(self, q: Float[Tensor, "... D"]) -> Tensor:
        return torch.sigmoid(q.float() @ self.gate_weight + self.gate_bias)


@dataclass(frozen=True, eq=False)
class FastState:
    """What a memory holds of one sequence a row: always float32, and replaced by every write, never changed.

    Hs is 1 where the heads share a state, Hkv where each has its own.
    """

    m: Float[Tensor, "B Hs dm D"]
    b: Float[Tensor, "B Hs dm"]

    def __post_init__(self) -> None:
        if self.m.dtype != torch.float32 or self.b.dtype != torch.float32:
            raise Refused(f"a latent memory in {str(self.m.dtype)[6:]}: sums over evicted tokens need float32; expected that.")


def written(memory: Memory, state: FastState | None, k: Float[Tensor, "B H S D"], v: Float[Tensor, "B H S D"],
            evicted: Bool[Tensor, "B H S"], *, lam: float = 1.0, eta: float = 1.0, per_head: bool = False) -> FastState:
    """The state after one write of the entries in `evicted`, whose keys are given without rotation.

    What the state held before decays once, by `lam`, in rows that evict something.
    """
    m = v.new_zeros(v.shape[0], v.shape[1] if per_head else 1, memory.weight.shape[0], v.shape[3], dtype=torch.float32)
    b = torch.zeros_like(m[..., 0])
    for start in range(0, k.shape[2], WRITE_BLOCK):
        part = slice(start, start + WRITE_BLOCK)
        # Entries that stay may hold anything, NaN in pads too: they are replaced, not multiplied by zero.
        phi = memory.features(k[:, :, part]).masked_fill(~evicted[:, :, part, None], 0.0)
        outer = phi.mT @ v[:, :, part].float().masked_fill(~evicted[:, :, part, None], 0.0)
        square = phi.square().sum(2)
        m = m + eta * (outer if per_head else outer.sum(1, keepdim=True))
        b = b + eta * (square if per_head else square.sum(1, keepdim=True))
    if state is None:
        return FastState(m, b)
    decay = torch.where(evicted.any(-1).any(-1), lam, 1.0)[:, None, None].to(b.dtype)
    return FastState(decay[..., None] * state.m + m, decay * state.b + b)


def read(memory: Memory, state: FastState, q: Float[Tensor, "B Hq T D"], eps: float = 1e-6) -> Float[Tensor, "B Hq T D"]:
    """g(q) m(q) of query rows before rotation: what the memory adds to the attention output of each head, float32."""
    phi = memory.features(q)
    grouped = phi.unflatten(1, (state.b.shape[1], -1))  # (B,Hs,G,T,dm): a query head reads its own key head's state
    above = grouped @ state.m[:, :, None]
    below = (grouped.square() @ state.b[:, :, None, :, None]) + eps
    return memory.gate(q)[..., None] * (above / below).flatten(1, 2)


# ------------------------------------------------------------------------------------------------- weights of a model


@dataclass(frozen=True, eq=False)
class Weights:
    """What was trained for a model: stacked over the layers in ``layers``, in the dtype they were stored in."""

    tensors: dict[str, Tensor]

    def indexer(self, parts: Parts, layer: int, device: torch.device) -> Indexer:
        """The indexer of a layer.

        Raises:
            Refused: the layer has none, or its shape isn't that of the model.
        """
        Hi, di = self.tensors["indexer.query"].shape[1:3]
        channels = parts.decoder.get_input_embeddings().weight.shape[1]
        shapes = {"query": (Hi, di, parts.n_heads * parts.head_dim), "key": (di, channels), "gate": (Hi, channels)}
        return Indexer(**self._of("indexer", shapes, layer, device))

    def memory(self, parts: Parts, layer: int, device: torch.device, per_head: bool = False) -> Memory:
        """The memory's weights of a layer; refused as `indexer` is."""
        name = memory_name(per_head)
        dm = self.tensors[f"{name}.weight"].shape[1]
        shapes: dict[str, tuple[int, ...]] = {"weight": (dm, parts.head_dim), "gate_weight": (parts.head_dim,), "gate_bias": ()}
        return Memory(**self._of(name, shapes, layer, device))

    def _of(self, name: str, shapes: dict[str, tuple[int, ...]], layer: int, device: torch.device) -> dict[str, Tensor]:
        layers = self.tensors["layers"].tolist()
        if layer not in layers:
            raise Refused(f"layer {layer} has no trained weights of the {name}: it saw only a window of the training texts, or "
                          "they were trained for another model; expected a model whose layers see the whole text.")
        at, found = layers.index(layer), {}
        for part, shape in shapes.items():
            t = self.tensors[f"{name}.{part}"]
            if len(t) != len(layers) or tuple(t.shape[1:]) != shape:
                raise Refused(f"the weights' {name}.{part} is {tuple(t.shape)}, expected {(len(layers), *shape)} for this model; "
                              "train them again with `longspan profile`.")
            found[part] = t[at].to(device, torch.float32)
        return found


def memory_name(per_head: bool) -> str:
    """Where a memory's weights stand in the file: those of states that heads share, or of states of their own."""
    return "memory-per-head" if per_head else "memory"


def trained_weights(method: Any, model: Any, where: str) -> Weights:
    """The weights that `method` needs on `model`; refused with the command that trains them where there are none."""
    return Weights(profiles.find_trained(model, method, where).tensors)

"""What a head's weights alone say about far look-ups: its frequency kernels.

1. With rotary positions, the score of a query at i and a key at j is x_i^T M(n) x_j, n = j - i, and M(n) is a sum over
   rotated pairs m. M_m(n) = Q_m^T R(n theta_m) K_m has rank two: Q_m and K_m are the pair's two rows of the query and
   key weights, R turns by the angle.
2. A pair's energy is |M_m|_F^2 = tr(R^T G^q R G^k), of the 2 x 2 Gram matrices of those rows; p is its share.
3. Low frequencies see far: s_dist is the mean of m/(P-1) under p. A head that uses few pairs is specialised: s_erank is
   1 - exp(entropy of p)/P. Long-context potential: lps = s_dist^0.4 s_erank^0.6.
4. A symmetric kernel matches a token with itself (induction); retrieval is asymmetric: rps = lps - sym/2.

Nothing is run and no data is seen. Source: "Revealing Long-context Potential of Attention Heads via Frequency Kernels",
ICML 2026.
"""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longspan.models.parts import Parts
from longspan.registry import Refused

RANKS = ("rps", "lps", "s_dist", "s_erank")
"""Scores by which heads may be ranked; more is better suited to far look-ups."""
DISTANCE = -32768
"""Where kernels are taken: key position minus query position. A positive distance looks ahead (the kernel is then much
like the transposed one)."""
NO_ENERGY = 1e-9


@dataclass(frozen=True)
class HeadScores:
    """One number for every query head, (layers, query heads)."""

    s_dist: Float[Tensor, "L Hq"]
    """Where the energy lies: 0 highest frequency, 1 lowest."""
    s_erank: Float[Tensor, "L Hq"]
    """1 minus the share of pairs that are effectively used."""
    lps: Float[Tensor, "L Hq"]
    sym: Float[Tensor, "L Hq"]
    """Symmetry of the kernel, 0 to 1/2."""
    rps: Float[Tensor, "L Hq"]

    def by(self, name: str, per_layer: bool = False) -> Float[Tensor, "L Hq"]:
        """The score called `name` (one of `RANKS`); with `per_layer` as deviations from the layer's mean."""
        found: Tensor = getattr(self, name)
        if not per_layer:
            return found
        return (found - found.mean(-1, keepdim=True)) / found.std(-1, correction=0, keepdim=True).clamp(min=1e-12)


def head_scores(parts: Parts, distance: int = DISTANCE) -> HeadScores:
    """Scores of all heads of a model.

    Raises:
        Refused: a layer has no rotary positions, or fewer than two rotated pairs.
    """
    projections = (getattr(parts.attention(0), name, None) for name in ("q_proj", "k_proj", "qkv_proj"))
    if any(getattr(module, "bias", None) is not None for module in projections):
        warnings.warn("the model's queries or keys have a bias, which frequency kernels leave out.", stacklevel=2)
    rows = []
    for layer in range(parts.n_layers):
        wq, wk = rotary_rows(parts, layer)
        cos, sin = rotation(parts, layer, distance, wq)
        energy = kernel_energy(wq, wk, cos, sin)
        s_dist, s_erank, lps = energy_scores(energy)
        sym = symmetry(wq, wk, cos, sin) * (energy.amax(-1) > NO_ENERGY)
        rows.append((s_dist, s_erank, lps, sym, lps - 0.5 * sym))
    device = rows[0][0].device
    return HeadScores(*(torch.stack([row[i].to(device) for row in rows]) for i in range(5)))


def best_heads(scores: Float[Tensor, "L H"]) -> list[tuple[int, int]]:
    """All (layer, head), best first; of equal ones the earlier first."""
    order = scores.flatten().argsort(descending=True, stable=True).tolist()
    return [divmod(i, scores.shape[1]) for i in order]


# ------------------------------------------------------------------------------------------------------- the kernels


def kernel_energy(
    wq: Float[Tensor, "Hq 2 P D"], wk: Float[Tensor, "Hkv 2 P D"], cos: Float[Tensor, P], sin: Float[Tensor, P]
) -> Float[Tensor, "Hq P"]:
    """|M_m|_F^2 of every query head and pair.

    Args:
        wq, wk: the pairs' two rows of query and key weights, see `rotary_rows`.
        cos, sin: of the angles n theta_m, see `rotation`.
    """
    gram_q = torch.einsum("hamd,hbmd->hmab", wq, wq)
    gram_k = torch.einsum("hamd,hbmd->hmab", wk, wk).repeat_interleave(len(wq) // len(wk), 0)
    turn = torch.stack((torch.stack((cos, -sin), -1), torch.stack((sin, cos), -1)), -2)
    return torch.einsum("mba,hmbc,mcd,hmda->hm", turn, gram_q, turn, gram_k)


def energy_scores(
    energy: Float[Tensor, "*h P"],
) -> tuple[Float[Tensor, "*h"], Float[Tensor, "*h"], Float[Tensor, "*h"]]:
    """(s_dist, s_erank, lps) of energies by pair, highest frequency first; 0 for a head without energy."""
    pairs = energy.shape[-1]
    alive = energy.amax(-1) > NO_ENERGY
    p = energy / energy.sum(-1, keepdim=True).clamp(min=1e-30)
    s_dist = (p * torch.linspace(0, 1, pairs, dtype=p.dtype, device=p.device)).sum(-1) * alive
    effective = torch.exp(-(p * torch.log(p + 1e-10)).sum(-1))
    s_erank = (1 - effective / pairs) * alive
    # Rounding may put a uniform head's effective rank a hair above the number of pairs.
    return s_dist, s_erank, s_dist.pow(0.4) * s_erank.clamp(min=0).pow(0.6)


def symmetry(
    wq: Float[Tensor, "Hq 2 P D"], wk: Float[Tensor, "Hkv 2 P D"], cos: Float[Tensor, P], sin: Float[Tensor, P]
) -> Float[Tensor, Hq]:
    """|tr(M M)| / (2 |M|_F^2) of the whole kernel: 1/2 if M is symmetric or antisymmetric, 0 if M M has no trace."""
    group = len(wq) // len(wk)
    q, k = wq.flatten(1, 2).unflatten(0, (-1, group)), wk.flatten(1, 2)[:, None]
    turned = _turned(k @ q.mT, cos, sin)
    trace = (turned * turned.mT).sum((-1, -2))
    both = _turned(_turned(k @ k.mT, cos, sin).mT, cos, sin).mT
    norm = (q @ q.mT * both).sum((-1, -2))
    return (trace.abs() / (2 * norm).clamp(min=1e-30)).flatten()


def _turned(x: Float[Tensor, "*h R n"], cos: Tensor, sin: Tensor) -> Float[Tensor, "*h R n"]:
    """The rows of x, first members of all pairs before second ones, turned pair by pair."""
    first, second = x.chunk(2, -2)
    c, s = cos[:, None], sin[:, None]
    return torch.cat((c * first - s * second, s * first + c * second), -2)


# ----------------------------------------------------------------------------------------------- from a model's parts


def rotary_rows(parts: Parts, layer: int) -> tuple[Float[Tensor, "Hq 2 P D"], Float[Tensor, "Hkv 2 P D"]]:
    """Query and key weights of a layer's rotated pairs, at least float32; the weight of a norm behind them included.

    Quantised weights and adapters are read as what they do to the identity. Channels that aren't rotated are left out.
    """
    attention, heads, kv_heads, dim = parts.attention(layer), parts.n_heads, parts.n_kv_heads, parts.head_dim
    pairs = rotary_pairs(parts, layer)
    if hasattr(attention, "qkv_proj"):
        q, k, _ = _matrix(parts, attention.qkv_proj).split((heads * dim, kv_heads * dim, kv_heads * dim))
    else:
        q, k = _matrix(parts, attention.q_proj), _matrix(parts, attention.k_proj)

    def arranged(w: Tensor, norm: nn.Module | None, n: int) -> Tensor:
        w = w.to(torch.promote_types(w.dtype, torch.float32)).view(n, dim, -1)
        if norm is not None:
            w = w * _norm_weight(norm, n, dim, w)[..., None]
        w = w[:, : 2 * pairs]
        return w.unflatten(1, (2, pairs)) if parts.pairing == "halves" else w.unflatten(1, (pairs, 2)).transpose(1, 2)

    return arranged(q, query_norm(attention), heads), arranged(k, _norm(attention, "k"), kv_heads)


def rotation(parts: Parts, layer: int, distance: int, like: Tensor) -> tuple[Float[Tensor, P], Float[Tensor, P]]:
    """cos and sin of the angles by which keys at `distance` are turned against the query, with the rotation's scaling.

    Queries and keys each carry the scaling (YaRN), so it enters squared.
    """
    frequencies, scaling = parts._frequencies(layer)
    angles = distance * frequencies.to(like.device, like.dtype)
    return angles.cos() * scaling**2, angles.sin() * scaling**2


def rotary_pairs(parts: Parts, layer: int) -> int:
    """Pairs of channels that a layer rotates in each head."""
    if getattr(parts.attention(layer), "use_rope", True) in (False, 0):
        raise Refused(f"layer {layer} of {type(parts.model).__name__} has no rotary positions, so its heads have no "
                      "frequency kernels; expected a model that rotates in every layer.")
    pairs = len(parts._frequencies(layer)[0])
    if pairs < 2:
        raise Refused(f"{type(parts.model).__name__} rotates {pairs} pair of channels a head; expected at least 2, for "
                      "frequencies are compared.")
    return pairs


def _norm(attention: Any, which: str) -> nn.Module | None:
    found = (getattr(attention, f"{which}{end}", None) for end in ("_norm", "_layernorm"))
    return next((norm for norm in found if norm is not None), None)


def query_norm(attention: Any) -> nn.Module | None:
    """The norm between query projection and rotation, or None."""
    return _norm(attention, "q")


def _norm_weight(norm: Any, heads: int, dim: int, like: Tensor) -> Float[Tensor, "heads_or_1 D"]:
    """What a norm multiplies each channel with, read off an input that is normalised already (families differ in
    whether the stored weight is that factor or one less)."""
    weight = getattr(norm, "weight", None)
    if weight is None:
        return like.new_ones(1, dim)
    shape = (dim,) if weight.numel() == dim else tuple(weight.shape)
    place = torch.device("cpu") if weight.is_meta else weight.device
    signs = torch.ones(weight.numel(), device=place, dtype=weight.dtype)
    signs[1::2] = -1  # mean 0 as well, for norms that centre
    signs = signs.view(shape)
    with torch.no_grad():  # its own forward: hooks on it expect a model's tensors
        found = (norm.forward(signs) - norm.forward(torch.zeros_like(signs))) * signs
    return found.to(like.device, like.dtype).reshape(-1, dim)


def _matrix(parts: Parts, module: Any) -> Float[Tensor, "out D"]:
    """The weight of a projection."""
    weight = module.weight
    offloaded = weight.is_meta and hasattr(module, "_hf_hook")
    if type(module) is nn.Linear and not offloaded:
        return weight.detach()
    place = torch.device("cpu") if offloaded else weight.device
    width = parts.decoder.get_input_embeddings().embedding_dim
    with torch.no_grad():
        found = module(torch.eye(width, device=place, dtype=parts.dtype))
        return (found - module(torch.zeros(1, width, device=place, dtype=parts.dtype))).T


# -------------------------------------------------------------------------------------------------------- remembering

_by_parts: weakref.WeakKeyDictionary[Parts, dict[int, HeadScores]] = weakref.WeakKeyDictionary()
_by_model: weakref.WeakKeyDictionary[nn.Module, tuple[Any, dict[int, HeadScores]]] = weakref.WeakKeyDictionary()


def known_head_scores(parts: Parts, distance: int = DISTANCE) -> HeadScores:
    """`head_scores`, computed once as long as the model's query and key weights are the same."""
    known = _by_parts.get(parts)
    if known is None:
        stamp, before = _stamp(parts), _by_model.get(parts.model)
        known = before[1] if before is not None and before[0] == stamp else {}
        _by_model[parts.model] = stamp, known
        _by_parts[parts] = known
    if distance not in known:
        known[distance] = head_scores(parts, distance)
    return known[distance]


def _stamp(parts: Parts) -> list[tuple[int, int]]:
    """Where the query and key weights lie and how often they were written to."""
    modules = [getattr(parts.attention(i), name, None) for i in range(parts.n_layers)
               for name in ("q_proj", "k_proj", "qkv_proj")]
    weights = [p for m in modules if m is not None for p in m.parameters()]
    return [(p.data_ptr() if not p.is_meta else 0, 0 if p.is_inference() else p._version) for p in weights]

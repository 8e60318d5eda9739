"""RePo as a retrofit: from some layer on, a pretrained model's tokens stand where their content says (arXiv:2512.14391).

The layers from `start` on keep their projections, norms and key-value cache and get the three matrices of
`longspan.layers.positions.repo`, which read the very tensor that queries and keys are made of. Queries and keys are turned
to the places these give, in the model's own frequencies, and the attention function is the one the model is set to. Keys are
stored turned; nothing else is remembered.

The start is not function-preserving: first places are near 0, which is no position at all, and training repairs that.
Trained are the three matrices and the projections of queries and keys. Scaling for longer texts (YaRN and its like) stays
with the layers below; ``rho=1`` gives the model as it was.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from longspan.layers import inverse_frequencies
from longspan.layers.positions.repo import LearnedPlaces, blend, first_layer, width_of
from longspan.models import Parts, find_parts
from longspan.models.hook import cache_keyword
from longspan.registry import Refused, knob, method
from longspan.training.retrofits.base import CONTEXT, Retrofit

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class RepoAttention(nn.Module):
    """Takes the place of a layer's ``self_attn``: the same weights and the same attention function, other places."""

    q_proj: nn.Module
    k_proj: nn.Module
    o_proj: nn.Linear

    def __init__(self, attention: Any, learned: LearnedPlaces, parts: Parts, method: RepoRetrofit):
        super().__init__()
        for name, child in attention.named_children():
            self.add_module(name, child)
        self.learned, self.rho, self.per_query_head = learned, method.rho, method.per_query_head
        self.config, self.layer_idx, self.head_dim = attention.config, attention.layer_idx, parts.head_dim
        self.groups = parts.n_heads // parts.n_kv_heads
        # What attention functions read of the module they are called for.
        self.num_key_value_groups = 1 if self.per_query_head else self.groups
        self.is_causal = getattr(attention, "is_causal", True)
        self.scaling, self.dropout = attention.scaling, getattr(attention, "attention_dropout", 0.0)
        window, softcap = parts.window(self.layer_idx), getattr(attention, "attn_logit_softcapping", None)
        self.further = {"sliding_window": window} | ({} if softcap is None else {"softcap": softcap})
        self.turn = dataclasses.replace(parts, model=None, decoder=None, layers=())  # rotations only, no second model
        # Out of reach of ``module.bfloat16()``: rounded frequencies would bend long distances.
        self._inv_freq = plain_frequencies(parts, self.layer_idx).float()
        self._cache_name = cache_keyword(parts.layers[self.layer_idx])
        home = sys.modules[type(attention).__module__]
        self._eager, self._by_index = home.eager_attention_forward, home.apply_rotary_pos_emb

    def forward(
        self,
        hidden_states: Float[Tensor, "B T C"],
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> tuple[Float[Tensor, "B T C"], Any]:
        kwargs.pop(CONTEXT, None)
        cache = kwargs.pop(self._cache_name, None)
        q, k = self._heads(hidden_states, "q"), self._heads(hidden_states, "k")
        v = self._heads(hidden_states, "v")
        if self.per_query_head:
            k, v = (t.repeat_interleave(self.groups, 1) for t in (k, v))
        q, k = self._turned(q, k, hidden_states, position_embeddings, kwargs.get("position_ids"))
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, self._eager)
        out, weights = attend(self, q, k, v, attention_mask, dropout=self.dropout if self.training else 0.0,
                              scaling=self.scaling, **self.further, **kwargs)
        return self.o_proj(out.flatten(2).contiguous()), weights

    def _heads(self, x: Float[Tensor, "B T C"], which: str) -> Float[Tensor, "B H T D"]:
        """Queries, keys or values by head, normalised where the model does that: over all heads, or each head alone."""
        made, norm = getattr(self, f"{which}_proj")(x), getattr(self, f"{which}_norm", None)
        by_head = norm is not None and norm.weight.shape[-1] == self.head_dim
        made = norm(made) if norm is not None and not by_head else made
        made = made.unflatten(-1, (-1, self.head_dim))
        return (norm(made) if by_head else made).transpose(1, 2)

    def _turned(
        self,
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B N T D"],
        x: Float[Tensor, "B T C"],
        by_index: tuple[Tensor, Tensor],
        position_ids: Int[Tensor, "#B T"] | None,
    ) -> tuple[Float[Tensor, "B H T D"], Float[Tensor, "B N T D"]]:
        """Both turned to their places; cosines and sines in float32, one for each key head here."""
        if self.rho == 1.0:
            return self._by_index(q, k, *by_index)
        z = self.learned(x)
        if self.rho > 0.0:
            if position_ids is None:
                raise ValueError(f"rho={self.rho} needs position_ids of shape (B, {x.shape[1]}), got none")
            z = blend(z, position_ids, self.rho)
        if self._inv_freq.device != z.device:
            self._inv_freq = self._inv_freq.to(z.device)
        angles = z.float()[..., None] * self._inv_freq
        halves = self.turn.pairing == "halves"
        angles = torch.cat((angles, angles), -1) if halves else angles.repeat_interleave(2, -1)
        cos, sin = angles.cos(), angles.sin()
        grouped = self.turn.rotate(q.unflatten(1, (k.shape[1], -1)), cos[:, :, None], sin[:, :, None])
        return grouped.flatten(1, 2), self.turn.rotate(k, cos, sin)


@method("repo-retrofit", kind="retrofit", system="repo-position", paper="arXiv:2512.14391", capabilities=("trains",),
        summary="Gives a pretrained model's later layers positions that are read from content.")
class RepoRetrofit(Retrofit):
    """For models with rotary positions and Llama's projections; ``--retrofit repo`` means this one."""

    start: int | None = knob(None, "first layer with learned positions, from 0; None: a third of the layers", low=0)
    d_p: int | None = knob(None, "width of what positions are read from; None: an eighth of the model's", low=1)
    rho: float = knob(0.0, "share of the token's index in its position; 1 is the model as it was", low=0.0, high=1.0)
    per_query_head: bool = knob(False, "a position per query head, which repeats keys and values")
    seed: int = knob(0, "draws the first weights of the three matrices", low=0)

    def _convert(self, model: Any) -> None:
        parts = _rotary_parts(model)
        chosen = range(first_layer(self.start, parts.n_layers, self), parts.n_layers)
        for i in chosen:
            _fits(parts, i)
        made = {i: self._made(parts, i) for i in chosen}
        if made:
            _same(parts, chosen[0], made[chosen[0]])
        for i, attention in made.items():
            parts.layers[i].self_attn = attention  # type: ignore[assignment]
        parts.decoder.register_forward_pre_hook(_refuse, with_kwargs=True)

    def _made(self, parts: Parts, i: int) -> RepoAttention:
        attention, dim = parts.attention(i), parts.o_proj(i).shape[0]
        places = parts.n_heads if self.per_query_head else parts.n_kv_heads
        draw = torch.Generator().manual_seed(self.seed * 1000 + i)
        learned = LearnedPlaces(dim, width_of(self.d_p, dim, self), places, i, draw)
        made = RepoAttention(attention, learned.to(attention.o_proj.weight.device, parts.dtype), parts, self)
        return made.train(attention.training)

    def _trained(self, model: Any) -> list[nn.Module]:
        return [part for found in repo_layers(model).values() for part in (found.learned, found.q_proj, found.k_proj)]


# ------------------------------------------------------------------------------------------------------ what is asked


def repo_layers(model: Any) -> dict[int, RepoAttention]:
    """The attention modules that read places from content, by layer."""
    layers = model.get_decoder().layers
    return {i: layer.self_attn for i, layer in enumerate(layers) if isinstance(layer.self_attn, RepoAttention)}


def without_positions(model: Any) -> Any:
    """Make a converted model the control that is trained alike: W_z is 0, so its layers turn nothing, and stays 0."""
    for attention in repo_layers(model).values():
        attention.learned.requires_grad_(False)
        attention.learned.assign.weight.data.zero_()
    return model


def plain_frequencies(parts: Parts, layer: int) -> Float[Tensor, " half"]:
    """The rotary frequencies of a model's base, without any scaling for longer texts."""
    config = parts.attention(layer).config
    given = getattr(config, "rope_parameters", None) or {}
    types = getattr(config, "layer_types", None)
    given = given.get(types[layer], given) if types else given
    theta = given.get("rope_theta", getattr(config, "rope_theta", None))
    if theta is None:
        raise Refused(f"{type(parts.model).__name__}: its config names no rope_theta, the base of its rotary positions.")
    rotated = parts.rope(torch.zeros(1, device=parts.attention(layer).o_proj.weight.device), layer)[0].shape[-1]
    return inverse_frequencies(rotated, float(theta))


# ----------------------------------------------------------------------------------------------------- what is refused


def _rotary_parts(model: Any) -> Parts:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    if not hasattr(decoder, "rotary_emb"):
        raise Refused(f"{type(model).__name__} has no rotary positions; RePo needs an encoding that real places can be put "
                      "into, so expected a model such as LlamaForCausalLM.")
    return find_parts(model)


def _fits(parts: Parts, i: int) -> None:
    """Refuse a layer whose attention isn't made of what `RepoAttention` calls, before anything is changed."""
    attention, name = parts.attention(i), type(parts.model).__name__
    inside = {child for child, _ in attention.named_children()}
    missing = sorted(set(PROJECTIONS) - inside)
    if missing:
        raise Refused(f"{name}: layer {i}'s attention has no {missing[0]}; expected {', '.join(PROJECTIONS)}.")
    if getattr(attention, "use_rope", True) in (False, 0):
        raise Refused(f"{name}: layer {i} has no rotary positions that could be learned; expected a start behind it.")
    if not hasattr(sys.modules[type(attention).__module__], "eager_attention_forward"):
        raise Refused(f"{name}: layer {i}'s attention doesn't call an attention function that can be chosen; expected a class "
                      "such as LlamaForCausalLM.")


@torch.no_grad()
def _same(parts: Parts, i: int, made: RepoAttention) -> None:
    """Refuse a class whose attention, on random numbers and by index, is not what `RepoAttention` makes of its weights."""
    attention, place = parts.attention(i), made.o_proj.weight.device
    if place.type == "meta":
        return
    types = getattr(attention.config, "layer_types", None)
    own = () if hasattr(parts.decoder.rotary_emb, "inv_freq") or types is None else (types[i],)
    x = torch.randn(1, 5, parts.o_proj(i).shape[0], generator=torch.Generator().manual_seed(0)).to(place, parts.dtype)
    turned = parts.decoder.rotary_emb(x, torch.arange(5, device=place)[None], *own)
    given = {"hidden_states": x, "position_embeddings": turned, "attention_mask": None}
    rho, made.rho = made.rho, 1.0
    was_training = attention.training
    try:
        found, wanted = made.eval()(**given)[0], attention.eval()(**given)[0]
    finally:
        made.rho = rho
        made.train(was_training)
        attention.train(was_training)
    close = 1e-4 if parts.dtype in (torch.float32, torch.float64) else 5e-2
    if not torch.allclose(found.float(), wanted.float(), atol=close * float(wanted.float().abs().max()), rtol=0):
        raise Refused(f"{type(parts.model).__name__}: its attention does more than project, normalise, turn and attend; expected "
                      "a class such as LlamaForCausalLM.")


def _refuse(decoder: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    asked = kwargs.get("output_attentions")
    if getattr(decoder.config, "output_attentions", False) if asked is None else asked:
        raise Refused("output_attentions=True can't be served by a model with a retrofit; leave it out.")
    ctx = kwargs.get(CONTEXT)
    if ctx is not None and ctx.valid is not None and ctx.segments is not None:
        raise Refused("padding and packed documents in one batch: transformers finds documents only where there is no padding "
                      "mask; expected one of the two.")

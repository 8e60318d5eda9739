"""TRSP as a retrofit: a pretrained model gets the smoothing path beside its attention (arXiv:2607.20484).

Every layer keeps its norms, its attention and its MLP, and adds gamma triBox(X) of its un-normalised residual stream X
where attention adds to it (`longspan.layers.sidepaths.trsp`). The one gate of all layers is the only new weight:

    X1 = X + Attn(norm(X)) + gamma triBox(X),   X2 = X1 + MLP(norm(X1))

Nothing is replaced. Before a layer runs, its residual stream joins the `Context` that travels with the call; after its
attention, the path is added to what attention gives. Caches hold each layer's last inputs beside keys and values.

The gate starts almost closed (c2 = -6), since a model that never saw the path is far off when half of it is added at once.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longspan.layers import Context
from longspan.layers.sidepaths.trsp import TRSP, LengthGate, TRSPModule
from longspan.registry import Refused, knob, method
from longspan.training.retrofits.base import CONTEXT, Retrofit
from longspan.training.retrofits.remembering import prepare

LOOKED_FOR = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
TRAINED = ("gate", "attention", "all")


@method("trsp-retrofit", kind="retrofit", system="trsp", paper="arXiv:2607.20484", capabilities=("trains",),
        summary="Adds a gated moving average of the residual stream beside every attention of a pretrained model.")
class TRSPRetrofit(Retrofit):
    """For models with pre-norm layers (Llama, Mistral, Qwen2, Qwen3, Phi3, Gemma); ``--retrofit trsp`` means this one.

    With ``l_ctx="current"`` the gate follows the tokens read so far, as in the reference implementation, so text written
    token by token has other gates than the same text read at once. A number makes the two agree.
    """

    l_ctx: str | int = knob("current", 'length the gate depends on: "current" (the tokens read so far) or a number')
    init_bias: float | str | None = knob(-6.0, 'first c2 of the gate; "-inf" leaves the model as it was; None: drawn')
    train: str = knob("attention", "what is trained: the gate, or attention or everything with it", choices=TRAINED)
    allow_longer: bool = knob(False, "let texts be longer than l_ctx")
    seed: int = knob(0, "draws the first weights of the gate", low=0)

    def check(self) -> None:
        object.__setattr__(self, "init_bias", self.side_path().init_bias)

    def side_path(self) -> TRSP:
        """The side path with these knobs. Refuses what it refuses."""
        return TRSP(l_ctx=self.l_ctx, init_bias=self.init_bias, allow_longer=self.allow_longer)  # type: ignore[call-arg]

    def _convert(self, model: Any) -> None:
        decoder, path = pre_norm_decoder(model), self.side_path()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            gate = path.gate()
        decoder.length_gate = gate.to(decoder.get_input_embeddings().weight.device)
        for i, layer in enumerate(decoder.layers):
            beside = functools.partial(_add, side=TRSPModule(path, i, gate), layer=i)
            layer.register_forward_pre_hook(_with_residual, with_kwargs=True)
            layer.self_attn.register_forward_hook(beside, with_kwargs=True)
        decoder.register_forward_pre_hook(prepare, with_kwargs=True)
        decoder.register_forward_pre_hook(_refuse, with_kwargs=True)

    def _trained(self, model: Any) -> list[nn.Module]:
        if self.train == "all":
            return [model]
        decoder = model.get_decoder()
        attention = [layer.self_attn for layer in decoder.layers] if self.train == "attention" else []
        return [decoder.length_gate, *attention]


def gate_of(model: Any) -> LengthGate:
    """The gate of a converted model."""
    return model.get_decoder().length_gate


# -------------------------------------------------------------------------------------------------------------- the hooks


def _with_residual(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Before a layer: its input joins the context."""
    x = args[0] if args else kwargs["hidden_states"]
    return args, kwargs | {CONTEXT: dataclasses.replace(kwargs[CONTEXT], residual=x)}


def _add(attention: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any, *, side: TRSPModule, layer: int) -> Any:
    """After a layer's attention, which answers with a tensor or with a tuple that begins with it."""
    ctx, cache = kwargs[CONTEXT], kwargs.get("past_key_values", kwargs.get("cache"))
    added, state = side(ctx.residual, ctx, None if cache is None else cache.states.get(layer))
    if cache is not None:
        cache.states[layer] = state
    return (output[0] + added, *output[1:]) if isinstance(output, tuple) else output + added


def _refuse(decoder: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Packed documents that transformers' own attention would not keep apart."""
    ctx: Context = kwargs[CONTEXT]
    if ctx.segments is None:
        return
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        raise Refused("padding and packed documents in one batch: transformers finds documents only where there is no padding "
                      "mask; expected one of the two, or a mask of shape (rows, 1, tokens, tokens).")
    if kwargs.get("past_key_values", kwargs.get("cache")) is not None:
        raise Refused("packed documents with a cache: transformers finds documents only where there is none; expected "
                      "use_cache=False.")


# ---------------------------------------------------------------------------------------------------------- what is refused


def pre_norm_decoder(model: Any) -> Any:
    """The decoder of a model whose layers are pre-norm; `Refused`, with what was looked for, for any other."""
    name, looked = type(model).__name__, ", ".join(LOOKED_FOR)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    layers = list(getattr(decoder, "layers", None) or ())
    if not layers:
        raise Refused(f"{name}: no get_decoder().layers; expected pre-norm layers with {looked}.")
    for i, layer in enumerate(layers):
        missing = [part for part in LOOKED_FOR if not isinstance(getattr(layer, part, None), nn.Module)]
        if missing:
            raise Refused(f"{name}: layer {i} has no {missing[0]}; expected pre-norm layers with {looked}.")
        if not _is_pre_norm(layer):
            raise Refused(f"{name}: layer {i} does more than add self_attn of input_layernorm, then mlp of "
                          f"post_attention_layernorm, to its input; expected pre-norm layers with {looked}.")
    return decoder


class _Answers(nn.Module):
    """Stands in for a part of a layer: answers the same to everything and notes what it was asked."""

    def __init__(self, answer: Any):
        super().__init__()
        self.answer, self.read, self.told = answer, torch.empty(0), set[str]()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.read, self.told = args[0] if args else kwargs["hidden_states"], set(kwargs)
        return self.answer


@torch.no_grad()
def _is_pre_norm(layer: Any) -> bool:
    """Found by trying, with random numbers in the place of what attention and MLP give."""
    norm = next(layer.input_layernorm.parameters(), torch.empty(0))
    if norm.is_meta:
        return True
    width = norm.shape[-1] if norm.numel() else layer.self_attn.o_proj.weight.shape[0]
    x, a, m = torch.randn(3, 1, 2, width, generator=torch.Generator().manual_seed(0)).to(norm.device, norm.dtype)
    probe = copy.copy(layer)
    attention, mlp = _Answers((a, None)), _Answers(m)
    others = {name: copy.deepcopy(child).eval() for name, child in layer.named_children() if name not in ("self_attn", "mlp")}
    probe._modules = others | {"self_attn": attention, "mlp": mlp}
    probe.training = False
    try:
        out = probe(x, **{CONTEXT: None})
    except (TypeError, ValueError, AttributeError, KeyError, RuntimeError):
        return False
    out = out[0] if isinstance(out, tuple) else out
    wanted = [(attention.read, probe.input_layernorm(x)), (mlp.read, probe.post_attention_layernorm(x + a)), (out, x + a + m)]
    return CONTEXT in attention.told and all(_close(found, want) for found, want in wanted)


def _close(found: Float[Tensor, "B T C"], wanted: Float[Tensor, "B T C"]) -> bool:
    return found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-2, atol=1e-2)

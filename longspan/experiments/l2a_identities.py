"""What must hold of the converted bundled model whatever its weights, checked on one text; nothing is trained."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longspan.experiments.hidden import plain_prose
from longspan.layers import Context
from longspan.layers.attention.l2a import FIRES, OPEN
from longspan.models import load
from longspan.training.l2a import penalty
from longspan.training.retrofits import CONTEXT
from longspan.training.retrofits.l2a import L2ARetrofit
from longspan.training.retrofits.two_stores import Rotary, TwoAttentions

CLOSE, DECODED, GRADIENT = 1e-4, 1e-3, 1e-4
"""Largest differences of logits in float32 (1e-4 of their size), of decode steps, and of gradients by their largest."""
NEVER = 100.0
"""A router logit that is never reached."""


@torch.no_grad()
def identities(tokens: int, window: int) -> dict[str, dict[str, Any]]:
    """Figures and statements about the bundled model, converted with `window` and read on `tokens` tokens of prose."""
    loaded = load(dtype="float32")
    ids = torch.tensor([loaded.tokenizer(" ".join(plain_prose()))["input_ids"][:tokens]])
    base, method = loaded.model, L2ARetrofit(window=window)  # type: ignore[call-arg]
    plain = _logits(base, ids)[0]
    twice = _by_hand(base, ids, window)
    model = method.convert(base, in_place=True)
    mixers = [layer.self_attn.mixer for layer in model.model.layers]
    got, ctx = _logits(model, ids)
    size = float(plain.abs().max())
    measured: dict[str, Any] = {"tokens": tokens, "window": window, "two attentions by hand": float((got - twice).abs().max())}
    checks = {"a zero router lets every token through": all(bool(m.all()) for m in ctx.auxiliary[FIRES]),
              "and costs L/4": abs(float(penalty(ctx.auxiliary[OPEN], per_token=False)) - tokens / 4) < 1e-3,
              "gates of ones are two dense attentions": measured["two attentions by hand"] <= CLOSE * size}
    generator = torch.Generator().manual_seed(0)
    for mixer in mixers:
        mixer.router.weight.normal_(std=0.05, generator=generator)
    sparse, ctx = _logits(model, ids)
    measured["firing rate of random routers"] = float(torch.stack(ctx.auxiliary[FIRES]).float().mean())
    measured["sparse and dense"] = float((sparse - _with(model, ids, implementation="dense")).abs().max())
    checks["sparse equals dense times the gate"] = measured["sparse and dense"] <= CLOSE * size
    measured["gradients, sparse and dense"] = _gradients(model.model.layers[0].self_attn, model, ids)
    checks["and so do gradients"] = measured["gradients, sparse and dense"] <= GRADIENT
    measured["prefill then decode"], cache = _decoded(model, ids, sparse)
    checks["prefill then decode is one forward"] = measured["prefill then decode"] <= DECODED * size
    measured["cache bytes"] = cache.nbytes
    method.prune(model, list(range(0, len(mixers), 2)))
    half = model(ids, use_cache=True, logits_to_keep=1).past_key_values
    measured["cache bytes with half the layers pruned"] = half.nbytes
    token = 2 * loaded.model.config.num_key_value_heads * mixers[0].local.head_dim * 4
    kept = len(mixers) - len(range(0, len(mixers), 2))
    local = min(tokens, window - 1) * (token + 8)
    checks["bytes are the sum over kept layers"] = half.nbytes == len(mixers) * local + kept * tokens * token
    closed = _closed(model, ids)
    method.prune(model, [i for i in range(len(mixers)) if i % 2], allow_local_only=True)
    checks["gates of zeros are the local model, bit for bit"] = torch.equal(closed, _logits(model, ids)[0])
    for mixer in mixers:
        mixer.local.window = tokens
    measured["a window of the whole text and the base model"] = float((_logits(model, ids)[0] - plain).abs().max())
    checks["a window of the whole text is full attention"] = measured[
        "a window of the whole text and the base model"] <= CLOSE * size
    return {"measured": measured, "checks": checks}


def _logits(model: Any, ids: Int[Tensor, "1 T"]) -> tuple[Float[Tensor, "1 T V"], Context]:
    ctx = Context.of(*ids.shape)
    return model(ids, use_cache=False, **{CONTEXT: ctx}).logits, ctx


def _by_hand(base: Any, ids: Int[Tensor, "1 T"], window: int) -> Float[Tensor, "1 T V"]:
    """The base model with every attention taken twice, by its own modules: within the window, then over everything."""
    inner, T = base.model, ids.shape[1]
    x = inner.embed_tokens(ids)
    turned = inner.rotary_emb(x, torch.arange(T)[None])
    everything = torch.ones(T, T, dtype=torch.bool).tril()
    for layer in inner.layers:
        for mask in (everything.triu(1 - window), everything):
            added, _ = layer.self_attn(layer.input_layernorm(x), position_embeddings=turned, attention_mask=mask[None, None])
            x = x + added
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return base.lm_head(inner.norm(x))


def _with(model: Any, ids: Int[Tensor, "1 T"], **knobs: Any) -> Float[Tensor, "1 T V"]:
    """Logits with other knobs in every layer."""
    mixers = [layer.self_attn.mixer for layer in model.model.layers]
    before = mixers[0].method
    for mixer in mixers:
        mixer.method = dataclasses.replace(before, **knobs)
    found = _logits(model, ids)[0]
    for mixer in mixers:
        mixer.method = before
    return found


def _closed(model: Any, ids: Int[Tensor, "1 T"]) -> Float[Tensor, "1 T V"]:
    """Logits when no token fires: the threshold is out of reach."""
    return _with(model, ids, temperature=NEVER, theta=1.0 - 1e-9)


@torch.enable_grad()
def _gradients(layer: TwoAttentions, model: Any, ids: Int[Tensor, "1 T"]) -> float:
    """The largest difference between a layer's gradients, sparse and dense, by the largest gradient of each weight."""
    x = model.model.embed_tokens(ids).detach()
    turned, found = model.model.rotary_emb(x, torch.arange(ids.shape[1])[None]), []
    mixer, before = layer.mixer.train(), layer.mixer.method
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    for implementation in ("sparse", "dense"):
        mixer.method = dataclasses.replace(before, implementation=implementation, leak=0.0)
        ctx = dataclasses.replace(Context.of(*ids.shape), residual=x, position=Rotary(layer.turn, *turned))
        y, _ = mixer(layer.norm(x), ctx)
        found.append(torch.autograd.grad((y * weights).sum(), list(mixer.parameters())))
    mixer.eval().method = before
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-12)) for a, b in zip(*found))


def _decoded(model: Any, ids: Int[Tensor, "1 T"], whole: Float[Tensor, "1 T V"], steps: int = 8) -> tuple[float, Any]:
    """The largest difference between one forward and reading all but the last tokens, then those one by one."""
    start = ids.shape[1] - steps
    out = model(ids[:, :start], use_cache=True, logits_to_keep=1)
    worst = float((out.logits[:, -1] - whole[:, start - 1]).abs().max())
    for t in range(start, ids.shape[1]):
        out = model(ids[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
        worst = max(worst, float((out.logits[:, -1] - whole[:, t]).abs().max()))
    return worst, out.past_key_values

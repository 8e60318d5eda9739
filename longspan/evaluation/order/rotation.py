"""What heads would put out without rotary positions: the same queries and keys of a layer, not turned to their places.

If a head finds time through rotary angles, its output computed with q.k of unrotated vectors tells little about it; if it
finds it by content that carries time, R^2 hardly falls. Only the noted outputs change; the model goes on as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from longspan.layers.attention.base import AttentionModule, KVState, who_sees_whom
from longspan.models import LayerCall
from longspan.models.call import plain_attention


@contextlib.contextmanager
def unrotated(module: AttentionModule, pool: Float[Tensor, "B S T"]) -> Iterator[list[Float[Tensor, "B S Hq D"]]]:
    """Pooled outputs of one layer of a `Decoder` without rotation, one for each whole-sequence forward made inside."""
    found: list[Tensor] = []

    def note(_: Any, arguments: tuple[Any, ...]) -> None:
        x, ctx = arguments[:2]
        q, k, v = module.project(x, ctx)
        q, k = module.turned(q, k, ctx)
        order = ctx.order if module.window is not None else None
        held = KVState(k, v, None, order, ctx.valid, ctx.segments)
        out = module.mix(q, held, who_sees_whom(held, x.shape[1], module.window), None).transpose(1, 2)
        found.append(_pooled(out, pool))

    handle = module.register_forward_pre_hook(note)
    try:
        yield found
    finally:
        handle.remove()


@contextlib.contextmanager
def unrotated_calls(run: Any, layer: int, pool: Float[Tensor, "1 S T"]) -> Iterator[list[Float[Tensor, "1 S Hq D"]]]:
    """The same for one layer of a model of transformers under a running recipe that keeps everything.

    Inside, each forward of T tokens on top of what was read adds one.
    """
    found: list[Tensor] = []
    plain = run.attend

    def attend_and_note(call: LayerCall) -> Tensor:
        whole = plain(call)
        if call.layer == layer:
            held = call.store.store.view()
            k = call.parts.unrotate(held.k, *call.parts.rope(held.positions, layer))
            out = plain_attention(call.q_pre_rope, k, held.v, None, call.scale, call.window, call.softcap)
            found.append(_pooled(out.transpose(1, 2), pool))
        return whole

    run.attend = attend_and_note
    try:
        yield found
    finally:
        run.attend = plain


def _pooled(out: Float[Tensor, "B T Hq D"], pool: Float[Tensor, "B S T"]) -> Float[Tensor, "B S Hq D"]:
    wide = out.detach().to(torch.promote_types(out.dtype, torch.float32))
    return torch.einsum("bst,bthd->bshd", pool.to(wide).expand(len(wide), -1, -1), wide)

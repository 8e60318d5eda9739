"""Attention over what a rank holds, forward and backward apart, as one autograd function per layer needs it.

A context-parallel layer keeps outputs and log-sum-exps and computes queries, keys and values again, so it calls the two
halves of attention itself. The backward half needs only (dout, q, k, v, out, lse): with p = exp(z - lse) and
delta = sum(dout * out), dv = p^T dout, dz = p (dout v^T - delta), dq = scale dz k, dk = scale dz^T q (FlashAttention-2,
arXiv:2307.08691). With the `out` and `lse` of the whole sequence, it gives a part of the keys its exact share, which is
what a ring sums up.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from longspan.kernels import attend
from longspan.kernels.attend import PLAIN_SCORES, causal_mask

Grads = tuple[Tensor, Tensor, Tensor]


class Engine(Protocol):
    """Attention of the queries of a rank over the whole sequence, whoever holds its keys."""

    def forward(self, q: Float[Tensor, "B n S d"], k: Float[Tensor, "B m S d"], v: Float[Tensor, "B m S d"]
                ) -> tuple[Float[Tensor, "B n S d"], Float[Tensor, "B n S"]]:
        """(out, lse); lse is float32, or float64 for float64 inputs."""
        ...

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Grads:
        """(dq, dk, dv); those of keys and values in the dtype they are summed in."""
        ...


class WholeSequence:
    """The engine of a rank that holds queries and keys of every position. `ends` cut it into documents."""

    def __init__(self, causal: bool = True, ends: tuple[int, ...] = ()) -> None:
        self.causal, self.ends = causal, ends

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        parts = [attention_forward(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], self.causal) for a, b in self._cuts(q)]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Grads:
        parts = [attention_backward(dout[:, :, a:b], q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], out[:, :, a:b],
                                    lse[:, :, a:b], self.causal) for a, b in self._cuts(q)]
        if len(parts) == 1:
            return parts[0]
        dq, dk, dv = (torch.cat(grads, 2) for grads in zip(*parts, strict=True))
        return dq, dk, dv

    def _cuts(self, q: Tensor) -> list[tuple[int, int]]:
        return list(pairwise((0, *self.ends))) if self.ends else [(0, q.shape[2])]


def attention_forward(q: Float[Tensor, "B n T d"], k: Float[Tensor, "B m S d"], v: Float[Tensor, "B m S d"], causal: bool
                      ) -> tuple[Float[Tensor, "B n T d"], Float[Tensor, "B n T"]]:
    """(out, lse) without a graph."""
    with torch.no_grad():
        return attend(q, k, v, causal=causal)


def attention_backward(dout: Float[Tensor, "B n T d"], q: Float[Tensor, "B n T d"], k: Float[Tensor, "B m S d"],
                       v: Float[Tensor, "B m S d"], out: Float[Tensor, "B n T d"], lse: Float[Tensor, "B n T"],
                       causal: bool) -> Grads:
    """(dq, dk, dv) in the dtypes of q, k, v; `out` and `lse` may be those of a longer sequence of keys.

    Raises ValueError when `lse` isn't in the dtype of statistics.
    """
    wanted = torch.promote_types(q.dtype, torch.float32)
    if lse.dtype != wanted:
        raise ValueError(f"the log-sum-exp of {q.dtype} attention must be {wanted}, got {lse.dtype}")
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"causal attention needs as many queries as keys here, got {q.shape[2]} and {k.shape[2]}")
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal, attn_mask=None, scale=None)
    return backward_reference(dout, q, k, v, out, lse, causal)


def backward_reference(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Grads:
    """The definition of `attention_backward`, a chunk of rows at a time, in the dtype of `lse`."""
    wide, group, scale = lse.dtype, q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    keys, values = (x.repeat_interleave(group, 1).to(wide) for x in (k, v))
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(keys), torch.zeros_like(values)
    T, S = q.shape[2], k.shape[2]
    rows = max(1, PLAIN_SCORES // max(1, q.shape[0] * q.shape[1] * S))
    for start in range(0, T, rows):
        stop = min(T, start + rows)
        own, dout_own = q[:, :, start:stop].to(wide), dout[:, :, start:stop].to(wide)
        weights = torch.exp(own @ keys.mT * scale - lse[:, :, start:stop, None])
        if causal:
            weights = weights.masked_fill(~causal_mask(T, S, q.device, start, stop), 0.0)
        delta = (dout_own * out[:, :, start:stop].to(wide)).sum(-1, keepdim=True)
        dscores = weights * (dout_own @ values.mT - delta) * scale
        dq[:, :, start:stop] = dscores @ keys
        dk += dscores.mT @ own
        dv += weights.mT @ dout_own
    return dq, _per_group(dk, group).to(k.dtype), _per_group(dv, group).to(v.dtype)


def _per_group(x: Tensor, group: int) -> Tensor:
    b, h, s, d = x.shape
    return x.view(b, h // group, group, s, d).sum(2)

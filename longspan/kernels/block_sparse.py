"""Attention over a read plan: the one executor behind every selector.

The definition is a masked softmax: of the pairs a `ReadPlan` lists (minus padding), and of no others. `reference`
computes exactly that; the CPU version (`block_sparse_cpu`) and the Triton version (`block_sparse_triton`) compute only
the listed pairs and agree with it. All return the log-sum-exp on request, so that results can be merged with other
parts (`merge`).
"""

from __future__ import annotations

from typing import Literal, overload

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longspan.kernels.attend import attend_reference
from longspan.kernels.plan import ReadPlan, repeat_heads

BACKENDS = ("reference", "cpu", "triton")
REFERENCE_PAIRS = 1 << 25
"""Pairs the reference holds at once."""

Result = tuple[Float[Tensor, "B Hq T D"], Float[Tensor, "B Hq T"]]


@overload
def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: ReadPlan, *, scale: float | None = None, valid: Tensor | None = None,
    return_lse: Literal[False] = False, backend: str | None = None,
) -> Tensor: ...  # fmt: skip


@overload
def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: ReadPlan, *, scale: float | None = None, valid: Tensor | None = None,
    return_lse: Literal[True], backend: str | None = None,
) -> Result: ...  # fmt: skip


def block_sparse_attention(
    q: Float[Tensor, "B Hq T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S D"],
    plan: ReadPlan,
    *,
    scale: float | None = None,
    valid: Bool[Tensor, "B S"] | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Float[Tensor, "B Hq T D"] | Result:
    """Attention of the last T of S positions over the pairs that `plan` lists.

    Query head h reads key head h // (Hq/Hkv) and follows list h // (Hq/plan.heads). `valid` is false where a key slot
    is padding: such keys are never read, and the rows of such positions become 0. `scale` (positive) defaults to
    1/sqrt(D). `backend` is "reference", "cpu" or "triton"; by default the fastest that applies, and the reference
    where gradients are wanted. Returns the output in q's dtype, with ``return_lse`` also the natural log-sum-exp in
    float32 (-inf for padding rows).

    Raises ValueError where shapes don't fit together and where a query that isn't padding has no key to read.
    """
    _check(q, k, v, plan, valid, backend)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if not scale > 0:
        raise ValueError(f"scale: expected a positive number, got {scale}")
    backend = backend or _fastest(q, k, v)
    if backend == "triton":
        from longspan.kernels.block_sparse_triton import block_sparse_triton

        out, lse = block_sparse_triton(q, k, v, plan, scale, valid)
    elif backend == "cpu":
        from longspan.kernels.block_sparse_cpu import block_sparse_cpu

        out, lse = block_sparse_cpu(q, k, v, plan, scale, valid)
    else:
        out, lse = reference(q, k, v, plan, scale, valid)
    refuse_empty_rows(lse, valid)
    return (out, lse) if return_lse else out


def reference(q: Tensor, k: Tensor, v: Tensor, plan: ReadPlan, scale: float, valid: Tensor | None) -> Result:
    """The definition: softmax in float32 under the plan's token mask, differentiable, in strips of rows."""
    rows = max(1, REFERENCE_PAIRS // (q.shape[0] * q.shape[1] * plan.k_len))
    parts = []
    for start in range(0, plan.q_len, rows):
        stop = min(start + rows, plan.q_len)
        mask = repeat_heads(plan.token_mask(start, stop), q.shape[1])
        if valid is not None:
            mask = mask & valid[:, None, None] & own_slots(valid, plan.q_len)[:, None, start:stop, None]
        parts.append(attend_reference(q[:, :, start:stop], k, v, scale=scale, causal=False, mask=mask))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def own_slots(valid: Bool[Tensor, "B S"], q_len: int) -> Bool[Tensor, "B T"]:
    """Whether each query's own position is a token."""
    return valid[:, valid.shape[1] - q_len:]


def refuse_empty_rows(lse: Float[Tensor, "B Hq T"], valid: Bool[Tensor, "B S"] | None) -> None:
    """Raise ValueError if a query that isn't padding has read nothing."""
    empty = torch.isneginf(lse)
    if valid is not None:
        empty &= own_slots(valid, lse.shape[2])[:, None]
    if bool(empty.any()):
        b, h, i = (int(x) for x in empty.nonzero()[0])
        raise ValueError(f"the plan gives {int(empty.sum())} queries no key to read, the first at batch row {b}, "
                         f"head {h}, query {i}; list at least the block of the query's own position")


def _fastest(q: Tensor, k: Tensor, v: Tensor) -> str:
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return "reference"
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return "reference"
    if q.device.type == "cpu":
        return "cpu"
    from longspan.kernels.block_sparse_triton import available

    return "triton" if available() and q.is_cuda else "reference"


def _check(q: Tensor, k: Tensor, v: Tensor, plan: ReadPlan, valid: Tensor | None, backend: str | None) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(f"expected q (B,Hq,T,D) and k, v (B,Hkv,S,D), got {shapes}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"expected q, k and v of one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    heads, key_heads = q.shape[1], k.shape[1]
    if heads % key_heads or heads % plan.heads or plan.batch not in (1, q.shape[0]):
        raise ValueError(f"expected Hq a multiple of Hkv and of the plan's heads, and a plan for 1 or B rows; got "
                         f"{shapes} and a plan for B={plan.batch}, H={plan.heads}")
    if (plan.q_len, plan.k_len) != (q.shape[2], k.shape[2]):
        raise ValueError(f"the plan is for T={plan.q_len}, S={plan.k_len}, got {shapes}")
    if valid is not None and (valid.shape != (q.shape[0], k.shape[2]) or valid.dtype != torch.bool):
        raise ValueError(f"valid: expected Bool {(q.shape[0], k.shape[2])}, got {valid.dtype} {tuple(valid.shape)}")
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")

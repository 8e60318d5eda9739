"""The Kullback-Leibler divergence of a student's next-token distribution from a fixed teacher's, in chunks of positions.

With log-probabilities a (student) and b (teacher),

    l = KL(student || teacher) = sum_v e^{a_v} (a_v - b_v),   dl/dlogits = e^a (a - b - l).

The student is the first argument (the reverse KL of distillation), and the teacher is a constant: no gradient reaches it.
Softmaxes are computed in float32 at least, `chunk` positions at a time, forwards and again backwards, so that beside the
logits themselves only a chunk is ever held wide.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from longspan.training.loop import Diverged


class _ReverseKL(torch.autograd.Function):
    """l for each row of logits; the backward computes the chunks again."""

    @staticmethod
    def forward(ctx: Any, student: Float[Tensor, "N V"], teacher: Float[Tensor, "N V"], chunk: int) -> Float[Tensor, " N"]:
        parts = [(probabilities * gap).sum(-1) for _, probabilities, gap in _chunks(student, teacher, chunk)]
        losses = torch.cat(parts) if parts else student.new_zeros(0, dtype=_wide(student))
        ctx.save_for_backward(student, teacher, losses)
        ctx.chunk = chunk
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        student, teacher, losses = ctx.saved_tensors
        out = torch.empty_like(student)
        for rows, probabilities, gap in _chunks(student, teacher, ctx.chunk):
            out[rows] = (probabilities * (gap - losses[rows, None]) * grads[0][rows, None]).to(out.dtype)
        return out, None, None


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _chunks(student: Tensor, teacher: Tensor, chunk: int) -> Any:
    """Row slices with e^a and a - b; where the student gives a token no probability at all, a - b counts as 0."""
    for start in range(0, len(student), chunk):
        rows, dtype = slice(start, start + chunk), _wide(student)
        a, b = (logits[rows].to(dtype).log_softmax(-1) for logits in (student, teacher))
        probabilities = a.exp()
        yield rows, probabilities, (a - b).masked_fill_(a == float("-inf"), 0.0)


def reverse_kl(student: Float[Tensor, "N V"], teacher: Float[Tensor, "N V"], chunk: int = 1024) -> Float[Tensor, " N"]:
    """KL(student || teacher) of each row, in nats; at least 0, and exactly 0 for equal logits.

    Args:
        student: logits of the distribution that learns.
        teacher: logits of the same shape, taken as constants.
        chunk: rows computed at once.

    Raises:
        Diverged: logits that hold NaN.
        ValueError: shapes that differ.
    """
    if student.shape != teacher.shape or student.ndim != 2:
        raise ValueError(f"reverse_kl takes two tensors (N,V), got {tuple(student.shape)} and {tuple(teacher.shape)}")
    with torch.autocast(student.device.type, enabled=False):
        losses = _ReverseKL.apply(student, teacher.detach(), chunk)
    if bool(losses.isnan().any()):
        raise Diverged("the logits hold NaN, so the two views can't be compared; lower the learning rate.")
    return losses.clamp(min=0.0)

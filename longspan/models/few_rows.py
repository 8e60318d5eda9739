"""Decode steps made of fewer, faster calls: linear layers, gated MLPs and RMS norms of an unchanged model.

A decode step of a small model on a CPU spends more time between its parts than in them. While a recipe is on, modules whose
meaning is known run as one native call each when they get a few rows; with more rows, on other devices and in other dtypes
they run as they are. Whether a class computes what is meant is found by trying it, not by its name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.kernels.linear import FEW_ROWS, gated_mlp, linear, rms_norm


def speed_up(model: nn.Module) -> list[Callable[[], Any]]:
    """Let modules of `model` take the fast way for few rows; returns what undoes it."""
    undo: list[Callable[[], Any]] = []
    for module in model.modules():
        fast = _fast_forward(module)
        if fast is not None:
            module.forward = fast  # type: ignore[assignment]
            undo.append(functools.partial(module.__dict__.pop, "forward", None))
    return undo


def _fast_forward(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """The fast way of a module, or None. A forward that somebody replaced already stays."""
    weight = getattr(module, "weight", None)
    if "forward" in module.__dict__:
        return None
    if type(module) is nn.Linear:
        return functools.partial(_linear, module) if _plain(weight) else None
    if _is_mlp(module):
        return functools.partial(_mlp, module)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if isinstance(eps, float) and isinstance(weight, Tensor) and _plain(weight) and weight.dim() == 1 and _is_rms_norm(
            type(module)):  # type: ignore[arg-type]
        return functools.partial(_norm, module, eps)
    return None


def _plain(weight: Any) -> bool:
    return isinstance(weight, Tensor) and weight.device.type == "cpu" and weight.dtype is torch.bfloat16


def _is_few(x: Tensor) -> bool:
    return x.numel() <= FEW_ROWS * x.shape[-1] and not torch.is_grad_enabled()


def _linear(module: Any, x: Tensor) -> Tensor:
    if _is_few(x):
        return linear(x, module.weight, module.bias)
    return F.linear(x, module.weight, module.bias)


def _mlp(module: Any, x: Tensor) -> Tensor:
    parts = (module.gate_proj, module.up_proj, module.down_proj)
    if _is_few(x) and not any(p._forward_hooks or p._forward_pre_hooks for p in parts):  # hooks want to see their module run
        return gated_mlp(x, module.gate_proj.weight, module.up_proj.weight, module.down_proj.weight)
    forward: Any = type(module).forward
    return forward(module, x)


def _norm(module: Any, eps: float, x: Tensor) -> Tensor:
    if _is_few(x):
        return rms_norm(x, module.weight, eps)
    forward: Any = type(module).forward
    return forward(module, x)


def _is_mlp(module: nn.Module) -> bool:
    """Whether this is ``down_proj(silu(gate_proj(x)) * up_proj(x))``, nothing more."""
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(type(p) is nn.Linear and p.bias is None and _plain(p.weight) for p in parts):
        return False
    act = getattr(module, "act_fn", None)
    known = {"gate_proj", "up_proj", "down_proj", "act_fn"}
    return {n for n, _ in module.named_children()} <= known and _is_silu_mlp(type(module), type(act))  # type: ignore[arg-type]


@functools.cache
def _is_silu_mlp(cls: Any, act: Any) -> bool:
    """Try the class on random numbers, with an activation of the given class."""
    try:
        trial = cls.__new__(cls)
        nn.Module.__init__(trial)
        generator = torch.Generator().manual_seed(0)
        sizes = {"gate_proj": (4, 8), "up_proj": (4, 8), "down_proj": (8, 4)}
        for name, (inputs, outputs) in sizes.items():
            layer = nn.Linear(inputs, outputs, bias=False)
            layer.weight.data = torch.randn(outputs, inputs, generator=generator)
            setattr(trial, name, layer)
        trial.act_fn = act()
        x = torch.randn(3, 4, generator=generator)
        with torch.no_grad():
            wanted = gated_mlp(x, trial.gate_proj.weight, trial.up_proj.weight, trial.down_proj.weight)
            return torch.allclose(cls.forward(trial, x), wanted, atol=1e-5)
    except Exception:  # a class that can't be tried is none that is known
        return False


@functools.cache
def _is_rms_norm(cls: Any) -> bool:
    """Try the class on random numbers."""
    try:
        trial = cls(8, eps=0.25)
        generator = torch.Generator().manual_seed(0)
        trial.weight.data = torch.randn(8, generator=generator)
        x = torch.randn(3, 8, generator=generator)
        with torch.no_grad():
            return torch.allclose(trial(x), rms_norm(x, trial.weight, 0.25), atol=1e-5)
    except Exception:  # a class that can't be tried is none that is known
        return False

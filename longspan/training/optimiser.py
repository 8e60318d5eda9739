"""AdamW over a model's parameters, each with the settings its module asks for.

Decoupled weight decay (arXiv:1711.05101) is applied to matrices; vectors, scalars and embeddings are left alone. A
module may set ``optimiser_settings = {"name": {"weight_decay": 0.0, "lr_scale": 0.5, "clip": 1e-4, …}}`` for parameters
of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from longspan.registry import Refused
from longspan.training.config import TrainConfig

SETTINGS = ("weight_decay", "lr_scale", "betas", "eps", "clip")


def named_trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that require gradients, by name; shared ones once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def make_optimiser(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW with one group for each distinct combination of settings. `Refused` when nothing can be trained."""
    groups: dict[tuple, dict[str, Any]] = {}
    seen: set[int] = set()
    for module in model.modules():
        asked = getattr(module, "optimiser_settings", {})
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            settings = _settings(module, name, parameter, asked.get(name, {}), config)
            key = tuple(sorted((k, str(v)) for k, v in settings.items()))
            groups.setdefault(key, {"params": []} | settings)["params"].append(parameter)
    if not groups:
        raise Refused("nothing to train: no parameter of the model requires gradients; expected at least one.")
    return torch.optim.AdamW(list(groups.values()), lr=config.lr, fused=True)


def _settings(module: nn.Module, name: str, parameter: Tensor, asked: Any, config: TrainConfig) -> dict[str, Any]:
    unknown = [key for key in asked if key not in SETTINGS]
    if unknown:
        raise ValueError(f"{type(module).__name__}.{name}: unknown optimiser setting {unknown[0]!r}; known: {SETTINGS}")
    decays = parameter.ndim >= 2 and not isinstance(module, nn.Embedding)
    plain = {
        "weight_decay": config.weight_decay if decays else 0.0,
        "lr_scale": 1.0,
        "betas": config.betas,
        "eps": config.eps,
        "clip": None,
    }
    return plain | dict(asked)


def clip_gradients(optimiser: torch.optim.Optimizer, clip: float | None) -> float:
    """Scale gradients to a norm of at most `clip`, then groups with a clip of their own; returns the norm before."""
    norm = nn.utils.clip_grad_norm_(
        [p for group in optimiser.param_groups for p in group["params"]], float("inf") if clip is None else clip
    )
    for group in optimiser.param_groups:
        if group["clip"] is not None:
            nn.utils.clip_grad_norm_(group["params"], group["clip"])
    return float(norm)


def scale_gradients(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply every gradient by `factor`."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def set_learning_rate(optimiser: torch.optim.Optimizer, lr: float) -> None:
    """Give every group `lr` times its own scale."""
    for group in optimiser.param_groups:
        group["lr"] = lr * group["lr_scale"]


def optimiser_tensors(optimiser: torch.optim.Optimizer, named: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """The optimiser's state as ``"parameter/entry"`` -> tensor."""
    found: dict[str, Tensor] = {}
    for name, parameter in named.items():
        for entry, value in optimiser.state.get(parameter, {}).items():
            found[f"{name}/{entry}"] = torch.as_tensor(value)
    return found


def load_optimiser_tensors(
    optimiser: torch.optim.Optimizer, named: dict[str, nn.Parameter], tensors: dict[str, Tensor]
) -> None:
    """Put back what `optimiser_tensors` gave. Raises ValueError for a parameter the model doesn't have."""
    for key, value in tensors.items():
        name, entry = key.rsplit("/", 1)
        if name not in named:
            raise ValueError(f"the checkpoint's optimiser knows a parameter {name!r} that the model doesn't have")
        optimiser.state[named[name]][entry] = value.to(named[name].device).clone()

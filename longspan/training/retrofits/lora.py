"""LoRA: a frozen model learns through low-rank additions to its projections (arXiv:2106.09685).

    y = W x + (alpha / rank) B A x,   A (rank x in) drawn, B (out x rank) = 0

At the start B A = 0 and the model answers exactly as before. Only A and B are trained. The `peft` library puts them into
the model; what is saved are weights and adapters apart, so that nothing is rounded. Loading folds the adapters into the
weights (W + alpha/rank B A) unless ``merge=False``: a merged model is a plain one again, which every recipe carries.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from longspan.models import find_parts
from longspan.models.retrofitted import ENTRY
from longspan.registry import Refused, knob, method
from longspan.training.retrofits.base import Retrofit, load_retrofit, retrofit_of

ADAPTER = "default"
"""peft's name for the only adapter of a model."""


@method("lora-retrofit", kind="retrofit", paper="arXiv:2106.09685", capabilities=("trains",),
        summary="Trains low-rank additions to a model's projections, and nothing else of it.")
class LoRA(Retrofit):
    """For models with Llama's layout; ``--retrofit lora`` means this one. Needs the extra ``longspan[train]``."""

    rank: int = knob(8, "rank of the additions", low=1)
    alpha: float | None = knob(None, "the additions are scaled by alpha/rank; None: twice the rank", low=0.0)
    dropout: float = knob(0.0, "dropout before the additions", low=0.0, high=0.99)
    mlp: bool = knob(False, "additions to the projections of the MLP as well as attention's")
    merge: bool = knob(True, "fold the additions into the weights when a saved model is loaded")
    seed: int = knob(0, "seed of the first matrices", low=0)

    def _convert(self, model: Any) -> None:
        peft = _peft()
        targets = projections(model, self.mlp)
        alpha: Any = 2 * self.rank if self.alpha is None else self.alpha
        config = peft.LoraConfig(r=self.rank, lora_alpha=alpha, lora_dropout=self.dropout, target_modules=targets, bias="none")
        training = model.training
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            peft.inject_adapter_in_model(config, model, ADAPTER)
        for module in self._trained(model):  # half precision would lose small steps
            module.float()
        model.train(training)

    def _trained(self, model: Any) -> list[nn.Module]:
        return [module for name, module in model.named_modules() if name.endswith((".lora_A", ".lora_B"))]

    @classmethod
    def load(cls, folder: str | Path, *, dtype: Any = None, device: Any = None) -> Any:
        """The model that ``save_pretrained`` wrote, merged if its retrofit says so, in evaluation mode."""
        model = load_retrofit(folder, dtype=dtype, device=device)
        return merged(model) if getattr(retrofit_of(model), "merge", False) else model


def merged(model: Any) -> Any:
    """The model itself with its adapters folded into the weights: a plain model, without the retrofit."""
    if not isinstance(retrofit_of(model), LoRA):
        raise Refused(f"the model has the retrofit {retrofit_of(model)}; expected lora-retrofit, which alone can be merged.")
    for name, module in list(model.named_modules()):
        if hasattr(module, "lora_A") and hasattr(module, "merge"):
            module.merge(safe_merge=True)
            model.set_submodule(name, module.base_layer)
    delattr(model.config, ENTRY)
    return model


def projections(model: Any, mlp: bool = False) -> list[str]:
    """Full names of the linear layers in every attention, and in every MLP if asked.

    Raises:
        Refused: a model whose layers can't be found, or that hold no linear layer there.
    """
    parts = find_parts(model)
    blocks = [layer.self_attn for layer in parts.layers]
    if mlp:
        blocks += [getattr(layer, "mlp", nn.Identity()) for layer in parts.layers]
    inside = [{id(m) for m in block.modules() if isinstance(m, nn.Linear)} for block in blocks]  # type: ignore[union-attr]
    if not all(inside):
        raise Refused(f"{type(model).__name__}: layer {inside.index(set()) % parts.n_layers} has no linear layer in its "
                      f"{'attention' if inside.index(set()) < parts.n_layers else 'MLP'}; expected one, as Llama's layers have.")
    wanted = set().union(*inside)
    return [name for name, module in model.named_modules() if id(module) in wanted]


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise Refused("lora-retrofit: the library peft isn't installed; expected the extra longspan[train].") from None
    return peft

"""What retrofits share: converting a transformers model, training it, keeping it.

A retrofit puts modules of ours into a pretrained causal language model. The model stays what it was to transformers:
``forward`` and ``generate`` work as before, and ``save_pretrained`` writes all that is needed, since the config then has
an entry of ours that names the retrofit and its knobs. `Retrofit.load` (or `longspan.load`) builds it again.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from longspan.layers import Context, choose, to_json
from longspan.models.retrofitted import ENTRY
from longspan.registry import Method, Refused
from longspan.training.retrofits.indices import explicit_mask, frozen_frequencies

CONTEXT = "longspan_context"
"""The keyword under which a `Context` travels through a transformers model to the modules of a retrofit."""


class Retrofit(Method):
    """A method of kind ``retrofit``. `_convert` and `_unfreeze` are what a retrofit is."""

    objective: ClassVar[str] = "next-token"
    """What it is trained with if nothing else is asked for."""

    def convert(self, model: Any, *, in_place: bool = False) -> Any:
        """`model` with the retrofit, changed itself or as a copy. New weights are chosen by the retrofit, not drawn.

        Raises `Refused` for a model that can't take it, before anything is changed.
        """
        if getattr(model.config, ENTRY, None):
            raise Refused(f"the model already has the retrofit {retrofit_of(model)}; expected a model without one.")
        if not in_place:
            model = copy.deepcopy(model)
        self._convert(model)
        setattr(model.config, ENTRY, to_json(self) | {"pruned": []})
        return model

    def _convert(self, model: Any) -> None:
        raise NotImplementedError

    def unfreeze(self, model: Any) -> None:
        """Ask for gradients where the method's own recipe trains, and nowhere else."""
        model.requires_grad_(False)
        for module in self._trained(model):
            module.requires_grad_(True)

    def _trained(self, model: Any) -> list[nn.Module]:
        raise NotImplementedError

    def prune(self, model: Any, layers: list[int], *, allow_local_only: bool = False) -> None:
        """Take away again what the retrofit added to some layers, where it can."""
        raise Refused(f"{self.card.name}: nothing of it can be pruned.")

    @classmethod
    def load(cls, folder: str | Path, *, dtype: Any = None, device: Any = None) -> Any:
        """The converted model that ``save_pretrained`` wrote to `folder`, in evaluation mode."""
        return load_retrofit(folder, dtype=dtype, device=device)


def retrofit_of(model_or_config: Any) -> Retrofit:
    """The retrofit that a model's (or config's) entry names. `Refused` when there is none."""
    config = getattr(model_or_config, "config", model_or_config)
    entry = getattr(config, ENTRY, None)
    if not entry:
        raise Refused(f"{type(model_or_config).__name__} has no retrofit; expected a model that `longspan train --retrofit` "
                      "or `Retrofit.convert` made.")
    return choose({"name": entry["name"], "knobs": entry["knobs"]}, "retrofit")


def load_retrofit(folder: str | Path, *, dtype: Any = None, device: Any = None) -> Any:
    """Build the base model of the config, convert it as the entry says, and fill in the saved weights."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(folder)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    method, entry = retrofit_of(config), getattr(config, ENTRY)
    delattr(config, ENTRY)
    dtype = config.dtype if dtype in (None, "auto") else dtype
    with torch.random.fork_rng(devices=[]):  # the first weights are thrown away; the caller's dice stay put
        model = method.convert(AutoModelForCausalLM.from_config(config, dtype=dtype), in_place=True)
    if entry["pruned"]:
        method.prune(model, entry["pruned"], allow_local_only=True)
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        weights |= load_file(str(file))
    found = model.load_state_dict(weights, strict=False)
    model.tie_weights()
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if config.tie_word_embeddings else set()
    wrong = [name for name in (*found.missing_keys, *found.unexpected_keys) if name not in tied]
    if wrong:
        raise Refused(f"{str(folder)!r}: its weights don't fit its config ({wrong[0]}); expected a folder that "
                      "save_pretrained wrote.")
    return (model if device is None else model.to(device)).eval()


@dataclass(frozen=True, eq=False)
class TunedOutput:
    """What `Tuned` answers, in the words of the small decoder's output."""

    logits: Float[Tensor, "B T V"]
    ctx: Context
    state: None = None


class Tuned(nn.Module):
    """A converted model as the training loop calls a model: ``model(ids, valid=…, segments=…)``."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    @classmethod
    def ready(cls, model: Any) -> Self:
        """`model` with gradients asked for as its retrofit's recipe has it."""
        retrofit_of(model).unfreeze(model)
        return cls(model)

    def forward(
        self,
        ids: Int[Tensor, "B T"],
        *,
        valid: Bool[Tensor, "B T"] | None = None,
        segments: Int[Tensor, "B T"] | None = None,
        positions: Int[Tensor, "B T"] | None = None,
        state: Any = None,
    ) -> TunedOutput:
        """Logits of a whole batch; padding may stand anywhere and documents may be packed. Takes no earlier state.

        `positions` are indices other than the standard ones; masks, documents and rotary frequencies stay those of the
        standard ones, and indices beyond the model's window are served.
        """
        if state is not None:
            raise Refused("a retrofit is trained on whole sequences; expected segments=1.")
        ctx = Context.of(*ids.shape, valid=valid, segments=segments, device=ids.device)
        if positions is not None:
            with frozen_frequencies(self.model, ctx.positions):
                return self._read(ids, dataclasses.replace(ctx, positions=positions), explicit_mask(self.model, ctx))
        if valid is not None and segments is not None:
            return self._read(ids, ctx, explicit_mask(self.model, ctx))
        return self._read(ids, ctx, None if valid is None else valid.long())

    def _read(self, ids: Int[Tensor, "B T"], ctx: Context, mask: Any) -> TunedOutput:
        out = self.model(input_ids=ids, attention_mask=mask, position_ids=ctx.positions, use_cache=False, **{CONTEXT: ctx})
        return TunedOutput(out.logits, ctx)

    def save(self, folder: str | Path) -> None:
        """Write the converted model as transformers does."""
        self.model.save_pretrained(folder)


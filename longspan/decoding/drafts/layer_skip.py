"""Layer skipping: the target without a run of its middle layers drafts for itself.

It shares the target's weights, and starts on a copy of the keys and values that the target has of the prompt, so nothing
is read twice (self-speculative decoding, arXiv:2309.08168). Whatever is left out, the text stays the target's.
"""

from __future__ import annotations

import copy

from torch import nn

from longspan.cache.fork import follower
from longspan.decoding.base import Draft, Target
from longspan.decoding.drafts.model import ModelDrafter
from longspan.models import find_parts
from longspan.registry import Refused, knob, method


@method("layer-skip", kind="draft", paper="arXiv:2309.08168", capabilities=("draft-model",),
        summary="Propose with the model itself, without a run of its middle layers.")
class LayerSkip(Draft):
    """Self-speculation: a shallower copy that shares all weights."""

    gamma: int = knob(4, "tokens proposed at once", low=1)
    skip: int = knob(4, "layers left out", low=1)
    first: int | None = knob(None, "the first layer left out; the run in the middle if left out", low=1)

    def begin(self, target: Target) -> ModelDrafter:
        n = find_parts(target.model).n_layers
        first = (n - self.skip) // 2 if self.first is None else self.first
        if n < 3:
            raise Refused(f"{self}: the model has {n} layers and its first and last must stay, so there is none to leave out; "
                          "expected another draft, such as suffix.")
        if first < 1 or first + self.skip > n - 1:
            raise Refused(f"{self}: the model has {n} layers and its first and last must stay; expected at most skip={n - 2}, "
                          f"and first between 1 and {max(1, n - 1 - self.skip)}.")
        left_out = range(first, first + self.skip)
        cache = follower(target.cache)
        for layer in left_out:
            cache.layers[layer].reset()
        return ModelDrafter(target, without_layers(target.model, left_out), cache, gamma=self.gamma, rule=self.rule)


def without_layers(model: nn.Module, left_out: range) -> nn.Module:
    """A model of the same modules without some of its layers. The given one stays as it is."""
    parts = find_parts(model)
    kept = nn.ModuleList(parts.layers[i] for i in range(parts.n_layers) if i not in left_out)
    path = next(name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)
                and module[0] is parts.layers[0])
    return _with_part(model, path, kept)


def _with_part(module: nn.Module, path: str, part: nn.Module) -> nn.Module:
    """A shallow copy of `module` in which `path` leads to `part`."""
    head, _, rest = path.partition(".")
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    twin._modules[head] = _with_part(getattr(module, head), rest, part) if rest else part
    return twin


__all__ = ["LayerSkip", "without_layers"]

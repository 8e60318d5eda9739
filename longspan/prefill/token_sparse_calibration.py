"""Measuring how much each layer moves its tokens: R_l = mean_t |h_{l+1,t} - h_{l,t}| / (|h_{l,t}| + 1e-8).

h_l is what layer l is given and h_{l+1} what it makes of it, attention and MLP together (Token Sparse Attention,
arXiv:2602.03216). One long text is enough: ``longspan profile token-sparse-attention --contexts 1 --length 4096 --dtype
float32``. Norms are taken in float32 whatever the model computes in; several texts are averaged over all their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from longspan.models import find_parts
from longspan.registry import Refused

Progress = Callable[[int, int, str], None]


def train(model: Any, texts: Sequence[Sequence[int]], methods: Iterable[Any], found: dict[str, Tensor], *, again: bool = False,
          seed: int = 0, progress: Progress | None = None) -> dict[str, Tensor]:
    """The drift of every layer, {"drift": (N)} float32: that of `found`, unless it is missing or to be made again.

    Args:
        texts: token ids, at least one text.

    Raises:
        Refused: no text, or hidden states that are NaN or infinite.
    """
    if "drift" in found and not again:
        return found
    if not any(len(ids) for ids in texts):
        raise Refused("no tokens to measure the layers' drift on; expected at least one text, better a long one.")
    total, tokens = torch.zeros(()), 0
    for n, ids in enumerate(texts):
        if progress is not None:
            progress(n, len(texts), f"text of {len(ids)} tokens")
        total = total + layer_drift(model, ids) * len(ids)
        tokens += len(ids)
    drift = total / tokens
    if not bool(torch.isfinite(drift).all()):
        raise Refused("the model's hidden states hold NaN or infinite numbers; expected a model that works in its dtype.")
    if progress is not None:
        progress(len(texts), len(texts), "")
    return {"drift": drift}


@torch.no_grad()
def layer_drift(model: Any, ids: Sequence[int]) -> Float[Tensor, " N"]:
    """R_l of every layer on one text (float32, on the CPU); nothing in the model changes."""
    parts = find_parts(model)
    drift = torch.zeros(parts.n_layers)

    def measure(layer: int) -> Callable[..., None]:
        def hook(module: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            before = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            after = output if isinstance(output, Tensor) else output[0]
            change = (after.float() - before.float()).norm(dim=-1)
            drift[layer] = float((change / (before.float().norm(dim=-1) + 1e-8)).mean())

        return hook

    hooks = [module.register_forward_hook(measure(i), with_kwargs=True) for i, module in enumerate(parts.layers)]
    try:
        parts.decoder(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return drift

"""Thresholds of SALE for a model: per layer and query head, the largest that keeps outputs close (arXiv:2505.24179).

The model reads a few prompts, key-value retrieval from a JSON dictionary. In every layer, beside dense attention,

    tau = 0.008;  while  sum |O_sparse - O_dense| >= theta L  (over L tokens and all channels of the head):  tau = tau / 2

and a tau of at most 0.0001 becomes 0: the head is read densely. Thresholds only ever fall, from prompt to prompt; prompts
are read again until none of them asks for a smaller one, so the bound holds for all. Layers with a sliding window or a
softcap, which are never read sparsely, get 0.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from longspan.kernels.block_sparse import block_sparse_attention
from longspan.kernels.plan import ReadPlan
from longspan.models import LayerCall, Loaded, attached
from longspan.models.call import plain_attention
from longspan.models.load import context_window, encode
from longspan.prefill.base import ReadContext, dense_plan
from longspan.prefill.sale import DENSE_BLOCK, DENSE_TAU, Inspection, Sale, inspect
from longspan.registry import Refused

START, LEAST = 0.008, 0.0001
"""The first threshold tried, and the one from which on a head is dense."""
LENGTH, SHORT = 4096, 2048
"""Tokens of a prompt where fewer than `SHORT` are asked for: short prompts have too little that can be skipped."""
TASK = "Below is a JSON dictionary. Remember its keys and values.\n\n"
QUESTION = '\n\nWhat is the value of the key "{key}"? Answer with the value alone.'
Progress = Callable[[int, int, str], None]


# ------------------------------------------------------------------------------------------------------------- prompts


def texts(loaded: Loaded, contexts: int, length: int, text: str = "", seed: int = 0) -> list[tuple[int, ...]]:
    """`contexts` prompts of nearly `length` tokens; of 4,096, or the model's window, where fewer than 2,048 are asked for.
    What prose is meant (`text`) doesn't matter here.

    Raises:
        Refused: fewer than one prompt, longer ones than the model can read, or a window too short for any.
    """
    window = context_window(loaded.model)
    length = min(LENGTH, window) if length < SHORT else length
    if contexts < 1:
        raise Refused(f"{contexts} prompts to find thresholds on; expected at least 1.")
    if length > window:
        raise Refused(f"prompts of {length} tokens: the model reads {window}; ask for at most that.")
    return [prompt(loaded.tokenizer, length, random.Random(f"sale-{seed}-{n}")) for n in range(contexts)]


def prompt(tokenizer: Any, length: int, rng: random.Random) -> tuple[int, ...]:
    """A JSON dictionary of random keys and values and a question about one of them, of at most `length` tokens, as many pairs
    as fit.

    Raises:
        Refused: not even one pair fits.
    """
    pairs = {f"{rng.getrandbits(48):012x}": f"{rng.getrandbits(64):016x}" for _ in range(max(2, length // 8))}
    place = rng.random()

    def tokens(n: int) -> list[int]:
        keys = list(pairs)[:n]
        body = TASK + json.dumps({key: pairs[key] for key in keys}, indent=0) + QUESTION.format(key=keys[int(place * n)])
        return encode(tokenizer, _as_chat(tokenizer, body))["input_ids"]

    low, high = 1, len(pairs)  # the most pairs that fit, by halving
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(tokens(middle)) <= length else (low, middle - 1)
    found = tokens(low)
    if len(found) > length:
        raise Refused(f"prompts of {length} tokens: one pair takes {len(found)} tokens with its question; ask for more.")
    return tuple(found)


def _as_chat(tokenizer: Any, body: str) -> str:
    if not getattr(tokenizer, "chat_template", None):
        return body
    return tokenizer.apply_chat_template([{"role": "user", "content": body}], tokenize=False, add_generation_prompt=True)


# ---------------------------------------------------------------------------------------------------------- thresholds


def train(model: Any, texts: Sequence[Sequence[int]], methods: Iterable[Any], found: dict[str, Tensor], *, again: bool = False,
          seed: int = 0, progress: Progress | None = None) -> dict[str, Tensor]:
    """The thresholds of every layer and query head, {"tau": (layers, Hq)} float32: those of `found`, unless there are none or
    they are to be found again.

    Args:
        model: a causal LM; nothing in it changes.
        texts: token ids of the prompts.
        methods: `Sale` methods that share their settings.

    Raises:
        Refused: no prompt is long enough to skip anything of it, or attention holds NaN or infinity.
    """
    if "tau" in found and not again:
        return found
    method: Sale = next(iter(methods))
    finder = _Finder(method)
    changed, round_ = True, 0
    while changed:
        changed, round_ = False, round_ + 1
        for n, ids in enumerate(texts):
            if progress is not None:
                progress(n, len(texts), f"prompt of {len(ids)} tokens" + (f", reading {round_}" if round_ > 1 else ""))
            changed |= finder.read(model, ids)
        changed &= len(texts) > 1
    if not finder.tau:
        longest = max(map(len, texts), default=0)
        raise Refused(f"prompts of up to {longest} tokens leave nothing to skip in any layer; ask for longer ones, such as "
                      f"{LENGTH} tokens.")
    if progress is not None:
        progress(len(texts), len(texts), "")
    heads = next(iter(finder.tau.values()))
    rows = [finder.tau.get(layer, torch.zeros_like(heads)) for layer in range(finder.n_layers)]
    return {"tau": torch.stack(rows).cpu()}


class _Finder:
    """A handler of attention calls that answers densely and lowers thresholds where they are too high."""

    needs_hidden = False

    def __init__(self, method: Sale) -> None:
        self.method, self.n_layers, self.changed = method, 0, False
        self.tau: dict[int, Float[Tensor, " Hq"]] = {}

    @torch.no_grad()
    def read(self, model: Any, ids: Sequence[int]) -> bool:
        """Read one prompt; returns whether a threshold changed."""
        self.changed = False
        with attached(model, self) as parts:
            self.n_layers = parts.n_layers
            model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False, logits_to_keep=1)
        return self.changed

    def attend(self, call: LayerCall) -> Float[Tensor, "1 Hq T D"]:
        if call.window is not None or call.softcap is not None or call.padding is not None:
            return plain_attention(call.q, call.k, call.v, call.padding, call.scale, call.window, call.softcap)
        x = ReadContext(q=call.q, k=call.k, v=call.v, scale=call.scale, layer=call.layer, n_layers=call.parts.n_layers)
        dense = _read(x, dense_plan(x, DENSE_BLOCK))
        before = self.tau.get(call.layer)
        after = lowered(x, self.method, dense, before)
        if after is not None:
            self.changed |= before is None or not torch.equal(before, after)
            self.tau[call.layer] = after
        return dense

    def new_cache(self, prompt: Any) -> Any:
        raise NotImplementedError("prompts are read without a cache")

    def owns(self, cache: Any) -> bool:
        return False

    def before_generate(self, arguments: dict[str, Any]) -> None:
        """Nothing is generated."""

    def left(self) -> None:
        """Nothing to let go of."""


def lowered(x: ReadContext, method: Sale, dense: Float[Tensor, "1 Hq T D"], tau: Float[Tensor, " Hq"] | None = None
            ) -> Float[Tensor, " Hq"] | None:
    """Thresholds that keep every head's error on `x` below theta L, from `tau` down; None where nothing can be skipped.

    Raises:
        Refused: the layer's output holds NaN or infinite numbers.
    """
    areas = method.areas(x)
    if not bool((areas.begin < areas.end).any()):
        return None
    if not bool(torch.isfinite(dense.sum(dtype=torch.float32))):
        raise Refused(f"layer {x.layer}'s attention holds NaN or infinite numbers; expected a model that works in its dtype.")
    tau = torch.full((x.heads,), START, device=x.q.device) if tau is None else tau.clone()
    seen = inspect(x, areas, groups=method.groups, estimate=method.estimate)
    open_ = tau >= DENSE_TAU
    while bool(open_.any()):
        # Heads that are done ask for nothing more, which costs nothing more.
        error = sparse_error(x, method, seen, torch.where(open_, tau, torch.inf), dense)
        open_ &= error >= method.theta * x.q_len
        tau = torch.where(open_, tau / 2, tau)
        dense_now = open_ & (tau <= LEAST)
        tau, open_ = tau.masked_fill(dense_now, 0.0), open_ & ~dense_now
    return tau


def sparse_error(x: ReadContext, method: Sale, seen: Inspection, tau: Float[Tensor, " Hq"], dense: Float[Tensor, "1 Hq T D"]
                 ) -> Float[Tensor, " Hq"]:
    """``sum |O_sparse - O_dense|`` over tokens and channels of every head."""
    chosen = seen.areas.sink_local[:, None] | seen.important(tau)
    plan = ReadPlan.from_mask(chosen, q_len=x.q_len, k_len=x.k_len, q_block=method.q_block, k_block=method.k_block)
    return (_read(x, plan).float() - dense.float()).abs().sum((0, 2, 3))


def _read(x: ReadContext, plan: ReadPlan) -> Float[Tensor, "1 Hq T D"]:
    return block_sparse_attention(x.q, x.k, x.v, plan, scale=x.scale)


__all__ = ["lowered", "prompt", "sparse_error", "texts", "train"]

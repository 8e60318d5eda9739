"""Margins at retrieval heads: how far the gold passage's logit stands above easy and hard passages'.

1. Every layer's queries of the question and its keys are looked at while a prompt is read, under the attention hook: for each
   query head the mean pre-softmax logit of the question's tokens to each passage, and each passage's share of the attention. One
   block of question rows is held at a time, never a map of all tokens.
2. A head's score is its mean logit to the gold passage; the best 1-2% of heads are the *retrieval heads* (chosen on other
   questions than those that are measured).
3. Margins at these heads: Delta_x = z_gold - z_x for weak ("e"), hard ("h") and other ("o") tokens; their gap, Delta_e - Delta_h.

Logits are what is compared: weights underflow in long contexts. (arXiv:2605.10828)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from longspan.context.document import check_window
from longspan.evaluation.ink.construction import GOLD, HARD, WEAK
from longspan.models import LayerCall, Loaded, attached
from longspan.recipe import Recipe, Run
from longspan.registry import Refused

ROWS = 32
"""Question rows whose logits are held at once."""
SHARE = 0.02
Head = tuple[int, int]
"""Layer and query head."""


@dataclass(frozen=True)
class Shown:
    """A prompt: its ids, each passage's range of tokens, and the range of the question's tokens after them."""

    ids: Sequence[int]
    documents: Sequence[tuple[int, int]]
    question: tuple[int, int]

    def __post_init__(self) -> None:
        first, end = self.question
        ends = [stop for _, stop in self.documents]
        if not (0 <= first < end <= len(self.ids)) or not ends or max(ends) > first or any(a >= b for a, b in self.documents):
            raise ValueError(f"documents {list(self.documents)} and question {self.question} in {len(self.ids)} tokens; expected "
                             "passages that end before the question")


class Looks(NamedTuple):
    """What rows of queries see of passages; the last column stands for all other tokens they see."""

    logits: Float[Tensor, "H columns"]
    """Mean pre-softmax logit."""
    masses: Float[Tensor, "H columns"]
    """Attention; the columns sum to 1."""


@dataclass(frozen=True)
class Seen:
    """One prompt, read: `Looks` of all layers (NaN in layers whose window is shorter), and the last token's logits."""

    logits: Float[np.ndarray, "L H columns"]
    masses: Float[np.ndarray, "L H columns"]
    last: Float[Tensor, " V"]


def looks(q: Float[Tensor, "Hq R D"], k: Float[Tensor, "Hkv S D"], scale: float, first: int,
          documents: Sequence[tuple[int, int]], softcap: float | None = None) -> Looks:
    """What question rows see of each passage, mean over rows.

    Args:
        q: rotated queries; row i stands at key `first` + i and sees no later key.
        k: rotated keys, cached or new; query head h reads key head h // (Hq / Hkv).
        documents: ranges of keys, all before `first`.
    """
    others = torch.ones(k.shape[1], dtype=torch.bool, device=k.device)
    for start, end in documents:
        others[start:end] = False
    total: list[Tensor] = []
    for begin in range(0, q.shape[1], ROWS):
        rows = q[:, begin : begin + ROWS]
        z = (rows.float().unflatten(0, (k.shape[0], -1)) @ k.float().mT[:, None]).flatten(0, 1) * scale
        if softcap is not None:
            z = softcap * torch.tanh(z / softcap)
        places = torch.arange(first + begin, first + begin + rows.shape[1], device=k.device)
        seen = torch.arange(k.shape[1], device=k.device) <= places[:, None]
        rest = seen & others
        log_sum = z.masked_fill(~seen, -torch.inf).logsumexp(-1)
        means = [z[..., a:b].mean(-1) for a, b in documents] + [z.where(rest, 0).sum(-1) / rest.sum(-1)]
        sums = [z[..., a:b].logsumexp(-1) for a, b in documents] + [z.masked_fill(~rest, -torch.inf).logsumexp(-1)]
        total.append(torch.stack([torch.stack(means, -1), (torch.stack(sums, -1) - log_sum[..., None]).exp()]).sum(2))
    logits, masses = torch.stack(total).sum(0) / q.shape[1]
    return Looks(logits, masses)


class _Watching(Run):
    """A run that looks at every attention call, row by row, and may sharpen it: logits / tau."""

    def __init__(self, prompts: Sequence[Shown], tau: float) -> None:
        super().__init__([Recipe()])
        self.prompts, self.tau = prompts, tau
        self.found: dict[tuple[int, int], Looks] = {}

    def attend(self, call: LayerCall) -> Float[Tensor, "B Hq T D"]:
        if self.tau != 1:
            call = dataclasses.replace(call, scale=call.scale / self.tau)
        keys = call.k.shape[2]
        for row, prompt in enumerate(self.prompts):
            if call.window is None or call.window >= len(prompt.ids):
                padding = keys - len(prompt.ids)
                first, end = prompt.question
                self.found[row, call.layer] = looks(call.q[row, :, padding + first : padding + end], call.k[row, :, padding:],
                                                    call.scale, first, prompt.documents, call.softcap)
        return super().attend(call)


@torch.inference_mode()
def read(loaded: Loaded, prompts: Sequence[Shown], tau: float = 1.0) -> list[Seen]:
    """Read prompts as one batch, padded on the left; padding is in no sum.

    Args:
        tau: attention logits are divided by it, in every layer.

    Raises:
        Refused: a prompt over the model's window; no layer that sees a whole prompt; tau that isn't above 0.
    """
    if not tau > 0:
        raise Refused(f"tau={tau}: expected a temperature above 0, such as 0.9.")
    longest = max(len(prompt.ids) for prompt in prompts)
    check_window(loaded, longest, "a prompt of the probe")
    model, run = loaded.model, _Watching(prompts, tau)
    pads = torch.tensor([longest - len(prompt.ids) for prompt in prompts])
    pad_id = loaded.tokenizer.pad_token_id or 0
    ids = torch.tensor([[pad_id] * (longest - len(prompt.ids)) + list(prompt.ids) for prompt in prompts])
    places = torch.arange(longest) - pads[:, None]
    given: dict[str, Any] = {"input_ids": ids, "position_ids": places.clamp(min=0)}
    if bool(pads.any()):
        given["attention_mask"] = (places >= 0).long()
    with attached(model, run) as parts:
        run.parts = parts
        out = model(**{name: tensor.to(model.device) for name, tensor in given.items()}, use_cache=False, logits_to_keep=1)
    return [_seen(run, row, parts.n_layers, out.logits[row, -1]) for row in range(len(prompts))]


def _seen(run: _Watching, row: int, layers: int, last: Tensor) -> Seen:
    found = {layer: each for (of, layer), each in run.found.items() if of == row}
    if not found:
        tokens = len(run.prompts[row].ids)
        raise Refused(f"every layer has a sliding window shorter than the prompt of {tokens} tokens; expected a shorter prompt.")
    blank = torch.full_like(next(iter(found.values())).logits, torch.nan)
    each = [found.get(i, Looks(blank, blank)) for i in range(layers)]
    logits, masses = (torch.stack(of).cpu().numpy() for of in zip(*each))
    return Seen(logits, masses, last.float().cpu())


# --------------------------------------------------------------------------------------------------- retrieval heads


def head_scores(seen: Iterable[Seen], gold: Iterable[int]) -> Float[np.ndarray, "L H"]:
    """Every head's mean logit to the gold passage, whose index is given for each prompt."""
    return np.mean([each.logits[:, :, at] for each, at in zip(seen, gold, strict=True)], axis=0)


def retrieval_heads(scores: Float[np.ndarray, "L H"], share: float = SHARE) -> list[Head]:
    """The best `share` of the heads, at least one, the best first.

    Raises:
        Refused: all heads score alike, so that none is better; a share outside (0, 1].
    """
    if not 0 < share <= 1:
        raise Refused(f"share={share} of the heads: expected more than 0 and at most 1, such as {SHARE}.")
    known = np.isfinite(scores)
    if known.sum() < 2 or float(np.ptp(scores[known])) <= 1e-6 * max(1.0, float(np.abs(scores[known]).max())):
        raise Refused(f"{int(known.sum())} heads whose logits to the gold passage don't differ; expected heads with variance, of "
                      "which some can be chosen.")
    ranked = np.argsort(-np.where(known, scores, -np.inf), axis=None, kind="stable")
    count = min(int(known.sum()), max(1, round(share * scores.size)))
    return [(int(i) // scores.shape[1], int(i) % scores.shape[1]) for i in ranked[:count]]


class Margins(NamedTuple):
    """Means over heads: Delta_e, Delta_h and Delta_o in logits (NaN where a prompt has no such passage), and the attention that
    gold, weak and hard passages get."""

    weak: float
    hard: float
    other: float
    gold_mass: float
    weak_mass: float
    hard_mass: float

    @property
    def gap(self) -> float:
        """Delta_e - Delta_h; its exponential is how much more a hard token competes than a weak one."""
        return self.weak - self.hard

    @property
    def competition(self) -> float:
        """The hard passages' share of the attention that all distractors get."""
        return self.hard_mass / (self.hard_mass + self.weak_mass)


def margins(seen: Seen, kinds: Sequence[str], heads: Sequence[Head]) -> Margins:
    """Of one prompt at some heads; `kinds` says what each passage is."""
    if seen.logits.shape[-1] != len(kinds) + 1:
        raise ValueError(f"{len(kinds)} kinds for {seen.logits.shape[-1] - 1} passages")
    layer, head = (np.array(x) for x in zip(*heads))
    z, mass = (each[layer, head].astype(np.float64) for each in (seen.logits, seen.masses))
    of = np.array([*kinds, "other"])

    def mean(kind: str) -> float:
        return float(z[:, of == kind].mean()) if (of == kind).any() else float("nan")

    gold = mean(GOLD)
    held = [float(mass[:, of == kind].sum(-1).mean()) for kind in (GOLD, WEAK, HARD)]
    return Margins(gold - mean(WEAK), gold - mean(HARD), gold - mean("other"), *held)

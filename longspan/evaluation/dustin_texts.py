"""Finding Dustin's settings for a model and a draft: the texts it is done on, and the steps of `dustin_calibration` on them.

Every text is prose with three facts, a question about one of them and the known answer. All of them say which heads
retrieve; proposals in the middle of each say which layers recover most attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from longspan.decoding import Draft, Target
from longspan.decoding.verifiers.dustin import DEFAULT_DRAFT
from longspan.decoding.verifiers.dustin_calibration import Needle, best_heads, fit, needle_scores, traces
from longspan.evaluation.calibration import calibration
from longspan.models import Loaded, Prompt
from longspan.recipe import Recipe
from longspan.registry import Refused, get

BUDGET, N_SINK, N_RECENT, GAMMA = 128, 4, 32, 4
"""Sizes that layers and split are chosen at."""
TRACES = 5
"""Proposals in each text, in its later half."""
Progress = Callable[[int, int, str], None]


def texts(loaded: Loaded, contexts: int, length: int, text: str, seed: int) -> list[Needle]:
    """Calibration texts with one question each, and where they say its answer."""
    readings = calibration(loaded.tokenizer, contexts=contexts, questions=1, length=length, known=True, text=text, seed=seed)
    return [needle(r.ids, r.questions[0].ids, r.questions[0].answer) for r in readings]


def needle(text: Sequence[int], question: Sequence[int], answer: Sequence[int]) -> Needle:
    """A text, a question and its answer, which is looked up in the text token by token.

    Raises:
        Refused: it isn't there.
    """
    n = len(answer)
    spans = tuple((i, i + n) for i in range(len(text) - n + 1) if tuple(text[i : i + n]) == tuple(answer))
    if not spans or not n:
        raise Refused("a calibration text doesn't hold the tokens of its answer; expected a tokenizer that cuts numbers the "
                      "same way everywhere.")
    return Needle((*text, *question, *answer), n, spans)


@contextmanager
def begun(model: Any, ids: Sequence[int]) -> Iterator[Target]:
    """A target that is about to read a text."""
    with Recipe().on(model) as run:
        cache = run.new_cache(Prompt(torch.tensor([list(ids)], device=model.device), len(ids)))
        yield Target(model, cache, list(ids), attach=Recipe().on)


def train(model: Any, texts: Sequence[Needle], methods: Iterable[Any], found: dict[str, Tensor], *, again: bool = False,
          seed: int = 0, progress: Progress | None = None) -> dict[str, Tensor]:
    """Retrieval heads of target and draft, as rows (layer, head), and the split.

    Args:
        methods: the verifier, which knows its draft.

    Raises:
        Refused: the texts are too short to choose from.
    """
    if found and not again:
        return found
    method = next(iter(methods))
    draft: Draft = method.draft or get(DEFAULT_DRAFT)()  # type: ignore[assignment]
    steps = iter(range(2 * len(texts)))

    def tell(what: str) -> None:
        if progress is not None:
            progress(next(steps), 2 * len(texts), what)

    scores: list[tuple[dict[int, Tensor], dict[int, Tensor]]] = []
    for one in texts:
        tell("retrieval heads")
        with begun(model, one.ids) as target:
            scores.append(needle_scores(target, draft, one))
    own, other = (best_heads(summed([pair[side] for pair in scores])) for side in (0, 1))
    seen = []
    for one in texts:
        tell("attention recovery")
        with begun(model, one.ids) as target:
            seen += traces(target, draft, histories(len(one.ids)), GAMMA, own, other)
    best = fit(seen, k=BUDGET, n_sink=N_SINK, n_recent=N_RECENT)
    if progress is not None:
        progress(2 * len(texts), 2 * len(texts), "")
    rows = [torch.tensor([(n, h) for n in layers for h in heads[n]]) for layers, heads in (((best.layer,), own),
                                                                                           (best.draft, other))]
    return {"target_heads": rows[0], "draft_heads": rows[1], "split": torch.tensor(best.split),
            "recovery": torch.tensor(best.recovery)}


def summed(scores: Sequence[dict[int, Tensor]]) -> dict[int, Tensor]:
    """Scores of several texts added up, layer by layer."""
    return {layer: torch.stack([one[layer] for one in scores]).sum(0) for layer in scores[0]}


def histories(length: int) -> list[int]:
    """Where proposals are traced: evenly through the later half of a text."""
    last = length - GAMMA - 1
    return sorted({length // 2 + (last - length // 2) * i // TRACES for i in range(TRACES)})

"""A document read once by a block-diffusion model, and asked many times.

Whole blocks of the document are read into the frozen prefix; what is left of the last one waits until more text fills it.
A question is read behind it in the same way, and the answer is denoised block by block, first the rest of the question's
last block. A recipe's part of kind *denoising* says how those blocks attend to the prefix; nothing else can stand in a
recipe for such a model, which has no hook for caches and selectors.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from longspan.cache import Achieved
from longspan.context.document import Answer, check_question, check_window, frame
from longspan.decoding import Denoising, Generated, Prefix, Reads, Sampling, denoise, end_ids, forced_nlls, read_blocks
from longspan.models import Loaded
from longspan.models.hook import turn
from longspan.recipe import Recipe
from longspan.registry import Refused

Spans = dict[str, list[tuple[int, int]]]


@dataclass
class DiffusionAchieved(Achieved):
    """What a prefix holds, and what the latest answer read of it."""

    reads: Reads = field(default_factory=Reads)

    def as_json(self) -> dict[str, Any]:
        r = self.reads
        return super().as_json() | {
            "prefix_reads": round(r.share, 6), "prefix_keys_read": r.keys, "page_bounds_read": r.bounds, "passes": r.steps,
            "refreshes": r.refreshes, "block_cache_bytes": r.cache_bytes, "notes": r.notes}


@dataclass(frozen=True)
class Held:
    """All tokens of a document, in every layer and head."""

    layers: int
    heads: int
    tokens: int

    def kept_positions(self) -> list[list[Int[Tensor, " N"]]]:
        """For every layer and key-value head the tokens that are held."""
        return [[torch.arange(self.tokens)] * self.heads] * self.layers


class DiffusionContext:
    """A document of one block-diffusion model. Make it with `read` or `from_ids`.

    Attributes:
        prefix: keys and values of the document's whole blocks, frozen.
        tail: tokens behind it that don't fill a block yet.
    """

    def __init__(self, loaded: Loaded, recipe: Recipe, ids: Sequence[int], foot: str = "",
                 sampling: Sampling | None = None) -> None:
        check_recipe(loaded, recipe)
        self.loaded, self.recipe, self.foot = loaded, recipe, foot
        self.method: Denoising = recipe.denoising or Denoising()  # type: ignore[assignment]
        self.sampling = sampling or Sampling()
        self.ids: list[int] = list(ids)
        start = time.perf_counter()
        with turn(loaded.model):
            self.prefix, self.tail = self._read(Prefix.empty(loaded.model), self.ids)
        self.read_s = time.perf_counter() - start
        self._note()

    # -- making

    @classmethod
    def read(cls, loaded: Loaded, text: str, recipe: Recipe | str = "full") -> DiffusionContext:
        """Read a document.

        Raises:
            Refused: an empty document, one longer than the model's window, or a recipe with other parts than a denoising one.
        """
        if not text.strip():
            raise Refused("the document is empty; expected some text.")
        head, foot = frame(loaded.tokenizer)
        return cls.from_ids(loaded, loaded.tokenizer(head + text)["input_ids"], recipe, foot=foot)

    @classmethod
    def from_ids(cls, loaded: Loaded, ids: Sequence[int], recipe: Recipe | str = "full", *, foot: str = "",
                 spans: Spans | None = None, sampling: Sampling | None = None) -> DiffusionContext:
        """Read tokens. `spans` is taken and not used: everything is kept."""
        recipe = Recipe.parse(recipe) if isinstance(recipe, str) else recipe
        if not len(ids):
            raise Refused("the document has no tokens; expected at least one.")
        check_window(loaded, len(ids), "the document")
        return cls(loaded, recipe, ids, foot, sampling)

    # -- using

    def ask(self, question: str, max_new_tokens: int = 128, answer_prefix: str = "") -> Answer:
        """Answer a question about the document; the context is afterwards as it was.

        Raises:
            Refused: the question is empty, or longer than what is left of the model's window.
        """
        check_question(question, max_new_tokens)
        tokenizer = self.loaded.tokenizer
        ids = tokenizer("\n\n" + question + self.foot + answer_prefix)["input_ids"]
        done, ttft = self.answer_ids(ids, max_new_tokens)
        return Answer(tokenizer.decode(done.ids).strip(), tuple(done.ids), ttft, done.seconds)

    def answer_ids(self, question: Sequence[int], max_new_tokens: int, *, stop: Sequence[str] = ()) -> tuple[Generated, float]:
        """Read question tokens and denoise the answer: what was written, and seconds until the first step committed some of it.

        The last block is cut to what is still to be written.
        """
        check_window(self.loaded, len(self.ids) + len(question) + max_new_tokens, "document, question and answer together")
        model, done, reads, start = self.loaded.model, Generated(), Reads(), time.perf_counter()
        first: list[float] = []

        def note_first() -> None:
            if not first:
                first.append(time.perf_counter())

        with turn(model):
            prefix, known = self._read(self.prefix, [*self.tail, *question])
            while len(done.ids) < max_new_tokens and not done.stopped:
                length = min(model.config.block, len(known) + max_new_tokens - len(done.ids))
                last = len(done.ids) + length - len(known) >= max_new_tokens
                ids = torch.tensor([known + [model.config.mask_id] * (length - len(known))], device=model.device)
                ids, prefix = denoise(model, prefix, ids, self.method, self.sampling, reads=reads, after_step=note_first,
                                      finish=not last)
                done.ids += ids[0, len(known) :].tolist()
                known = []
                self._stop(done, stop)
        end = time.perf_counter()
        done.seconds = end - first[0] if first else 0.0
        if reads.steps:
            self.achieved.reads = reads
        return done, (first[0] if first else end) - start

    def nlls(self, question: Sequence[int], answer: Sequence[int], chunk: int | None = None) -> list[float]:
        """Negative log-likelihood (nats) of each answer token, denoised from left to right one token a step.

        `chunk` is taken and not used: blocks are read one at a time anyway.
        """
        check_window(self.loaded, len(self.ids) + len(question) + len(answer), "document, question and answer together")
        reads = Reads()
        with turn(self.loaded.model):
            prefix, known = self._read(self.prefix, [*self.tail, *question])
            found = forced_nlls(self.loaded.model, prefix, known, answer, self.method, reads=reads)
        if reads.steps:
            self.achieved.reads = reads
        return found

    def append(self, turn_: str) -> None:
        """Add text to the document. What was read before is not read again."""
        if not turn_.strip():
            raise Refused("the turn to append is empty; expected some text.")
        ids = self.loaded.tokenizer("\n\n" + turn_)["input_ids"]
        check_window(self.loaded, len(self.ids) + len(ids), "document and turn together")
        with turn(self.loaded.model):
            self.prefix, self.tail = self._read(self.prefix, [*self.tail, *ids])
        self.ids += ids
        self._note()

    @property
    def cache(self) -> Held:
        """What is held of the document, for whoever asks which tokens were kept."""
        return Held(len(self.prefix.k), self.prefix.k[0].shape[1], len(self.ids))

    # -- inside

    def _read(self, prefix: Prefix, ids: Sequence[int]) -> tuple[Prefix, list[int]]:
        """The prefix after the whole blocks of `ids`, and what is left."""
        model = self.loaded.model
        whole = len(ids) // model.config.block * model.config.block
        known = torch.tensor([list(ids[:whole])], dtype=torch.long, device=model.device)
        return read_blocks(model, prefix, known), list(ids[whole:])

    def _note(self) -> None:
        """What is held after reading. The tail is kept as tokens."""
        held = self.prefix.nbytes
        self.achieved = DiffusionAchieved(len(self.ids), asked=str(self.recipe), cache_bytes=held, full_bytes=held)

    def _stop(self, done: Generated, stop: Sequence[str]) -> None:
        """Cut what was written at the first end token or stop text."""
        tokenizer, ends = self.loaded.tokenizer, end_ids(self.loaded.model, self.loaded.tokenizer)
        for n, token in enumerate(done.ids):
            if token in ends:
                done.ids, done.stopped = done.ids[:n], True
                return
            if stop and any(s in tokenizer.decode(done.ids[: n + 1]) for s in stop):
                done.ids, done.stopped = done.ids[: n + 1], True
                return


def check_recipe(loaded: Loaded, recipe: Recipe) -> None:
    """Refuse a recipe that doesn't suit the model: denoising parts go with models that denoise, all others with the rest.

    Raises:
        Refused: names the part.
    """
    denoises = getattr(loaded.model, "denoises_blocks", False)
    if not denoises and recipe.denoising is not None:
        raise Refused(f"{recipe.denoising} says how a block-diffusion model denoises, but {loaded.name} writes token by token; "
                      "leave it out of the recipe, or use --model block-diffusion.")
    others = [m for m in recipe.methods if m is not recipe.denoising]
    if denoises and others:
        raise Refused(f"{others[0]} is a {others[0].card.kind}, but {loaded.name} denoises blocks and takes denoising methods "
                      "only; expected a recipe such as flashblock(tau=2) or full.")

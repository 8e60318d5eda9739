"""Documents read once each, in any order, and joined for every question.

    library = Library(load(), folder="caches")
    context = ReusedContext.of(library, [contract, minutes, letter], "prophetkv(r=0.2)")
    context.ask("Who pays?").text

Each document is read alone and kept in a `Library`; for a question the caches of the documents named are joined, some of
their tokens are recomputed (the recipe's part of kind ``reuse`` says which), and the answer is written on the result.
`open_context` makes one of any text when the recipe has such a part, and an ordinary `Context` when it hasn't; for a model
that denoises blocks it makes a `DiffusionContext`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from longspan.cache import Achieved, RecipeCache
from longspan.cache.reuse import Assembled, DocumentCache, Fused, Joined, Library, Piece, Reuse, assemble, fill, join
from longspan.context.diffusion import DiffusionContext, check_recipe
from longspan.context.document import Answer, Context, check_question, check_window, frame
from longspan.decoding import Generated, end_ids, greedy, token_nlls
from longspan.models import Loaded, Prompt
from longspan.models.hook import turn
from longspan.models.profiles import model_key
from longspan.recipe import Recipe, Run
from longspan.registry import Refused

Spans = dict[str, list[tuple[int, int]]]


@dataclass
class ReuseAchieved(Achieved):
    """What a joined prompt holds, and what was recomputed for the latest question."""

    documents: int = 0
    hits: int = 0
    """Documents whose cache was there when the context was made."""
    misses: int = 0
    context_tokens: int = 0
    recomputed: float = 0.0
    """Context tokens recomputed for the question, mean over layers; those between documents included."""
    reselected: int = 0
    """Times more were recomputed while the answer was written."""
    choosing_s: float = 0.0
    repair_s: float = 0.0

    def as_json(self) -> dict[str, Any]:
        share = self.recomputed / self.context_tokens if self.context_tokens else 0.0
        names = ("documents", "hits", "misses", "context_tokens", "recomputed", "reselected", "choosing_s", "repair_s")
        return super().as_json() | {n: getattr(self, n) for n in names} | {"recomputed_fraction": round(share, 6)}


@dataclass
class _Found:
    """Documents' caches in their order, and which of them were there."""

    prefix: DocumentCache | None = None
    pieces: list[Piece] = field(default_factory=list)
    hits: int = 0
    misses: int = 0


class ReusedContext:
    """Documents of one model, joined anew for every question. Make it with `of`, `read` or `from_ids`."""

    def __init__(self, loaded: Loaded, recipe: Recipe, found: _Found, foot: str, start: float) -> None:
        self.loaded, self.recipe, self.foot = loaded, recipe, foot
        assert isinstance(recipe.reuse, Reuse)
        self.method: Reuse = recipe.reuse
        with turn(loaded.model), Recipe().on(loaded.model) as run:
            self.joined: Assembled = assemble(run.parts, model_key(loaded.model), found.prefix, found.pieces)
        self.read_s = time.perf_counter() - start
        """Seconds it took to find or read the documents and to join them."""
        self.ids: list[int] = self.joined.ids.tolist()
        self.achieved = ReuseAchieved(len(self.ids), asked=str(recipe), documents=len(self.joined.documents), hits=found.hits,
                                      misses=found.misses, context_tokens=len(self.ids))
        self._cache: RecipeCache | None = None
        self._latest: Fused | None = None

    # -- making

    @classmethod
    def of(cls, library: Library, documents: Sequence[str], recipe: Recipe | str = "prophetkv") -> ReusedContext:
        """Join documents in the order given. Those the library doesn't have are read now, and recomputed whole this time.

        Raises:
            Refused: no documents or an empty one, or a recipe without a part of kind reuse.
        """
        recipe = _with_reuse(recipe)
        if not documents or not all(d.strip() for d in documents):
            raise Refused("there is an empty document or none; expected some text in every one.")
        loaded, tokenizer = library.loaded, library.loaded.tokenizer
        head, foot = frame(tokenizer)
        start, found = time.perf_counter(), _Found()
        with turn(loaded.model), Recipe().on(loaded.model):
            if first := tokenizer(head, add_special_tokens=not head)["input_ids"]:
                found.prefix = library.get(first)[0]
            for document in documents:
                _look_up(library, tokenizer(document.strip() + "\n\n", add_special_tokens=False)["input_ids"], found, ahead=False)
        return cls(loaded, recipe, found, foot, start)

    @classmethod
    def read(cls, loaded: Loaded, text: str, recipe: Recipe | str) -> ReusedContext:
        """Cut a text into documents of the recipe's `chunk` tokens, and read them alone."""
        if not text.strip():
            raise Refused("the document is empty; expected some text.")
        head, foot = frame(loaded.tokenizer)
        ids = loaded.tokenizer(head + text, add_special_tokens=not head)["input_ids"]
        return cls.from_ids(loaded, ids, recipe, foot=foot)

    @classmethod
    def from_ids(cls, loaded: Loaded, ids: Sequence[int], recipe: Recipe | str, *, foot: str = "",
                 spans: Spans | None = None) -> ReusedContext:
        """Documents of a prompt that is already framed: the spans named "documents", else pieces of `chunk` tokens.

        All documents are read ahead of the question, so that each counts as known when it is asked. What stands before
        the first is the prefix, which is exact; words between documents are recomputed for every question.
        """
        recipe = _with_reuse(recipe)
        check_window(loaded, len(ids), "the document")
        assert isinstance(recipe.reuse, Reuse)
        library = Library(loaded, recipe.reuse.library)
        prefix, stretches = cut(ids, (spans or {}).get("documents") or [], recipe.reuse.chunk, _head(loaded, ids))
        start, found = time.perf_counter(), _Found()
        with turn(loaded.model), Recipe().on(loaded.model):
            if prefix:
                found.prefix = library.get(ids[:prefix])[0]
            for a, b, is_document in stretches:
                if is_document:
                    _look_up(library, ids[a:b], found, ahead=True)
                else:
                    found.pieces.append(Piece(library.get(ids[a:b])[0], is_document=False))
        return cls(loaded, recipe, found, foot, start)

    # -- using

    def ask(self, question: str, max_new_tokens: int = 128, answer_prefix: str = "") -> Answer:
        """Answer a question about the documents.

        Raises:
            Refused: the question is empty, or longer than what is left of the model's window.
        """
        check_question(question, max_new_tokens)
        tokenizer = self.loaded.tokenizer
        asked, rest = (tokenizer(text, add_special_tokens=False)["input_ids"]
                       for text in ("\n\n" + question, self.foot + answer_prefix))
        done, ttft = self._answer(asked + rest, max_new_tokens, (), (0, len(asked)))
        return Answer(tokenizer.decode(done.ids, skip_special_tokens=True).strip(), tuple(done.ids), ttft, done.seconds)

    def answer_ids(self, question: Sequence[int], max_new_tokens: int, *, stop: Sequence[str] = ()) -> tuple[Generated, float]:
        """Read question tokens and write greedily: what was written, and seconds to the first token."""
        return self._answer(question, max_new_tokens, stop, self._asked(question))

    def nlls(self, question: Sequence[int], answer: Sequence[int], chunk: int | None = None) -> list[float]:
        """Negative log-likelihood (nats) of each answer token after documents and question."""
        check_window(self.loaded, len(self.ids) + len(question) + len(answer), "documents, question and answer together")
        with turn(self.loaded.model), Recipe().on(self.loaded.model) as run:
            cache, logits = self._join(run, question, self._asked(question))
            return token_nlls(self.loaded.model, cache, logits, answer, chunk)

    @property
    def cache(self) -> RecipeCache:
        """The cache of the latest question's prompt; before the first one, that of the documents as they were joined."""
        if self._cache is None:
            with turn(self.loaded.model), Recipe().on(self.loaded.model) as run:
                layers = range(len(self.joined.k))
                plain = Fused(self.joined.ids, [self.joined.k[i][None].clone() for i in layers],
                              [self.joined.v[i][None].clone() for i in layers], torch.empty(0), self.joined.ids.new_empty(0))
                self._cache = fill(run.new_cache(Prompt(self.joined.ids[None], len(self.ids))), plain)
        return self._cache

    # -- joining

    def _join(self, run: Run, suffix: Sequence[int], question: tuple[int, int]) -> tuple[RecipeCache, Tensor]:
        joined = join(self.loaded.model, self.joined, suffix, self.method, question=question)
        self._note(joined)
        return self._adopt(run, joined), joined.fused.logits[-1:]

    def _adopt(self, run: Run, joined: Joined) -> RecipeCache:
        fused = self._latest = joined.fused
        self._cache = fill(run.new_cache(Prompt(fused.ids[None], len(fused.ids))), fused)
        fused.k, fused.v = [], []  # the cache has them now
        self.recipe.last_run = run
        held, known = self._cache.achieved(), self.achieved
        for name in ("seen", "kept", "kept_fraction", "cache_bytes", "full_bytes"):
            setattr(known, name, getattr(held, name))
        known.tokens_computed = (known.recomputed + held.seen - len(self.ids)) / held.seen
        return self._cache

    def _note(self, joined: Joined) -> None:
        known = self.achieved
        known.recomputed, known.choosing_s, known.repair_s = joined.recomputed, joined.choosing_s, joined.repair_s
        known.reselected = 0

    def _asked(self, suffix: Sequence[int]) -> tuple[int, int]:
        """Where the question stands in a suffix: before what the chat template puts between it and the answer."""
        foot = frame(self.loaded.tokenizer)[1]
        mark = self.loaded.tokenizer(foot, add_special_tokens=False)["input_ids"] if foot.strip() else []
        for start in range(len(suffix) - len(mark), 0, -1):
            if mark and list(suffix[start : start + len(mark)]) == mark:
                return 0, start
        return 0, len(suffix)

    def _answer(self, suffix: Sequence[int], max_new_tokens: int, stop: Sequence[str],
                question: tuple[int, int]) -> tuple[Generated, float]:
        check_window(self.loaded, len(self.ids) + len(suffix) + max_new_tokens, "documents, question and answer together")
        start = time.perf_counter()
        with turn(self.loaded.model), Recipe().on(self.loaded.model) as run:
            cache, logits = self._join(run, suffix, question)
            int(logits.argmax())  # waits for the device
            ttft = time.perf_counter() - start
            return self._write(run, cache, logits, max_new_tokens, stop), ttft

    def _write(self, run: Run, cache: RecipeCache, logits: Tensor, max_new_tokens: int, stop: Sequence[str]) -> Generated:
        """Write the answer; where the method wants it, more of the documents is recomputed every so many tokens."""
        model, tokenizer = self.loaded.model, self.loaded.tokenizer
        ends = end_ids(model, tokenizer)
        steps = self.method.steps_between() or max_new_tokens
        eligible = self.joined.eligible.clone()
        done = Generated()
        while True:
            start = time.perf_counter()
            part = greedy(model, cache, logits, min(steps, max_new_tokens - len(done.ids)), ends, stop, tokenizer)
            done.ids, done.stopped = done.ids + part.ids, part.stopped
            _stop_across(done, stop, tokenizer)
            over = done.stopped or len(done.ids) >= max_new_tokens
            if not over:
                cache, logits = self._again(run, cache, part.ids, eligible)
            done.seconds += time.perf_counter() - start
            if over:
                return done

    def _again(self, run: Run, cache: RecipeCache, written: Sequence[int], eligible: Tensor) -> tuple[RecipeCache, Tensor]:
        """Choose once more among the documents' tokens not yet recomputed, and read the newest token in the same forward.

        Args:
            written: tokens since the latest choice; the last one is not read yet.
            eligible: what may still be chosen; what was chosen leaves it.
        """
        if len(cache.policy_layers) != len(cache.layers):
            raise Refused(f"{self.method.card.name} recomputes documents while it writes, but layers with a sliding window have "
                          f"let go of them; expected {self.method.card.name}(reselect=0) on this model.")
        assert self._latest is not None
        eligible[self._latest.recomputed] = False
        held = [layer.store.view() for layer in cache.policy_layers]
        ids = torch.cat([self._latest.ids, self._latest.ids.new_tensor(written[:-1])])
        beyond = torch.zeros(len(ids) - len(eligible), dtype=torch.bool, device=ids.device)
        context = Assembled(ids, torch.cat([h.k for h in held]), torch.cat([h.v for h in held]), self.joined.prefix,
                            self.joined.documents, torch.cat([eligible, beyond]), ids.new_zeros(len(ids), dtype=torch.bool),
                            self.joined.rotary)
        joined = join(self.loaded.model, context, written[-1:], self.method)
        self.achieved.recomputed += joined.recomputed
        self.achieved.reselected += 1
        return self._adopt(run, joined), joined.fused.logits[-1:]


def open_context(loaded: Loaded, document: str | Sequence[int], recipe: Recipe | str, *,
                 spans: Spans | None = None) -> Context | ReusedContext | DiffusionContext:
    """A text, or tokens that are already framed, read as the recipe and the model have it."""
    recipe = Recipe.parse(recipe) if isinstance(recipe, str) else recipe
    check_recipe(loaded, recipe)
    denoises = getattr(loaded.model, "denoises_blocks", False)
    kind: Any = DiffusionContext if denoises else Context if recipe.reuse is None else ReusedContext
    if isinstance(document, str):
        return kind.read(loaded, document, recipe)
    return kind.from_ids(loaded, document, recipe, spans=spans)


def ask(library: Library, question: str, documents: Sequence[str], recipe: Recipe | str = "prophetkv", *,
        max_new_tokens: int = 128) -> Answer:
    """Answer a question from documents, in any order; each is read once for all questions."""
    return ReusedContext.of(library, documents, recipe).ask(question, max_new_tokens)


# ------------------------------------------------------------------------------------------------- what documents are


def cut(ids: Sequence[int], documents: Sequence[tuple[int, int]], chunk: int,
        head: int) -> tuple[int, list[tuple[int, int, bool]]]:
    """Cut a prompt's context into a prefix and stretches that follow it: (first, end, whether it is a document).

    Args:
        documents: where documents stand; none: all after the head, in pieces of `chunk` tokens.
        head: tokens that the chat template wrote first.

    Raises:
        Refused: documents that overlap, are empty, out of order, or outside the context.
    """
    edges = [0, *(place for span in documents for place in span), len(ids)]
    if any(b < a for a, b in itertools.pairwise(edges)) or any(a >= b for a, b in documents):
        raise Refused(f"documents at tokens {[tuple(s) for s in documents]} of {len(ids)}: expected ranges in ascending order "
                      "that don't overlap, each with at least one token.")
    prefix = documents[0][0] if documents else head
    found: list[tuple[int, int, bool]] = []
    at = prefix
    for a, b in [*documents, (len(ids), len(ids))]:
        if documents and a - at <= chunk:
            found += [(at, a, False)] if a > at else []
        else:  # so much text between documents is documents too
            found += [(i, min(i + chunk, a), True) for i in range(at, a, chunk)]
        found += [(a, b, True)] if b > a else []
        at = b
    return prefix, found


def _head(loaded: Loaded, ids: Sequence[int]) -> int:
    """How many tokens at the front the chat template wrote."""
    head, _ = frame(loaded.tokenizer)
    own = loaded.tokenizer(head, add_special_tokens=False)["input_ids"] if head else []
    return len(own) if list(ids[: len(own)]) == own and len(ids) > len(own) else 0


def _look_up(library: Library, ids: Sequence[int], found: _Found, *, ahead: bool) -> None:
    """Find or read one document; one that is read ahead of the question counts as known to it."""
    cache, there = library.get(ids)
    found.hits, found.misses = found.hits + there, found.misses + (not there)
    found.pieces.append(Piece(cache, known=there or ahead))


def _with_reuse(recipe: Recipe | str) -> Recipe:
    recipe = Recipe.parse(recipe) if isinstance(recipe, str) else recipe
    if not isinstance(recipe.reuse, Reuse):
        raise Refused(f"recipe {str(recipe)!r} doesn't say how documents are joined; expected one such as prophetkv(r=0.2).")
    return recipe


def _stop_across(done: Generated, stop: Sequence[str], tokenizer: Any) -> None:
    """End at a stop text that began in one stretch of writing and ended in the next."""
    if not stop or done.stopped or not any(s in tokenizer.decode(done.ids) for s in stop):
        return
    done.ids = next(done.ids[:n] for n in range(1, len(done.ids) + 1) if any(s in tokenizer.decode(done.ids[:n]) for s in stop))
    done.stopped = True

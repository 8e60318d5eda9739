"""A document read once, compressed, and asked many times.

    context = Context.read(load(), text, "snapkv(budget=0.2)")
    context.ask("Who pays?").text
    context.append("Later they agreed to split the bill.")
    context.save("contract.longspan")

The document is read and compressed before any question is known; each question is read on top of what was kept and
taken back afterwards. An appended turn stays, and is not read again.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import safe_open, save_file
from torch import Tensor

from longspan.cache import Achieved, RecipeCache, achieved_from_json
from longspan.cache.digest import content_digest
from longspan.context.units import with_units
from longspan.decoding import Generated, Target, end_ids, greedy, read, token_nlls, write
from longspan.models import Loaded, Prompt
from longspan.models.hook import turn
from longspan.models.load import context_window
from longspan.recipe import Recipe, Run, per_row
from longspan.registry import Refused

FORMAT = "longspan-context-1"


@dataclass(frozen=True)
class Answer:
    """What the model said, and what it took."""

    text: str
    ids: tuple[int, ...]
    ttft_s: float
    """Seconds from the question to the first token."""
    decode_s: float

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first, per second of decoding."""
        return (len(self.ids) - 1) / self.decode_s if len(self.ids) > 1 and self.decode_s > 0 else None


class Context:
    """A compressed document of one model. Make it with `read` or `load`."""

    def __init__(self, loaded: Loaded, recipe: Recipe, cache: RecipeCache, ids: list[int], foot: str,
                 read_s: float = 0.0) -> None:
        self.loaded, self.recipe, self.cache, self.ids, self.foot, self.read_s = loaded, recipe, cache, ids, foot, read_s
        self.logits: Tensor | None = None
        self.achieved = Achieved(0)
        """What was kept when the document had been read."""

    # -- making

    @classmethod
    def read(cls, loaded: Loaded, text: str, recipe: Recipe | str = "full") -> Context:
        """Read a document and compress it.

        Args:
            loaded: what `longspan.load` returned.
            text: the document.
            recipe: how to read and what to keep.

        Raises:
            Refused: an empty document, or one longer than the model's window.
        """
        if not text.strip():
            raise Refused("the document is empty; expected some text.")
        head, foot = frame(loaded.tokenizer)
        ids = loaded.tokenizer(head + text, add_special_tokens=not head)["input_ids"]
        return cls.from_ids(loaded, ids, recipe, foot=foot)

    @classmethod
    def from_ids(cls, loaded: Loaded, ids: Sequence[int], recipe: Recipe | str = "full", *, foot: str = "",
                 spans: dict[str, list[tuple[int, int]]] | None = None) -> Context:
        """Read and compress tokens that are already framed (chat template and all).

        `spans` names token ranges with a meaning, such as ``shots``; a recipe that keeps whole units of text gets the
        sentences where no shots are named.
        """
        recipe = Recipe.parse(recipe) if isinstance(recipe, str) else recipe
        if not len(ids):
            raise Refused("the document has no tokens; expected at least one.")
        check_window(loaded, len(ids), "the document", recipe)
        context = cls(loaded, recipe, None, list(ids), foot)  # type: ignore[arg-type]
        tensor = torch.tensor([context.ids], device=loaded.model.device)
        start = time.perf_counter()
        marked = with_units(spans, recipe, loaded.tokenizer, context.ids)
        with turn(loaded.model), recipe.on(loaded.model) as run:
            context.cache = run.new_cache(Prompt(tensor, len(context.ids), marked))
            context.logits = read(loaded.model, tensor, context.cache)[:, 0]
        context.read_s = time.perf_counter() - start
        context.achieved = run.achieved
        return context

    # -- using

    def ask(self, question: str, max_new_tokens: int = 128, answer_prefix: str = "") -> Answer:
        """Answer a question about the document; the context is afterwards as it was.

        Raises:
            Refused: the question is empty, or longer than what is left of the model's window.
        """
        check_question(question, max_new_tokens)
        tokenizer = self.loaded.tokenizer
        ids = tokenizer("\n\n" + question + self.foot + answer_prefix, add_special_tokens=False)["input_ids"]
        done, ttft = self.answer_ids(ids, max_new_tokens)
        return Answer(tokenizer.decode(done.ids, skip_special_tokens=True).strip(), tuple(done.ids), ttft, done.seconds)

    def answer_ids(self, question: Sequence[int], max_new_tokens: int, *, stop: Sequence[str] = ()) -> tuple[Generated, float]:
        """Read question tokens and write greedily: what was written, and seconds to the first token."""
        check_window(self.loaded, len(self.ids) + len(question) + max_new_tokens, "document, question and answer together",
                     self.recipe)
        start = time.perf_counter()
        with self._on(), self._taken_back():
            logits = self._next_logits(question)
            int(logits.argmax())  # waits for the device
            ttft = time.perf_counter() - start
            done = self._write(question, logits, max_new_tokens, stop)
        return done, ttft

    def _write(self, question: Sequence[int], logits: Tensor, max_new_tokens: int, stop: Sequence[str]) -> Generated:
        """The answer, token by token or as the recipe's draft has it."""
        model, tokenizer = self.loaded.model, self.loaded.tokenizer
        ends = end_ids(model, tokenizer)
        if self.recipe.decoding is None:
            return greedy(model, self.cache, logits, max_new_tokens, ends, stop, tokenizer)
        target = Target(model, self.cache, [*self.ids, *question], tokenizer=tokenizer, attach=Recipe().on)
        return write(target, self.recipe.decoding, logits, max_new_tokens, ends, stop)

    def nlls(self, question: Sequence[int], answer: Sequence[int], chunk: int | None = None) -> list[float]:
        """Negative log-likelihood (nats) of each answer token after document and question."""
        with self._on(), self._taken_back():
            return token_nlls(self.loaded.model, self.cache, self._next_logits(question), answer, chunk)

    def forced(self, question: Sequence[int], answer: Sequence[int]) -> tuple[list[float], list[bool]]:
        """For each token of an answer given after the question: its negative log-likelihood (nats), and whether it is the
        likeliest token there. If all are, greedy decoding would write this answer."""
        ids = torch.tensor([[*question, *answer]], device=self.loaded.model.device)
        with self._on(), self._taken_back():
            after = read(self.loaded.model, ids, self.cache, last=len(answer) + bool(question))
        assert self.logits is not None
        before = after if question else torch.cat([self.logits[:, None], after], 1)
        logits, wanted = before[0, :-1], ids[0, len(question) :]
        nlls = -logits.log_softmax(-1).gather(-1, wanted[:, None])[:, 0]
        return nlls.tolist(), (logits.argmax(-1) == wanted).tolist()

    def append(self, turn: str) -> None:
        """Add text to the document. What was read before is not read again; the new text is kept whole."""
        ids = self.loaded.tokenizer("\n\n" + turn, add_special_tokens=False)["input_ids"]
        if not turn.strip():
            raise Refused("the turn to append is empty; expected some text.")
        check_window(self.loaded, len(self.ids) + len(ids), "document and turn together", self.recipe)
        with self._on(), self._taken_back(only_on_error=True):
            self.logits = self._next_logits(ids)
        self.ids += ids

    def _on(self) -> Any:
        return _adopted(self.recipe, self.loaded.model, self.cache)

    @contextlib.contextmanager
    def _taken_back(self, only_on_error: bool = False) -> Iterator[None]:
        """Whatever is read inside is taken back at the end, or only if something went wrong."""
        point = self.cache.snapshot()
        try:
            yield
        except BaseException:
            self.cache.restore(point)
            raise
        if not only_on_error:
            self.cache.restore(point)

    def _next_logits(self, ids: Sequence[int]) -> Tensor:
        if not ids:
            assert self.logits is not None
            return self.logits
        return read(self.loaded.model, torch.tensor([list(ids)], device=self.loaded.model.device), self.cache)[:, 0]

    # -- keeping

    def save(self, path: str | Path) -> Path:
        """Write the compressed context to one safetensors file (atomically)."""
        file = Path(path)
        if len(self.cache.policy_layers) != len(self.cache.layers):
            raise Refused("a context of a model with sliding-window layers can't be saved; read the document again.")
        assert self.logits is not None
        tensors = {f"{i}.{n}": t for i, layer in enumerate(self.cache.policy_layers) for n, t in layer.state().items()}
        tensors |= {"logits": self.logits, "ids": torch.tensor(self.ids)}
        tensors = {n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}
        stores = [type(layer.store).__name__ for layer in self.cache.policy_layers]
        spans = self.cache.prompt.spans if self.cache.prompt else {}
        meta = {"format": FORMAT, "recipe": str(self.recipe), "foot": self.foot, "stores": json.dumps(stores),
                "fingerprint": self.loaded.fingerprint, "dtype": str(self.loaded.model.dtype),
                "prompt": str(self.cache.prompt_length), "spans": json.dumps(spans),
                "achieved": json.dumps(self.achieved.as_json())}
        temporary = file.with_name(file.name + ".part")
        try:
            save_file(tensors, temporary, metadata=meta | {"digest": content_digest(tensors, meta)})
            temporary.replace(file)
        except Exception as error:  # safetensors has an exception of its own
            temporary.unlink(missing_ok=True)
            raise Refused(f"can't save the context to {str(file)!r} ({error}); name a file in a folder that you may write "
                          "to.") from error
        return file

    @classmethod
    def load(cls, path: str | Path, loaded: Loaded) -> Context:
        """Read a saved context for the same model.

        Raises:
            Refused: no such file, another format, another model, or a damaged file.
        """
        file = Path(path)
        if not file.is_file():
            raise Refused(f"{str(path)!r}: no such file; expected one written by Context.save.")
        try:
            with safe_open(file, "pt", device=str(loaded.model.device)) as stored:
                meta = stored.metadata() or {}
                tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        except Exception as error:
            raise Refused(f"{str(path)!r} can't be read as a saved context ({error}).") from error
        if meta.get("format") != FORMAT:
            raise Refused(f"{str(path)!r} is not a saved context; expected format {FORMAT}.")
        if content_digest(tensors, {n: t for n, t in meta.items() if n != "digest"}) != meta.get("digest"):
            raise Refused(f"{str(path)!r} is damaged: its content doesn't match its digest; save the context again.")
        if meta["fingerprint"] != loaded.fingerprint:
            raise Refused(f"{str(path)!r} was made with another model than {loaded.name}; load that model, or read again.")
        if meta["dtype"] != str(loaded.model.dtype):
            raise Refused(f"{str(path)!r} holds {meta['dtype'][6:]} numbers, but {loaded.name} is loaded in "
                          f"{str(loaded.model.dtype)[6:]}; load the model in {meta['dtype'][6:]}, or read again.")
        ids, recipe = tensors["ids"].tolist(), Recipe.parse(meta["recipe"])
        with turn(loaded.model), recipe.on(loaded.model) as run:
            spans = {name: [tuple(s) for s in found] for name, found in json.loads(meta.get("spans", "{}")).items()}
            cache = run.new_cache(Prompt(tensors["ids"][None], int(meta["prompt"]), spans))
        _fill(cache, tensors, len(ids), json.loads(meta["stores"]))
        context = cls(loaded, recipe, cache, ids, meta["foot"])
        context.logits, context.achieved = tensors["logits"], achieved_from_json(json.loads(meta["achieved"]))
        return context


def _fill(cache: RecipeCache, tensors: dict[str, Tensor], seen: int, stores: list[str]) -> None:
    for i, layer in enumerate(cache.policy_layers):
        own = {n.split(".", 1)[1]: t for n, t in tensors.items() if n.startswith(f"{i}.")}
        layer.load_state(own, seen, stores[i])


class _adopted:
    """A recipe's run that goes on with a cache made earlier."""

    def __init__(self, recipe: Recipe, model: Any, cache: RecipeCache) -> None:
        self.cache, self.context, self.recipe = cache, contextlib.ExitStack(), recipe
        self.run, self.turn = per_row([recipe], model), turn(model)

    def __enter__(self) -> Run:
        self.context.enter_context(self.turn)
        run = self.context.enter_context(self.run)
        run.adopt(self.cache)
        self.recipe.last_run = run
        return run

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)


def frame(tokenizer: Any) -> tuple[str, str]:
    """What the chat template writes before a user's text, and between it and the answer; empty without a template."""
    if not getattr(tokenizer, "chat_template", None):
        return "", "\n"
    mark = "[[text]]"
    whole = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True)
    if whole.count(mark) != 1:
        raise Refused("the tokenizer's chat template doesn't show the user's text exactly once; expected one that does.")
    head, foot = whole.split(mark)
    return head, foot


def check_question(question: str, max_new_tokens: int) -> None:
    """Refuse a question without text, and an answer without room."""
    if not question.strip():
        raise Refused("the question is empty; expected some text.")
    if max_new_tokens < 1:
        raise Refused(f"max_new_tokens={max_new_tokens}: expected at least 1.")


def check_window(loaded: Loaded, tokens: int, what: str, recipe: Recipe | None = None) -> None:
    """Refuse more tokens than the model was made for, or than the recipe's positions stretch it to."""
    native = context_window(loaded.model)
    window = native if recipe is None else recipe.window(native)
    if tokens > window:
        fixed = recipe is None or getattr(loaded.model, "denoises_blocks", False)
        stretch = "" if fixed else f", or stretch its positions, as in yarn(factor={-(-tokens // native)})"
        raise Refused(f"{what}: {tokens} tokens, but {loaded.name} reads at most {window}; shorten by {tokens - window} tokens, "
                      f"or choose a model with a longer window{stretch}.")

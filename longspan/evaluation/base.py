"""What a task is, and how one of its examples becomes token ids.

A task yields examples: a context, a question about it, the first words of the answer, and the right answers. Each
example is drawn from a key of its own (task, length, seed, index), so that it is byte for byte the same whatever else
is drawn, and grows its haystack to the largest number of units with which the whole prompt and the tokens to be
generated still fit the length asked for.

A method that compresses before the question is read sees `context_ids` only; so the prompt is cut there, and the two
pieces are tokenised apart.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from longspan.evaluation.texts import Text
from longspan.registry import Method, Refused


@dataclass(frozen=True)
class Example:
    """One question with its context.

    The user's turn of the prompt is `context` directly followed by `question`; `answer_prefix` opens the answer.

    `meta` holds JSON values: always "index"; where a task has them "depth" (0 to 1; the mean over "depths" if there
    are several), "spans" (character ranges of the needles in `context`), "documents" and "shots" (character ranges),
    "answers_are" ("all", the default, or "any" when `answers` are alternatives), "answer_text" (the answer as it
    would be written, if that isn't the answers joined by commas), "target" (text whose likelihood is scored, for tasks
    without answers), "chat_template" (False when the chat template must not be used), "stop" (strings that end the
    answer).
    """

    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    max_new_tokens: int
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptParts:
    """An example as token ids.

    `context_ids` is all that comes before the question, with the head of the chat template; `question_ids` all the
    rest: question, foot of the template, answer prefix. `prefix_ids` are the last of `question_ids`: the answer prefix.
    """

    context_ids: list[int]
    question_ids: list[int]
    prefix_ids: list[int]

    @property
    def ids(self) -> list[int]:
        """The whole prompt."""
        return self.context_ids + self.question_ids


@dataclass(frozen=True)
class Key:
    """What an example is drawn from; the same key gives the same example."""

    task: str
    length: int
    seed: int
    index: int

    def rng(self, purpose: str = "") -> random.Random:
        """A generator for one `purpose`, independent of those for other purposes."""
        return random.Random(f"{self.task}/{self.length}/{self.seed}/{self.index}/{purpose}")


@dataclass(frozen=True)
class Draft:
    """An example whose haystack is still open: `build(units)` makes it with `least` to `most` units.

    `exhausted` tells the user what to do when even `most` units leave a tenth of the length empty. `estimate` gives
    roughly how many tokens a number of units takes, up to a constant; it saves tries.
    """

    build: Callable[[int], Example]
    least: int = 1
    most: int | None = None
    exhausted: str = ""
    estimate: Callable[[int], float] | None = None


class Task(Method):
    """Base of all tasks. A subclass gives `draft` and `metric`, and `text` if it reads one."""

    probes: ClassVar[int] = 8
    """How many examples `floor` looks at."""

    own_text: ClassVar[bool] = False
    """Whether the haystack is not the published one, so that scores can't be set beside published ones."""

    @property
    def text(self) -> Text | None:
        """The text the task reads, with its source and hash; its hash belongs to the key of a stored result."""
        return None

    @property
    def score_name(self) -> str:
        """Name for scores of this task: ends in `-open` where the haystack isn't the published one."""
        return f"{self.card.name}-open" if self.own_text else self.card.name

    def draft(self, key: Key, tokenizer: Any) -> Draft:
        """The example of `key`, its haystack still open."""
        raise NotImplementedError

    def metric(self, prediction: str, example: Example) -> float:
        """Score of a generated answer (without the answer prefix), 0 to 1."""
        raise NotImplementedError

    def available(self, length: int, tokenizer: Any) -> int | None:
        """How many examples there are at this length, where that is limited; `examples` stops there."""
        return None

    def examples(self, length: int, n: int, seed: int, tokenizer: Any, first: int = 0) -> Iterator[Example]:
        """Examples `first` up to `n` for `length` tokens: prompt with chat template plus the tokens to be generated.

        Raises:
            Refused: the length is below the task's floor (the message states it), or the tokenizer loses text.
        """
        check_round_trip(tokenizer)
        floor = self.floor(tokenizer)
        if length < floor:
            raise Refused(f"{self.card.name} at length {length}: its smallest prompt takes {floor} tokens with this "
                          f"tokenizer, answer included; ask for at least {floor}.")
        available = self.available(length, tokenizer)
        for index in range(first, n if available is None else min(n, available)):
            draft = self.draft(Key(self.card.name, length, seed, index), tokenizer)
            yield fit(draft, length, tokenizer, self.card.name)

    def floor(self, tokenizer: Any) -> int:
        """The smallest length, in tokens, that this task can be built for with this tokenizer."""
        check_round_trip(tokenizer)
        known, key = tokenizer_memory(tokenizer), ("floor", self, str(getattr(tokenizer, "chat_template", None)))
        if key not in known:
            known[key] = self._floor(tokenizer)
        return known[key]

    def _floor(self, tokenizer: Any) -> int:
        # What a draft needs may grow with the length it is made for: climb until a length holds its own smallest draft.
        length = 1
        for _ in range(16):
            drafts = [self.draft(Key(self.card.name, length, 0, -1 - i), tokenizer) for i in range(self.probes)]
            needed = max(total_length(d.build(d.least), tokenizer) for d in drafts)
            needed += needed // 20 + 4  # other keys may take a few tokens more than the probes
            needed = -16 * (-needed // 16)
            if needed <= length:
                return length
            length = needed
        return length


# ----------------------------------------------------------------------------------------------------- fitting a length


def fit(draft: Draft, length: int, tokenizer: Any, name: str = "task") -> Example:
    """The example of `draft` with the most units whose `total_length` is at most `length`.

    Raises:
        Refused: even the smallest one is longer, or the haystack runs out before the length is reached.
    """
    built: dict[int, Example] = {}

    def cost(units: int) -> int:
        built[units] = draft.build(units)
        return total_length(built[units], tokenizer)

    smallest = cost(draft.least)
    if smallest > length:
        raise Refused(f"{name} at length {length}: this example takes {smallest} tokens, answer included; "
                      f"ask for at least {smallest}.")
    guess = draft.least + 8 if draft.estimate is None else _guess(draft, length - smallest)
    units = largest(cost, length, draft.least, draft.most, smallest, guess)
    if units == draft.most and draft.exhausted and total_length(built[units], tokenizer) < 0.9 * length:
        raise Refused(f"{name} at length {length}: {draft.exhausted}")
    return built[units]


def _guess(draft: Draft, room: int) -> int:
    """About how many units fill `room` tokens beyond the smallest number of them."""
    assert draft.estimate is not None
    start, low, high = draft.estimate(draft.least), draft.least, draft.least + 1
    while draft.estimate(high) - start <= room:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if draft.estimate(middle) - start <= room else (low, middle)
    return low


def largest(cost: Callable[[int], int], limit: int, least: int, most: int | None, cost_of_least: int,
            guess: int) -> int:
    """The largest number of units with `cost(units) <= limit`, at most `most`; `cost` must not fall with units.

    `guess` is tried first; then secant steps inside a bracket, falling back on bisection: a handful of calls where
    plain bisection needs fifteen.
    """
    low, high = least, None if most is None else most + 1  # cost(low) fits, cost(high) doesn't
    units, calls = guess, 0
    while high is None or high - low > 1:
        units = max(low + 1, units if high is None else min(units, high - 1))
        found = cost(units)
        calls += 1
        low, high = (units, high) if found <= limit else (low, units)
        if found <= cost_of_least:
            units = 2 * units
        elif calls > 8 and high is not None:
            units = (low + high) // 2
        else:
            per_unit = (found - cost_of_least) / (units - least)
            units = units + math.floor((limit - found) / per_unit)
    return low


def total_length(example: Example, tokenizer: Any) -> int:
    """Tokens of the prompt, and of what is generated after it (or scored, for tasks that generate nothing)."""
    parts = prompt_parts(example, tokenizer)
    after = example.max_new_tokens or len(answer_ids(example, tokenizer))
    return len(parts.context_ids) + len(parts.question_ids) + after


# ---------------------------------------------------------------------------------------------------- text to token ids


def prompt_parts(example: Example, tokenizer: Any, template: bool = True) -> PromptParts:
    """The prompt of `example` as token ids, cut before the question.

    With `template`, and where the tokenizer has a chat template (and the example allows it), the user's turn holds
    context and question, and the answer prefix follows the generation prompt. Otherwise a newline parts question and
    answer prefix, and a beginning-of-sequence token comes first if the tokenizer adds one.

    Raises:
        Refused: the chat template doesn't show the user's text exactly once.
    """
    head, foot = _frame(example, tokenizer, template)
    context_ids = _encode(tokenizer, head + example.context)
    if not head and _adds_bos(tokenizer):
        context_ids = [tokenizer.bos_token_id, *context_ids]
    prefix_ids = encode_continuation(tokenizer, example.answer_prefix)
    question_ids = encode_continuation(tokenizer, example.question + foot) + prefix_ids
    return PromptParts(context_ids, question_ids, prefix_ids)


def answer_ids(example: Example, tokenizer: Any, template: bool = True) -> list[int]:
    """The right answer as token ids, as it would continue the prompt; or the target text of a task without answers.

    Several answers are joined by commas; of alternatives the first is taken. A space comes first unless the prompt
    ends in white space or an opening quote or bracket.
    """
    if "target" in example.meta:
        return encode_continuation(tokenizer, example.meta["target"])
    _, foot = _frame(example, tokenizer, template)
    before = example.answer_prefix or example.question + foot or example.context
    space = " " if before and not before[-1].isspace() and before[-1] not in "\"'“‘([{" else ""
    return encode_continuation(tokenizer, space + answer_text(example))


def answer_text(example: Example) -> str:
    """The right answer as it would be written."""
    if "answer_text" in example.meta:
        return example.meta["answer_text"]
    return ", ".join(example.answers[:1] if example.meta.get("answers_are") == "any" else example.answers)


def token_spans(example: Example, tokenizer: Any, name: str = "spans", template: bool = True) -> list[tuple[int, int]]:
    """Where the character ranges `meta[name]` lie in `context_ids`: (first, end) token indices.

    Tokens that straddle an edge belong to the range. Works with any tokenizer; with a fast one by its offsets.
    """
    head, _ = _frame(example, tokenizer, template)
    shift = len(head)
    offset = int(not head and _adds_bos(tokenizer))
    spans = [(start + shift, end + shift) for start, end in example.meta.get(name, [])]
    text = head + example.context
    if not getattr(tokenizer, "is_fast", False):
        return [(_tokens_before(tokenizer, text, start) + offset,
                 len(_encode(tokenizer, text[:end])) + offset) for start, end in spans]
    edges = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return [(next(i for i, (_, stop) in enumerate(edges) if stop > start) + offset,
             next((i for i, (begin, _) in enumerate(edges) if begin >= end), len(edges)) + offset)
            for start, end in spans]


def _tokens_before(tokenizer: Any, text: str, start: int) -> int:
    """Leading tokens of `text` that surely end before character `start`."""
    before, whole = _encode(tokenizer, text[:start]), _encode(tokenizer, text)
    return next((i for i, (a, b) in enumerate(zip(before, whole)) if a != b), len(before))


def encode_continuation(tokenizer: Any, text: str) -> list[int]:
    """Token ids of `text` as the continuation of other text.

    Some tokenizers put a space before whatever they are given; tokenising behind a digit and dropping the digit's
    tokens avoids that. Where the digit would melt into the text, the text is tokenised alone.
    """
    if not text:
        return []
    anchor, joined = _encode(tokenizer, "0"), _encode(tokenizer, "0" + text)
    if not text[0].isdigit() and joined[:len(anchor)] == anchor:
        return joined[len(anchor):]
    return _encode(tokenizer, text)


MARK = "[[longspan: the user's text]]"


def _frame(example: Example, tokenizer: Any, template: bool) -> tuple[str, str]:
    """What comes before the context and after the question, as text."""
    if template and example.meta.get("chat_template", True) and getattr(tokenizer, "chat_template", None):
        return _template_halves(tokenizer)
    return "", "\n" if example.answer_prefix else ""


def _template_halves(tokenizer: Any) -> tuple[str, str]:
    known, key = tokenizer_memory(tokenizer), ("template", str(tokenizer.chat_template))
    if key not in known:
        shown = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False,
                                              add_generation_prompt=True)
        if shown.count(MARK) != 1:
            raise Refused(f"the tokenizer's chat template shows the user's text {shown.count(MARK)} times; expected "
                          "once, so that the prompt can be cut before the question.")
        known[key] = tuple(shown.split(MARK))
    return known[key]


def _adds_bos(tokenizer: Any) -> bool:
    known = tokenizer_memory(tokenizer)
    if "bos" not in known:
        bos = getattr(tokenizer, "bos_token_id", None)
        known["bos"] = bos is not None and tokenizer.encode("0")[:1] == [bos] != _encode(tokenizer, "0")[:1]
    return known["bos"]


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False)) if text else []


SAMPLE = "One of the 7 magic numbers for quiet-river is: 1234567. VAR QZXWV = \"3f2b8a9c-0d1e-4576\" {jkpy}?"


def check_round_trip(tokenizer: Any) -> None:
    """Refuse a tokenizer that doesn't give plain text back (case and white space aside).

    Raises:
        Refused: with what came back.
    """
    known = tokenizer_memory(tokenizer)
    if "round trip" not in known:
        known["round trip"] = tokenizer.decode(_encode(tokenizer, SAMPLE), skip_special_tokens=True)
    back = known["round trip"]
    if "".join(back.lower().split()) != "".join(SAMPLE.lower().split()):
        raise Refused(f"the tokenizer turns {SAMPLE!r} into {back!r}; tasks need one that gives text back, such as a "
                      "byte-level one.")


_memories: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()


def tokenizer_memory(tokenizer: Any) -> dict[Any, Any]:
    """What has been found out about a tokenizer, forgotten together with it."""
    return _memories.setdefault(tokenizer, {})

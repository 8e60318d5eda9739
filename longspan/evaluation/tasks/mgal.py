"""MGAL (arXiv:2608.20853): seven tasks over aligned paragraphs, by grain, language and place.

The unit grows around the paragraph that is asked about, which keeps its third of the document; examples take turns in the nine
places. With `shared`, the unit is what fits the length in the dearest language, so that runs in several languages read the same
paragraphs; the other languages then fill less than the length.

Scores are the task's own: the letter chosen, containment, chrF++ / 100, ROUGE-Lsum. They don't compare between tasks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from longspan.evaluation.base import Draft, Example, Key, Task, tokenizer_memory, total_length
from longspan.evaluation.mgal import LANGUAGES, TASKS, Aligned, Item, Unit, chosen_letter, load_corpus, prompt, scores
from longspan.evaluation.mgal.cores import FARTHEST, Asked, Core, placed
from longspan.evaluation.mgal.prompts import PLACES, PROMPT_LANGUAGES
from longspan.evaluation.mgal.units import GAP, THIRDS
from longspan.evaluation.texts import Text
from longspan.registry import Refused, knob, method

LETTER_TOKENS, WORD_TOKENS, SUMMARY_TOKENS = 6, 16, 256
LONGER = 1.3
"""Tokens that may be written, over those of the gold."""
SPARE = 1.5
"""Paragraphs in reach of a length, over those that fit on average: some stretches have shorter ones."""


@method("mgal", kind="task", system="mgal", paper="arXiv:2608.20853",
        summary="Seven tasks from word to document in six languages, over the same aligned paragraphs.")
class Mgal(Task):
    """Multilingual questions by grain and place; every row's `meta` holds the item's id, the same in every language."""

    task: str = knob("word-choice", "what is asked", choices=TASKS)
    language: str = knob("en", "language of the document", choices=LANGUAGES)
    corpus: str = knob("debian-handbook", "debian-handbook (a Debian package) or own (small)", choices=("debian-handbook", "own"))
    path: str = knob("", "folder of files en.txt, ar.txt, ... with one paragraph a line, in place of the corpus")
    position: str = knob("balanced", "third of the document asked about, or all places in turn", choices=("balanced", *THIRDS))
    options: int = knob(10, "options of the choice tasks", low=2, high=14)
    crowding: int = knob(3, "wrong sentences from the same or adjacent paragraphs (sentence-cloze)", low=0, high=13)
    direction: str = knob("into", "translate into English or from English", choices=("into", "from"))
    instruction: str = knob("first", "where the instruction stands", choices=PLACES)
    prompt_language: str = knob("document", "language of the instruction", choices=PROMPT_LANGUAGES)
    shared: bool = knob(True, "show the same paragraphs in every language")

    own_text = True

    def check(self) -> None:
        if self.task == "sentence-cloze" and self.crowding > self.options - 1:
            raise Refused(f"mgal: crowding={self.crowding} with options={self.options}; expected at most {self.options - 1}.")
        if self.task.endswith("translate") and self.language == "en":
            raise Refused(f"mgal: task={self.task} with language=en; expected another language, such as fr: English is the "
                          "other side.")

    @property
    def text(self) -> Text:
        aligned = self._aligned()
        return Text("mgal", aligned.source, aligned.sha256, GAP.join(aligned.of(self.language)))

    def _aligned(self) -> Aligned:
        return load_corpus(self.path or self.corpus)

    # -- the example

    def draft(self, key: Key, tokenizer: Any) -> Draft:
        whole = Unit(self._aligned(), 0, len(self._aligned()))
        turn = THIRDS[key.index // 3 % 3] if self.position == "balanced" else self.position
        at = (THIRDS.index(turn) + key.rng("place").uniform(0.2, 0.8)) / 3
        core, wide = self._core(key, whole, tokenizer)

        def build(units: int, language: str = self.language) -> Example:
            return self._example(core.make(placed(core, wide, units, at), language), key.index, tokenizer)

        most = self._most(build, key.length, len(core.pool), len(wide), tokenizer) if self.shared else len(wide)
        exhausted = "the corpus ends before that; name a longer one." if len(wide) == len(whole) else ""
        return Draft(build, len(core.pool), most, exhausted if most == len(wide) else "")

    def _core(self, key: Key, whole: Unit, tokenizer: Any) -> tuple[Core, Unit]:
        """A legal item about a drawn paragraph, in the third of it whose turn it is if there is one; and the widest unit."""
        wanted = THIRDS[key.index % 3] if self.position == "balanced" else None
        reach = max(FARTHEST, int(SPARE * key.length / _shortest(whole.corpus, tokenizer)) + 1)
        asked, rng = Asked(self.task, self.options, self.crowding, self.direction), key.rng("item")
        spare: tuple[Core, Unit] | None = None
        for k in rng.sample(range(len(whole)), len(whole)):
            wide = Unit(whole.corpus, max(0, k - reach), min(len(whole), k + reach + 1))
            for core in asked.cores(k, wide, rng):
                if wanted is None or core.third in (None, wanted):
                    return core, wide
                spare = spare or (core, wide)
        if spare is None:
            raise Refused(f"mgal(task={self.task}) at length {key.length}: 0 legal items exist in {whole.corpus.source}; "
                          "expected a shorter length, fewer options or another corpus.")
        return spare

    def _most(self, build: Callable[[int, str], Example], length: int, least: int, count: int, tokenizer: Any) -> int:
        """The most paragraphs that fit in every language."""
        languages = [one for one in self._aligned().languages if not (self.task.endswith("translate") and one == "en")]

        def fits(units: int) -> bool:
            return all(total_length(build(units, language), tokenizer) <= length for language in languages)

        low, high = least, least + 1
        while high <= count and fits(high):
            low, high = high, 2 * high
        high = min(high, count + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _example(self, item: Item, index: int, tokenizer: Any) -> Example:
        shown = prompt(item, self.instruction, self.prompt_language)
        meta: dict[str, Any] = {"index": index, "id": item.id, "task": item.task, "language": item.language,
                                "paragraphs": [item.unit.first, item.unit.end], "answers_are": "any", **item.details}
        if item.place is not None:
            meta |= {"document_position": item.place[0], "paragraph_position": item.place[1]}
        if item.choices is not None:
            return Example(shown.context, shown.question, shown.answer_prefix, (f"({item.choices.letter})",), LETTER_TOKENS,
                           meta | {"options": list(item.choices.options)})
        gold = len(tokenizer.encode(item.gold, add_special_tokens=False))
        rooms = {"word-extract": max(WORD_TOKENS, gold), "document-summary": max(SUMMARY_TOKENS, gold)}
        room = rooms.get(item.task, int(LONGER * gold) + 1)
        return Example(shown.context, shown.question, shown.answer_prefix, (item.gold,), room, meta)

    # -- its score

    def metric(self, prediction: str, example: Example) -> float:
        """The task's own score, 0 to 1."""
        meta = example.meta
        if "options" in meta:
            return float(f"({chosen_letter(prediction, len(meta['options']))})" == example.answers[0])
        details: dict[str, str | int] = {name: meta[name] for name in ("source", "target") if name in meta}
        item = Item(meta["id"], meta["task"], meta["language"], Unit(self._aligned(), *meta["paragraphs"]), "",
                    example.answers[0], details=details)
        name, value = next(iter(scores(item, prediction.strip()).items()))
        return value / 100 if name == "chrf++" else value


def _shortest(corpus: Aligned, tokenizer: Any) -> float:
    """Tokens of a paragraph in the language that takes fewest, on average over a few."""
    known, name = tokenizer_memory(tokenizer), ("mgal", corpus.sha256)
    if name not in known:
        some = range(0, len(corpus), max(1, len(corpus) // 16))
        known[name] = min(sum(len(tokenizer.encode(corpus.of(one)[i], add_special_tokens=False)) for i in some) / len(some)
                          for one in corpus.languages)
    return known[name]

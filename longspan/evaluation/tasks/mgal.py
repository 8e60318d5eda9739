"""MGAL (arXiv:2608.20853): seven tasks over aligned paragraphs, by grain, language and place.

The unit grows around the paragraph that is asked about, which keeps its third of the document. With position=balanced examples
take turns in the nine places: thirds of the document, and of the paragraph in every language; tasks about paragraphs have three
places. Where no question is left with the wanted place in its paragraph, another one of the same third of the document is asked,
and then one of the other thirds. Each question is asked once; examples end when none is left that fits the length. With `shared`,
the unit is what fits the length in the dearest language, so that runs in several languages read the same paragraphs; the other
languages then fill less than the length.

Scores are the task's own: the letter chosen, containment, chrF++ / 100, ROUGE-Lsum. They don't compare between tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from longspan.evaluation.base import Draft, Example, Key, Task, check_round_trip, tokenizer_memory, total_length
from longspan.evaluation.mgal import LANGUAGES, TASKS, Aligned, Item, Unit, chosen_letter, load_corpus, prompt, scores
from longspan.evaluation.mgal.cores import FARTHEST, Asked, placed
from longspan.evaluation.mgal.corpus import ENGLISH
from longspan.evaluation.mgal.deal import Deal, Dealt, Place
from longspan.evaluation.mgal.prompts import NAMED, PLACES, PROMPT_LANGUAGES
from longspan.evaluation.mgal.units import GAP, THIRDS
from longspan.evaluation.texts import Text
from longspan.registry import Refused, knob, method

LETTER_TOKENS, WORD_TOKENS, SUMMARY_TOKENS = 6, 16, 256
CROWDING = 3
LONGER = 1.3
"""Tokens that may be written, over those of the gold."""
TRIED = 3
"""Questions of each place looked at for the floor: what doesn't fit a length isn't asked, so the shortest counts."""
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
    position: str = knob("balanced", "third of the document asked about; balanced: all places in turn, as far as there are legal "
                         "items", choices=("balanced", *THIRDS))
    options: int = knob(10, "options of the choice tasks", low=2, high=14)
    crowding: int = knob(CROWDING, "wrong sentences from the same or adjacent paragraphs (sentence-cloze)", low=0, high=13)
    direction: str = knob("into", "translate into English or from English", choices=("into", "from"))
    instruction: str = knob("first", "where the instruction stands", choices=PLACES)
    prompt_language: str = knob("document", "language of the instruction", choices=PROMPT_LANGUAGES)
    shared: bool = knob(True, "same paragraphs in every language: they must fit the length in the dearest one, often Arabic, and "
                        "may fill only a third of it in English; false fills each language by itself")

    own_text = True
    probes = 9

    def check(self) -> None:
        # Other tasks have no use for it, so its default goes with any number of options there.
        if self.crowding > self.options - 1 and (self.task == "sentence-cloze" or self.crowding != CROWDING):
            raise Refused(f"mgal: crowding={self.crowding} with options={self.options}; expected at most {self.options - 1}.")
        if self.task.endswith("translate") and self.language == "en":
            raise Refused(f"mgal: task={self.task} with language=en; expected another language, such as fr: English is the "
                          "other side.")
        if self.task.startswith("document") and self.position != "balanced":
            raise Refused(f"mgal: position={self.position} with task={self.task}, which asks about the whole document; expected "
                          "balanced, or another task such as paragraph-fill.")

    @property
    def text(self) -> Text:
        aligned = self._aligned()
        return Text("mgal", aligned.source, aligned.sha256, GAP.join(aligned.of(self.language)))

    def _aligned(self) -> Aligned:
        return load_corpus(self.path or self.corpus)

    # -- the example

    def examples(self, length: int, n: int, seed: int, tokenizer: Any, first: int = 0) -> Iterator[Example]:
        """As of every task; they end early where no question is left that hasn't been asked.

        Raises:
            Refused: the length is below the floor; with `shared` the sentence names the language that needs most.
        """
        check_round_trip(tokenizer)
        if self.shared and length < (floor := self.floor(tokenizer)):
            dearest = self._dearest(self._dealt(Key(self.card.name, floor, 0, -1), tokenizer), tokenizer)
            raise Refused(f"mgal at length {length}: its smallest prompt takes {floor} tokens with this tokenizer, answer "
                          f"included, since the {NAMED[ENGLISH][dearest]} text of the same paragraphs must fit too; ask for at "
                          f"least {floor}, or for shared=false, which fills each language by itself.")
        for index in range(first, n):
            if index and self._get(Key(self.card.name, length, seed, index), tokenizer) is None:
                return
            yield from super().examples(length, index + 1, seed, tokenizer, index)

    def draft(self, key: Key, tokenizer: Any) -> Draft:
        dealt, share = self._dealt(key, tokenizer), key.rng("place").random()
        core, wide, turn = dealt
        language = self._dearest(dealt, tokenizer) if key.index < 0 else self.language

        def build(units: int, language: str = language) -> Example:
            unit = placed(core, wide, units, turn, share)
            assert unit is not None
            return self._example(core.make(unit, language), key.index, tokenizer)

        widest = len(core.pool)
        while placed(core, wide, widest + 1, turn, share) is not None:
            widest += 1
        most = self._most(build, key.length, len(core.pool), widest, tokenizer) if self.shared else widest
        whole = self._widest(key.length, tokenizer) == len(self._aligned())
        exhausted = "the corpus ends before that; name a longer one." if whole and most == widest else ""
        return Draft(build, len(core.pool), most, exhausted)

    def _dealt(self, key: Key, tokenizer: Any) -> Dealt:
        """The question of a key; negative indices are the probes of `floor`, which need not fit the length."""
        found = self._get(key, tokenizer)
        if found is None:
            many = len(self._deal(key, tokenizer).dealt)
            raise Refused(f"mgal(task={self.task}, position={self.position}) at length {key.length}: {many} legal items exist in "
                          f"{self._aligned().source}; expected another length, fewer options, another position or corpus.")
        return found

    def _get(self, key: Key, tokenizer: Any) -> Dealt | None:
        """Question number `index`, None if there are fewer; a probe is the shortest of `TRIED` with the same place."""
        deal = self._deal(key, tokenizer)
        if key.index < 0:
            tried = [deal.get(-1 - key.index + self.probes * i, lambda one: True) for i in range(TRIED)]
            found = [one for one in tried if one] or deal.dealt
            return min(found, key=lambda one: len(one.core.pool.text(ENGLISH))) if found else None
        languages = self._shown() if self.shared else [self.language]
        return deal.get(key.index, lambda one: all(self._least(one, each, tokenizer) <= key.length for each in languages))

    def _deal(self, key: Key, tokenizer: Any) -> Deal:
        known, name = tokenizer_memory(tokenizer), ("mgal", self, self._aligned().sha256, key.length, key.seed, key.index < 0)
        if name not in known:
            asked = Asked(self.task, self.options, self.crowding, self.direction)
            known[name] = Deal(asked, Unit(self._aligned(), 0, len(self._aligned())), self._widest(key.length, tokenizer),
                               self._places(), Key(key.task, key.length, key.seed, 0).rng("deal"))
        return known[name]

    def _places(self) -> list[Place]:
        """Nine for words and sentences, three for paragraphs, one without a place or where the place is asked for."""
        if self.task.startswith("document"):
            return [Place(None, None)]
        if self.position != "balanced":
            return [Place(self.position, None)]
        if self.task.startswith("paragraph"):
            return [Place(turn, None) for turn in THIRDS]
        return [Place(turn, third) for turn in THIRDS for third in THIRDS]

    def _widest(self, length: int, tokenizer: Any) -> int:
        """Paragraphs of the largest unit that a length may hold."""
        per = _per_paragraph(self._aligned(), tokenizer)
        least = 1 if self.task.startswith("document") else 2 * FARTHEST + 1
        return min(len(self._aligned()), max(least, int(SPARE * length / (max(per) if self.shared else min(per))) + 1))

    def _shown(self) -> list[str]:
        """Languages in which the task can be asked."""
        return [one for one in self._aligned().languages if not (self.task.endswith("translate") and one == ENGLISH)]

    def _least(self, one: Dealt, language: str, tokenizer: Any) -> int:
        """Tokens of a question with the fewest paragraphs that it needs."""
        return total_length(self._example(one.core.make(one.core.pool, language), 0, tokenizer), tokenizer)

    def _dearest(self, one: Dealt, tokenizer: Any) -> str:
        """The language whose text must fit and takes most tokens."""
        if not self.shared:
            return self.language
        return max(self._shown(), key=lambda language: self._least(one, language, tokenizer))

    def _most(self, build: Callable[[int, str], Example], length: int, least: int, count: int, tokenizer: Any) -> int:
        """The most paragraphs that fit in every language."""
        def fits(units: int) -> bool:
            return all(total_length(build(units, language), tokenizer) <= length for language in self._shown())

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


def _per_paragraph(corpus: Aligned, tokenizer: Any) -> list[float]:
    """Tokens of a paragraph in each language, on average over a few."""
    known, name = tokenizer_memory(tokenizer), ("mgal", corpus.sha256)
    if name not in known:
        some = range(0, len(corpus), max(1, len(corpus) // 16))
        known[name] = [sum(len(tokenizer.encode(corpus.of(one)[i], add_special_tokens=False)) for i in some) / len(some)
                       for one in corpus.languages]
    return known[name]

"""The seven tasks as items, made from a unit by rules alone; no model has a hand in it.

An item's id names its content and not its language, and an item is legal only if it is so in every language of the corpus, so
that the same items exist in all of them.

Words. The blanked string is one that stands in the paragraph in every language, letter for letter: a name or term in Latin script
of five or more characters, a year (`date`), or another number. It stands once in the unit, and no other sentence reads like the
rest of its own.

Sentences. A sentence is replaced by a marker; c wrong options are sentences of the same or the adjacent paragraphs, the others
come from further away. They stay in the text: true, but in the wrong place. Sentences that reach into the text which follows the
gap, by which options are scored, are no options.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from longspan.evaluation.mgal.corpus import ENGLISH, Aligned
from longspan.evaluation.mgal.language import LATIN, NUMBER, normalise, sentence_spans
from longspan.evaluation.mgal.options import Choices, check_options
from longspan.evaluation.mgal.units import GAP, Unit, paragraph_third, third
from longspan.registry import Refused

TASKS = ("word-extract", "word-choice", "sentence-cloze", "paragraph-fill", "paragraph-translate", "document-summary",
         "document-translate")
MARKER = "[[...]]"
BLANK = "____"
SHORTEST_NAME, STEM, STEM_LEAST = 5, 80, 10
FOLLOWING = 240
FIRST_WORDS = 40
"""Characters of a paragraph that name it."""


@dataclass(frozen=True)
class Item:
    """One question.

    Attributes:
        document: the unit's text, with `MARKER` where something was taken out.
        asked: what the question names: the sentence with a blank, or a paragraph's first words.
        gold: the right answer in full.
        choices: the options; None where the answer is written.
        before, after: the text before and after the blank or the gap, by which options are scored.
        place: thirds of the document and of the paragraph (None: fewer than three sentences, or no sentence).
        paragraph: the paragraph asked about, in full.
    """

    id: str
    task: str
    language: str
    unit: Unit
    document: str
    gold: str
    asked: str = ""
    choices: Choices | None = None
    before: str = ""
    after: str = ""
    place: tuple[str, str | None] | None = None
    paragraph: str = ""
    details: dict[str, str | int] = field(default_factory=dict)


# ----------------------------------------------------------------------------------------------------------------- words


@dataclass(frozen=True)
class Spot:
    """A string that stands once in paragraph `paragraph` in every language; `kind` is name, date or number."""

    paragraph: int
    string: str
    kind: str


def kind_of(string: str) -> str:
    if string[0].isdigit():
        return "date" if re.fullmatch(r"(1[5-9]|20)\d\d", string) else "number"
    return "name"


def strings(text: str) -> list[str]:
    """Names and terms in Latin script of five or more characters, and numbers of two or more."""
    names = [word for word in LATIN.findall(text) if len(word) >= SHORTEST_NAME]
    return names + [number for number in NUMBER.findall(text) if len(number) > 1]


@functools.lru_cache(maxsize=1 << 14)
def _shared(texts: tuple[str, ...]) -> frozenset[str]:
    """Strings that stand in every one of the texts."""
    return frozenset.intersection(*(frozenset(strings(text)) for text in texts))


@functools.lru_cache(maxsize=1 << 14)
def _spots(texts: tuple[str, ...], paragraph: int) -> tuple[Spot, ...]:
    shared = _shared(texts)
    lower = [text.casefold() for text in texts]
    return tuple(Spot(paragraph, s, kind_of(s)) for s in sorted(shared) if all(t.count(s.casefold()) == 1 for t in lower))


def spots(corpus: Aligned, paragraph: int) -> tuple[Spot, ...]:
    """What can be blanked in a paragraph, as far as the paragraph itself says."""
    return _spots(tuple(corpus.of(language)[paragraph] for language in corpus.languages), paragraph)


def word_is_legal(unit: Unit, spot: Spot) -> bool:
    """Whether the string stands once in the unit and the rest of its sentence is unique, in every language."""
    for language in unit.corpus.languages:
        if _lower(unit, language).count(spot.string.casefold()) != 1:
            return False
        text = unit.corpus.of(language)[spot.paragraph]
        at = text.index(spot.string)
        if at < STEM_LEAST:
            return False
        start, end = _sentence_at(text, at, language)
        before, after = text[start:at], text[at + len(spot.string) : end]
        alike = sum(s.startswith(before) and s.endswith(after) and len(s) > len(before) + len(after)
                    for p in unit.paragraphs(language) for s in (p[a:b] for a, b in spans_of(p, language)))
        if alike != 1:
            return False
    return True


@functools.lru_cache(maxsize=32)
def _lower(unit: Unit, language: str) -> str:
    return unit.text(language).casefold()


def signed(string: str) -> bool:
    """Whether it holds signs, as paths, commands and decimals do."""
    return not string.isalnum()


def same_kind(unit: Unit, spot: Spot, same_form: bool = False) -> list[str]:
    """Strings of the spot's kind in the unit, shared by all languages; none holds the right one or lies in it.

    With `same_form` only those that are `signed` like it: beside plain words a path is known without the document.
    """
    gold = spot.string.casefold()
    found: dict[str, str] = {}
    for i in range(unit.first, unit.end):
        for string in sorted(_shared(tuple(unit.corpus.of(language)[i] for language in unit.corpus.languages))):
            own, alike = string.casefold(), not same_form or signed(string) == signed(spot.string)
            if alike and kind_of(string) == spot.kind and own not in gold and gold not in own:
                found.setdefault(own, string)
    return [found[key] for key in sorted(found)]


def word_item(unit: Unit, spot: Spot, language: str, task: str = "word-choice", options: int = 10,
              pool: Unit | None = None, seed: int = 0, same_form: bool = False) -> Item:
    """The item of a spot; wrong options come from `pool`, the unit itself by default, and are the same in every language.

    `same_form` as in `same_kind`.

    Raises:
        Refused: fewer strings of its kind than wrong options; fewer than two options.
    """
    check_options(options)
    text = unit.corpus.of(language)[spot.paragraph]
    at = text.index(spot.string)
    start, end = _sentence_at(text, at, language)
    asked = text[start:at] + BLANK + text[at + len(spot.string) : end]
    name = _id(task, unit, spot.paragraph, spot.string)
    choices = None
    if task == "word-choice":
        pool = pool or unit
        others = same_kind(pool, spot, same_form)
        if len(others) < options - 1:
            raise Refused(f"{options} options: the unit holds {len(others)} strings of kind {spot.kind} beside "
                          f"{spot.string!r}; expected at most {len(others) + 1} options.")
        rng = random.Random(f"{_id(task, pool, spot.paragraph, spot.string)}/{seed}")
        choices = Choices.shuffled(spot.string, rng.sample(others, options - 1), language, rng)
    spans = spans_of(text, language)
    place = (third(spot.paragraph - unit.first, len(unit)),
             paragraph_third(next(i for i, (a, b) in enumerate(spans) if a <= at < b), len(spans)))
    return Item(name, task, language, unit, unit.text(language), spot.string, asked, choices, text[max(0, at - STEM) : at],
                text[at + len(spot.string) : end], place, text, {"kind": spot.kind})


# ------------------------------------------------------------------------------------------------------------- sentences


@dataclass(frozen=True)
class Gap:
    """Sentence `sentence` of paragraph `paragraph` (index in the corpus)."""

    paragraph: int
    sentence: int


def gaps(corpus: Aligned, paragraph: int) -> list[Gap]:
    """Sentences of a paragraph that can be taken out: it has three or more, as many in every language."""
    counts = {len(spans_of(corpus.of(language)[paragraph], language)) for language in corpus.languages}
    return [Gap(paragraph, i) for i in range(min(counts))] if len(counts) == 1 and min(counts) >= 3 else []


@dataclass(frozen=True)
class Distractors:
    """Sentences that may be wrong options: from paragraphs k-1 to k+1, and from further away."""

    near: tuple[str, ...]
    far: tuple[str, ...]


def distractors(unit: Unit, gap: Gap, language: str, following: int = FOLLOWING) -> Distractors:
    """The legal ones, each once; none is the gold sentence or reaches into the text scored after it."""
    start, end = _gap_at(unit, gap, language)
    text = unit.text(language)
    seen = {normalise(text[start:end], language)}
    barred = {normalise(text[a:b], language) for a, b, _ in _sentences(unit, language) if a < end + following and b > end}
    near: list[str] = []
    far: list[str] = []
    for a, b, k in _sentences(unit, language):
        form = normalise(text[a:b], language)
        if form not in seen | barred:
            (near if abs(k - gap.paragraph) <= 1 else far).append(text[a:b])
            seen.add(form)
    return Distractors(tuple(near), tuple(far))


def cloze_is_legal(unit: Unit, gap: Gap, options: int = 10, following: int = FOLLOWING, crowding: Sequence[int] = (0, 9),
                   unique_in: Unit | None = None) -> bool:
    """Whether in every language the sentence stands once, text follows it, and there are wrong options for each crowding.

    `unique_in` is a wider unit in which the sentence must stand once too.
    """
    for language in unit.corpus.languages:
        start, end = _gap_at(unit, gap, language)
        text = unit.text(language)
        found = distractors(unit, gap, language, following)
        enough = len(found.near) >= max(crowding) and len(found.far) >= options - 1 - min(crowding)
        once = (unique_in or unit).text(language).count(text[start:end]) == 1
        if not enough or not once or not text[end:].strip() or not text[:start].strip():
            return False
    return True


def cloze_item(unit: Unit, gap: Gap, language: str, crowding: int = 3, options: int = 10, following: int = FOLLOWING,
               seed: int = 0, pool: Unit | None = None) -> Item:
    """A gap with `crowding` near and `options` - 1 - `crowding` far wrong options; those at two crowdings are nested.

    The options come from `pool`, the unit itself by default.

    Raises:
        Refused: fewer than two options, more crowded ones than wrong options, or too few sentences.
    """
    check_options(options)
    if not 0 <= crowding <= options - 1:
        raise Refused(f"crowding {crowding} with {options} options; expected 0 to {options - 1}.")
    pool = pool or unit
    found, far = distractors(pool, gap, language, following), options - 1 - crowding
    if len(found.near) < crowding or len(found.far) < far:
        raise Refused(f"crowding {crowding} with {options} options: the unit holds {len(found.near)} sentences near the gap and "
                      f"{len(found.far)} further away; expected {crowding} and {far}.")
    name = _id("sentence-cloze", unit, gap.paragraph, gap.sentence)
    rng = random.Random(f"{_id('sentence-cloze', pool, gap.paragraph, gap.sentence)}/{seed}")
    near_order, far_order = (rng.sample(own, len(own)) for own in (found.near, found.far))
    start, end = _gap_at(unit, gap, language)
    text = unit.text(language)
    choices = Choices.shuffled(text[start:end], near_order[:crowding] + far_order[:far], language, rng)
    spans = spans_of(unit.corpus.of(language)[gap.paragraph], language)
    place = third(gap.paragraph - unit.first, len(unit)), paragraph_third(gap.sentence, len(spans))
    return Item(name, "sentence-cloze", language, unit, text[:start] + check_marker(text) + text[end:], text[start:end], "",
                choices, text[:start], text[end : end + following], place, unit.corpus.of(language)[gap.paragraph],
                {"crowding": crowding})


# --------------------------------------------------------------------------------------------- paragraphs and documents


def fill_item(unit: Unit, paragraph: int, language: str) -> Item:
    """A paragraph taken out; the model writes it."""
    text, start = unit.text(language), unit.start(paragraph, language)
    gold = unit.corpus.of(language)[paragraph]
    return Item(_id("paragraph-fill", unit, paragraph), "paragraph-fill", language, unit,
                text[:start] + check_marker(text) + text[start + len(gold) :], gold, before=text[:start],
                after=text[start + len(gold) :], place=(third(paragraph - unit.first, len(unit)), None), paragraph=gold)


def translate_item(unit: Unit, paragraph: int | None, language: str, direction: str = "into") -> Item:
    """Translate a paragraph, or the whole unit where it is None, into English or from English (`direction` into, from).

    Raises:
        Refused: the language is English, or another direction.
    """
    if language == ENGLISH:
        raise Refused("translation with language=en; expected another language, such as fr: English is the other side.")
    if direction not in ("into", "from"):
        raise Refused(f"direction {direction!r}: expected 'into' (English) or 'from' (English).")
    source, target = (language, ENGLISH) if direction == "into" else (ENGLISH, language)
    details: dict[str, str | int] = {"direction": direction, "source": source, "target": target}
    if paragraph is None:
        return Item(_id("document-translate", unit), "document-translate", language, unit, unit.text(source),
                    unit.text(target), details=details)
    own = unit.corpus.of(source)[paragraph]
    return Item(_id("paragraph-translate", unit, paragraph), "paragraph-translate", language, unit, unit.text(source),
                unit.corpus.of(target)[paragraph], first_words(own), place=(third(paragraph - unit.first, len(unit)), None),
                paragraph=own, details=details)


def summary_item(unit: Unit, language: str) -> Item:
    """Summarise the unit; the reference is each heading with the first sentence below it, or every paragraph's first one."""
    headings = unit.corpus.headings.get(language, ("",) * len(unit.corpus))[unit.first : unit.end]
    lines: list[str] = []
    for i, (text, heading) in enumerate(zip(unit.paragraphs(language), headings)):
        if heading and i and heading == headings[i - 1]:
            continue
        a, b = spans_of(text, language)[0]
        lines += [heading] * bool(heading) + [text[a:b]]
    return Item(_id("document-summary", unit), "document-summary", language, unit, unit.text(language), "\n".join(lines))


def first_words(text: str) -> str:
    """The beginning that names a paragraph."""
    return text if len(text) <= FIRST_WORDS else (text[:FIRST_WORDS].rsplit(" ", 1)[0] or text[:FIRST_WORDS])


# ----------------------------------------------------------------------------------------------------------------- parts


@functools.lru_cache(maxsize=1 << 15)
def spans_of(text: str, language: str) -> tuple[tuple[int, int], ...]:
    """Ranges of a paragraph's sentences, found once."""
    return tuple(sentence_spans(text, language))


def neighbours(item: Item) -> str:
    """The sentences on both sides of a gap, for the surface cues of options."""
    before = spans_of(item.before.rstrip(), item.language)[-1:]
    after = spans_of(item.after.strip(), item.language)[:1]
    return " ".join([item.before[a:b] for a, b in before] + [item.after.strip()[a:b] for a, b in after])


def restored(item: Item) -> str:
    """The document with the gold in place of the marker: the unit's own text."""
    return item.document.replace(MARKER, item.gold)


def check_marker(text: str) -> str:
    """The marker; `Refused` if the text holds it already."""
    if MARKER in text:
        raise Refused(f"the text holds the marker {MARKER}; expected one without it.")
    return MARKER


def _id(task: str, unit: Unit, *parts: object) -> str:
    return "/".join(map(str, (task, f"{unit.first}-{unit.end}", *parts)))


def _sentence_at(text: str, at: int, language: str) -> tuple[int, int]:
    return next((a, b) for a, b in spans_of(text, language) if a <= at < b)


def _gap_at(unit: Unit, gap: Gap, language: str) -> tuple[int, int]:
    """Where the sentence stands in the unit's text."""
    start = unit.start(gap.paragraph, language)
    a, b = spans_of(unit.corpus.of(language)[gap.paragraph], language)[gap.sentence]
    return start + a, start + b


def _sentences(unit: Unit, language: str) -> list[tuple[int, int, int]]:
    """Every sentence of the unit: its range in the unit's text, and its paragraph."""
    found, start = [], 0
    for k, text in enumerate(unit.paragraphs(language), unit.first):
        found += [(start + a, start + b, k) for a, b in spans_of(text, language)]
        start += len(text) + len(GAP)
    return found

"""Aligned paragraphs in several languages: paragraph i says the same in each of them.

Three sources: the Debian Administrator's Handbook, which the Debian package debian-handbook installs in six languages; a folder
with one file ``en.txt``, ``ar.txt``, ... for each language and one paragraph a line, the form in which the United Nations
parallel corpus is given; and a small text of our own (`longspan.evaluation.mgal.own`).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

from longspan.evaluation.mgal.own import own_paragraphs
from longspan.evaluation.texts import SHARE
from longspan.registry import Refused, nearest

ENGLISH = "en"
LANGUAGES = ("ar", "en", "es", "fr", "ru", "zh")
"""Codes of the six languages."""
HANDBOOK = {"ar": "ar-MA", "en": "en-US", "es": "es-ES", "fr": "fr-FR", "ru": "ru-RU", "zh": "zh-CN"}
"""Folders of the handbook."""
SHORTEST = 80
"""Characters that an English paragraph of the handbook must exceed to count: shorter ones are captions and commands."""


@dataclass(frozen=True, eq=False)
class Aligned:
    """A document in several languages, paragraph by paragraph.

    Attributes:
        source: where it was read.
        paragraphs: language -> its paragraphs, all languages equally many.
        headings: language -> the heading that each paragraph stands under; empty where the source has none.

    Raises:
        Refused: an unknown language, no English, unequal or no paragraphs, an untranslated paragraph.
    """

    source: str
    paragraphs: Mapping[str, tuple[str, ...]]
    headings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for language in self.paragraphs:
            check_language(language)
        if ENGLISH not in self.paragraphs:
            raise Refused(f"{self.source}: no English paragraphs (en); expected them, for units are measured in English.")
        counts = {language: len(found) for language, found in self.paragraphs.items()}
        if len(set(counts.values())) > 1:
            given = ", ".join(f"{language} {count}" for language, count in sorted(counts.items()))
            raise Refused(f"{self.source}: unequal paragraph counts ({given}); expected as many in every language.")
        if not len(self):
            raise Refused(f"{self.source}: no paragraphs; expected at least one in every language.")
        for language in self.languages:
            for i, (own, english) in enumerate(zip(self.paragraphs[language], self.paragraphs[ENGLISH])):
                if not own.strip():
                    raise Refused(f"{self.source}: paragraph {i} in {language} is empty; expected text in every language.")
                if language != ENGLISH and own == english:
                    raise Refused(f"{self.source}: paragraph {i} in {language} is untranslated, the same string as in English; "
                                  "leave such paragraphs out in all languages.")

    def __len__(self) -> int:
        return len(self.paragraphs[ENGLISH])

    @property
    def languages(self) -> tuple[str, ...]:
        return tuple(sorted(self.paragraphs))

    @property
    def sha256(self) -> str:
        """Hash of all paragraphs in all languages."""
        both = "\0".join("\n".join((language, *self.paragraphs[language])) for language in self.languages)
        return hashlib.sha256(both.encode()).hexdigest()

    def only(self, *languages: str) -> Aligned:
        """The corpus in some of its languages: items have to be legal in these only."""
        return Aligned(self.source, {one: self.of(one) for one in languages},
                       {one: self.headings[one] for one in languages if one in self.headings})

    def of(self, language: str) -> tuple[str, ...]:
        """The paragraphs in one language; `Refused` if they aren't there."""
        check_language(language)
        if language not in self.paragraphs:
            raise Refused(f"{self.source} has no language {language!r}; expected one of {', '.join(self.languages)}.")
        return self.paragraphs[language]


def check_language(language: str) -> None:
    """Refuse a code that is none of the six."""
    if language not in LANGUAGES:
        raise Refused(nearest(language, LANGUAGES, "language"))


def load_corpus(name: str = "debian-handbook") -> Aligned:
    """``debian-handbook``, ``own``, or else a folder of ``LANG.txt`` files."""
    if name == "own":
        return own()
    return handbook() if name == "debian-handbook" else folder(name)


@functools.lru_cache(maxsize=1)
def own() -> Aligned:
    """The small text of our own."""
    return Aligned("own", {language: own_paragraphs(language) for language in LANGUAGES})


@functools.lru_cache(maxsize=2)
def folder(path: str) -> Aligned:
    """A folder of UTF-8 files ``en.txt``, ``ar.txt``, ...: line i is paragraph i. English must be among them.

    Raises:
        Refused: no such folder, a file that isn't UTF-8, and all that `Aligned` refuses.
    """
    root = Path(path).expanduser()
    files = sorted(root.glob("*.txt")) if root.is_dir() else []
    if not files:
        raise Refused(f"{path!r}: expected a folder of files en.txt, ar.txt, ... with one paragraph a line, or debian-handbook.")
    found = {}
    for file in files:
        check_language(file.stem)
        try:
            found[file.stem] = tuple(line.strip() for line in file.read_text(encoding="utf-8").rstrip("\n").split("\n"))
        except UnicodeDecodeError:
            raise Refused(f"{str(file)!r}: not UTF-8; expected a UTF-8 text file.") from None
    return Aligned(str(root), found)


# -------------------------------------------------------------------------------------------------------------- handbook


@functools.lru_cache(maxsize=2)
def handbook(root: Path = SHARE / "doc/debian-handbook/html") -> Aligned:
    """The paragraphs of the handbook that are translated into all five languages, longer than `SHORTEST` in English.

    Raises:
        Refused: the package debian-handbook isn't installed, or its pages don't agree.
    """
    if not root.is_dir():
        raise Refused(f"the corpus debian-handbook comes with the Debian package debian-handbook, which isn't installed (looked "
                      f"for {root}); install it, or name a folder of aligned files en.txt, ar.txt, ..., or own.")
    blocks = {language: _blocks(root / name) for language, name in HANDBOOK.items()}
    counts = {language: len(found) for language, found in blocks.items()}
    if len(set(counts.values())) > 1:
        raise Refused(f"{root}: unequal paragraph counts ({counts}); expected pages of one edition in every language.")
    kept, seen = [], set()
    for i, row in enumerate(zip(*(blocks[language] for language in LANGUAGES))):
        texts = dict(zip(LANGUAGES, (text for text, _ in row)))
        english = texts[ENGLISH]
        translated = all(text and text != english for language, text in texts.items() if language != ENGLISH)
        if len(english) > SHORTEST and translated and english not in seen:
            seen.add(english)
            kept.append(i)
    return Aligned(str(root), {language: tuple(found[i][0] for i in kept) for language, found in blocks.items()},
                   {language: tuple(found[i][1] for i in kept) for language, found in blocks.items()})


def _blocks(root: Path) -> Sequence[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for page in sorted(root.glob("*.html")):
        reader = _Page()
        reader.feed(page.read_text(encoding="utf-8"))
        found += reader.blocks()
    return found


class _Page(HTMLParser):
    """Text of each ``<div class="para">``, empty ones too so that pages stay aligned, with the heading above it."""

    HEADINGS = ("h1", "h2", "h3", "h4")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[list[str], str]] = []
        self.open: list[list[str] | None] = []
        self.heading, self.title = "", False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.HEADINGS:
            self.heading, self.title = "", True
        elif tag == "div":
            text: list[str] = []
            para = ("class", "para") in attrs
            self.open.append(text if para else None)
            if para:
                self.found.append((text, self.heading))

    def handle_endtag(self, tag: str) -> None:
        if tag in self.HEADINGS:
            self.title = False
        elif tag == "div" and self.open:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.title:
            self.heading += data
        elif self.open and self.open[-1] is not None:
            self.open[-1].append(data)

    def blocks(self) -> list[tuple[str, str]]:
        return [(" ".join("".join(text).split()), " ".join(heading.split())) for text, heading in self.found]

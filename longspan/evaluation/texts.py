"""Texts that tasks hide things in, read where they are installed and never copied.

Every Python carries the help topics of `pydoc` (about 65,000 words) and its own docstrings; Debian packages add longer
and multilingual ones. A `Text` knows where it came from and its hash, because installed texts differ between Python
versions and a result is comparable only with results on the same text.
"""

from __future__ import annotations

import ast
import functools
import gzip
import hashlib
import re
import sysconfig
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path

from longspan.registry import Refused, nearest

SHARE = Path("/usr/share")
"""Where Debian packages keep their texts."""

LONGEST_UNIT = 240
"""Longest sentence in characters; longer ones (tables, grammars) are cut at a word, so that lengths fit closely."""


@dataclass(frozen=True)
class Text:
    """A text with its origin: short name, where it was read, SHA-256 of its UTF-8 bytes, and the text itself."""

    name: str
    source: str
    sha256: str
    text: str

    @cached_property
    def sentences(self) -> tuple[str, ...]:
        """The text as sentences with single spaces: rules under headings dropped, long ones cut."""
        lines = [line for line in self.text.splitlines() if not re.fullmatch(r"\s*([^\w\s])\1{2,}\s*", line)]
        blocks = re.split(r"\n\s*\n", "\n".join(lines))
        flat = (" ".join(block.split()) for block in blocks)
        parts = (part for block in flat for part in re.split(r"(?<=[\w)\]\"”*][.!?]) (?=[^\Wa-z_]|[\"“(*>])", block))
        return tuple(piece for part in parts for piece in _cut(part) if piece)

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The text as words, each with the white space before it: joined, they are the text again."""
        found = re.findall(r"\s*\S+", self.text)
        return tuple(found)


def make_text(name: str, source: str, text: str) -> Text:
    """A `Text` with its hash."""
    return Text(name, source, hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(), text)


@functools.lru_cache(maxsize=16)
def load_text(name: str = "pydoc") -> Text:
    """The text called `name` (see `TEXTS`; `debian-handbook-fr-FR` and so on name a language of the handbook).

    Raises:
        Refused: an unknown name, or the package that carries the text isn't installed; the message names it.
    """
    base, language = (name[:15], name[16:]) if name.startswith("debian-handbook-") else (name, "en-US")
    if base not in TEXTS:
        raise Refused(nearest(name, TEXTS, "text"))
    source, text = _handbook(language) if base == "debian-handbook" else TEXTS[base]()
    return make_text(name, source, text)


def load_file(path: str) -> Text:
    """A UTF-8 file of the user's as a `Text`.

    Raises:
        Refused: no such file, or it isn't UTF-8.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise Refused(f"{path!r}: no such file; expected a UTF-8 text file.")
    found = file.stat()
    return _read_file(file, found.st_mtime_ns, found.st_size)


@functools.lru_cache(maxsize=4)
def _read_file(file: Path, changed: int, size: int) -> Text:
    try:
        return make_text(file.name, str(file), file.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise Refused(f"{str(file)!r}: not UTF-8; expected a UTF-8 text file.") from None


def _cut(sentence: str) -> list[str]:
    """`sentence` in pieces of at most `LONGEST_UNIT` characters, cut at spaces."""
    pieces = []
    while len(sentence) > LONGEST_UNIT:
        at = sentence.rfind(" ", 1, LONGEST_UNIT)
        at = LONGEST_UNIT if at < 0 else at
        pieces.append(sentence[:at])
        sentence = sentence[at:].lstrip()
    return [*pieces, sentence]


# ------------------------------------------------------------------------------------------------ what Python carries


def _pydoc() -> tuple[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise Refused("text 'pydoc': this Python comes without the module pydoc_data; "
                      "install the full standard library or name another text, such as 'docstrings'.") from None
    return "pydoc_data.topics", "\n\n".join(topics[key].strip() for key in sorted(topics))


SKIPPED_FOLDERS = {"test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "encodings", "site-packages",
                   "dist-packages", "__pycache__"}


def _docstrings() -> tuple[str, str]:
    """Docstrings of the public standard-library modules, in order of file and line; nothing is imported."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [f for f in sorted(root.rglob("*.py")) if not _skipped(f.relative_to(root).parts)]
    found = [doc.strip() for file in files for doc in _docstrings_of(file) if len(doc.split()) > 2]
    if not found:
        raise Refused(f"text 'docstrings': no source files below {str(root)!r}; the nearest text is 'pydoc'.")
    return "docstrings of the Python standard library", "\n\n".join(found)


def _skipped(parts: tuple[str, ...]) -> bool:
    return bool(SKIPPED_FOLDERS & set(parts)) or any(p.startswith("_") and p != "__init__.py" for p in parts)


def _docstrings_of(file: Path) -> list[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in string literals
            tree = ast.parse(file.read_bytes())
    except SyntaxError:
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return [doc for node in nodes if (doc := ast.get_docstring(node))]


# ------------------------------------------------------------------------------------------- what Debian packages carry


def _installed(file: Path, name: str, package: str) -> Path:
    if not file.exists():
        raise Refused(f"text {name!r} comes with the Debian package {package}, which isn't installed "
                      f"(looked for {file}); install it or use the text 'pydoc'.")
    return file


def _jargon() -> tuple[str, str]:
    file = _installed(SHARE / "doc/jargon-text/jargon.txt.gz", "jargon", "jargon-text")
    lines = gzip.decompress(file.read_bytes()).decode("utf-8", "replace").splitlines()
    return str(file), "\n".join(line for line in lines if not re.search("[│├┌└]", line)).strip()


def _web2() -> tuple[str, str]:
    file = _installed(SHARE / "dict/web2", "web2", "miscfiles")
    return str(file), file.read_text(encoding="utf-8", errors="replace").strip()


def _bible() -> tuple[str, str]:
    """The World English Bible, verses joined to books; read with pysword."""
    _installed(SHARE / "sword/modules/texts/ztext/engWEB2015eb", "bible", "sword-text-web")
    try:
        from pysword.modules import SwordModules
    except ImportError:
        raise Refused("text 'bible' is read with the package pysword (pip install pysword); "
                      "install it or use the text 'pydoc'.") from None
    modules = SwordModules(str(SHARE / "sword"))
    modules.parse_modules()
    bible = modules.get_bible_from_module("engWEB2015eb")
    books = [book for part in bible.get_structure().get_books().values() for book in part]
    return "World English Bible", "\n\n".join(bible.get(books=[book.name]).strip() for book in books)


def _handbook(language: str = "en-US") -> tuple[str, str]:
    """The Debian Administrator's Handbook in one language: paragraphs and titles of its pages, by file name."""
    root = _installed(SHARE / "doc/debian-handbook/html", "debian-handbook", "debian-handbook")
    known = sorted(f.name for f in root.iterdir() if f.is_dir())
    if language not in known:
        raise Refused(nearest(language, known, "language of the text debian-handbook"))
    pages = sorted((root / language).glob("*.html"))
    found = [paragraph for page in pages for paragraph in _paragraphs(page.read_text(encoding="utf-8"))]
    return str(root / language), "\n\n".join(found)


class _Paragraphs(HTMLParser):
    """Collects `<div class="para">` and headings of a page."""

    HEADINGS = ("h1", "h2", "h3", "h4")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open: list[str] = []
        self.inside: list[bool] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "div" or tag in self.HEADINGS:
            self._close(keep=bool(self.inside and self.inside[-1]))
        if tag == "div":
            self.inside.append(("class", "para") in attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag == "div" and self.inside:
            self._close(keep=self.inside.pop())
        elif tag in self.HEADINGS:
            self._close(keep=True)

    def handle_data(self, data: str) -> None:
        self.open.append(data)

    def _close(self, keep: bool) -> None:
        text = " ".join("".join(self.open).split())
        if keep and text:
            self.found.append(text)
        self.open = []


def _paragraphs(html: str) -> list[str]:
    parser = _Paragraphs()
    parser.feed(html)
    return parser.found


TEXTS: dict[str, Callable[[], tuple[str, str]]] = {
    "pydoc": _pydoc, "docstrings": _docstrings, "jargon": _jargon, "bible": _bible, "debian-handbook": _handbook,
    "web2": _web2,
}
"""Names of texts and how each is read: a function that returns (source, text)."""

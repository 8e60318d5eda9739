"""Small tools on Markdown: generated blocks between markers, links that move with a page, text that stays text."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

BLOCK = re.compile(
    r"^(?P<open>[ ]*(?:<!-- begin generated: (?P<name>[\w-]+) -->|# begin generated: (?P<yaml>[\w-]+))\n)"
    r"(?P<body>.*?)"
    r"(?P<close>^[ ]*(?:<!-- end generated -->|# end generated)$)",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#|/)([^)\s]+)(?=\))")
OUTSIDE_SITE = re.compile(
    r"^<!-- begin not on the site -->\n.*?^<!-- end not on the site -->\n", re.MULTILINE | re.DOTALL
)


def fill(page: str, make: Callable[[str, str], str]) -> str:
    """Put ``make(name, body)`` into every generated block of a page; the markers stay."""

    def replace(found: re.Match[str]) -> str:
        body = make(found["name"] or found["yaml"], found["body"])
        return found["open"] + body + found["close"]

    return BLOCK.sub(replace, page)


def blocks(page: str) -> dict[str, str]:
    """Name and content of every generated block."""
    return {found["name"] or found["yaml"]: found["body"] for found in BLOCK.finditer(page)}


def relink(text: str, change: Callable[[str], str]) -> str:
    """Rewrite the targets of relative links."""
    return LINK.sub(lambda found: change(found[1]), text)


def prose(text: str) -> str:
    """A docstring as Markdown: double backticks become code, and characters outside code mean themselves."""
    whole = re.sub(r"``(.+?)``", r"`\1`", inspect.cleandoc(text)).replace("::\n", ":\n")
    # Kept as they are: what stands in backticks, what is indented behind an empty line, and *emphasis*.
    pieces = re.split(r"(`[^`]*`|(?<=\n\n)(?: {4}.*(?:\n|$))+|(?<![\w*])\*[A-Za-z][^*\n]*?[\w.]\*(?![\w*]))", whole)
    return "".join(piece if i % 2 else escaped(piece) for i, piece in enumerate(pieces))


def escaped(text: str) -> str:
    """Plain text in which no character is markup (bullets at the beginning of a line are)."""
    text = re.sub(r"\\|(?<!^)(?<!\n)\*|(?<!\w)_|\](?=\()", lambda found: "\\" + found[0], text)
    return text.replace("<", "&lt;")


def cell(text: str) -> str:
    """Text that can stand in a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def code(text: object) -> str:
    """Inline code that can stand in a table; empty text stays empty."""
    shown = str(text)
    fence = "``" if "`" in shown else "`"
    return f"{fence}{shown}{fence}".replace("|", "\\|") if shown else ""


def table(head: list[str], rows: list[list[str]], align: str = "") -> str:
    """A Markdown table; `align` has one of ``l``, ``r`` or ``c`` for each column."""
    marks = {"l": ":--", "r": "--:", "c": ":-:"}
    rule = [marks[a] for a in align] if align else [":--"] * len(head)
    return "".join("| " + " | ".join(line) + " |\n" for line in [head, rule, *rows])

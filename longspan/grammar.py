"""The text form of a recipe, parsed strictly; nothing is ever evaluated.

    recipe := "full" | "auto" | part ("+" part)*
    part   := call ["@" call]
    call   := name ["(" knob "=" value ("," knob "=" value)* ")"]
    value  := literal | call

Literals are numbers, quoted text, True, False and None. `parse` returns plain `Call` and `Part` objects; `build` makes
methods of calls, checking every name and knob against the cards.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from longspan import registry
from longspan.registry import Method, Refused, nearest

_TOKEN = re.compile(r"""
    \s*(?:
      (?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.]))
    | (?P<text>"[^"\n]*"|'[^'\n]*')
    | (?P<name>[A-Za-z_][A-Za-z0-9_]*(?:-[A-Za-z0-9_]+)*)
    | (?P<mark>[()@+=,])
    )""", re.VERBOSE)
MAX_DEPTH = 16
"""Methods inside methods; far more than any recipe needs, far less than Python's stack."""
MAX_LENGTH = 4096
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "none": None}


@dataclass(frozen=True)
class Call:
    """A name with settings, not yet looked up."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    bare: bool = False
    """Written without parentheses."""


@dataclass(frozen=True)
class Part:
    """One part of a recipe: a call, and what stands behind its ``@``."""

    call: Call
    at: Call | None = None


def parse(text: str) -> list[Part]:
    """Read a recipe; ``full`` and ``auto`` are calls like any other.

    Raises:
        Refused: with the place where the text stops making sense.
    """
    reader = _Reader(text)
    parts = [reader.part()]
    while reader.take("+"):
        parts.append(reader.part())
    reader.end()
    return parts


class _Reader:
    """Recursive descent over the tokens of one recipe."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_LENGTH:
            raise Refused(f"the recipe has {len(text)} characters; expected at most {MAX_LENGTH}.")
        self.text = text
        self.tokens: list[tuple[str, str, int]] = []
        at = 0
        while text[at:].strip():
            match = _TOKEN.match(text, at)
            if match is None:
                place = at + len(text[at:]) - len(text[at:].lstrip())
                raise Refused(f"recipe {text!r}: unexpected {text[place]!r} at character {place + 1}; "
                              "expected something like snapkv(budget=0.2).")
            kind = match.lastgroup or ""
            self.tokens.append((kind, match[kind], match.start(kind)))
            at = match.end()
        if not self.tokens:
            raise Refused("the recipe is empty; expected a name such as full or snapkv(budget=0.2).")
        self.at = self.depth = 0

    def peek(self) -> tuple[str, str, int]:
        return self.tokens[self.at] if self.at < len(self.tokens) else ("end", "the end", len(self.text))

    def take(self, mark: str) -> bool:
        if self.peek()[:2] == ("mark", mark):
            self.at += 1
            return True
        return False

    def fail(self, expected: str) -> Refused:
        _, word, place = self.peek()
        return Refused(f"recipe {self.text!r}: unexpected {word!r} at character {place + 1}; expected {expected}.")

    def end(self) -> None:
        if self.peek()[0] != "end":
            raise self.fail('"+" and another part, or the end')

    def part(self) -> Part:
        call = self.call()
        return Part(call, self.call() if self.take("@") else None)

    def call(self) -> Call:
        kind, name, _ = self.peek()
        if kind != "name":
            raise self.fail("the name of a method")
        self.at += 1
        if not self.take("("):
            return Call(name, {}, bare=True)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.fail(f"at most {MAX_DEPTH} methods inside one another")
        settings: dict[str, Any] = {}
        while not self.take(")"):
            if settings and not self.take(","):
                raise self.fail('"," or ")"')
            kind, knob, _ = self.peek()
            if kind != "name":
                raise self.fail(f"a knob of {name}, as in {name}(knob=value)")
            self.at += 1
            if not self.take("="):
                raise self.fail(f'"=" after {knob}')
            if knob in settings:
                raise Refused(f"recipe {self.text!r}: {knob}= is given twice in {name}(…); expected it once.")
            settings[knob] = self.value()
        self.depth -= 1
        return Call(name, settings)

    def value(self) -> Any:
        kind, word, _ = self.peek()
        if kind == "number":
            self.at += 1
            # Python reads whole numbers of any length only up to a limit; no knob takes one that long.
            return int(word) if re.fullmatch(r"[-+]?\d{1,100}", word) else float(word)
        if kind == "text":
            self.at += 1
            return word[1:-1]
        if kind == "name":
            if word in _WORDS:
                self.at += 1
                return _WORDS[word]
            return self.call()
        raise self.fail("a number, quoted text, True, False, None or a method")


def build(call: Call, *, extra: tuple[str, ...] = ()) -> Method:
    """Make the method a call names.

    Args:
        extra: settings that the caller handles itself and that are left out here.
    """
    cls = registry.get(call.name)
    settings = {k: v for k, v in call.settings.items() if k not in extra}
    known = [k.name for k in cls.card.knobs]
    for name in settings:
        if name not in known:
            raise Refused(f"{call.name}: {nearest(name, [*known, *extra], 'knob')}")
    return cls(**{name: _value(cls.card.knob(name), value) for name, value in settings.items()})


def _value(knob: registry.Knob, value: Any) -> Any:
    if not isinstance(value, Call):
        # 1 where a fraction is meant: JSON and shells write whole floats so.
        return float(value) if knob.type == "float" and type(value) is int else value
    if knob.kind:
        return build(value)
    if value.bare and "str" in knob.type:
        return value.name
    raise Refused(f"{knob.name}={value.name}: expected {knob.type}, such as {knob.default!r}, not a method.")

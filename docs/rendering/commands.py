"""The command line's reference, from the signatures of the commands themselves."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.models import ArgumentInfo, OptionInfo

from longspan.cli import app
from rendering.text import cell, code, table

TYPES = {str: "text", int: "integer", float: "number", bool: "flag", Path: "path"}


@dataclass(frozen=True)
class Parameter:
    """One argument or option of a command."""

    name: str
    spelled: tuple[str, ...]
    """Ways to write an option; empty for an argument."""
    type: type
    repeats: bool
    default: Any
    help: str
    low: float | None = None
    high: float | None = None
    metavar: str = ""

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty

    @property
    def is_flag(self) -> bool:
        return self.type is bool

    @property
    def values(self) -> str:
        """The type with its range."""
        bounds = {
            (True, True): f", {self.low} to {self.high}",
            (True, False): f", at least {self.low}",
            (False, True): f", at most {self.high}",
        }.get((self.low is not None, self.high is not None), "")
        return TYPES[self.type] + bounds + (", repeatable" if self.repeats else "")

    @property
    def usage(self) -> str:
        if self.metavar:
            return self.metavar
        return self.name.upper() if self.required else f"[{self.name.upper()}]"


def commands() -> dict[str, Callable[..., Any]]:
    """Name and function, in the order of ``longspan --help``."""
    found = [info.callback for info in app.registered_commands if info.callback is not None]
    names = [info.name for info in app.registered_commands if info.callback is not None]
    return {name or call.__name__.replace("_", "-"): call for name, call in zip(names, found)}


def parameters(command: Callable[..., Any]) -> list[Parameter]:
    """The arguments and options of a command, in order."""
    hints = typing.get_type_hints(command, include_extras=True)
    return [parameter(p, hints[name]) for name, p in inspect.signature(command).parameters.items()]


def parameter(p: inspect.Parameter, hint: Any) -> Parameter:
    info: Any = OptionInfo()
    if typing.get_origin(hint) is typing.Annotated:
        hint, info = typing.get_args(hint)[:2]
    kind, repeats = plain_type(hint)
    spelled: tuple[str, ...] = ()
    if not isinstance(info, ArgumentInfo):
        plain = f"--{p.name.replace('_', '-')}"
        # Inside Annotated, typer's first positional argument is a spelling too.
        written = tuple(
            d for d in (info.default, *(info.param_decls or ())) if isinstance(d, str) and d.startswith("-")
        )
        spelled = written or ((plain, f"--no-{plain[2:]}") if kind is bool else (plain,))
    return Parameter(p.name, spelled, kind, repeats, p.default, info.help or "", info.min, info.max, info.metavar or "")


def plain_type(hint: Any) -> tuple[type, bool]:
    """``list[Path] | None`` -> (Path, True); ``int | None`` -> (int, False)."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    if typing.get_origin(hint) is list:
        return typing.get_args(hint)[0], True
    return hint, False


# ------------------------------------------------------------------------------------------------------------- the page


def page() -> str:
    return "\n".join(section(name, command) for name, command in commands().items())


def section(name: str, command: Callable[..., Any]) -> str:
    """One command: what it does, its arguments and options."""
    found = parameters(command)
    named, options = [p for p in found if not p.spelled], [p for p in found if p.spelled]
    first, *more = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    usage = " ".join(["longspan", name, *(p.usage for p in named), "[OPTIONS]"])
    parts = [
        f"## {name}\n",
        f"{' '.join(first.split())}\n",
        f"```text\n{usage}\n```\n",
        *(f"{text}\n" for text in more),
    ]
    if named:
        parts.append(
            table(
                ["argument", "values", "meaning"], [[code(p.name.upper()), cell(p.values), cell(p.help)] for p in named]
            )
        )
    rows = [[", ".join(map(code, p.spelled)), cell(p.values), code(default(p)), cell(p.help)] for p in options]
    parts.append(table(["option", "values", "default", "meaning"], rows))
    return "\n".join(parts)


def default(p: Parameter) -> str:
    return "" if p.required or p.is_flag or p.default in (None, ()) else str(p.default)

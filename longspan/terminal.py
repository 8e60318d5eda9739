"""What the commands share: options, the model, progress, and how words and files are read. Nothing heavy is imported."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from longspan import registry
from longspan.registry import Refused

Model = Annotated[str | None, typer.Option("--model", "-m", help="Folder, .gguf file or hub id; the bundled model if left out.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output, nothing else.")]
Load = Annotated[list[Path] | None, typer.Option("--load", help="A Python file that registers methods of your own.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16 or float16; chosen by the machine if left out.")]


def show(document: Any) -> None:
    print(json.dumps(document, indent=2, ensure_ascii=False, default=str))


def quoted(word: str) -> str:
    return word if word.replace("-", "").replace(".", "").replace("/", "").isalnum() else f'"{word}"'


def read_text(file: Path) -> str:
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "no such file"
        raise Refused(f"{str(file)!r}: {what}; expected a text file.")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Refused(f"{str(file)!r} is not text: byte {error.start} is not UTF-8; expected a plain text file.") from error
    if "\x00" in text:
        raise Refused(f"{str(file)!r} is not text: it holds zero bytes; expected a plain text file.")
    return text


def part(text: str, role: str) -> Any:
    """A method given as text: a name, with knobs in parentheses if wanted."""
    from longspan import grammar

    kind = role.replace("_", "-")
    known = [c.name for c in registry.cards(kind=kind)]
    name = text.split("(")[0].strip()
    if name not in {c.name for c in registry.cards()}:
        raise Refused(f"--{kind}: {registry.nearest(name, known, kind)}")
    parts = grammar.parse(text)
    if len(parts) != 1 or parts[0].at is not None or registry.card(parts[0].call.name).kind != kind:
        raise Refused(f"--{kind} {text!r}: {registry.nearest(text, known, kind)}")
    return grammar.build(parts[0].call)


def own_methods(files: list[Path] | None) -> None:
    """Register the methods of the user's own files."""
    for file in files or []:
        registry.load_file(file)


def parse_recipes(texts: list[str]) -> list[Any]:
    from longspan.recipe import Recipe

    return [Recipe.parse(text) for text in texts]


def choose_recipe(loaded: Any, length: int) -> Any:
    """What `auto` stands for: the cheapest recipe that measured results allow at this length."""
    from longspan.evaluation.planner import choose

    return choose(loaded, length)


def load_model(model: str | None, dtype: str | None) -> Any:
    from longspan.models import load as load_any

    quiet_libraries()
    return load_any(model, dtype=dtype)


def quiet_libraries() -> None:
    """Standard error is for our progress and our sentences."""
    import warnings

    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)


@contextmanager
def progress_bar(unit: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on standard error when that is a terminal, else nothing. Called with done, total and what comes next."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total, what: None
        return
    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn(),
               TextColumn("[dim]{task.description}"))
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("starting", total=None)
        yield lambda done, total, what: bars.update(bar, completed=done, total=total, description=what)

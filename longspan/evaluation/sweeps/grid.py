"""A sweep as a file: models x recipes x tasks x lengths x seeds, and the cells it is made of.

A grid is a YAML file::

    models: [smollm2]
    recipes: [full, "snapkv(budget=0.2)", "streaming-llm(budget=0.5)"]
    tasks: [niah, ruler-vt]
    lengths: [512, 1024]
    seeds: [0, 1]
    examples: 4

A *cell* is one of each, with all its examples. Its key is a hash of everything that decides its rows: the model's weights,
the recipe, task and text, length, seed, number of examples, settings, the package's code and shipped weights, the user's
own method files, and the libraries' versions; profiles that a user made are not part of it. So a finished cell can be told
from one that must be run again, whatever the file is called.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from longspan import registry
from longspan.evaluation.digests import code_digest
from longspan.evaluation.measure import AFTER, BEFORE
from longspan.evaluation.runner import own_code, parse_task
from longspan.recipe import Recipe
from longspan.registry import Refused, nearest

AXES = ("models", "recipes", "tasks", "lengths", "seeds")
EXAMPLE = {"recipes": "full", "tasks": "niah", "lengths": "1024", "seeds": "0", "load": "my_score.py"}
ROOMS = ("kernels", "layers", "models", "prefill", "cache", "decoding", "weights", "context", "evaluation")
"""Rooms whose code decides rows, with what was trained here and comes with them."""
LIBRARIES = ("torch", "transformers")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Grid:
    """What to sweep over. Raises `Refused` for anything a cell couldn't be made of."""

    recipes: tuple[str, ...]
    tasks: tuple[str, ...]
    models: tuple[str | None, ...] = (None,)
    """None: the bundled model."""
    lengths: tuple[int, ...] = (1024,)
    seeds: tuple[int, ...] = (0,)
    examples: int = 10
    compress: str = BEFORE
    max_new_tokens: int | None = None
    dtype: str | None = None
    read_once: bool = False
    load: tuple[str, ...] = field(default=())
    """Python files whose methods the recipes may name."""

    def __post_init__(self) -> None:
        for axis in AXES:
            values = getattr(self, axis)
            if not values:
                raise Refused(f"{axis}: []: expected at least one.")
        for name, low in (("lengths", 1), ("seeds", 0)):
            for value in getattr(self, name):
                _whole(name, value, low)
        _whole("examples", self.examples, 1)
        if self.max_new_tokens is not None:
            _whole("max_new_tokens", self.max_new_tokens, 1)
        if self.compress not in (BEFORE, AFTER):
            raise Refused(f"compress: {self.compress!r}: expected {BEFORE} or {AFTER}.")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise Refused(f"dtype: {self.dtype!r}: expected {', '.join(DTYPES[:-1])} or {DTYPES[-1]}.")
        if not isinstance(self.read_once, bool):
            raise Refused(f"read_once: {self.read_once!r}: expected true or false, without quotes.")
        for file in self.load:
            if not Path(file).is_file():
                raise Refused(f"load: {file!r}: no such file; expected a Python file that registers a method.")
            registry.load_file(file)
        _once("recipes", self.recipes, [_named("recipes", text, lambda t: str(Recipe.parse(t))) for text in self.recipes])
        _once("tasks", self.tasks, [_named("tasks", text, lambda t: str(parse_task(t))) for text in self.tasks])
        _once("models", self.models, [None if m is None else str(Path(m).expanduser()) for m in self.models])
        _once("lengths", self.lengths, self.lengths)
        _once("seeds", self.seeds, self.seeds)

    def cells(self) -> Iterator[Cell]:
        """Every cell; recipes change fastest, so that those that read the same examples are run next to each other."""
        axes = (self.models, self.tasks, self.lengths, self.seeds, self.recipes)
        for model, task, length, seed, recipe in itertools.product(*axes):
            yield Cell(model, recipe, task, length, seed, self.examples, self.compress, self.max_new_tokens, self.dtype,
                       self.read_once, self.load)


def _once(axis: str, values: Sequence[Any], meant: Sequence[Any]) -> None:
    """Refuse what stands there twice, in whatever spelling."""
    for i, value in enumerate(meant):
        if value in meant[:i]:
            same = values[meant.index(value)]
            as_well = "" if same == values[i] else f", as {same!r}"
            raise Refused(f"{axis}: {values[i]!r} stands there twice{as_well}; expected each once.")


def _named(axis: str, text: str, parse: Callable[[str], str]) -> str:
    try:
        return parse(text)
    except Refused as error:
        unquoted = " (text with brackets or commas goes in quotes)" if text.count("(") != text.count(")") else ""
        raise Refused(f"{axis}: {text!r}{unquoted}: {error}") from error


def _whole(name: str, value: Any, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        quotes = ", without quotes" if isinstance(value, str) else ""
        raise Refused(f"{name}: {value!r}: expected a whole number of at least {low}{quotes}.")


@dataclass(frozen=True)
class Cell:
    """One of each axis, and the settings they share."""

    model: str | None
    recipe: str
    task: str
    length: int
    seed: int
    examples: int
    compress: str = BEFORE
    max_new_tokens: int | None = None
    dtype: str | None = None
    read_once: bool = False
    load: tuple[str, ...] = ()

    def __str__(self) -> str:
        model = "" if self.model is None else f"{self.model} · "
        return f"{model}{self.recipe} · {self.task} · {self.length:,} tokens · seed {self.seed}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Cell:
        return cls(**(data | {"load": tuple(data["load"])}))

    @functools.cached_property
    def key(self) -> str:
        """The hash of all that decides this cell's rows."""
        recipe, task = Recipe.parse(self.recipe), parse_task(self.task)
        text = task.text
        named = self.as_json() | {
            "weights": _weights(self.model), "recipe": str(recipe), "task": str(task), "load": None,
            "text": "" if text is None else text.sha256, "code": code_digest(ROOMS), **own_code(recipe),
            "libraries": [importlib.import_module(name).__version__ for name in LIBRARIES],
        }
        return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:32]


@functools.cache
def _weights(model: str | None) -> str:
    from longspan.models.load import fingerprint, resolve

    return fingerprint(resolve(model)[0])


def read_grid(path: Path) -> Grid:
    """The grid of a YAML file.

    Raises:
        Refused: no such file, no YAML, an entry that doesn't exist (with the nearest), or values of another kind.
    """
    import yaml

    if not path.is_file():
        raise Refused(f"{str(path)!r}: no such file; expected a YAML file with recipes and tasks.")
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = str(error).split("\n")[0]
        raise Refused(f"{str(path)!r} is not YAML ({where}); expected entries such as recipes: [full].") from error
    if not isinstance(data, dict):
        raise Refused(f"{str(path)!r}: expected entries such as recipes: [full] and tasks: [niah].")
    names = list(Grid.__dataclass_fields__)
    for name in data:
        if name not in names:
            raise Refused(f"{str(path)!r}: {nearest(str(name), names, 'entry')}")
    for name in ("recipes", "tasks"):
        if name not in data:
            raise Refused(f"{str(path)!r} has no {name}; expected a list, such as {name}: [{EXAMPLE[name]}].")
    given = {name: data[name] for name in (*AXES, "load") if name in data}
    for name, value in given.items():
        if value is None and name != "models":
            raise Refused(f"{str(path)!r}: {name} is empty; expected a list, such as {name}: [{EXAMPLE.get(name, '...')}].")
    lists = {name: tuple(value if isinstance(value, list) else [value]) for name, value in given.items()}
    for name in ("recipes", "tasks", "models", "load"):
        for value in lists.get(name, ()):
            if not isinstance(value, str) and not (name == "models" and value is None):
                raise Refused(f"{str(path)!r}: {name}: {value!r}: expected text, in quotes if it holds brackets.")
    try:
        return Grid(**(data | lists))
    except Refused as error:
        raise Refused(f"{str(path)!r}: {error}") from error

"""Method cards: what a method is called, what it does, which knobs it has and what it needs.

Every method is a frozen dataclass whose fields are its knobs::

    @method("knorm", kind="score", paper="arXiv:2406.11430", summary="Keep the keys with the smallest norm.")
    class KNorm(Score):
        power: float = knob(1.0, "exponent of the norm", low=0.1)

The decorator makes the dataclass, checks knob values on construction, and files a `Card`. Help pages, documentation
tables, the recipe parser and the test grid read cards; nothing shared ever asks for a method by name.

This module imports nothing heavy. A generated index (`methods.json`, made by ``python -m longspan.registry``) lets the
command line describe every method without importing PyTorch.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import hashlib
import importlib
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar, TypeVar, dataclass_transform

PACKAGE = Path(__file__).parent
INDEX_FILE = PACKAGE / "methods.json"
ENTRY_POINT_GROUP = "longspan.methods"

KINDS: dict[str, str] = {
    "score": "compare", "budget": "compare", "policy": "compare", "store": "compare", "schedule": "compare",
    "reuse": "compare",
    "selector": "compare", "token-subset": "compare", "draft": "compare", "verifier": "compare",
    "denoising": "compare",
    "position": "compare", "weight-transform": "compare", "oracle": "compare", "task": "compare",
    "mixer": "train", "side-path": "train", "stack": "train", "objective": "train", "retrofit": "train",
    "codec": "reproduce", "parallel": "reproduce", "sequence-model": "reproduce", "theory": "reproduce",
    "context-strategy": "ask",
}
"""Kind of a method and the command-line verb that reaches it."""

CAPABILITIES: dict[str, str] = {
    "query-window": "reads the last query rows of the prompt",
    "all-queries": "watches every query row of the prompt",
    "pre-rope-queries": "reads queries before rotary positions are applied",
    "hidden-states": "reads the layer's input",
    "output-projection": "reads the layer's output projection",
    "values": "reads the values",
    "value-norm": "its scores already contain a norm of the values",
    "wraps-score": "re-scores another score",
    "shares-heads": "gives every head of a layer the same scores",
    "content-free": "looks at positions only, never at content",
    "ragged": "may keep different numbers of tokens per head",
    "equal-lengths": "can only hold equal numbers of tokens per head",
    "layer-budgets": "keeps different numbers of tokens per layer",
    "lossy": "stores values with less precision than the model computed",
    "units": "keeps whole units of text: shots, or sentences where none are marked",
    "across-layers": "what one layer keeps depends on other layers",
    "drops-tokens": "stops computing part of the prompt from some layer on",
    "profile": "needs offline statistics (`longspan profile`)",
    "rollback": "can drop its newest tokens again",
    "lossless": "what is written follows the model's own distribution exactly",
    "draft-model": "proposes with a model, whose queries can be read",
    "needs-draft-queries": "reads the queries of the proposed tokens in the draft",
    "trains": "has weights or settings that are learned (`longspan train`) or found for a model once (`longspan profile`)",
    "block-plan": "chooses key blocks per query block",
    "columns": "chooses single key columns",
}
"""What a card may declare; shared code decides by these words alone."""


class Refused(ValueError):
    """The request can't be served as written.

    The message is one sentence for the user: the value given, what was expected, the nearest valid choice.
    """


def nearest(name: str, options: Iterable[str], what: str) -> str:
    """One clear sentence for an unknown `name`: names it, the closest of `options`, and how to see them all."""
    known = sorted(options)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known) or 'none'}."
    return f"unknown {what} {name!r}; {hint}"


# ---------------------------------------------------------------------------------------------------- knobs and cards


@dataclasses.dataclass(frozen=True)
class Knob:
    """One setting of a method: a dataclass field with its meaning and its valid range."""

    name: str
    type: str
    default: Any
    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[Any, ...] = ()
    kind: str = ""
    """Set when the knob's value is itself a method of that kind (``base=snapkv()``)."""

    def check(self, value: Any, owner: str) -> None:
        """Raise `Refused` unless `value` is one this knob takes."""
        where = f"{owner}({self.name}={value!r})"
        if value is None and "None" in self.type:
            return
        if self.kind:
            kind = getattr(getattr(value, "card", None), "kind", None)
            if kind != self.kind:
                raise Refused(f"{where}: expected a {self.kind}, such as the default {self.default}.")
            return
        if self.choices and value not in self.choices:
            raise Refused(f"{where}: {nearest(str(value), map(str, self.choices), 'choice')}")
        if self.is_number:
            self._check_number(value, where)
        elif self.type.startswith("bool") and not isinstance(value, bool):
            raise Refused(f"{where}: expected True or False.")
        elif self.type == "str" and not isinstance(value, str):
            raise Refused(f"{where}: expected text, such as {self.default!r}.")

    @property
    def is_number(self) -> bool:
        return "str" not in self.type and self.type.split("|")[0].strip() in ("int", "float")

    def _check_number(self, value: Any, where: str) -> None:
        whole = self.type.startswith("int")
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise Refused(f"{where}: expected a {'whole ' if whole else ''}number, such as {self.default!r}.")
        if not math.isfinite(value):
            raise Refused(f"{where}: expected a finite number, such as {self.default!r}.")
        if self.low is not None and value < self.low:
            raise Refused(f"{where}: expected at least {self.low}.")
        if self.high is not None and value > self.high:
            raise Refused(f"{where}: expected at most {self.high}.")

    def as_json(self) -> dict[str, Any]:
        found = {"name": self.name, "type": self.type, "default": self.default, "help": self.help}
        found |= {key: getattr(self, key) for key in ("low", "high", "kind") if getattr(self, key) not in (None, "")}
        return found | ({"choices": list(self.choices)} if self.choices else {})


@dataclasses.dataclass(frozen=True)
class Card:
    """All that shared code knows about a method."""

    name: str
    kind: str
    system: str
    room: str
    paper: str
    summary: str
    module: str
    qualname: str
    capabilities: tuple[str, ...] = ()
    knobs: tuple[Knob, ...] = ()
    doc: str = ""

    def can(self, capability: str) -> bool:
        """Whether the method declares `capability` (one of `CAPABILITIES`)."""
        assert capability in CAPABILITIES, capability
        return capability in self.capabilities

    def knob(self, name: str) -> Knob:
        for found in self.knobs:
            if found.name == name:
                return found
        raise Refused(f"{self.name}: {nearest(name, [k.name for k in self.knobs], 'knob')}")

    def as_json(self) -> dict[str, Any]:
        out = dataclasses.asdict(self)
        return out | {"capabilities": list(self.capabilities), "knobs": [k.as_json() for k in self.knobs]}


def knob(default: Any = dataclasses.MISSING, help: str = "", *, low: float | None = None, high: float | None = None,
         choices: Iterable[Any] = (), kind: str = "", default_factory: Callable[[], Any] | None = None) -> Any:
    """A dataclass field that is a knob: default, one-line meaning, valid range or choices."""
    meta = {"help": help, "low": low, "high": high, "choices": tuple(choices), "kind": kind}
    if default_factory is not None:
        return dataclasses.field(default_factory=default_factory, metadata=meta)
    return dataclasses.field(default=default, metadata=meta)


class Method:
    """Base of every method. Subclasses are frozen dataclasses made by `method`."""

    card: ClassVar[Card]

    def __post_init__(self) -> None:
        for found in self.card.knobs:
            found.check(getattr(self, found.name), self.card.name)
        self.check()

    def check(self) -> None:
        """Refuse knob values that exclude each other; override where there are such."""

    def __str__(self) -> str:
        """The method as it is written in a recipe: only knobs that differ from their defaults."""
        parts = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            default = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc, operator]
            if value != default:
                parts.append(f"{field.name}={value if isinstance(value, Method) else _literal(value)}")
        return f"{self.card.name}({', '.join(parts)})" if parts else self.card.name


def _literal(value: Any) -> str:
    """A knob's value as the grammar reads it back: quoted text knows no escapes."""
    if not isinstance(value, str):
        return repr(value)
    return f"'{value}'" if '"' in value else f'"{value}"'


T = TypeVar("T", bound=type)
_methods: dict[str, type[Method]] = {}


@dataclass_transform(frozen_default=True, kw_only_default=False, field_specifiers=(knob,))
def method(name: str, *, kind: str, summary: str, system: str = "baselines", paper: str = "",
           capabilities: Iterable[str] = ()) -> Callable[[T], T]:
    """Register a class as the method `name` and make it a frozen dataclass of its knobs.

    Args:
        name: what users write in a recipe; lower case with hyphens.
        kind: one of `KINDS`.
        system: the published system it belongs to.
        paper: where it comes from, ``arXiv:NNNN.NNNNN`` where there is one.
        capabilities: words from `CAPABILITIES`.

    Raises:
        ValueError: an unknown kind or capability, or a name that another module already holds.
    """
    if kind not in KINDS:
        raise ValueError(nearest(kind, KINDS, "kind"))
    unknown = [c for c in capabilities if c not in CAPABILITIES]
    if unknown:
        raise ValueError(nearest(unknown[0], CAPABILITIES, "capability"))

    def register(cls: T) -> T:
        made: Any = dataclasses.dataclass(frozen=True, repr=True)(cls)
        room = cls.__module__.split(".")[1] if cls.__module__.startswith("longspan.") else "external"
        made.card = Card(name, kind, system, room, paper, summary, cls.__module__, cls.__qualname__,
                         tuple(capabilities), tuple(_knobs(made)), (cls.__doc__ or "").strip())
        before = _methods.get(name)
        if before is not None and (before.card.module, before.card.qualname) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"method {name!r} is already registered by {before.card.module}; choose another name.")
        _methods[name] = made
        return made

    return register


def _knobs(cls: type) -> Iterable[Knob]:
    for field in dataclasses.fields(cls):
        default = field.default if field.default is not dataclasses.MISSING else (
            field.default_factory() if field.default_factory is not dataclasses.MISSING else None)
        meta = dict(field.metadata)
        # A file without `from __future__ import annotations` gives types as classes.
        type_ = field.type.__name__ if isinstance(field.type, type) else str(field.type)
        yield Knob(name=field.name, type=type_, help=meta.pop("help", ""),
                   default=str(default) if isinstance(default, Method) else default, **meta)


# ------------------------------------------------------------------------------------------------------------ look-up


def cards(*, kind: str | None = None, room: str | None = None) -> list[Card]:
    """Every known card, by name. Reads the generated index; imports no method."""
    found = dict(_index())
    found |= {name: cls.card for name, cls in _methods.items()}
    return [c for _, c in sorted(found.items()) if (kind in (None, c.kind)) and (room in (None, c.room))]


def card(name: str) -> Card:
    """The card called `name`; `Refused` with the nearest name otherwise."""
    known = {c.name: c for c in cards()}
    if name not in known:
        raise Refused(nearest(name, known, "method"))
    return known[name]


def get(name: str) -> type[Method]:
    """The class of the method called `name`, imported now if it has to be."""
    if name not in _methods:
        module = card(name).module
        importlib.import_module(module)
        if name not in _methods:
            raise Refused(f"method {name!r} is no longer in {module}; expected an index that matches the source, "
                          "made by `python -m longspan.registry`.")
    return _methods[name]


def load_file(path: str | Path) -> list[Card]:
    """Import a Python file of the user's (``--load my_score.py``) and return the cards it registered."""
    file = Path(path)
    if not file.is_file():
        raise Refused(f"--load {str(path)!r}: no such file; expected a Python file that registers a method.")
    before = dict(_methods)
    # Two files of one name in different folders are two modules.
    name = f"longspan_loaded_{file.stem}_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise Refused(f"--load {str(path)!r}: expected a file that ends in .py.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            _methods.clear()
            _methods.update(before)
            raise
        if _methods.keys() == before.keys():
            del sys.modules[name]
            raise Refused(f"--load {str(path)!r}: the file registers no method; decorate a class with longspan.method.")
    return [c.card for c in _methods.values() if c.card.module == name]


def discover() -> list[Card]:
    """Import every module of the package that registers methods, and installed third-party ones; return all cards."""
    for module in method_modules():
        importlib.import_module(module)
    for entry in _entry_points():
        entry.load()
    return [cls.card for _, cls in sorted(_methods.items())]


def method_modules() -> list[str]:
    """Modules below the package whose source holds a ``@method(`` decorator, without importing them."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if "@method(" in text and file.name != "registry.py" and _decorates(text):
            parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
            found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


def _decorates(source: str) -> bool:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            for d in node.decorator_list:
                if isinstance(d, ast.Call) and getattr(d.func, "id", getattr(d.func, "attr", "")) == "method":
                    return True
    return False


def _entry_points() -> Iterable[Any]:
    from importlib.metadata import entry_points

    return entry_points(group=ENTRY_POINT_GROUP)


_cached_index: dict[str, Card] | None = None


def _index() -> dict[str, Card]:
    global _cached_index
    if _cached_index is None:
        rows = json.loads(INDEX_FILE.read_text(encoding="utf-8")) if INDEX_FILE.exists() else []
        _cached_index = {row["name"]: _card_from_json(row) for row in rows if _source_exists(row["module"])}
        for entry in _entry_points():
            entry.load()
    return _cached_index


def _source_exists(module: str) -> bool:
    """Whether the module's file is there: a method whose file was removed is simply not known any more."""
    base = PACKAGE.parent.joinpath(*module.split("."))
    return base.with_suffix(".py").exists() or (base / "__init__.py").exists()


def _card_from_json(row: dict[str, Any]) -> Card:
    knobs = tuple(Knob(**{**k, "choices": tuple(k.get("choices", ()))}) for k in row["knobs"])
    return Card(**{**row, "knobs": knobs, "capabilities": tuple(row["capabilities"])})


def write_index(path: Path = INDEX_FILE) -> int:
    """Make the index again from the source; returns how many cards it holds."""
    rows = [c.as_json() for c in discover() if c.module.startswith("longspan.")]
    path.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return len(rows)


if __name__ == "__main__":
    from longspan.registry import write_index as write  # the module under its real name, not __main__

    print(f"{write()} methods in {INDEX_FILE.name}")

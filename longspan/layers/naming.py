"""Methods by name, and methods as plain JSON: how a configuration names its parts without running any code."""

from __future__ import annotations

import dataclasses
from typing import Any

from longspan import grammar, registry
from longspan.registry import Method, Refused, nearest


def choose(value: Method | str | dict[str, Any], kind: str) -> Any:
    """The method of `kind` that `value` stands for: itself, a text such as ``goat(R=2)``, or `to_json`'s dictionary.

    Raises `Refused` for an unknown name (with the nearest of that kind), and for a method of another kind.
    """
    if isinstance(value, str) and "(" in value:
        parts = grammar.parse(value)
        if len(parts) != 1 or parts[0].at is not None:
            raise Refused(f"{value!r}: expected one {kind}, such as softmax(window=64).")
        choose(parts[0].call.name, kind)  # refuses a name of another kind before its knobs are looked at
        return grammar.build(parts[0].call)
    if isinstance(value, Method):
        found = value
    else:
        name = value if isinstance(value, str) else value.get("name", "")
        known = {card.name: card.kind for card in registry.cards()}
        if name not in known:
            raise Refused(nearest(name, [n for n, k in known.items() if k == kind], kind))
        if known[name] != kind:
            options = ", ".join(n for n, k in known.items() if k == kind)
            raise Refused(f"{name!r} is a {known[name]}; expected a {kind}: {options}.")
        knobs = {} if isinstance(value, str) else value.get("knobs", {})
        found = _with_knobs(registry.get(name), knobs)
    if found.card.kind != kind:
        raise Refused(f"{found} is a {found.card.kind}; expected a {kind}.")
    return found


def to_json(method: Method) -> dict[str, Any]:
    """``{"name": …, "knobs": {…}}`` with every knob, methods inside knobs included; `choose` reads it back."""
    fields = dataclasses.fields(method)  # type: ignore[arg-type]
    return {"name": method.card.name, "knobs": {f.name: _plain(getattr(method, f.name)) for f in fields}}


def _with_knobs(cls: type[Method], knobs: dict[str, Any]) -> Method:
    for name in knobs:
        cls.card.knob(name)  # refuses an unknown knob with the nearest one
    return cls(**{name: _read(value) for name, value in knobs.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, Method):
        return to_json(value)
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _read(value: Any) -> Any:
    if isinstance(value, dict) and "name" in value:
        return _with_knobs(registry.get(value["name"]), value.get("knobs", {}))
    return tuple(_read(item) for item in value) if isinstance(value, list) else value

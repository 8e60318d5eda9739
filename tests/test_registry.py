"""Method cards, knobs and their checks, look-up, the generated index, files of the user's."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from longspan import registry
from longspan.registry import Method, Refused, cards, knob, method, nearest


@pytest.fixture(autouse=True)
def _clean_registry():
    """What a test registers is gone after it; modules of the package stay imported, so their methods stay too."""
    before = set(registry._methods)
    yield
    for name, cls in list(registry._methods.items()):
        if name not in before and not cls.__module__.startswith("longspan."):
            del registry._methods[name]


def a_method(name="tried", **knobs):
    """Register a throwaway method whose knobs are given as name=(type, knob)."""
    body = {"__annotations__": {n: t for n, (t, _) in knobs.items()}, "__module__": __name__, "__qualname__": name}
    cls = type("Tried", (Method,), body | {n: k for n, (_, k) in knobs.items()})
    return method(name, kind="score", summary="Tried out.")(cls)


def test_decorator_makes_a_frozen_dataclass_with_a_card():
    made = a_method(power=("float", knob(2.0, "exponent", low=0.5, high=4.0)))
    assert dataclasses.is_dataclass(made)
    card = made.card
    assert (card.name, card.kind, card.room, card.summary) == ("tried", "score", "external", "Tried out.")
    assert [(k.name, k.type, k.default, k.low, k.high, k.help) for k in card.knobs] == [
        ("power", "float", 2.0, 0.5, 4.0, "exponent")]
    with pytest.raises(dataclasses.FrozenInstanceError):
        made().power = 3.0


@pytest.mark.parametrize(("type_", "options", "good", "bad"), [
    ("int", {"low": 1, "high": 8}, [1, 8], [0, 9, 2.0, True, "2", math.inf]),
    ("float", {"low": 0.0, "high": 1.0}, [0, 1, 0.5], [-0.1, 1.1, math.nan, math.inf, "x", True, None]),
    ("float | None", {"low": 0.0}, [None, 1.0], [-1.0, "x"]),
    ("bool", {}, [True, False], [0, 1, "True", None]),
    ("str", {"choices": ("mean", "max")}, ["mean"], ["mode", 1, None]),
    ("str", {}, ["anything"], [1, None]),
    ("float | str", {}, [0.2, "512 tokens"], []),
    ("int", {"choices": (8, 4, 2)}, [8, 4], [3, "8", 4.0]),
])
def test_knob_values_are_checked(type_, options, good, bad):
    start = good[0]
    made = a_method(x=(type_, knob(start, "meaning", **options)))
    for value in good:
        assert made(x=value).x == value
    for value in bad:
        with pytest.raises(Refused, match=r"tried\(x="):
            made(x=value)


def test_types_may_be_classes():
    """A user's file without `from __future__ import annotations` has classes where ours have names."""
    made = a_method(x=(int, knob(1, "meaning", low=1)))
    assert made.card.knobs[0].type == "int"
    with pytest.raises(Refused, match="at least 1"):
        made(x=0)


def test_knob_that_is_a_method():
    inner = a_method("inner-one")
    outer = a_method("outer-one", base=("Method", knob(kind="score", default_factory=inner, help="what is wrapped")))
    assert str(outer()) == "outer-one"
    assert outer.card.knobs[0].default == "inner-one"
    with pytest.raises(Refused, match="expected a score, such as the default inner-one"):
        outer(base=3)


def test_a_check_of_its_own():
    class Own(Method):
        a: int = knob(1, "one")
        b: int = knob(2, "two")

        def check(self):
            if self.a >= self.b:
                raise Refused(f"own(a={self.a}): expected less than b={self.b}.")

    made = method("own", kind="score", summary="Own.")(Own)
    with pytest.raises(Refused, match="expected less than b=2"):
        made(a=2)


@pytest.mark.parametrize(("arguments", "words"), [
    ({"kind": "scores"}, "did you mean 'score'"), ({"kind": "score", "capabilities": ("raggedy",)}, "did you mean 'ragged'")])
def test_unknown_kinds_and_capabilities_are_errors(arguments, words):
    with pytest.raises(ValueError, match=words):
        method("x", summary="X.", **arguments)


def test_two_modules_cant_share_a_name():
    a_method("taken")
    cls = type("Other", (Method,), {"__annotations__": {}, "__module__": "elsewhere", "__qualname__": "Other"})
    with pytest.raises(ValueError, match="already registered by"):
        method("taken", kind="score", summary="Other.")(cls)


def test_text_form_shows_what_differs_and_can_be_read_again():
    from longspan import grammar

    made = a_method(a=("int", knob(1, "one")), b=("str", knob("x", "two")), c=("float", knob(0.5, "three")))
    assert str(made()) == "tried"
    for text in ('plain', 'with "quotes"', "with 'single'", "back\\slash", "naïve"):
        value = made(a=3, b=text, c=1e-5)
        assert grammar.build(grammar.parse(str(value))[0].call) == value


def test_nearest_names_the_value_and_a_choice():
    assert nearest("snapvk", ["snapkv", "h2o"], "method") == "unknown method 'snapvk'; did you mean 'snapkv'?"
    assert "known: h2o, snapkv" in nearest("zzzz", ["snapkv", "h2o"], "method")
    assert "none" in nearest("zzzz", [], "method")


# ---------------------------------------------------------------------------------------------------------- look-up


def test_cards_come_from_the_index_without_importing_methods():
    found = {c.name: c for c in cards(kind="score")}
    assert {"snapkv", "h2o", "knorm"} <= set(found)
    assert all(c.kind == "score" for c in found.values())
    assert found["snapkv"].knob("window").low == 1
    assert [c.name for c in cards(room="cache", kind="score")] == sorted(found)


@pytest.mark.parametrize("kind", ["score", "budget", "store", "schedule"])
def test_cards_of_the_index_are_those_of_the_source(kind):
    for name, card in registry._index().items():
        if card.kind == kind:
            assert registry.get(name).card == card, name


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(Refused, match="unknown method 'snapvk'; did you mean 'snapkv'"):
        registry.card("snapvk")
    with pytest.raises(Refused, match="did you mean 'snapkv'"):
        registry.get("snapvk")
    with pytest.raises(Refused, match="snapkv: unknown knob 'windw'; did you mean 'window'"):
        registry.card("snapkv").knob("windw")


def test_a_card_whose_method_has_gone_is_refused(monkeypatch):
    row = registry.card("knorm")
    stale = dataclasses.replace(row, name="gone-since")
    monkeypatch.setattr(registry, "_cached_index", {**registry._index(), "gone-since": stale})
    with pytest.raises(Refused, match=r"no longer in longspan\.cache\.scores\.knorm"):
        registry.get("gone-since")


def test_a_removed_file_is_not_known_any_more(monkeypatch, tmp_path):
    rows = [registry.card("knorm").as_json(), registry.card("keydiff").as_json() | {"module": "longspan.cache.scores.removed"}]
    file = tmp_path / "methods.json"
    file.write_text(json.dumps(rows))
    monkeypatch.setattr(registry, "INDEX_FILE", file)
    monkeypatch.setattr(registry, "_cached_index", None)
    assert list(registry._index()) == ["knorm"]


def test_index_is_read_back_as_it_was_written(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "method_modules", lambda: ["longspan.cache.scores.criticalkv"])
    file = tmp_path / "methods.json"
    a_method("not-ours")
    n = registry.write_index(file)
    rows = json.loads(file.read_text())
    assert len(rows) == n == len({r["name"] for r in rows})
    assert {"criticalkv", "snapkv"} <= {r["name"] for r in rows}
    assert "not-ours" not in {r["name"] for r in rows}
    for row in rows:
        assert registry._card_from_json(row) == registry._methods[row["name"]].card


def test_method_modules_are_found_without_importing_them():
    found = registry.method_modules()
    assert {"longspan.cache.scores.snapkv", "longspan.cache.stores.ragged", "longspan.evaluation.tasks.needle"} <= set(found)
    assert not {"longspan.registry", "longspan.cache.base", "longspan"} & set(found)


def test_installed_packages_register_through_their_entry_point(monkeypatch):
    class Entry:
        def load(self):
            a_method("from-a-package")

    monkeypatch.setattr(registry, "_entry_points", lambda: [Entry()])
    monkeypatch.setattr(registry, "_cached_index", None)
    assert registry.card("from-a-package").room == "external"


# ------------------------------------------------------------------------------------------------------- user's files


SOURCE = '''
from longspan import method, knob
from longspan.cache import Score

@method("{name}", kind="score", summary="Mine.")
class Mine(Score):
    width: int = knob(3, "how wide", low=1)
    def score(self, x):
        return -x.positions.float()
'''


def test_a_file_of_the_users_is_a_method_like_any_other(tmp_path):
    from longspan.recipe import Recipe

    file = tmp_path / "mine.py"
    file.write_text(SOURCE.format(name="mine-alone"))
    assert [c.name for c in registry.load_file(file)] == ["mine-alone"]
    assert [c.name for c in registry.load_file(file)] == ["mine-alone"]  # again: the same, not an error
    assert str(Recipe.parse("mine-alone(width=5, budget=0.5)")) == "mine-alone(width=5, budget=0.5)"
    with pytest.raises(Refused, match="at least 1"):
        Recipe.parse("mine-alone(width=0)")


def test_files_of_one_name_in_two_folders_are_two(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(SOURCE.format(name=f"mine-{folder}"))
        assert [c.name for c in registry.load_file(tmp_path / folder / "mine.py")] == [f"mine-{folder}"]


@pytest.mark.parametrize(("name", "text", "words"), [
    ("empty.py", "x = 1\n", "registers no method"), ("notes.txt", "hello", "ends in .py"), (None, "", "no such file")])
def test_files_without_methods_are_refused(tmp_path, name, text, words):
    file = tmp_path / (name or "missing.py")
    if name:
        file.write_text(text)
    for _ in range(2):
        with pytest.raises(Refused, match=words):
            registry.load_file(file)


def test_a_file_that_fails_leaves_nothing_behind(tmp_path):
    file = tmp_path / "half.py"
    file.write_text(SOURCE.format(name="mine-half") + "\nraise RuntimeError('half way')\n")
    before = dict(registry._methods)
    with pytest.raises(RuntimeError, match="half way"):
        registry.load_file(file)
    assert registry._methods == before

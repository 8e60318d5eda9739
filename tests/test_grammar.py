"""The text form of recipes: what is read, what is refused, and that nothing else can happen."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longspan import grammar
from longspan.grammar import Call, Part
from longspan.registry import Refused


@pytest.mark.parametrize(("text", "parts"), [
    ("full", [Part(Call("full", bare=True))]),
    (" snapkv ( budget = 0.2 ) ", [Part(Call("snapkv", {"budget": 0.2}))]),
    ("prism(p=0.95) + snapkv()@adakv(budget=1e-2)",
     [Part(Call("prism", {"p": 0.95})), Part(Call("snapkv"), Call("adakv", {"budget": 0.01}))]),
    ("x(a=-3, b=+.5, c='it', d=\"512 tokens\", e=True, f=none, g=false)",
     [Part(Call("x", {"a": -3, "b": 0.5, "c": "it", "d": "512 tokens", "e": True, "f": None, "g": False}))]),
    ("c(base=snapkv(window=4), store=quantised)",
     [Part(Call("c", {"base": Call("snapkv", {"window": 4}), "store": Call("quantised", bare=True)}))]),
    ("streaming-llm", [Part(Call("streaming-llm", bare=True))]),
])
def test_reads(text, parts):
    assert grammar.parse(text) == parts


def test_whole_numbers_stay_whole():
    settings_ = grammar.parse("x(a=3, b=3.0, c=3e0)")[0].call.settings
    assert [type(v) for v in settings_.values()] == [int, float, float]


@pytest.mark.parametrize(("text", "place", "words"), [
    ("", None, "empty"), ("   ", None, "empty"), ("snapkv(", 8, "a knob of snapkv"), ("snapkv(budget)", 14, '"=" after budget'),
    ("snapkv(budget=)", 15, "a number, quoted text"), ("snapkv(budget=0.2", 18, '"," or ")"'), ("snapkv budget", 8, "the end"),
    ("snapkv)", 7, "the end"), ("+ full", 1, "the name of a method"), ("full +", 7, "the name of a method"),
    ("snapkv @", 9, "the name of a method"), ("snapkv(a=1,)", 12, "a knob of snapkv"), ("snapkv(a=0.2.3)", 10, "unexpected '0'"),
    ("snapkv(a=1 b=2)", 12, '"," or ")"'), ("snapkv; rm", 7, "unexpected ';'"), ("a(b='x)", 5, 'unexpected "\'"'),
    ("a(b=__import__('os'))", 16, "a knob of __import__"), ("full\x00", 5, "unexpected '\\x00'"),
])
def test_refuses_with_the_place(text, place, words):
    with pytest.raises(Refused) as error:
        grammar.parse(text)
    assert words in str(error.value)
    if place is not None:
        assert f"at character {place};" in str(error.value)


def test_refuses_a_knob_given_twice():
    with pytest.raises(Refused, match=r"window= is given twice in snapkv"):
        grammar.parse("snapkv(window=1, window=2)")


def test_refuses_depth_and_length_that_no_recipe_has():
    with pytest.raises(Refused, match="at most 16 methods inside one another"):
        grammar.parse("a(b=" * 500 + "1" + ")" * 500)
    assert grammar.parse("a(b=" * 10 + "1" + ")" * 10)
    with pytest.raises(Refused, match="characters"):
        grammar.parse("+".join(["full"] * 2000))
    assert grammar.parse("a(n=" + "9" * 3000 + ")")[0].call.settings["n"] == float("inf")


names = st.sampled_from(["snapkv", "h2o", "full", "a-b", "x_1"])
literals = st.one_of(st.integers(-10**6, 10**6), st.floats(-1e6, 1e6), st.booleans(), st.none(),
                     st.text(st.characters(blacklist_characters="\"'\n", codec="utf-8"), max_size=8))


def written(value):
    if isinstance(value, Call):
        return value.name if value.bare else f"{value.name}({', '.join(f'{k}={written(v)}' for k, v in value.settings.items())})"
    return f'"{value}"' if isinstance(value, str) else repr(value)


calls = st.recursive(
    st.builds(lambda n: Call(n, {}, bare=True), names),
    lambda inner: st.builds(Call, names, st.dictionaries(st.sampled_from("abcd"), st.one_of(literals, inner), max_size=3)),
    max_leaves=4)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(calls, st.one_of(st.none(), calls)), min_size=1, max_size=3))
def test_what_is_written_is_read_back(parts):
    text = " + ".join(written(c) + (f" @ {written(at)}" if at else "") for c, at in parts)
    assert grammar.parse(text) == [Part(c, at) for c, at in parts]


@settings(max_examples=150, deadline=None)
@given(st.text(st.sampled_from("snapkv(budget=0.2)+@, \"'1e-9_\n\t;[]{}"), max_size=30))
@example("snapkv(budget=1e999)")
@example("٣")
def test_any_text_is_read_or_refused(text):
    try:
        assert grammar.parse(text)
    except Refused as error:
        assert str(error)


# -------------------------------------------------------------------------------------------------------------- build


def test_builds_methods_with_checked_knobs():
    made = grammar.build(grammar.parse("snapkv(window=4, pool=max)")[0].call)
    assert (made.window, made.pool, made.kernel) == (4, "max", 5)
    assert grammar.build(grammar.parse("adakv(alpha=1)")[0].call).alpha == 1.0
    assert type(grammar.build(grammar.parse("adakv(alpha=1)")[0].call).alpha) is float
    nested = grammar.build(grammar.parse("criticalkv(base=h2o(recent=0.25))")[0].call)
    assert nested.base.recent == 0.25


@pytest.mark.parametrize(("text", "words"), [
    ("snapvk", "did you mean 'snapkv'"), ("snapkv(windo=3)", "did you mean 'window'"),
    ("snapkv(window=0)", "expected at least 1"), ("snapkv(window=1.5)", "expected a whole number"),
    ("snapkv(pool=mode)", "unknown choice 'mode'"), ("snapkv(window=h2o)", "not a method"),
    ("criticalkv(base=adakv)", "expected a score"), ("criticalkv(base=3)", "expected a score"),
    ("snapkv(kernel=4)", "expected an odd width, such as 5"), ("random(seed=99999999999999999999)", "expected at most"),
])
def test_build_refuses(text, words):
    with pytest.raises(Refused) as error:
        grammar.build(grammar.parse(text)[0].call)
    assert words in str(error.value)

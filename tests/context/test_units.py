"""Sentences as token ranges, and documents kept by whole sentences."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tiny_models import TOKENS, tiny, tiny_tokenizer
from tiny_tokenizer import tiny_tokenizer as trained_tokenizer

from longspan.context import Context
from longspan.context.units import sentence_spans, token_starts, with_units
from longspan.evaluation import AFTER, BEFORE, measure, parse_task
from longspan.evaluation.base import token_spans
from longspan.models import Loaded
from longspan.recipe import Recipe
from longspan.registry import Refused

TEXT = "the other path leads on. who thought of it? nobody!\n\nthen it rained. and v1.5 of the weather came."


def sentences(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    spans = sentence_spans(tokenizer, ids)
    return [tokenizer.decode(ids[a:b]) for a, b in spans], spans, ids


@pytest.mark.parametrize("make", [tiny_tokenizer, trained_tokenizer])
def test_sentences_end_at_marks_before_white_space_and_at_newlines(make):
    found, spans, ids = sentences(make(), TEXT)
    assert "".join(found) == TEXT
    assert [s.strip() for s in found] == ["the other path leads on.", "who thought of it?", "nobody!", "then it rained.",
                                          "and v1.5 of the weather came."]
    assert spans[0][0] == 0 and spans[-1][1] == len(ids)
    assert all(a[1] == b[0] for a, b in pairwise(spans))


@pytest.mark.parametrize(("text", "wanted"), [
    ("no end", ["no end"]), ("a.", ["a."]), ("a\nb\n\n\nc", ["a", "b", "c"]), ("a. \n b", ["a.", "b"]), ("...", ["..."]),
    ("wait... what?! yes", ["wait...", "what?!", "yes"]), ("\n\na", ["", "a"]), ("é. ü! 日本。 x", ["é.", "ü!", "日本。 x"]),
])
def test_edges(text, wanted):
    assert [s.strip() for s in sentences(tiny_tokenizer(), text)[0]] == wanted


def test_nothing_has_no_sentences():
    assert sentence_spans(tiny_tokenizer(), []) == []


class Slow:
    """A tokenizer of whole words that drops the blank before the first one it decodes, without offsets."""

    is_fast = False

    def decode(self, ids, **_):
        return " ".join(["Hi", "there.", "How", "now?", "Fine"][i] for i in ids)


def test_tokenizers_without_offsets():
    assert sentence_spans(Slow(), [0, 1, 2, 3, 4]) == [(0, 2), (2, 4), (4, 5)]
    assert token_starts(Slow(), [0, 1, 2]) == ("Hi there. How", [0, 2, 9])


def test_tokens_that_are_no_tokenization_of_their_text():
    """Single bytes where the tokenizer would merge them: offsets of the text again would be those of other tokens."""
    tokenizer = tiny_tokenizer()
    ids = [TOKENS.index(letter) for letter in "the.ĠtheĠend"]
    assert tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"] != ids
    assert sentence_spans(tokenizer, ids) == [(0, 4), (4, 12)]


# ---------------------------------------------------------------------------------------------------------- in a context


@pytest.fixture(scope="module")
def loaded():
    model = tiny("llama", vocab=len(TOKENS))
    model.generation_config.eos_token_id = None
    return Loaded(model, tiny_tokenizer(), "tiny llama", "print", Path("nowhere"))


@pytest.fixture(scope="module")
def trained():
    tokenizer = trained_tokenizer()
    model = tiny("llama", vocab=len(tokenizer), positions=4096)
    model.generation_config.eos_token_id = None
    return Loaded(model, tokenizer, "tiny llama", "print", Path("nowhere"))


def test_units_are_marked_for_policies_that_ask_for_them():
    tokenizer, ids = tiny_tokenizer(), tiny_tokenizer()(TEXT)["input_ids"]
    marked = with_units(None, Recipe.parse("shotkv"), tokenizer, ids)
    assert marked == {"sentences": sentence_spans(tokenizer, ids)}
    assert with_units(None, Recipe.parse("snapkv"), tokenizer, ids) == {}
    assert with_units(None, Recipe.parse("full"), tokenizer, ids) == {}
    given = {"shots": [(0, 4)], "documents": [(0, 9)]}
    assert with_units(given, Recipe.parse("shotkv"), tokenizer, ids) == given
    assert set(with_units({"documents": [(0, 9)]}, Recipe.parse("shotkv"), tokenizer, ids)) == {"documents", "sentences"}


@pytest.mark.filterwarnings("ignore:shotkv")
@pytest.mark.parametrize("recipe", ["shotkv(r_p=0.5, W=4)", "shotkv(r_p=0.5, r_d=0.5, W=4, W_d=3)"])
def test_documents_keep_whole_sentences(loaded, recipe, tmp_path):
    context = Context.read(loaded, TEXT, recipe)
    spans = sentence_spans(loaded.tokenizer, context.ids)
    tail = range(len(context.ids) - 4, len(context.ids))
    for heads in context.cache.kept_positions():
        kept = set(heads[0].tolist())
        assert torch.equal(heads[0], heads[1]) and set(tail) <= kept and 4 < len(kept) <= 0.5 * len(context.ids)
        for a, b in spans:
            assert set(range(a, b)) <= kept or not kept & (set(range(a, b)) - set(tail))
    first = context.ask("what then?", 12).ids
    assert context.ask("what then?", 12).ids == first
    assert Context.load(context.save(tmp_path / "c"), loaded).ask("what then?", 12).ids == first


@pytest.mark.filterwarnings("ignore:shotkv")
@pytest.mark.parametrize("compress", [BEFORE, AFTER])
def test_tasks_with_shots_tell_the_policy_where_they_are(trained, compress):
    task = parse_task("kvfunda-arithmetic(shots=6)")
    (example,) = task.examples(900, 1, 0, trained.tokenizer)
    done = measure(trained, Recipe.parse("shotkv(r_p=0.6, W=2)"), task, example, compress=compress, want_kept=True)
    ids = trained.tokenizer(example.context, add_special_tokens=False)["input_ids"]
    shots = token_spans(example, trained.tokenizer, "shots")
    assert json.loads(done.row["meta"])["shots"] == example.meta["shots"]
    edge = len(ids) - 2 if compress == BEFORE else len(ids)
    for layer in done.kept[:, 0]:
        whole = [layer[a : min(b, edge)].all() for a, b in shots]
        none = [not layer[a : min(b, edge)].any() for a, b in shots]
        assert all(w != n for w, n in zip(whole, none)) and 0 < sum(whole) < 6
        assert layer[: shots[0][0]].all() and layer[len(ids) :].all()


def test_shots_can_be_none_and_then_sentences_count(trained):
    task = parse_task("kvfunda-arithmetic(shots=0)")
    (example,) = task.examples(400, 1, 0, trained.tokenizer)
    assert measure(trained, Recipe.parse("shotkv(r_p=0.9, W=2)"), task, example, compress=AFTER).row["answer_nll"] > 0
    with pytest.raises(Refused, match="protected"):
        measure(trained, Recipe.parse("shotkv(r_p=0.1, W=90)"), task, example, compress=AFTER)

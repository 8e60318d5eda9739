import pytest
import torch
from tiny_folder import write_tiny_folder

from longspan.evaluation.mgal import Unit, own
from longspan.evaluation.mgal.drawing import legal_gaps, legal_words
from longspan.evaluation.mgal.items import cloze_item, word_item
from longspan.evaluation.mgal.likelihood import (
    Reader,
    before_gap,
    fluency,
    gap_space,
    score_cloze,
    score_words,
    scored_by_itself,
    start_id,
)
from longspan.models import load
from longspan.registry import Refused

UNIT = Unit(own(), 10, 15)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load(write_tiny_folder(tmp_path_factory.mktemp("mgal") / "tiny"), dtype="float32", device="cpu")


def direct(loaded, ids, wanted):
    """Mean log-likelihood of `wanted` after `ids`, by one plain forward pass."""
    with torch.no_grad():
        logits = loaded.model(torch.tensor([[start_id(loaded.tokenizer), *ids, *wanted]])).logits[0, :-1].log_softmax(-1)
    return float(logits[-len(wanted) :].gather(-1, torch.tensor(wanted)[:, None]).mean())


def test_words_are_scored_after_unit_and_stem(loaded):
    item = word_item(UNIT, next(s for s in legal_words(UNIT, 4) if s.kind == "name"), "ar", options=4)
    for text, lead in ((item.document, "\n\n"), ("", "")):
        reader = Reader(loaded, text)
        found = score_words(reader, item)
        stem = reader.ids(text) + reader.ids(lead + item.before.rstrip(" "))
        space = item.before[len(item.before.rstrip(" ")) :]
        assert found == pytest.approx([direct(loaded, stem, reader.ids(space + o)) for o in item.choices.options], abs=1e-4)
        assert score_words(reader, item) == pytest.approx(found, abs=1e-6)  # nothing of an option stays in the cache


def test_gaps_are_scored_by_what_follows(loaded):
    gap = next(g for g in legal_gaps(UNIT, 4, 60, (0, 3)) if g.sentence)
    item = cloze_item(UNIT, gap, "en", 3, 4, 60)
    reader, (space, after) = Reader(loaded, before_gap(item)), gap_space(item)
    before = reader.ids(before_gap(item))
    assert space == " " and after == item.after and len(after) == 60
    expected = [direct(loaded, before + reader.ids(space + o), reader.ids(after)) for o in item.choices.options]
    assert score_cloze(reader, item) == pytest.approx(expected, abs=1e-4)
    itself = [direct(loaded, before, reader.ids(space + o)) for o in item.choices.options]
    assert scored_by_itself(reader, item) == pytest.approx(itself, abs=1e-4)
    assert score_cloze(reader, item, item.choices.options[:2]) == pytest.approx(expected[:2], abs=1e-4)


def test_the_same_reader_completes(loaded):
    assert isinstance(Reader(loaded, "One two.").complete(" Three", 4), str)


def test_fluency_is_minus_the_mean_nll_and_empty_text_has_none(loaded):
    text = "The wind was measured."
    assert fluency(loaded, text) == pytest.approx(direct(loaded, [], Reader(loaded).ids(text)), abs=1e-4)
    assert fluency(loaded, " ") is None


def test_empty_options_are_refused(loaded):
    with pytest.raises(Refused, match="empty option"):
        Reader(loaded, "One.").loglik("Two", [""])

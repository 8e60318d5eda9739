import sys

import pytest

from longspan.evaluation.mgal import LANGUAGES, Unit, bleu, chrf, contained, entity_consistency, exact, judged, own, rouge_l
from longspan.evaluation.mgal.drawing import legal_words
from longspan.evaluation.mgal.items import fill_item, summary_item, translate_item, word_item
from longspan.evaluation.mgal.scores import coverage, length_ratio, rouge_l_sum, scores
from longspan.evaluation.mgal.units import GAP
from longspan.registry import Refused

UNIT = Unit(own(), 4, 10)


@pytest.mark.parametrize("language", LANGUAGES)
def test_copying_the_gold_scores_full_and_nothing_scores_zero(language):
    pytest.importorskip("sacrebleu")
    gold = own().of(language)[7]
    assert chrf(gold, gold) == pytest.approx(100) and bleu(gold, gold, language) == pytest.approx(100)
    assert rouge_l(gold, gold, language) == pytest.approx(1) and rouge_l_sum(gold, gold, language) == pytest.approx(1)
    assert entity_consistency(gold, [gold], language) == 1.0
    assert chrf("", gold) == bleu("", gold, language) == rouge_l("", gold, language) == rouge_l_sum("", gold, language) == 0.0
    assert entity_consistency("", [gold], language) == 0.0


def test_chrf_and_bleu_are_those_of_sacrebleu():
    metrics = pytest.importorskip("sacrebleu").metrics
    said, gold = "The wind was measured by Suland.", "The wind was measured with 301 instruments by Suland."
    assert chrf(said, gold) == metrics.CHRF(word_order=2).sentence_score(said, [gold]).score
    assert 0 < bleu(said, gold, "en") < 60
    chinese = "风速用三台仪器来测量。"
    assert bleu(chinese[:-4], chinese, "zh") > bleu(chinese[:-4], chinese, "ru")


def test_a_missing_sacrebleu_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(Refused, match=r"pip install longspan\[suites\]"):
        chrf("a", "b")


def test_rouge_counts_words_of_every_script():
    assert rouge_l("كتب أحمد رسالة", "كتب أحمد رسالة طويلة", "ar") == pytest.approx(2 * 3 / 7)
    assert rouge_l("风很大", "风不大", "zh") == pytest.approx(2 / 3)
    assert rouge_l("ветер был", "дождь шёл", "ru") == 0.0


@pytest.mark.parametrize("language,said,gold,is_exact,is_in", [
    ("en", " Kelmark.", "kelmark", 1, 1), ("en", "It is Kelmark", "Kelmark", 0, 1), ("en", "Kelmarkson", "Kelmark", 0, 0),
    ("ar", "١٩٣١", "1931", 1, 1), ("zh", "答案是 Kelmark", "Kelmark", 0, 1), ("en", "11931", "1931", 0, 0),
    ("en", "", "x", 0, 0)])
def test_words_are_compared_in_normal_form(language, said, gold, is_exact, is_in):
    assert (exact(said, gold, language), contained(said, gold, language)) == (is_exact, is_in)


def test_entities_that_stand_nowhere_count_against():
    text = "The island of Kelmark had 12 men."
    assert entity_consistency("On Kelmark lived 12 men and Ostinde with 13 men.", [text], "en") == 0.5
    assert entity_consistency("nothing is named", [text], "en") == 1.0
    assert entity_consistency("在 Ostinde 有12人", ["在 Kelmark 有12人"], "zh") == 0.5


def test_coverage_and_length():
    gold = GAP.join(("alpha beta gamma", "delta epsilon", "zeta eta theta"))
    assert coverage(gold, gold, "en") == 1.0 and coverage("alpha beta\n\nalpha gamma\n\nzeta", gold, "en") == pytest.approx(2 / 3)
    assert coverage("", gold, "en") == coverage("nothing", gold, "en") == 0.0
    assert length_ratio("ab", "abcd") == 0.5


def test_each_task_has_its_scores_first_its_own():
    pytest.importorskip("sacrebleu")
    spot = next(legal_words(UNIT, 10))
    rows = {"containment": word_item(UNIT, spot, "en", "word-extract"), "chrf++": fill_item(UNIT, 6, "fr"),
            "rouge-lsum": summary_item(UNIT, "zh")}
    for name, item in rows.items():
        found = scores(item, item.gold)
        assert next(iter(found)) == name and found[name] == pytest.approx(100 if name == "chrf++" else 1)
    assert set(scores(translate_item(UNIT, 6, "ru"), "x")) == {"chrf++", "bleu"}
    assert set(scores(translate_item(UNIT, None, "ru"), "x")) == {"chrf++", "length ratio", "coverage"}
    with pytest.raises(Refused, match="scored by the option chosen"):
        scores(word_item(UNIT, spot, "en"), "A")


def test_a_judge_is_used_or_asked_for():
    item = fill_item(UNIT, 6, "en")
    assert judged(item, "said", lambda unit, gold, said: float(gold in unit and said == "said")) == 1.0
    with pytest.raises(Refused, match="scored by a judge and none was given"):
        judged(item, "said", None)

import importlib.util

import pytest

from longspan.evaluation import lveval_metrics as lveval
from longspan.registry import Refused

needs_jieba = pytest.mark.skipif(importlib.util.find_spec("jieba") is None, reason="jieba isn't installed")


def test_keywords_open_the_gate():
    gold, keywords = "red green blue", "k1 k2 k3 k4 k5 k6 k7 k8 k9 k10 k11 k12 k13 k14 k15 k16"
    assert lveval.f1_with_keywords("red green blue k1 k2 k3", gold, keywords) == 0.0  # recall 3/16 = .19
    assert lveval.f1_with_keywords("red green blue k1 k2 k3 k4", gold, keywords) == pytest.approx(0.6)  # 4/16
    assert lveval.f1_with_keywords("red green blue", gold) == 1.0  # no keywords: plain F1
    assert lveval.f1_with_keywords("with and of", "of and with", "of and with") == 0.0  # only stop words found
    assert lveval.f1_with_keywords("with and", "and with", "and with", stop_words=frozenset()) == 1.0


def test_eleven_sets_and_their_metrics():
    assert len(lveval.SETS) == 11
    assert lveval.score("hotpotwikiqa_mixup_16k", "red k1", ["red", "red k1"], "k1 k2") == pytest.approx(2 / 3)  # first only
    assert lveval.score("hotpotwikiqa_mixup_16k", "red", ["red"], "k1 k2") == 0.0
    assert lveval.score("factrecall_en_256k", "red", ["red"], "k1 k2") == 1.0  # plain F1, whatever the keywords
    assert lveval.score("factrecall_en_256k", "", ["red"]) == 0.0
    assert lveval.score("factrecall_en", "red", []) == 0.0
    with pytest.raises(Refused, match="unknown set of LV-Eval 'factrecall_fr'"):
        lveval.score("factrecall_fr_16k", "red", ["red"])


@needs_jieba
def test_chinese_sets():
    assert lveval.score("dureader_mixup_16k", "北京是首都", ["北京首都"]) == 1.0  # 是 is a stop word
    assert lveval.score("dureader_mixup_16k", "", ["北京"]) == 0.0
    assert lveval.score("cmrc_mixup_16k", "北京", ["北京"]) == 1.0
    assert lveval.score("cmrc_mixup_16k", "的", ["北京的"]) == 0.0  # without keywords the answer is the gate


def test_missing_jieba_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(Refused, match="jieba"):
        lveval.score("dureader_mixup_16k", "北京", ["北京"])

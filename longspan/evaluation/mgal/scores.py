"""How what was written is scored; every score is named, and grains are never averaged together.

Words: exact match and containment of the normal form. Paragraphs and documents: chrF++ and BLEU (sacrebleu, 0 to 100), ROUGE-L
and ROUGE-Lsum (rouge_score with a tokenizer for all scripts, 0 to 1), entity consistency: the share of numbers and names in the
output that stand in the unit or the gold. An empty output scores 0 everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from longspan.evaluation.metrics import overlap_f1
from longspan.evaluation.mgal.items import Item
from longspan.evaluation.mgal.language import names, normalise, tokens
from longspan.evaluation.mgal.units import GAP
from longspan.registry import Refused

Judge = Callable[[str, str, str], float]
"""(unit, gold, output) -> topic fidelity, 0 to 1."""


def exact(prediction: str, gold: str, language: str) -> float:
    """Whether the prediction is the gold, in normal form; a full stop at its end doesn't count."""
    said = normalise(prediction, language).strip(" \"'.,;:!?。，！？；：؟؛،()")
    return float(bool(said) and said == normalise(gold, language))


def contained(prediction: str, gold: str, language: str) -> float:
    """Whether the gold stands in the prediction, in normal form and not inside a longer word or number."""
    said, wanted = tokens(prediction, language), tokens(gold, language)
    return float(bool(wanted) and any(said[i : i + len(wanted)] == wanted for i in range(len(said))))


def chrf(prediction: str, gold: str) -> float:
    """chrF++ (Popović 2017), 0 to 100."""
    if not prediction.strip():
        return 0.0
    return float(_sacrebleu().CHRF(word_order=2).sentence_score(prediction, [gold]).score)


def bleu(prediction: str, gold: str, language: str) -> float:
    """BLEU of one text, 0 to 100, over as many orders as it has; sacrebleu's tokenizers zh and 13a."""
    if not prediction.strip():
        return 0.0
    metric = _sacrebleu().BLEU(tokenize="zh" if language == "zh" else "13a", effective_order=True)
    return min(100.0, float(metric.sentence_score(prediction, [gold]).score))


def _sacrebleu() -> Any:
    try:
        import sacrebleu.metrics
    except ImportError:
        raise Refused("chrF++ and BLEU need the package sacrebleu; install it with pip install longspan[suites].") from None
    return sacrebleu.metrics


def rouge_l(prediction: str, gold: str, language: str) -> float:
    """F of ROUGE-L, 0 to 1."""
    return float(_rouge(language).score(gold, prediction)["rougeL"].fmeasure)


def rouge_l_sum(prediction: str, gold: str, language: str) -> float:
    """F of ROUGE-L over the lines of both, 0 to 1."""
    return float(_rouge(language).score(gold, prediction)["rougeLsum"].fmeasure)


class _Tokens:
    """A tokenizer for rouge_score, whose own drops all but a-z and digits."""

    def __init__(self, language: str) -> None:
        self.language = language

    def tokenize(self, text: str) -> list[str]:
        return tokens(text, self.language)


@functools.lru_cache(maxsize=8)
def _rouge(language: str) -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL", "rougeLsum"], tokenizer=_Tokens(language))


def entity_consistency(prediction: str, sources: Sequence[str], language: str) -> float:
    """Share of the numbers and names in the output that stand in one of the sources; 1 without any, 0 for an empty output."""
    if not prediction.strip():
        return 0.0
    said = names(prediction, language)
    known = {token for text in sources for token in tokens(text, language)} | {n for s in sources for n in names(s, language)}
    return sum(name in known for name in said) / len(said) if said else 1.0


def length_ratio(prediction: str, gold: str) -> float:
    """Characters of the output over those of the gold."""
    return len(prediction.strip()) / len(gold.strip())


def coverage(prediction: str, gold: str, language: str) -> float:
    """Share of the gold's paragraphs that are the nearest one (token F1) to some paragraph of the output."""
    wanted = [tokens(text, language) for text in gold.split(GAP)]
    found = set()
    for text in filter(str.strip, prediction.split("\n")):
        own = [overlap_f1(tokens(text, language), each) for each in wanted]
        if max(own) > 0:
            found.add(own.index(max(own)))
    return len(found) / len(wanted)


def judged(item: Item, prediction: str, judge: Judge | None) -> float:
    """Topic fidelity of a filled paragraph by a judge.

    Raises:
        Refused: there is no judge.
    """
    if judge is None:
        raise Refused("topic fidelity is scored by a judge and none was given; expected judge=(unit, gold, output) -> 0 to 1, or "
                      "the scores without one.")
    return judge(item.unit.text(item.language), item.gold, prediction)


def scores(item: Item, prediction: str) -> dict[str, float]:
    """All scores of a written answer that need no model; the first is the task's own."""
    gold, language = item.gold, str(item.details.get("target", item.language))
    if item.task == "word-extract":
        return {"containment": contained(prediction, gold, language), "exact": exact(prediction, gold, language)}
    if item.task == "paragraph-fill":
        sources = [item.unit.text(language), gold]
        return {"chrf++": chrf(prediction, gold), "rouge-l": rouge_l(prediction, gold, language),
                "entity consistency": entity_consistency(prediction, sources, language)}
    if item.task == "paragraph-translate":
        return {"chrf++": chrf(prediction, gold), "bleu": bleu(prediction, gold, language)}
    if item.task == "document-summary":
        return {"rouge-lsum": rouge_l_sum(prediction, gold, language)}
    if item.task == "document-translate":
        return {"chrf++": chrf(prediction, gold), "length ratio": length_ratio(prediction, gold),
                "coverage": coverage(prediction, gold, language)}
    raise Refused(f"task {item.task!r} is scored by the option chosen; expected one whose answer is written.")

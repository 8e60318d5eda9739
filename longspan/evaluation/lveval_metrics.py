"""LV-Eval's scores (arXiv:2402.05136): an F1 that counts only once the answer's keywords were found.

Long answers of a model that found nothing still share words with the right one. So LV-Eval looks for annotated keywords first:
below a share of them the score is 0. Two sets differ: dureader is scored by ROUGE-L without stop words, factrecall by plain F1.
Upstream scores against the first reference only, and so does `score`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from longspan.evaluation.metrics import f1, f1_zh, jieba_words, normalise, overlap_f1, rouge_l_of_words
from longspan.evaluation.words import listed
from longspan.registry import Refused, nearest

STOP_WORDS = frozenset(listed("""
about and are as at be because being but by did do does for from had has have he her his in is it its of on or over she
that their them these they this those to under was were what when where which who whom whose why will with would
"""))
"""Function words that don't count as found answer keywords; our own list."""

STOP_WORDS_ZH = frozenset(listed("""
的 了 是 在 和 与 及 或 而 但 也 就 都 又 不 于 由 以 为 对 从 到 把 被 让 给 向 等 其 之 所 这 那 个
有 中 上 后 会 能 要 可以 通过 进行 以及 因为 所以 然后 一种
"""))

LEAST_RECALL = {"en": 0.2, "zh": 0.4}
"""Share of the keywords below which an answer scores 0."""

SETS: dict[str, tuple[str, str]] = {
    "hotpotwikiqa_mixup": ("gated", "en"), "loogle_SD_mixup": ("gated", "en"), "loogle_CR_mixup": ("gated", "en"),
    "loogle_MIR_mixup": ("gated", "en"), "multifieldqa_en_mixup": ("gated", "en"), "multifieldqa_zh_mixup": ("gated", "zh"),
    "factrecall_en": ("f1", "en"), "factrecall_zh": ("f1", "zh"), "cmrc_mixup": ("gated", "zh"), "lic_mixup": ("gated", "zh"),
    "dureader_mixup": ("rouge", "zh"),
}
"""Metric and language of each of the eleven sets."""


def f1_with_keywords(prediction: str, gold: str, keywords: str = "", language: str = "en",
                     stop_words: frozenset[str] | None = None) -> float:
    """LV-Eval's qa_f1_with_gold_ans: F1, or 0 unless enough answer keywords were found (a fifth; two fifths in Chinese).

    Stop words among the keywords found don't count as found, but all keywords count in the denominator.

    Args:
        keywords: the keywords in one string; without any, English answers get the plain F1 and Chinese ones are
            checked against the whole answer.
        language: "en" or "zh" (needs jieba).
        stop_words: replaces `STOP_WORDS` or `STOP_WORDS_ZH`.
    """
    split: Callable[[str], list[str]] = jieba_words if language == "zh" else lambda text: normalise(text).split()
    stopped = (STOP_WORDS_ZH if language == "zh" else STOP_WORDS) if stop_words is None else stop_words
    found = split(prediction)
    wanted = split(keywords or (gold if language == "zh" else ""))
    if wanted:
        shared = Counter(found) & Counter(wanted)
        recall = sum(times for word, times in shared.items() if word not in stopped) / len(wanted)
        if recall < LEAST_RECALL[language]:
            return 0.0
    return overlap_f1(found, split(gold))


def rouge_without_stop_words(prediction: str, gold: str, stop_words: frozenset[str] = STOP_WORDS_ZH) -> float:
    """F of ROUGE-L over jieba words that aren't stop words (dureader).

    Raises:
        Refused: jieba isn't installed.
    """
    kept = ([word for word in jieba_words(text) if word not in stop_words] for text in (prediction, gold))
    return rouge_l_of_words(*kept)


def score(name: str, prediction: str, references: Sequence[str], keywords: str = "") -> float:
    """Score of an answer in the set `name` (`SETS`; a length such as ``_16k`` at its end is passed over).

    Raises:
        Refused: an unknown set, or jieba isn't installed and the set is Chinese.
    """
    base = base_name(name)
    if not references:
        return 0.0
    kind, language = SETS[base]
    gold = references[0]
    if kind == "rouge":
        return rouge_without_stop_words(prediction, gold)
    if kind == "f1":
        return f1_zh(prediction, gold) if language == "zh" else f1(prediction, gold)
    return f1_with_keywords(prediction, gold, keywords, language)


def base_name(name: str) -> str:
    """The set's name without its length.

    Raises:
        Refused: no such set.
    """
    stem, _, length = name.rpartition("_")
    base = stem if length in ("16k", "32k", "64k", "128k", "256k") else name
    if base not in SETS:
        raise Refused(nearest(base, SETS, "set of LV-Eval"))
    return base

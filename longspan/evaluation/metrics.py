"""How an answer is scored: plain functions of the generated text and the right answer, 0 to 1.

Definitions follow the public suites: RULER (arXiv:2404.06654), LongBench (arXiv:2308.14508), InfiniteBench
(arXiv:2402.13718), BABILong (arXiv:2406.10149), HELMET (arXiv:2410.02694); perplexity is that of PG-19
(arXiv:1911.05507). LV-Eval's scores are in `lveval_metrics`, those of rankings in `retrieval_metrics`, of citations in
`citations`.
"""

from __future__ import annotations

import functools
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from longspan.registry import Refused

# ------------------------------------------------------------------------------------------------- words in common

CHINESE_PUNCTUATION = ("！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》"
                       "「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏.")
_drop_ascii = str.maketrans("", "", string.punctuation)
_drop_all = str.maketrans("", "", string.punctuation + CHINESE_PUNCTUATION)


def normalise(text: str) -> str:
    """SQuAD's normal form: lower case, no ASCII punctuation, no a / an / the, single spaces."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_drop_ascii)).split())


def normalise_zh(text: str) -> str:
    """The Chinese normal form: lower case, no ASCII or Chinese punctuation, no white space."""
    return "".join(text.lower().translate(_drop_all).split())


def overlap_f1(prediction: Sequence[str], gold: Sequence[str]) -> float:
    """F1 of two multisets of tokens; 0 when they share none."""
    same = sum((Counter(prediction) & Counter(gold)).values())
    return 2 * same / (len(prediction) + len(gold)) if same else 0.0


def f1(prediction: str, gold: str) -> float:
    """F1 over normalised words."""
    return overlap_f1(normalise(prediction).split(), normalise(gold).split())


def f1_characters(prediction: str, gold: str) -> float:
    """F1 over the characters of the Chinese normal form (InfiniteBench, longbook_qa_chn)."""
    return overlap_f1(normalise_zh(prediction), normalise_zh(gold))


def f1_zh(prediction: str, gold: str) -> float:
    """F1 over normalised jieba words (LongBench, multifieldqa_zh).

    Raises:
        Refused: jieba isn't installed.
    """
    return overlap_f1(*(jieba_words(text) for text in (prediction, gold)))


def best(metric: Callable[[str, str], float], prediction: str, golds: Iterable[str]) -> float:
    """The best score over several references; 0 without any."""
    return max((metric(prediction, gold) for gold in golds), default=0.0)


def jieba_words(text: str) -> list[str]:
    """Normalised jieba words.

    Raises:
        Refused: jieba isn't installed.
    """
    return [word for word in map(normalise_zh, _jieba(text)) if word]


def _jieba(text: str) -> list[str]:
    try:
        import jieba
    except ImportError:
        raise Refused("scoring Chinese answers needs the package jieba (pip install jieba).") from None
    jieba.setLogLevel(60)
    return list(jieba.cut(text, cut_all=False))


# ------------------------------------------------------------------------------------------------------------- matching


def clean(prediction: str) -> str:
    """RULER's clean-up: control characters become newlines, white space at both ends goes."""
    return re.sub("[\x00-\x1f]", "\n", prediction).strip()


def match_all(prediction: str, answers: Sequence[str]) -> float:
    """Share of the answers that occur in the prediction, case aside (RULER)."""
    return sum(answer.lower() in prediction.lower() for answer in answers) / len(answers) if answers else 0.0


def match_part(prediction: str, answers: Sequence[str]) -> float:
    """1 if any of the answers occurs in the prediction, case aside (RULER's question answering)."""
    return float(any(answer.lower() in prediction.lower() for answer in answers))


def contains(prediction: str, phrase: str) -> float:
    """1 if the phrase occurs in the prediction, case, ASCII punctuation and white space aside."""
    found, wanted = (" ".join(text.lower().translate(_drop_ascii).split()) for text in (prediction, phrase))
    return float(bool(wanted) and f" {wanted} " in f" {found} ")


def substring_match(prediction: str, answers: Iterable[str]) -> float:
    """1 if the normal form of any answer occurs in that of the prediction (HELMET's recall and retrieval tasks)."""
    found = normalise(prediction)
    return float(any(wanted in found for wanted in map(normalise, answers) if wanted))


def exact_match(prediction: str, answers: Iterable[str]) -> float:
    """1 if the normal form of the prediction is that of any answer (HELMET's many-shot learning)."""
    return float(normalise(prediction) in {normalise(answer) for answer in answers} - {""})


def first_integer(text: str) -> str | None:
    """The first run of digits."""
    found = re.search(r"[0-9]+", text)
    return found.group() if found else None


def passkey(prediction: str, key: str) -> float:
    """1 if the first integer of the prediction is the key, digit for digit (InfiniteBench passkey, number_string)."""
    return float(first_integer(prediction) == key)


def kv_label(prediction: str, label: str) -> float:
    """1 if the label is one of the words left when punctuation becomes space (InfiniteBench kv_retrieval)."""
    return float(label in re.sub("[\n:\"'.,?!{}]", " ", prediction).split())


def last_integer(prediction: str, value: int) -> float:
    """1 if the last word of the prediction is that integer (InfiniteBench code_run)."""
    words = re.sub("[\n.`'\":]", " ", prediction).split()
    return float(bool(words) and re.fullmatch(r"[+-]?\d+", words[-1]) is not None and int(words[-1]) == value)


def first_number(prediction: str, value: float) -> float:
    """1 if the first number of the prediction, whole or decimal, equals `value` (InfiniteBench math_find).

    The published scorer fails on a decimal where the answer is whole; here 3.5 is simply not 3.
    """
    found = re.search(r"\d+\.\d+|\d+", prediction)
    return float(found is not None and float(found.group()) == value)


def correct_prefix(prediction: str, values: Sequence[int]) -> float:
    """Share of the integers that are right before the first wrong one (InfiniteBench math_calc)."""
    found = [int(number) for number in re.findall(r"[0-9]+", prediction)]
    right = next((i for i, (a, b) in enumerate(zip(found, values)) if a != b), min(len(found), len(values)))
    return right / len(values) if values else 0.0


def babilong(prediction: str, target: str, question: str, labels: Iterable[str]) -> float:
    """BABILong's rule: the labels in the first sentence, less those in the question, are exactly the target.

    A target with commas (qa8) names a set of labels. Labels are looked for as whole words. The published scorer looks for
    them anywhere in the text, so that it finds "one" in "none", which then is never right, and "no" in "know" and "noon".
    """
    sentence = re.split(r"\.|<context>|<example>", prediction.lower(), maxsplit=1)[0]
    known = {label.lower() for label in labels}
    found = _words_among(known, sentence) - _words_among(known, question.lower())
    several = "," in target and len(target) > 3  # two-letter path labels such as "e,n" are single labels
    return float(found == ({part.strip() for part in target.lower().split(",")} if several else {target.lower()}))


def _words_among(labels: set[str], text: str) -> set[str]:
    """The labels that occur in a text with no letter or digit right before or after."""
    return {label for label in labels if re.search(rf"(?<!\w){re.escape(label)}(?!\w)", text)}


# ------------------------------------------------------------------------------------------------------------ LongBench


def rouge_1(prediction: str, gold: str) -> float:
    """F of ROUGE-1, without stemming."""
    return _rouge_scorer().score(gold, prediction)["rouge1"].fmeasure


def rouge_l(prediction: str, gold: str) -> float:
    """F of ROUGE-L, without stemming."""
    return _rouge_scorer().score(gold, prediction)["rougeL"].fmeasure


def rouge_l_zh(prediction: str, gold: str) -> float:
    """F of ROUGE-L over jieba words.

    Raises:
        Refused: jieba isn't installed.
    """
    return rouge_l_of_words(_jieba(prediction), _jieba(gold))


def rouge_l_of_words(prediction: Sequence[str], gold: Sequence[str]) -> float:
    """F of ROUGE-L over words that are given as such."""
    return _rouge_scorer(split_at_spaces=True).score(" ".join(gold), " ".join(prediction))["rougeL"].fmeasure


def rouge_l_sum(prediction: str, gold: str) -> float:
    """F of ROUGE-L over the lines of a summary, without stemming (InfiniteBench, longbook_sum_eng)."""
    return _rouge_scorer().score(gold, prediction)["rougeLsum"].fmeasure


def rouge_l_upstream(prediction: str, gold: str, chinese: bool = False) -> float:
    """F of ROUGE-L by the package `rouge`, which LongBench's published numbers come from (it unites the longest
    common subsequences of the sentences of a text).

    Raises:
        Refused: the package rouge isn't installed.
    """
    try:
        from rouge import Rouge
    except ImportError:
        raise Refused("ROUGE-L as LongBench published it needs the package rouge (pip install rouge); "
                      "upstream=False scores with rouge_score.") from None
    if chinese:
        prediction, gold = " ".join(_jieba(prediction)), " ".join(_jieba(gold))
    try:
        return Rouge().get_scores([prediction], [gold], avg=True)["rouge-l"]["f"]
    except (ValueError, RecursionError):  # the package refuses empty texts and recurses over long ones
        return 0.0


class _Spaces:
    """A tokenizer for rouge_score that splits at white space (its own drops all but a-z and digits)."""

    def tokenize(self, text: str) -> list[str]:
        return text.split()


@functools.lru_cache(maxsize=2)
def _rouge_scorer(split_at_spaces: bool = False) -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rouge1", "rougeL", "rougeLsum"], tokenizer=_Spaces() if split_at_spaces else None)


def classification(prediction: str, gold: str, classes: Sequence[str], upstream: bool = False) -> float:
    """1 / (classes named) if the right one is among those named; classes that are part of its name don't count.

    With `upstream` the list is changed while it is walked, as in LongBench's published scorer: whatever follows a
    dropped class is skipped and stays.
    """
    named = [name for name in classes if name in prediction]
    if upstream:
        for name in named:
            if name in gold and name != gold:
                named.remove(name)
    else:
        named = [name for name in named if name == gold or name not in gold]
    return 1.0 / len(named) if gold in named else 0.0


def count(prediction: str, gold: str) -> float:
    """Share of the integers in the prediction that equal the right one; 0 without any (LongBench passage_count)."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(gold.strip()) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, gold: str) -> float:
    """`count` with the number in the right answer, such as "Paragraph 7" (LongBench passage_retrieval)."""
    return count(prediction, first_integer(gold) or "")


def code_sim(prediction: str, gold: str, upstream: bool = False) -> float:
    """Similarity of the first line of code and the right one: twice the matching characters over both lengths.

    Lines with a backtick, # or // are passed over. `upstream` rounds to whole per cent, as the published scorer does.
    """
    from rapidfuzz import fuzz

    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not re.search(r"`|#|//", line)), "")
    if not line and not gold:
        return 0.0
    ratio = fuzz.ratio(line, gold)
    return (round(ratio) if upstream else ratio) / 100


# ----------------------------------------------------------------------------------------------------------- perplexity


def perplexity(nlls: Sequence[float]) -> float:
    """exp of the mean negative log-likelihood (nats) of the tokens scored."""
    if len(nlls) == 0:
        raise ValueError("perplexity of no tokens; expected at least one negative log-likelihood.")
    return math.exp(math.fsum(nlls) / len(nlls))


def word_perplexity(total_nll: float, words: int) -> float:
    """exp(total negative log-likelihood / words): the same for every tokenizer of the same text (PG-19)."""
    if words < 1:
        raise ValueError(f"word perplexity over {words} words; expected at least one.")
    return math.exp(total_nll / words)


def windows(tokens: int, window: int, stride: int) -> list[tuple[int, int, int]]:
    """Windows over a text: (start, first token scored, end) of each.

    Windows are `window` tokens long and move by `stride`; each scores the tokens no earlier one has scored, its last
    `stride`. Token 0, which nothing predicts, is never scored, every other token once: where the stride is the whole
    window, windows share one token, so that the first one scored has something before it.
    """
    if window < 2 or not 1 <= stride <= window:
        raise ValueError(f"windows of {window}, stride {stride}; expected at least 2, and a stride of 1 to {window}.")
    found, scored, start = [], 1, 0
    while scored < tokens:
        end = min(start + window, tokens)
        found.append((start, scored, end))
        scored, start = end, start + min(stride, window - 1)
    return found


def windowed_perplexity(nll: Callable[[int, int, int], Sequence[float]], tokens: int, window: int, stride: int,
                        words: int | None = None) -> float:
    """Perplexity of a text from windows: a word's when `words` (of the whole text) is given, else a token's.

    Args:
        nll: (start, first, end) -> the negative log-likelihoods of tokens first to end - 1, given those from start.
    """
    found = [value for window_ in windows(tokens, window, stride) for value in nll(*window_)]
    return perplexity(found) if words is None else word_perplexity(math.fsum(found), words)

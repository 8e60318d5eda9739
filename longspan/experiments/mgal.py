"""Does a small model need the document, in each language, and is a word easier than a sentence?

Published (12 models, UN reports): word questions fall from 73% to 31% without context, and sentences and paragraphs stay near
chance for many. Here the bundled model scores ten options by likelihood (`evaluation/mgal/likelihood.py`) over aligned paragraphs
of the Debian Administrator's Handbook: words after their stem, in English, Arabic and Chinese on the same items, with the unit,
with the paragraph alone and with nothing; sentences, in English, by the text that follows the gap, with 0 to 9 of the nine
wrong ones taken from near the gap. Beside it stands the trap: scoring the sentence itself, which rewards what stands in the
text.

The accuracy without context isn't chance, since the stem excludes options: the difference is the measure.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from longspan.evaluation.mgal import (
    Aligned,
    Item,
    Unit,
    context_need,
    crowding_slope,
    cue_overlap,
    language_gap,
    load_corpus,
    neighbours,
    option_reuse,
    position_curve,
    surface_cue_index,
    units,
)
from longspan.evaluation.mgal.drawing import cloze_items, word_items
from longspan.evaluation.mgal.likelihood import Reader, before_gap, score_cloze, score_words, scored_by_itself
from longspan.evaluation.statistics import mean_interval
from longspan.experiments.base import Experiment, Outcome, by_checks
from longspan.models import Loaded, load
from longspan.registry import Refused

SEED = 0
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"corpus": "own", "languages": ("en", "ar"), "words": 1, "cloze": 1, "crowding": (0, 3), "following": 60,
              "balance": False, "options": 4, "word unit": 4, "cloze unit": 5},
    "small": {"corpus": "debian-handbook", "languages": ("en", "ar", "zh"), "words": 25, "cloze": 14, "crowding": (0, 3, 6, 9),
              "following": 240, "balance": True, "options": 10, "word unit": 10, "cloze unit": 8},
}
CONDITIONS: dict[str, Callable[[Item], str]] = {
    "unit": lambda item: item.unit.text(item.language), "paragraph": lambda item: item.paragraph, "none": lambda item: ""}
TRIAL = {"words with / without the unit": {"en": [1.0, 0.56], "ar": [0.9, 0.3], "zh": [0.94, 0.35]},
         "cloze": {0: 0.64, 3: 0.64, 6: 0.5, 9: 0.5}, "cloze, options scored by themselves": 0.0}
LEAST_GAIN, LEAST_WORD, LEAST_CLOZE, MOST_RISE = 0.25, 0.75, 0.3, 0.1
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Choice:
    """One item answered: the option chosen, whether it is right, and the margin of the best over the second (nats a token)."""

    item: Item
    chosen: int
    right: bool
    margin: float

    @classmethod
    def of(cls, item: Item, scores: Sequence[float]) -> Choice:
        assert item.choices is not None
        order = np.argsort(scores)
        return cls(item, int(order[-1]), int(order[-1]) == item.choices.right, float(scores[order[-1]] - scores[order[-2]]))


def measure(scale: str, progress: Progress) -> Outcome:
    """Words in every language and condition, then gaps at every crowding."""
    if scale == "paper":
        raise Refused("mgal at paper scale needs the UN reports of the paper, which aren't published, models that read 128K "
                      "tokens in six languages, and GPUs; expected smoke or small.")
    size = SIZES[scale]
    corpus, loaded = load_corpus(size["corpus"]), load()
    words = {language: answer_words(loaded, corpus, size, language, progress) for language in size["languages"]}
    cloze, trap = answer_gaps(loaded, corpus, size, progress)
    return judged(scale, words, cloze, trap)


# ----------------------------------------------------------------------------------------------------------------- words


def answer_words(loaded: Loaded, corpus: Aligned, size: dict[str, Any], language: str, progress: Progress
                 ) -> dict[str, list[Choice]]:
    """Each item in each condition; a unit is read once for all its items."""
    items = draw(corpus, size["word unit"], lambda found: word_items(
        found, size["words"], language, options=size["options"], kinds=("name",), seed=SEED, balance=size["balance"]))
    out: dict[str, list[Choice]] = {}
    for condition, shown in CONDITIONS.items():
        progress(f"words in {language}, {condition}")
        reader, done = None, {}
        for item in sorted(items, key=shown):
            if reader is None or reader.text != shown(item):
                reader = Reader(loaded, shown(item))
            done[item.id] = Choice.of(item, score_words(reader, item))
        out[condition] = [done[item.id] for item in items]
    return out


def draw(corpus: Aligned, paragraphs: int, items: Callable[[list[Unit]], list[Item]]) -> list[Item]:
    """Items from as few units as hold enough of them, taken in drawn order: then units are read for several items."""
    every = random.Random(f"units/{SEED}").sample(found := units(corpus, paragraphs), len(found))
    for count in range(1, len(every)):
        try:
            return items(every[:count])
        except Refused:
            continue
    return items(every)


# ------------------------------------------------------------------------------------------------------------------ gaps


def answer_gaps(loaded: Loaded, corpus: Aligned, size: dict[str, Any], progress: Progress
                ) -> tuple[dict[int, list[Choice]], dict[int, list[Choice]]]:
    """Each gap at each crowding, by the text after it, and by the options themselves. Options are scored once a gap."""
    every = cloze_items(units(corpus.only("en"), size["cloze unit"]), size["cloze"], "en", size["crowding"],
                        options=size["options"], following=size["following"], seed=SEED, balance=size["balance"])
    found: tuple[dict[int, list[Choice]], ...] = ({c: [] for c in every}, {c: [] for c in every})
    for number, rows in enumerate(zip(*every.values())):
        progress(f"gap {number + 1} of {size['cloze']}")
        reader = Reader(loaded, before_gap(rows[0]))
        options = list(dict.fromkeys(option for item in rows for option in shown(item)))
        for out, score in zip(found, (score_cloze, scored_by_itself)):
            known = dict(zip(options, score(reader, rows[0], options)))
            for c, item in zip(every, rows):
                out[c].append(Choice.of(item, [known[option] for option in shown(item)]))
    return found[0], found[1]


def shown(item: Item) -> tuple[str, ...]:
    """The options of an item."""
    assert item.choices is not None
    return item.choices.options


# --------------------------------------------------------------------------------------------------------------- verdict


def accuracy(choices: Sequence[Choice]) -> float:
    """Share of right answers."""
    return float(np.mean([choice.right for choice in choices]))


def judged(scale: str, words: dict[str, dict[str, list[Choice]]], cloze: dict[int, list[Choice]], trap: dict[int, list[Choice]]
           ) -> Outcome:
    """The figures and the statements about them."""
    with_unit = {language: accuracy(own["unit"]) for language, own in words.items()}
    gains = {language: with_unit[language] - accuracy(own["none"]) for language, own in words.items()}
    least, most = min(cloze), max(cloze)
    gap = {c: accuracy(own) for c, own in cloze.items()}
    checks = {
        f"the unit adds at least {LEAST_GAIN} in each language": min(gains.values()) >= LEAST_GAIN,
        f"words with the unit at least {LEAST_WORD} in each language": min(with_unit.values()) >= LEAST_WORD,
        f"English words above sentences at c = {most}": with_unit["en"] > gap[most],
        f"sentences at c = {least} at least {LEAST_CLOZE}": gap[least] >= LEAST_CLOZE,
        f"sentences at c = {most} at most {MOST_RISE} above those at c = {least}": gap[most] <= gap[least] + MOST_RISE,
    }
    measured = {f"words in {language}": _words(own) for language, own in words.items()}
    measured |= {f"language gap, {language} - en": _paired(words, language) for language in words if language != "en"}
    measured |= _gaps(words["en"]["unit"], cloze, trap)
    table = [{"grain": "word", "language": language, "condition": condition, **_row(own)}
             for language, each in words.items() for condition, own in each.items()]
    table += [{"grain": name, "language": "en", "crowding": c, **_row(own)}
              for name, each in (("sentence", cloze), ("sentence, scored by itself", trap)) for c, own in each.items()]
    verdict, reason = by_checks(checks)
    if scale == "smoke":
        verdict, reason = "mechanism-only", "one item of each kind says nothing about means."
    return Outcome(measured, TRIAL, checks, verdict, reason, [SEED], table)


def _words(own: dict[str, list[Choice]]) -> dict[str, Any]:
    right = {condition: [float(c.right) for c in choices] for condition, choices in own.items()}
    need = context_need(right["unit"], right["paragraph"], right["none"])
    curve = position_curve([c.item.place or ("", None) for c in own["unit"]], right["unit"])
    gain = need["gain"]
    return {"n": gain.n, **{name: _short(need[name][0]) for name in CONDITIONS}, "gain": _short(gain.difference),
            "gain, 95%": _short([gain.lo, gain.hi]), "gain, p (McNemar)": _short(gain.p_value),
            "end minus begin of the document": _short(curve.nearest_evidence_bias)}


def _paired(words: dict[str, dict[str, list[Choice]]], language: str) -> dict[str, Any]:
    own, english = ({c.item.id: float(c.right) for c in words[one]["unit"]} for one in (language, "en"))
    gap = language_gap(own, english)
    return {"n": gap.n, "difference": _short(gap.difference), "p (McNemar)": _short(gap.p_value)}


def _gaps(words: list[Choice], cloze: dict[int, list[Choice]], trap: dict[int, list[Choice]]) -> dict[str, Any]:
    # Tests want independent answers: a gap comes again at every crowding, a word in every language.
    most = max(cloze)
    wrong = [c for c in cloze[most] if not c.right]
    overlaps = [[cue_overlap(text, neighbours(c.item), "en") for text in (shown(c.item)[c.chosen], c.item.gold)] for c in wrong]
    cues = surface_cue_index([a for a, _ in overlaps], [b for _, b in overlaps])
    every = words + cloze[most]
    reuse = option_reuse([c.chosen for c in every], len(shown(every[0].item)), [c.margin for c in every])
    return {"sentences by crowding": {str(c): _short(accuracy(own)) for c, own in cloze.items()},
            "sentences, scored by themselves": {str(c): _short(accuracy(own)) for c, own in trap.items()},
            "crowding slope": _short(crowding_slope({c: [float(x.right) for x in own] for c, own in cloze.items()})),
            f"surface-cue index at c = {most}": {"share": _short(cues.share), "errors": cues.n, "p": _short(cues.p_value)},
            "letters of English words and these sentences against uniform, p": _short(reuse.p_value),
            "letters at low margin, p": _short(reuse.low_p_value)}


def _row(choices: Sequence[Choice]) -> dict[str, Any]:
    mean, low, high = mean_interval([float(c.right) for c in choices])
    return {"n": len(choices), "accuracy": mean, "low": low, "high": high}


def _short(value: Any) -> Any:
    return [_short(part) for part in value] if isinstance(value, list) else round(value, 4)


def lines(table: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Accuracies with their intervals."""
    head = ["grain", "language", "shown", "items", "accuracy", "95%"]
    return head, [[row["grain"], row["language"], row.get("condition", f"c = {row.get('crowding')}"), str(row["n"]),
                   f"{row['accuracy']:.2f}", f"{row['low']:.2f} to {row['high']:.2f}"] for row in table]


EXPERIMENT = Experiment(
    id="mgal", system="mgal", run=measure, lines=lines,
    claim="Word questions need the document in every language and are answered well with it; sentences in their place are "
          "harder, and more so the nearer the wrong ones stand.",
)

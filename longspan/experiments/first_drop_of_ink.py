"""How much of the damage of misleading documents is done by the first few, and do they stand closer to the gold one in attention?

The published curve: Llama-3.1-8B at 128K loses 58% of what it loses in all when a tenth of the distractors turn hard. Here the
bundled model is asked what somebody in a town works as, among 30 one-line documents beside the right one
(`evaluation/ink/town.py`); hard ones share the first or the last name. The answer is started, and the next token is compared over
the sixteen jobs. Every question is read at six shares, with swapped documents only. While it is read, each head's logits to each
document are noted: heads are chosen on half of the questions by their logit to the gold document, and margins to easy and hard
ones are measured on the other half.

Controls: easy documents in place of hard ones; attention logits divided by 0.9. The filtering split (delete hard ones, delete
easy ones, replace) is reported beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from longspan.evaluation.base import Key, encode_continuation, prompt_parts, token_spans
from longspan.evaluation.ink import Curve, Mix, Nested, competition, damage, hard_share
from longspan.evaluation.ink.filtering import filter_hard, filter_random, recovery
from longspan.evaluation.ink.margins import Head, Margins, Seen, Shown, head_scores, margins, read, retrieval_heads
from longspan.evaluation.ink.town import JOBS, Person, example, town
from longspan.experiments.base import Experiment, Outcome, by_checks
from longspan.models import Loaded, load
from longspan.registry import Refused

SEED = 0
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"questions": 2, "n": 10, "shares": (0.0, 0.1, 1.0), "controls": (1.0,), "temperature": (), "lengths": ()},
    "small": {"questions": 24, "n": 30, "shares": (0.0, 0.03, 0.1, 0.2, 0.5, 1.0), "controls": (0.03, 0.1, 0.2, 0.5, 1.0),
              "temperature": (0.1,), "lengths": (30, 15, 7)},
}
"""`shares` to measure, those of the two controls, and the distractors left at the steps of the filtering split."""
TAU = 0.9
REPLACED = 0.5
TRIAL = {"accuracy": (1.0, 1.0, 0.5, 0.29, 0.17, 0.13), "log-probability": (-0.03, -0.11, -1.11, -1.51, -2.83, -3.98)}
LEAST_CLEAN, MOST_FULL, LEAST_ACCURACY_DROP, LEAST_LOG_DROP, LEAST_CONTROL = 0.9, 0.35, 0.35, 0.15, 0.9


@dataclass(frozen=True)
class Cell:
    """One question read at one mix of documents."""

    seen: Seen
    mix: Mix
    logprob: float
    """Of the right job among the sixteen."""
    right: bool
    tokens: int
    """Of the prompt; then those of the distractors."""
    distracting: int


@dataclass
class Probe:
    """The bundled model and the sixteen answers as token ids."""

    loaded: Loaded

    def __post_init__(self) -> None:
        self.jobs = [encode_continuation(self.loaded.tokenizer, f" {job}") for job in JOBS]
        if long := [job for job, ids in zip(JOBS, self.jobs) if len(ids) != 1]:
            raise Refused(f"{long[0]!r} isn't one token for {self.loaded.name}; expected a tokenizer in which every job is.")

    def cell(self, person: Person, mix: Mix, tau: float = 1.0) -> Cell:
        """Read one context with its question."""
        tokenizer, made = self.loaded.tokenizer, example(person, mix, 0)
        parts = prompt_parts(made, tokenizer)
        first, documents = len(parts.context_ids), token_spans(made, tokenizer, "documents")
        asked = first + len(encode_continuation(tokenizer, made.question))  # the question's own tokens, no template
        (seen,) = read(self.loaded, [Shown(parts.ids, documents, (first, asked))], tau)
        among = seen.last[[ids[0] for ids in self.jobs]].log_softmax(-1)
        at = JOBS.index(person.job)
        distracting = sum(end - start for i, (start, end) in enumerate(documents) if i != mix.gold)
        return Cell(seen, mix, float(among[at]), int(among.argmax()) == at, len(parts.ids), distracting)


Progress = Callable[[str], None]
Drawn = Sequence[tuple[Person, Nested]]


def questions(tokenizer: Any, size: dict[str, Any], hard: str = "shared-name") -> Drawn:
    """The questions with all their contexts."""
    return [town(Key("first-drop-of-ink", 0, SEED, index), size["n"], tokenizer, hard) for index in range(size["questions"])]


def measure(scale: str, progress: Progress) -> Outcome:
    """Read every question at every share, then the controls and the filtering split."""
    if scale == "paper":
        raise Refused("first-drop-of-ink at paper scale needs Natural Questions, TriviaQA, PopQA and HotpotQA with passages, "
                      "Llama-3.1-8B at 128K tokens, and GPUs; expected smoke or small.")
    size, loaded = SIZES[scale], load(dtype="float32")
    probe, drawn, easy = Probe(loaded), questions(loaded.tokenizer, size), questions(loaded.tokenizer, size, "easy")
    cells = {p: walk(probe, drawn, at(p), progress, f"share {p}") for p in size["shares"]}
    control = {p: walk(probe, easy, at(p), progress, f"easy ones instead, share {p}") for p in size["controls"]}
    sharp = {p: walk(probe, drawn, at(p), progress, f"logits / {TAU}, share {p}", TAU) for p in size["temperature"]}
    split = filtering(probe, drawn, cells, size["lengths"], progress) if size["lengths"] else []
    return judged(scale, cells, control, sharp, split)


def at(p: float) -> Callable[[Nested], Mix]:
    """Contexts at one share."""
    return lambda contexts: contexts.at(p)


def walk(probe: Probe, drawn: Drawn, mix: Callable[[Nested], Mix], progress: Progress, what: str, tau: float = 1.0) -> list[Cell]:
    """Every question at one mix."""
    progress(what)
    return [probe.cell(person, mix(contexts), tau) for person, contexts in drawn]


def filtering(probe: Probe, drawn: Drawn, cells: dict[float, list[Cell]], lengths: tuple[int, ...], progress: Progress
              ) -> list[dict[str, Any]]:
    """The arms step by step; each one's gain over its start, as a share of what a clean context at full length would gain."""
    steps: list[tuple[str, list[Cell]]] = []
    for name, arm in (("filter hard", filter_hard), ("filter random", filter_random)):
        for step, left in enumerate(lengths):

            def mix(contexts: Nested, arm: Any = arm, step: int = step) -> Mix:
                return arm(contexts, lengths).mixes[step]

            known = next((own for own in cells.values() if own[0].mix == mix(drawn[0][1])), None)  # a start of the grid
            steps.append((name, known or walk(probe, drawn, mix, progress, f"{name}, {left} left")))
    steps += [("replace", cells[p]) for p in (REPLACED, 0.1, 0.0)]
    clean, rows = figures(cells[0.0]), []
    starts: dict[str, dict[str, float]] = {}
    for name, found in ((name, figures(own)) for name, own in steps):
        start = starts.setdefault(name, found)
        gains = {f"recovered {what}": recovery(found[what], start[what], clean[what]) for what in ("accuracy", "log-probability")}
        rows.append({"arm": name, **found} | gains)
    return rows


def figures(cells: Iterable[Cell]) -> dict[str, float]:
    """Means over questions."""
    found = list(cells)
    return {"share": float(np.mean([c.mix.share for c in found])), "accuracy": float(np.mean([c.right for c in found])),
            "log-probability": float(np.mean([c.logprob for c in found])), "tokens": float(np.mean([c.tokens for c in found])),
            "distractors": float(np.mean([c.mix.distractors for c in found]))}


# ---------------------------------------------------------------------------------------------------------------- margins


@dataclass(frozen=True)
class HeadStudy:
    """Heads chosen on the first half of the questions, margins on the second, by share; and how alike the halves' scores are."""

    heads: list[Head]
    margins: dict[float, Margins]
    pearson: float
    spearman: float
    g: float


def study_heads(cells: dict[float, list[Cell]]) -> HeadStudy:
    """Choose on the first half, at all shares; measure on the second."""
    half = len(next(iter(cells.values()))) // 2

    def scores(which: slice) -> np.ndarray:
        own = [c for found in cells.values() for c in found[which]]
        return head_scores([c.seen for c in own], [c.mix.gold for c in own])

    first, second = scores(slice(half)), scores(slice(half, None))
    heads = retrieval_heads(first)
    found: dict[float, Margins] = {}
    for p, own in cells.items():
        each = np.array([margins(c.seen, c.mix.kinds, heads) for c in own[half:]])
        found[p] = Margins(*each.mean(0))
    both = [m for m in found.values() if math.isfinite(m.gap)]
    weak, hard, other = (float(np.mean([getattr(m, name) for m in both])) for name in ("weak", "hard", "other"))
    every = [c for own in cells.values() for c in own]
    distracting = float(np.mean([c.distracting for c in every]))
    g = competition(weak, hard, other, distracting, float(np.mean([c.tokens for c in every])) - distracting).g
    return HeadStudy(heads, found, float(stats.pearsonr(first.ravel(), second.ravel())[0]),
                     float(stats.spearmanr(first.ravel(), second.ravel())[0]), g)


# ------------------------------------------------------------------------------------------------------------------ verdict


def curves(cells: dict[float, list[Cell]]) -> dict[str, Curve]:
    """Accuracy and log-probability of every question at every share really held."""
    shares = tuple(own[0].mix.share for own in cells.values())
    return {name: Curve(shares, np.array([[value(c) for c in own] for own in cells.values()], dtype=np.float64).T)
            for name, value in (("accuracy", lambda c: c.right), ("log-probability", lambda c: c.logprob))}


def judged(scale: str, cells: dict[float, list[Cell]], control: dict[float, list[Cell]], sharp: dict[float, list[Cell]],
           split: list[dict[str, Any]]) -> Outcome:
    """The figures and the statements about them."""
    found, study = curves(cells), study_heads(cells)
    reports = {name: curve.report(SEED) for name, curve in found.items()}
    accuracy, logprob = (found[name].means for name in ("accuracy", "log-probability"))
    both = [m for m in study.margins.values() if math.isfinite(m.gap)]
    weak, hard = (float(np.mean([getattr(m, name) for m in both])) for name in ("weak", "hard"))
    calm = min(figures(own)["accuracy"] for own in control.values())
    checks = {
        f"accuracy without hard documents at least {LEAST_CLEAN}": bool(accuracy[0] >= LEAST_CLEAN),
        f"accuracy with hard documents only at most {MOST_FULL}": bool(accuracy[-1] <= MOST_FULL),
        "log-probability falls along the grid": bool((np.diff(logprob) < 0).all()),
        f"drop ratio of accuracy at least {LEAST_ACCURACY_DROP}": reports["accuracy"]["drop_ratio"] >= LEAST_ACCURACY_DROP,
        f"drop ratio of log-probability at least {LEAST_LOG_DROP}": reports["log-probability"]["drop_ratio"] >= LEAST_LOG_DROP,
        f"easy documents in place of hard ones: accuracy at least {LEAST_CONTROL} at every share": calm >= LEAST_CONTROL,
        "at retrieval heads the margin over easy documents is larger than over hard ones": weak > hard,
    }
    measured = summary(found, reports, study, control, sharp) | {"filtering": [rounded(row) for row in split]}
    expected = {"accuracy": list(TRIAL["accuracy"]), "log-probability": list(TRIAL["log-probability"]),
                "drop ratio": {"accuracy": 0.57, "log-probability": 0.27, "linear": 0.1}, "published drop ratio": 0.58}
    parts = {"hard": cells, "control": control, "temperature": sharp}
    table = [{"part": part, "p": p, **figures(own)} for part, each in parts.items() for p, own in each.items()]
    table += [{"part": "filtering", **row} for row in split]
    table += [{"part": "margins", "p": p, **m._asdict(), "gap": m.gap} for p, m in study.margins.items()]
    verdict, reason = by_checks(checks)
    if scale == "smoke":
        verdict, reason = "mechanism-only", "two questions say nothing about means."
    return Outcome(measured, expected, checks, verdict, reason, [SEED], table)


def summary(found: dict[str, Curve], reports: dict[str, dict[str, Any]], study: HeadStudy, control: dict[float, list[Cell]],
            sharp: dict[float, list[Cell]]) -> dict[str, Any]:
    """What a reader wants to see."""
    out: dict[str, Any] = {"shares": [round(p, 3) for p in found["accuracy"].shares]}
    for name, report in reports.items():
        out[name] = rounded(report["means"])
        out[f"{name}: damage"] = rounded(report["damage"])
        keys = ("drop_ratio", "g", "g_interval", "ink_index", "ink_index_interval", "message")
        out[f"{name}: fit"] = rounded({key: report[key] for key in keys if key in report})
    gaps = {p: m.gap for p, m in study.margins.items() if math.isfinite(m.gap)}
    out |= {
        "retrieval heads (layer, head)": [list(head) for head in study.heads],
        "margins over easy, hard, other tokens": {str(p): rounded([m.weak, m.hard, m.other]) for p, m in study.margins.items()},
        "gap": {str(p): round(gap, 3) for p, gap in gaps.items()},
        "hard documents' share of attention to distractors": {str(p): rounded(m.competition) for p, m in study.margins.items()},
        "the same, by the gap": {str(p): rounded(float(hard_share(p, gap))) for p, gap in gaps.items()},
        "attention to gold": {str(p): rounded(m.gold_mass) for p, m in study.margins.items()},
        "g by margins": rounded(study.g), "damage at .1 by margins": rounded(float(damage(0.1, study.g))),
        "head scores on both halves": rounded({"pearson": study.pearson, "spearman": study.spearman}),
        "control: accuracy": {str(p): rounded(figures(own)["accuracy"]) for p, own in control.items()},
    }
    if sharp:
        each = {p: figures(own) for p, own in sharp.items()}
        out[f"attention logits / {TAU}: accuracy, log-probability"] = {
            str(p): rounded([f["accuracy"], f["log-probability"]]) for p, f in each.items()}
    return out


def rounded(value: Any) -> Any:
    """Figures with four digits behind the point."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(part) for part in value]
    return round(value, 4) if isinstance(value, float) else value


def lines(table: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The curve beside its control."""
    calm = {row["p"]: row["accuracy"] for row in table if row["part"] == "control"}
    head = ["share of hard documents", "accuracy", "log-probability of the right job", "accuracy with easy ones instead"]
    return head, [[f"{row['share']:.0%}", f"{row['accuracy']:.2f}", f"{row['log-probability']:.2f}",
                   f"{calm[row['p']]:.2f}" if row["p"] in calm else ""] for row in table if row["part"] == "hard"]


EXPERIMENT = Experiment(
    id="first-drop-of-ink", system="first-drop-of-ink", run=measure, lines=lines,
    claim="At fixed length, the first tenth of misleading documents does far more than a tenth of the damage they do in all, "
          "and heads that find the right document tell it from easy ones by more than from misleading ones.",
)

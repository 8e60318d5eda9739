"""What the experiment says of made-up readings."""

import numpy as np
import pytest
import torch

from longspan.evaluation.ink import Mix
from longspan.evaluation.ink.margins import Seen
from longspan.experiments.first_drop_of_ink import SIZES, Cell, figures, judged, measure, study_heads
from longspan.registry import Refused

SHARES, N, QUESTIONS = SIZES["small"]["shares"], 30, 24
GOOD_HEADS = {(0, 3), (1, 7)}


def cell(p: float, right: bool, logprob: float, hard_logit: float, index: int) -> Cell:
    """Heads look at gold with a logit of 6 (two of them, the others 1), at easy documents with 0."""
    kinds = ["hard"] * round(p * N) + ["weak"] * (N - round(p * N))
    kinds.insert(index, "gold")
    logits = np.zeros((2, 50, N + 2), dtype=np.float32)
    logits[:, :, index] = 1.0
    for layer, head in GOOD_HEADS:
        logits[layer, head, : N + 1] = [{"gold": 6.0, "hard": hard_logit, "weak": 0.0}[kind] for kind in kinds]
    masses = np.full_like(logits, 1 / (N + 2))
    return Cell(Seen(logits, masses, torch.zeros(1)), Mix(("",) * (N + 1), tuple(kinds)), logprob, right, 500, 330)


def readings(accuracy, logprob, hard_logit=4.0):
    return {p: [cell(p, q < round(a * QUESTIONS), z - 0.01 * q, hard_logit, q) for q in range(QUESTIONS)]
            for p, a, z in zip(SHARES, accuracy, logprob)}


FALLING = ((1.0, 1.0, 0.5, 0.29, 0.17, 0.13), (-0.03, -0.11, -1.11, -1.51, -2.83, -3.98))
CALM = {p: found for p, found in readings((1.0,) * 6, (-0.03,) * 6).items() if p > 0}


def test_the_trial_s_figures_count_as_reproduced():
    outcome = judged("small", readings(*FALLING), CALM, {}, [])
    assert outcome.verdict == "reproduced" and all(outcome.checks.values())
    assert outcome.measured["accuracy: fit"]["drop_ratio"] == pytest.approx(0.57, abs=0.02)
    assert outcome.measured["log-probability: fit"]["drop_ratio"] == pytest.approx(0.27, abs=0.01)


@pytest.mark.parametrize("accuracy,logprob,hard_logit,calm,failed", [
    ((0.8, *FALLING[0][1:]), FALLING[1], 4.0, CALM, "accuracy without"),
    ((1.0, 0.99, 0.95, 0.9, 0.7, 0.3), FALLING[1], 4.0, CALM, "drop ratio of accuracy"),
    (FALLING[0], (-0.03, -0.11, -0.2, -0.5, -2.0, -3.98), 4.0, CALM, "drop ratio of log-probability"),
    (FALLING[0], (-0.03, -1.2, -1.11, -1.51, -2.83, -3.98), 4.0, CALM, "falls along the grid"),
    (*FALLING, -1.0, CALM, "at retrieval heads"),
    (*FALLING, 4.0, readings((1.0, 1.0, 0.8, 1.0, 1.0, 1.0), (-0.03,) * 6), "easy documents in place"),
])
def test_each_check_can_fail(accuracy, logprob, hard_logit, calm, failed):
    outcome = judged("small", readings(accuracy, logprob, hard_logit), calm, {}, [])
    assert outcome.verdict == "failed" and failed in outcome.reason


def test_no_damage_is_said_and_not_divided_by():
    outcome = judged("small", readings((1.0,) * 6, (-0.03,) * 6), CALM, {}, [])
    assert outcome.verdict == "failed" and "standard errors" in outcome.measured["accuracy: fit"]["message"]


def test_heads_are_chosen_by_their_logit_to_gold():
    study = study_heads(readings(*FALLING))
    assert set(study.heads) == GOOD_HEADS
    assert study.margins[0.1].gap == pytest.approx(4.0) and np.isnan(study.margins[1.0].weak)
    assert study.pearson == pytest.approx(1.0)
    assert figures(readings(*FALLING)[0.1])["share"] == pytest.approx(0.1)


def test_paper_scale_is_refused_with_what_it_would_need():
    with pytest.raises(Refused, match=r"Natural Questions.*Llama-3\.1-8B"):
        measure("paper", print)

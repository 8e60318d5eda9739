"""L-CUBE's scores on predictors whose scores are known."""

import math

import pytest
import torch

from longspan.evaluation.lcube import (
    LCube,
    Prediction,
    Scores,
    available,
    bipartite,
    budget,
    divergence,
    expected_divergence,
    marginal,
    nll,
    oracle,
    owned,
    score,
    utilised_length,
    window,
)
from longspan.evaluation.lcube.truth import conditional
from longspan.registry import Refused

PLAN = LCube(5)
GROUPS = LCube(5, r=2, lowest=2, rho=0.8)


def sequences(plan, batch=256, seed=0):
    return plan.sample(batch, torch.Generator().manual_seed(seed))


def expected(reference):
    """The scores over all sequences, in closed form."""
    return Scores(reference.plan, expected_divergence(reference.plan, reference.seen))


@pytest.mark.parametrize("plan", [PLAN, GROUPS, LCube(5, shuffle=1), LCube(1)])
def test_the_oracle_uses_everything(plan):
    found = score(plan, oracle(plan), sequences(plan))
    informed = available(plan) > 0
    assert (found.utilisation[informed] - 1.0).abs().max() < 1e-6
    assert found.utilisation[~informed].isnan().all() and (~informed).any()
    assert found.overall == pytest.approx(1.0, abs=1e-6) and found.across() == pytest.approx(1.0, abs=1e-6)
    assert (found.levels[plan.lowest - 1 :] - 1.0).abs().max() < 1e-6 and found.levels[: plan.lowest - 1].isnan().all()


@pytest.mark.parametrize("plan", [PLAN, GROUPS])
def test_knowing_nothing_uses_nothing(plan):
    exact = expected(marginal(plan))
    assert exact.utilisation.nan_to_num().abs().max() < 1e-12 and exact.overall == pytest.approx(0.0, abs=1e-12)
    found = score(plan, marginal(plan), sequences(plan, 512))
    assert abs(found.overall) < 3 * float(found.of_sequences.std()) / 512**0.5
    lo, hi = found.interval
    assert lo < found.overall < hi and float(found.of_sequences.mean()) == pytest.approx(found.overall)
    assert (found.kl[~owned(plan)] == 0.0).all()
    assert found.across() == pytest.approx(0.0, abs=0.1)


@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 16])
def test_a_window_uses_the_levels_it_spans(tokens):
    spanned = torch.tensor([float(2 ** (h - 1) <= tokens) for h in range(1, 6)], dtype=torch.float64)
    torch.testing.assert_close(expected(window(PLAN, tokens)).levels, spanned, atol=1e-12, rtol=0)
    found = score(PLAN, window(PLAN, tokens), sequences(PLAN)).levels
    torch.testing.assert_close(found[spanned == 1], spanned[spanned == 1], atol=1e-6, rtol=0)
    assert (found - spanned).abs().max() < 0.2


@pytest.mark.parametrize("latents", [0, 1, 6, 13, 40])
def test_a_budget_is_a_share_of_what_crosses_the_cut(latents):
    share = min(1.0, latents / PLAN.latents(5))
    exact = expected(budget(PLAN, latents))
    assert exact.across() == pytest.approx(share, abs=1e-12)
    assert exact.carried() == pytest.approx(min(13, latents), abs=1e-9)
    assert (exact.levels[:4] == 1.0).all()
    found = score(PLAN, budget(PLAN, latents), sequences(PLAN, 1024))
    assert found.across() == pytest.approx(share, abs=0.05)
    assert expected(budget(PLAN, 0, cut=10)).across(10) == pytest.approx(0.0, abs=1e-12)


def test_extracted_information_at_every_cut():
    reference = window(PLAN, 4)
    exact = expected(reference)
    times, near = PLAN.times, PLAN.times[:, 1] - PLAN.times[:, 0] <= 4
    for cut in range(1, 32):
        crossing = (times[:, 0] < cut) & (times[:, 1] >= cut)
        assert exact.extracted(cut) == pytest.approx(int((crossing & near).sum()) * PLAN.pair_information, abs=1e-9)
    assert (exact.cuts * bipartite(PLAN)).tolist() == pytest.approx([exact.extracted(cut) for cut in range(1, 32)])


def test_with_several_copies_a_reading_starts_at_the_cut():
    x, cuts = sequences(GROUPS, 512), [8, 16, 20]
    for reference, share in ((oracle(GROUPS), 1.0), (marginal(GROUPS), 0.0)):
        found = score(GROUPS, reference, x, cuts=cuts)
        assert [found.across(cut) for cut in cuts] == pytest.approx([share] * 3, abs=0.1)
        assert found.cuts[14].isnan() and float(found.cuts[15]) == pytest.approx(found.across(16))
    with pytest.raises(Refused, match="cut=9"):
        found.across(9)


def test_excess_likelihood_is_the_divergence():
    for plan in (PLAN, GROUPS):
        x = plan.sample(4000, torch.Generator().manual_seed(3), torch.float64)
        truth = conditional(plan, x)
        off = Prediction(0.5 * truth.mu + 0.1, 0.7 * truth.var + 0.2)
        excess = nll(off, x) - nll(truth, x)
        gap = excess - divergence(truth, off).sum((1, 2))
        assert abs(float(gap.mean())) < 3 * float(gap.std()) / 4000**0.5
        assert float(excess.mean()) > 1.0


def test_a_shifted_target_is_worse_than_nothing():
    x = sequences(PLAN)
    late = conditional(PLAN, x)

    def shifted(part, start):
        mu, var = conditional(PLAN, part)
        return Prediction(mu.roll(1, 1), var)

    assert (late.var < 1).any() and score(PLAN, shifted, x).overall < 0.0


def test_tokens_without_a_past_do_not_count():
    def careless(x, start):
        mu, var = oracle(PLAN)(x, start)
        return Prediction(mu, torch.where(available(PLAN)[:, None] > 0, var, 9.0))

    found = score(PLAN, careless, sequences(PLAN))
    assert found.kl[0].sum() > 1.0 and found.utilisation[0].isnan()
    assert found.overall == pytest.approx(1.0, abs=1e-6) and float(found.of_sequences.min()) == pytest.approx(1.0, abs=1e-6)


def test_rows_at_a_time_change_nothing():
    x = sequences(PLAN, 50)
    whole, pieces = (score(PLAN, window(PLAN, 2), x, rows=rows) for rows in (50, 7))
    torch.testing.assert_close(whole.kl, pieces.kl)
    torch.testing.assert_close(whole.of_sequences, pieces.of_sequences)


@pytest.mark.parametrize(("change", "said"), [
    (lambda p: p._replace(mu=p.mu.masked_fill(p.mu == p.mu[0, 3, 0], math.nan)), "not finite"),
    (lambda p: p._replace(var=torch.full_like(p.var, math.inf)), "not finite"),
    (lambda p: p._replace(var=torch.zeros_like(p.var)), "var=0"),
    (lambda p: p._replace(var=-p.var), "above 0"),
    (lambda p: p._replace(mu=p.mu[:, 1:]), "mu has shape"),
    (lambda p: p._replace(var=p.var[..., :1]), "var has shape"),
])
def test_predictions_that_are_no_distributions_are_refused(change, said):
    def predict(x, start):
        return change(oracle(PLAN)(x, start))

    with pytest.raises(Refused, match=said):
        score(PLAN, predict, sequences(PLAN, 4))
    with pytest.raises(Refused, match=said):
        nll(predict(sequences(PLAN, 4), 0), sequences(PLAN, 4))


def test_other_sequences_cuts_and_budgets_are_refused():
    with pytest.raises(Refused, match="expected \\(B, 32, 5\\)"):
        score(PLAN, oracle(PLAN), torch.zeros(4, 32, 6))
    with pytest.raises(Refused, match="cut=32"):
        expected(oracle(PLAN)).across(32)
    with pytest.raises(Refused, match="cut=0"):
        score(GROUPS, oracle(GROUPS), sequences(GROUPS, 2), cuts=[0])
    for make in (window, budget):
        with pytest.raises(Refused, match="-1"):
            make(PLAN, -1)


def test_utilised_length():
    assert utilised_length({64: 0.97, 128: 0.9, 256: 0.4}) == 128
    assert utilised_length({64: 0.2}) is None


def test_a_report_is_plain():
    report = score(GROUPS, oracle(GROUPS), sequences(GROUPS, 8)).report()
    assert report["levels"][1] is None and report["levels"][16] == pytest.approx(1.0)
    assert report["length"] == 32 and report["pairs across the middle"] == GROUPS.latents(5)

"""Policies: score times budget, the checks between them, and how they are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from layer_contexts import random_context

from longspan.cache.base import Budget, KeepPlan, Score, column_sums
from longspan.cache.budgets.adakv import AdaKV
from longspan.cache.budgets.uniform import Uniform
from longspan.cache.layer import packed, select_rows
from longspan.cache.policy import CachePolicy
from longspan.cache.schedules.every import Every
from longspan.cache.schedules.per_chunk import PerChunk
from longspan.cache.schedules.prompt import AtPrompt
from longspan.cache.scores.criticalkv import CriticalKV
from longspan.cache.scores.h2o import H2O
from longspan.cache.scores.knorm import KNorm
from longspan.cache.scores.snapkv import SnapKV
from longspan.cache.scores.streaming_llm import StreamingLLM
from longspan.cache.stores.dense import Dense
from longspan.cache.stores.quantised import Quantised
from longspan.recipe import Recipe
from longspan.registry import Refused


def policy(score, budget=0.5, **more):
    return CachePolicy(score, budget if isinstance(budget, Budget) else Uniform(budget=budget), **more)


def test_keeps_the_best_of_every_head():
    x = random_context(20)
    mask = policy(KNorm()).plan(x).mask
    norms = x.k.norm(dim=-1)
    assert (mask.sum(-1) == 10).all()
    assert (norms.masked_fill(~mask, 0).amax(-1) <= norms.masked_fill(mask, torch.inf).amin(-1)).all()


def test_budgets_count_real_tokens_and_pads_never_stay():
    x = random_context(20, rows=2, pads=(0, 11))
    plan = policy(KNorm()).plan(x)
    assert plan.counts.tolist() == [[10, 10], [4, 4]]
    assert not (plan.mask & ~x.valid).any()
    assert not plan.equal_lengths


@pytest.mark.parametrize(("score", "length"), [
    (SnapKV(window=20), 20), (SnapKV(window=32), 20), (StreamingLLM(n_sink=4), 4), (StreamingLLM(n_sink=9), 4), (KNorm(), 1)])
def test_nothing_to_choose_from_is_a_no_op(score, length):
    """A window or sinks that cover the text, a prompt of one token."""
    assert policy(score, 0.01).plan(random_context(length)).mask.all()


def test_a_budget_that_covers_the_text_is_a_no_op():
    for budget in (1.0, "20 tokens", "1 GiB"):
        assert policy(KNorm(), budget).plan(random_context(20)).mask.all()


def test_rows_are_no_ops_one_by_one():
    plan = policy(KNorm(), "12 tokens").plan(random_context(20, rows=2, pads=(0, 9)))
    assert plan.counts.tolist() == [[12, 12], [11, 11]]


def test_a_budget_below_what_is_protected_is_refused_with_both_numbers():
    with pytest.raises(Refused, match=r"budget of 5 tokens .* smaller than the 8 tokens that snapkv\(window=8\)"):
        policy(SnapKV(window=8), "5 tokens").plan(random_context(20))
    with pytest.raises(Refused, match=r"budget of 0 tokens .* smaller than the 1 tokens"):
        policy(H2O(), 0.01).plan(random_context(20))
    with pytest.raises(Refused, match="budget of 3 tokens"):
        policy(CriticalKV(base=StreamingLLM(n_sink=6)), AdaKV(budget="3 tokens")).plan(random_context(20))


def test_before_the_prompts_end_such_a_row_waits():
    x = random_context(20, rows=2, pads=(0, 12), early=True)
    plan = policy(SnapKV(window=4), 0.3).plan(x)
    assert plan.counts.tolist() == [[6, 6], [8, 8]]  # 30 % of 8 is 2, less than the window


def test_nan_is_refused():
    x = random_context(20)
    x.k[0, 1, 3, 0] = torch.nan
    with pytest.raises(Refused, match="knorm gave NaN in layer 0"):
        policy(KNorm()).plan(x)
    x = random_context(20, rows=2, pads=(0, 5))
    x.k[1, :, :5] = torch.nan  # in padding nobody sees it
    assert policy(KNorm()).plan(x).counts.tolist() == [[10, 10], [7, 7]]
    x = random_context(20)
    x.q[0, 0, -1] = torch.nan
    with pytest.raises(Refused, match="snapkv gave NaN"):
        policy(SnapKV(window=4)).plan(x)


def test_scores_of_a_wrong_shape_are_errors():
    @dataclass(frozen=True)
    class Short(Score):
        card = KNorm.card

        def score(self, x):
            return x.k.norm(dim=-1)[..., :-1]

    with pytest.raises(ValueError, match=r"gave scores \(1, 2, 19\) for entries \(1, 2, 20\)"):
        policy(Short()).plan(random_context(20))


def test_a_score_reads_its_own_window_only():
    """A batch may carry policies with windows of several sizes; the widest is kept, and each takes its part."""
    wide, narrow = random_context(20, window=20), random_context(20, window=20)
    narrow.q, narrow.q_valid, narrow.q_positions = wide.q[:, :, -4:], wide.q_valid[:, -4:], wide.q_positions[:, -4:]
    assert torch.equal(policy(SnapKV(window=4)).plan(wide).mask, policy(SnapKV(window=4)).plan(narrow).mask)


def test_methods_that_define_nothing_say_so():
    @dataclass(frozen=True)
    class Bare(Score):
        card = KNorm.card

    @dataclass(frozen=True)
    class BareBudget(Budget):
        card = Uniform.card

    with pytest.raises(NotImplementedError, match="Bare must define score"):
        policy(Bare()).plan(random_context(20))
    with pytest.raises(NotImplementedError, match="BareBudget must define keep"):
        policy(KNorm(), BareBudget(budget=0.5)).plan(random_context(20))


# ------------------------------------------------------------------------------------------------ budgets in bytes


def test_bytes_are_shared_by_everything_that_is_held():
    x = random_context(20, rows=2, pads=(0, 0), bytes_per_token=100.0)
    assert policy(KNorm(), "850 B").plan(x).counts.tolist() == [[8, 8]] * 2


def test_select_rows_takes_everything_along():
    x = random_context(20, rows=3, pads=(0, 2, 4), per_key={"a": torch.arange(3.0)[:, None, None].expand(3, 2, 20)},
                       stats={"b": torch.arange(3.0)}, hidden=torch.arange(3.0)[:, None, None].expand(3, 20, 5))
    y = select_rows(x, torch.tensor([2, 0]))
    assert y.seen.tolist() == [16, 20]
    assert y.per_key["a"][:, 0, 0].tolist() == y.stats["b"].tolist() == y.hidden[:, 0, 0].tolist() == [2.0, 0.0]
    assert torch.equal(y.k, x.k[[2, 0]]) and torch.equal(y.attention, x.attention[[2, 0]])
    torch.testing.assert_close(column_sums(y), column_sums(x)[[2, 0]])


def test_packed_statistics_follow_their_entries():
    mask = torch.tensor([[[True, False, True, True], [False, False, True, False]]])
    t = torch.tensor([[[10.0, 11, 12, 13], [20, 21, 22, 23]]])
    out = packed(t, KeepPlan(mask))
    assert out[0, 0].tolist() == [10.0, 12.0, 13.0]
    assert out[0, 1, -1] == 22.0


# --------------------------------------------------------------------------------------------- policies as written


def test_ragged_budgets_and_equal_length_stores_exclude_each_other():
    with pytest.raises(Refused, match=r"adakv keeps a different number of tokens per head, which store=dense"):
        CachePolicy(KNorm(), AdaKV(), Dense())
    assert CachePolicy(KNorm(), Uniform(), Dense()).store == Dense()


@pytest.mark.parametrize("text", [
    "knorm(budget=0.2)", 'knorm(budget="512 tokens")', "snapkv(window=4, budget=0.5)", "h2o(recent=0.25) @ adakv(budget=0.5)",
    "criticalkv(base=snapkv(window=8)) @ adakv(alpha=0.1)",
    "snapkv(budget=0.2, store=quantised(bits=4), schedule=every(steps=64))",
    "tova(store=ragged, schedule=per-chunk) @ pyramid(budget=0.5)", "full(budget=1.0, store=quantised)"])
def test_policies_are_written_as_they_are_read(text):
    recipe = Recipe.parse(text)
    assert str(recipe.cache) == text
    assert Recipe.parse(str(recipe)).cache == recipe.cache


def test_capabilities_of_wrapped_scores_count():
    class Twice(Score):
        card: ClassVar = CriticalKV.card
        base = CriticalKV(base=H2O())

    assert Twice().can("all-queries") and Twice().can("value-norm") and not Twice().can("hidden-states")


# ------------------------------------------------------------------------------------------------------- schedules


@pytest.mark.parametrize(("schedule", "start", "stop", "prompt", "cuts"), [
    (AtPrompt(), 0, 10, 10, [10]), (AtPrompt(), 0, 9, 10, []), (AtPrompt(), 9, 12, 10, [10]), (AtPrompt(), 10, 12, 10, []),
    (AtPrompt(), 0, 10, None, []),
    (Every(steps=3), 0, 10, 10, [10]), (Every(steps=3), 0, 17, 10, [10, 13, 16]), (Every(steps=3), 12, 13, 10, [13]),
    (Every(steps=3), 13, 15, 10, []), (Every(steps=1), 10, 12, 10, [11, 12]), (Every(steps=3), 5, 50, None, []),
    (PerChunk(size=4), 0, 10, 10, [4, 8, 10]), (PerChunk(size=4), 3, 5, 10, [4]), (PerChunk(size=5), 0, 10, 10, [5, 10]),
    (PerChunk(size=4), 9, 14, 10, [10]), (PerChunk(size=4), 10, 20, 10, []), (PerChunk(size=40), 0, 10, 10, [10]),
    (PerChunk(size=4), 0, 10, None, []),
])
def test_cuts(schedule, start, stop, prompt, cuts):
    assert schedule.cuts(start, stop, prompt) == cuts


@pytest.mark.parametrize("schedule", [AtPrompt(), Every(steps=3), PerChunk(size=4)])
def test_cuts_do_not_depend_on_how_the_text_arrives(schedule):
    whole = schedule.cuts(0, 40, 25)
    for size in (1, 7):
        assert [c for i in range(0, 40, size) for c in schedule.cuts(i, min(40, i + size), 25)] == whole


@pytest.mark.parametrize("schedule", [AtPrompt(), Every(steps=3), PerChunk(size=4)])
def test_watching_lasts_as_long_as_a_cut_may_come(schedule):
    for seen in range(1, 40):
        if schedule.cuts(seen - 1, 100, 25):
            assert schedule.watches(seen, 25)
    assert schedule.watches(1000, None)


def test_a_quantised_store_takes_any_budget():
    assert CachePolicy(KNorm(), AdaKV(), Quantised()).store == Quantised()

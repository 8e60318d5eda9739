"""ShotKV: whole shots of the prompt, tokens of the answer, and what it refuses."""

from __future__ import annotations

import warnings

import pytest
import torch
from generating import left_padded, new_tokens
from layer_contexts import plain_attention, random_context
from masked_oracle import check_against_oracle, forced_logits
from tiny_models import tiny, tiny_ids

from longspan.cache.policies.shotkv import (
    RECEIVED,
    ShotKV,
    check_spans,
    heaviest,
    received_from,
    take,
    unit_ids,
    unit_means,
)
from longspan.recipe import Recipe
from longspan.registry import Refused

pytestmark = pytest.mark.filterwarnings("ignore:shotkv")
SPANS = {"shots": [(2, 6), (6, 9), (9, 14), (14, 17)]}
PROMPT = 20


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


def context(spans=SPANS, **more):
    found = random_context(PROMPT, spans=spans, **more)
    if found.prompt is None:
        found.prompt = found.seen.clone()
    return found


def planned(policy, x):
    policy.observe(x)
    return policy.plan(x).mask


def protected(x, policy, spans):
    inside = torch.zeros_like(x.valid[0, 0])
    for a, b in spans:
        inside |= (x.positions[0, 0] >= a) & (x.positions[0, 0] < b)
    return ~inside | (x.positions[0, 0] >= PROMPT - policy.W)


# ------------------------------------------------------------------------------------------------------ exact checks


def test_keeping_everything_changes_no_logit(model):
    """Exact check 1."""
    ids = tiny_ids(1, 34)
    found = []
    for text in ("full", "shotkv(r_p=1.0, r_d=1.0)"):
        with Recipe.parse(text).on(model) as run:
            found.append(forced_logits(run, model, ids, PROMPT, spans=SPANS)[0])
            assert run.achieved.kept_fraction == 1
    torch.testing.assert_close(*found, atol=1e-5, rtol=0)


@pytest.mark.parametrize("rows", ["all", "window"])
@pytest.mark.parametrize("r_p", [0.4, 0.55, 0.7, 0.9])
def test_kept_sets_are_whole_spans_and_protected_tokens(rows, r_p):
    """Exact check 2; heads share the choice."""
    policy = ShotKV(r_p=r_p, rows=rows, W=2)
    for seed in range(6):
        x = context(seed=seed)
        mask = planned(policy, x)
        assert (mask == mask[:, :1]).all()
        kept, safe = mask[0, 0], protected(x, policy, SPANS["shots"])
        assert kept[safe].all()
        for a, b in SPANS["shots"]:
            assert kept[a:b].all() or not (kept & ~safe)[a:b].any()
        assert int(kept.sum()) <= int(r_p * PROMPT)


def test_shots_of_one_token_are_token_level_top_k():
    """Exact check 3."""
    spans = {"shots": [(i, i + 1) for i in range(PROMPT - 3)]}
    for seed in range(5):
        x = context(spans, seed=seed)
        kept = planned(ShotKV(r_p=0.5, W=3), x)[0, 0]
        mass = plain_attention(x).sum((0, 1, 2))[: PROMPT - 3]
        wanted = set(mass.topk(10 - 3).indices.tolist()) | set(range(PROMPT - 3, PROMPT))
        assert set(kept.nonzero()[:, 0].tolist()) == wanted


def test_uniform_attention_keeps_the_earlier_shots():
    """Exact check 4: equal scores, ties to the earlier shot, the same every time."""
    unit = unit_ids(torch.arange(12)[None], torch.ones(1, 12, dtype=torch.bool), [(0, 3), (3, 10), (10, 12)])
    means = unit_means(torch.full((1, 12), 0.1), unit, 3)
    assert (means == means[0, 0]).all()
    assert take(means[0].tolist(), [3, 7, 2], 5) == [0, 2]
    x = context()
    x.q = torch.zeros_like(x.q)
    policy = ShotKV(r_p=0.6, rows="window", W=1)  # the last row sees all 20 tokens alike
    first, again = (planned(policy, context(q=x.q)) for _ in range(2))
    assert torch.equal(first, again)
    # Outside of shots stand 0, 1, 17, 18, 19; 7 of 12 tokens are left for the shots 2-6, 6-9.
    assert first[0, 0].nonzero()[:, 0].tolist() == [*range(2), *range(2, 9), 17, 18, 19]


def test_scores_do_not_grow_with_length():
    """Exact check 5: a mean, not a sum."""
    short, long = torch.tensor([[3.0, 5.0]]), torch.tensor([[3.0, 5.0, 3.0, 5.0]])
    assert unit_means(short, torch.zeros(1, 2, dtype=torch.long), 1) == unit_means(long, torch.zeros(1, 4, dtype=torch.long), 1)
    spans = {"shots": [(0, 12), (12, 15)]}
    x = context(spans)
    x.per_key[RECEIVED] = torch.full((1, 2, PROMPT), 0.5)
    x.per_key[RECEIVED][..., 12:15] = 1.0  # sums: 6 a head against 3
    kept = ShotKV(r_p=0.85, W=0).plan(x).mask[0, 0]
    assert kept.tolist() == [False] * 12 + [True] * 8


def test_scale_changes_no_choice_and_layers_decide_alone(model):
    """Exact check 6."""
    x, y = context(seed=3), context(seed=3)
    policy = ShotKV(r_p=0.6)
    policy.observe(x)
    policy.observe(y)
    y.per_key[RECEIVED] = 17.5 * y.per_key[RECEIVED]
    assert torch.equal(policy.plan(x).mask, policy.plan(y).mask)

    pairs = {"shots": [(i, i + 2) for i in range(1, 17, 2)]}

    def kept(changed):
        model = tiny("llama", layers=4)
        if changed:
            with torch.no_grad():  # the last layer's queries have nothing to do with the others' attention
                model.model.layers[3].self_attn.q_proj.weight.mul_(-3)
        with Recipe.parse('shotkv(r_p=0.5, rows="window", W=3)').on(model) as run:
            return forced_logits(run, model, tiny_ids(1, PROMPT), PROMPT, spans=pairs)[1].kept_positions()

    before, after = kept(False), kept(True)
    assert [torch.equal(a[0], b[0]) for a, b in zip(before, after)] == [True, True, True, False]
    assert len({tuple(heads[0].tolist()) for heads in before}) > 1, "layers should differ here"


def test_the_prompt_is_frozen_and_the_answer_bounded(model):
    """Exact checks 7 and 8, over 100 decoding steps."""
    ids = tiny_ids(1, PROMPT + 100)
    with Recipe.parse("shotkv(r_p=0.6, r_d=0.25, W=2, W_d=4)").on(model) as run:
        _, cache = forced_logits(run, model, ids[:, :PROMPT], PROMPT, spans=SPANS)
        start = [layer.store.view() for layer in cache.policy_layers]
        start = [(v.k.clone(), v.v.clone(), v.positions.clone()) for v in start]
        evicted = False
        for n in range(1, 101):
            step = slice(PROMPT + n - 1, PROMPT + n)
            model(input_ids=ids[:, step], position_ids=torch.arange(PROMPT + n - 1, PROMPT + n)[None], past_key_values=cache,
                  use_cache=True)
            for layer, (k, v, positions) in zip(cache.policy_layers, start):
                view, m = layer.store.view(), k.shape[2]
                assert torch.equal(view.k[:, :, :m], k) and torch.equal(view.v[:, :, :m], v)
                assert torch.equal(view.positions[:, :, :m], positions)
                generated = view.positions[0, 0, m:].tolist()
                assert len(generated) == min(n, max(4, -(-n // 4)))
                assert generated[-min(4, n) :] == list(range(PROMPT + n - min(4, n), PROMPT + n))
                evicted |= len(generated) > 4 and generated != list(range(PROMPT + n - len(generated), PROMPT + n))
        assert evicted, "what is kept should not be the newest tokens alone"


def test_full_answer_rate_never_evicts(model):
    with Recipe.parse("shotkv(r_p=0.6, r_d=1.0, W=2, schedule=every(steps=1))").on(model) as run:
        _, cache = forced_logits(run, model, tiny_ids(1, PROMPT + 30), PROMPT, spans=SPANS)
    held = [layer.store.view().positions[0, 0].tolist() for layer in cache.policy_layers]
    assert all(found[-30:] == list(range(PROMPT, PROMPT + 30)) for found in held)
    assert Recipe.parse("shotkv(r_p=0.6)").cache.schedule is None, "no watching after the prompt where nothing is evicted"
    assert str(Recipe.parse("shotkv(r_d=0.5)").cache.schedule) == "every(steps=1)"


@pytest.mark.parametrize("pads", [(0,), (3,)])
def test_attention_of_a_row_adds_up_to_the_query_heads(pads):
    """Exact check 9, with grouped heads and padding."""
    x = context({"shots": [(2, 6)]}, pads=pads)
    rows = PROMPT - pads[0]
    assert received_from(x, x.q_valid).sum().item() == pytest.approx(4 * rows, rel=1e-5)
    one = torch.zeros_like(x.q_valid)
    one[0, -2] = True
    assert received_from(x, one).sum().item() == pytest.approx(4, rel=1e-5)
    ShotKV(r_p=0.5).observe(x)
    torch.testing.assert_close(x.per_key[RECEIVED].sum(1).double(), plain_attention(x).sum((1, 2)), atol=1e-5, rtol=1e-5)


# ------------------------------------------------------------------------------------------------------- choosing


def test_a_shot_that_does_not_fit_is_skipped_or_ends_the_choice():
    scores, costs = [3.0, 2.0, 1.0], [4, 9, 3]
    assert take(scores, costs, 8) == [0, 2]
    assert take(scores, costs, 8, stop_on_overflow=True) == [0]
    assert take(scores, costs, 2) == []
    assert take(scores, costs, 2, force_one=True) == [0]
    assert take([], [], 5, force_one=True) == []


def test_warnings_say_what_was_left_out():
    big = {"shots": [(0, 14), (14, 17)]}
    with pytest.warns(UserWarning, match=r"a shot of 14 tokens is longer than the 5 that shots may take"):
        assert planned(ShotKV(r_p=0.4, W=3), context(big))[0, 0].sum() == 6
    with pytest.warns(UserWarning, match="no shot fits the 2 tokens left"):
        assert planned(ShotKV(r_p=0.25, W=3), context(big))[0, 0].sum() == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = planned(ShotKV(r_p=0.25, W=3, force_one=True), context(big))[0, 0]
    assert int(kept.sum()) in (6, 17)


def test_window_counts_the_last_prompt_rows_only():
    x = context(seed=1)
    ShotKV(rows="window", W=4, r_p=0.8).observe(x)
    wanted = plain_attention(x)[:, :, -4:].sum((1, 2))
    torch.testing.assert_close(x.per_key[RECEIVED].sum(1).double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", ["all", "window"])
def test_prompt_in_pieces_gives_the_same_choice(model, rows):
    kept = []
    for pieces in ([PROMPT], [7, 7, 6], [1] * PROMPT):
        with Recipe.parse(f'shotkv(r_p=0.5, W=2, rows="{rows}")').on(model) as run:
            kept.append(forced_logits(run, model, tiny_ids(1, PROMPT), PROMPT, pieces=pieces, spans=SPANS)[1].kept_positions())
    for other in kept[1:]:
        assert all(torch.equal(a[0], b[0]) for a, b in zip(kept[0], other))


def test_answer_rows_give_only_to_the_answer():
    x = random_context(PROMPT, window=3, spans=SPANS, prompt=torch.tensor([PROMPT - 3]))
    x.stats["chosen"] = torch.ones(1, dtype=torch.long)
    ShotKV(r_d=0.5).observe(x)
    received, plain = x.per_key[RECEIVED].sum(1), plain_attention(x).sum((1, 2))
    assert (received[..., : PROMPT - 3] == 0).all()
    torch.testing.assert_close(received[..., -3:].double(), plain[..., -3:], atol=1e-5, rtol=1e-5)


def test_heaviest_keeps_the_newest_and_then_the_largest():
    mass = torch.tensor([[9.0, 1.0, 5.0, 5.0, 0.0, 0.0]])
    among = torch.tensor([[False, True, True, True, True, True]])
    assert heaviest(mass, among, torch.tensor([3]), 2)[0].tolist() == [False, False, True, False, True, True]
    assert heaviest(mass, among, torch.tensor([2]), 2)[0].tolist() == [False, False, False, False, True, True]


def test_sentences_stand_in_for_shots_and_shots_come_first():
    x = context({"sentences": SPANS["shots"]}, seed=2)
    assert torch.equal(planned(ShotKV(r_p=0.6), x), planned(ShotKV(r_p=0.6), context(seed=2)))
    both = context(SPANS | {"sentences": [(0, 10), (10, 20)]}, seed=2)
    assert torch.equal(planned(ShotKV(r_p=0.6), both), planned(ShotKV(r_p=0.6), context(seed=2)))


# -------------------------------------------------------------------------------------------------- in a model, batched


@pytest.mark.parametrize("text", [
    "shotkv(r_p=0.5, W=1)", 'shotkv(r_p=0.6, rows="window", W=3)', "shotkv(r_p=0.5, r_d=0.5, W=1, W_d=2)",
    "shotkv(r_p=0.6, r_d=0.3, W=1, W_d=1, schedule=every(steps=3))",
    "shotkv(r_p=0.6, r_d=0.3, W=1, W_d=1, schedule=every(steps=3, at_prompt=False))",
    "shotkv(r_p=0.6, W=1, schedule=per-chunk(size=7))"])
def test_equals_attention_with_evicted_entries_masked(model, text):
    ids, mask = left_padded(tiny_ids(1, 33), tiny_ids(1, 30, seed=1))
    spans = {"shots": [(0, 4), (4, 9), (9, 14), (14, 18)]}
    cache = check_against_oracle(model, Recipe.parse(text), ids, 24, mask, pieces=[24, 1, 4, 3, 1], spans=spans)
    assert cache.achieved().kept_fraction < 1


def test_batched_rows_choose_as_they_do_alone(model):
    rows = [tiny_ids(1, 24), tiny_ids(1, 20, seed=1)]
    ids, mask = left_padded(*rows)
    spans = {"shots": [(0, 4), (4, 9), (9, 14), (14, 18)]}
    recipe = Recipe.parse("shotkv(r_p=0.6, W=2)")
    with recipe.on(model) as run:
        _, cache = forced_logits(run, model, ids, 24, mask, spans=spans)
    for i, row in enumerate(rows):
        with recipe.on(model) as run:
            _, alone = forced_logits(run, model, row, row.shape[1], spans=spans)
        for layer, other in zip(cache.policy_layers, alone.policy_layers):
            view, single = layer.store.view(), other.store.view()
            assert torch.equal(view.positions[i, 0][view.valid[i, 0]], single.positions[0, 0][single.valid[0, 0]])


def test_rejected_drafts_leave_no_trace(model):
    ids = tiny_ids(1, PROMPT + 16)
    found = []
    for drafts in (False, True):
        with Recipe.parse("shotkv(r_p=0.6, r_d=0.4, W=2, W_d=2)").on(model) as run:
            _, cache = forced_logits(run, model, ids[:, : PROMPT + 8], PROMPT, spans=SPANS)
            if drafts:
                model(input_ids=tiny_ids(1, 5, seed=9), position_ids=torch.arange(PROMPT + 8, PROMPT + 13)[None],
                      past_key_values=cache, use_cache=True)
                cache.crop(PROMPT + 8)
            for n in range(PROMPT + 8, PROMPT + 16):
                out = model(input_ids=ids[:, n : n + 1], position_ids=torch.tensor([[n]]), past_key_values=cache, use_cache=True)
            found.append(out.logits)
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(("spans", "words"), [
    ([(0, 5), (4, 8)], r"\(4, 8\) begins before the one before it ends, at 5"),
    ([(6, 9), (0, 5)], r"\(0, 5\) begins before"),
    ([(3, 3)], r"\(3, 3\) is empty"),
    ([(0, 5), (5, 25)], r"\(5, 25\) lies outside of a prompt of 20 tokens"),
    ([(-2, 5)], r"\(-2, 5\) lies outside"),
    ([[(0, 5)], [(0, 4)]], "the same for all rows of a batch"),
])
def test_spans_that_are_no_ordered_ranges_are_refused(spans, words):
    with pytest.raises(Refused, match=words):
        check_spans(spans, 20)
    with pytest.raises(Refused, match=words):
        planned(ShotKV(r_p=0.5), context({"shots": spans}))


def test_rows_that_do_not_hold_the_spans_are_refused():
    x = context({"shots": [(0, 19)]}, rows=2, pads=(0, 4))
    with pytest.raises(Refused, match=r"\(0, 19\) lies outside of a prompt of 16 tokens; .* that every row of the batch has"):
        planned(ShotKV(r_p=0.5), x)
    # Positions that count pads: the span's first tokens are no real ones.
    x = context({"shots": [(0, 6)]}, pads=(3,))
    x.positions = torch.arange(PROMPT, dtype=torch.int32).expand_as(x.positions).clone()
    with pytest.raises(Refused, match=r"\(0, 6\) holds 3 real tokens in row 0, expected 6"):
        planned(ShotKV(r_p=0.9), x)


def test_more_protected_than_the_budget_is_refused_with_both_numbers():
    with pytest.raises(Refused, match=r"12 of the prompt's 20 tokens are protected .* is 8; expected r_p of at least 0\.6"):
        planned(ShotKV(r_p=0.4, W=2), context({"shots": [(0, 4), (10, 14)]}))


@pytest.mark.parametrize("knobs", ["r_p=0.0", "r_p=1.5", "r_d=0.0", "r_d=-0.2", 'rows="window", W=0', "W_d=0", 'rows="question"'])
def test_knobs_out_of_range_are_refused(knobs):
    with pytest.raises(Refused, match="shotkv"):
        Recipe.parse(f"shotkv({knobs})")


def test_without_spans_the_refusal_says_where_they_come_from(model):
    with pytest.raises(Refused, match=r"longspan\.Context, which marks sentences, or use a task with shots"), \
            Recipe.parse("shotkv").on(model):
        new_tokens(model, tiny_ids(1, PROMPT), 2)


def test_nan_attention_is_refused():
    x = context()
    x.k[0, 0, 4] = torch.nan
    with pytest.raises(Refused, match="NaN attention in layer 0"):
        planned(ShotKV(r_p=0.6), x)


def test_early_cuts_wait_for_the_prompts_end():
    x = context(early=True)
    assert planned(ShotKV(r_p=0.5), x).all() and "chosen" not in x.stats


def test_expected_entries():
    assert ShotKV(r_p=0.3).expected(1000) == 300
    assert ShotKV(r_p=0.29).expected(100) == 29

"""HARD-KV's rounds: who is kept, within which bounds, with which temperatures, and what they leave alone.

The exact checks of sets and calibration are in `test_top_p.py`, those of the layout in `test_paged.py`, and those of the
sparse tier in `test_tiered.py`.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from generating import left_padded, new_tokens
from layer_contexts import random_context
from masked_oracle import check_against_oracle, forced_logits
from tiny_folder import write_tiny_folder
from tiny_models import tiny, tiny_ids

from longspan.cache import OwnPolicy
from longspan.cache.layer import select_rows
from longspan.cache.policies.hard_kv import TEMPERATURE, HardKV, bounded
from longspan.cache.top_p import calibrate, less_redundant, pooled, top_p_sizes
from longspan.context import Context
from longspan.models import load
from longspan.recipe import Recipe
from longspan.registry import Refused

SMALL = "W=4, sink=2, B_lo=7, B_up=9"
METRICS = ("vanilla", "snapkv", "rkv")


def policy(**more):
    return HardKV(**({"W": 4, "sink": 2, "B_lo": 7, "B_up": 9} | more))


def recipe(text="", store="", schedule="every(steps=3)"):
    extra = [text] * bool(text) + [f"store={store}"] * bool(store) + [f"schedule={schedule}"]
    return Recipe.parse(f"hard-kv({SMALL}, {', '.join(extra)})")


# --------------------------------------------------------------------------------------------------------- the choice


def plain_plan(x, row, head, T, method):
    """One head's kept set, step by step with Python sets."""
    live = [t for t in range(x.k.shape[2]) if x.valid[row, head, t]]
    low, high = method.bounds
    if len(live) < low:
        return set(live)
    z = torch.full((method.W, x.k.shape[2]), -torch.inf)
    for w in range(method.W):
        at = x.q.shape[2] - method.W + w
        for t in live:
            if x.q_valid[row, at] and x.positions[row, head, t] <= x.q_positions[row, at]:
                z[w, t] = max(float(x.q[row, head * x.group + g, at] @ x.k[row, head, t]) * x.scale for g in range(x.group))
    redundant = less_redundant(z, x.k[row, head], x.valid[row, head])
    g = {"vanilla": z, "snapkv": pooled(z, method.kernel), "rkv": redundant}[method.metric]
    rows, wanted = [], set()
    for w in range(method.W):
        if not torch.isfinite(z[w]).any():
            continue
        probs = (g[w] / T).softmax(-1)
        rows.append(probs)
        mass = 0.0
        for t in sorted(range(len(probs)), key=lambda t: (-float(probs[t]), t)):
            if mass >= method.p or probs[t] == 0:
                break
            wanted.add(t)
            mass += float(probs[t])
    weight = torch.stack(rows).mean(0)
    always = {t for t in live if x.positions[row, head, t] < method.sink} | set(live[-method.W :])
    keep = wanted | always
    others = sorted(set(live) - keep, key=lambda t: -float(weight[t]))
    keep |= set(others[: max(0, low - len(keep))])
    surplus = sorted(keep - always, key=lambda t: float(weight[t]))
    return keep - set(surplus[: max(0, len(keep) - high)])


def kept(mask):
    return set(mask.nonzero()[:, 0].tolist())


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("p", [0.3, 0.7, 0.95])
def test_keeps_what_the_steps_say(metric, p):
    method = policy(metric=metric, p=p, B_up=40)
    x = random_context(60, rows=2, pads=(0, 7), window=6)
    plan = method.plan(x)
    for row in range(2):
        for head in range(2):
            T = float(x.stats[TEMPERATURE][row, head])
            assert kept(plan.mask[row, head]) == plain_plan(x, row, head, T, method)


def test_the_largest_query_head_of_a_group_decides():
    x = random_context(40)
    z = policy(metric="vanilla").logits(x)
    each = [x.q.view(1, 2, 2, 20, 8)[:, :, g, -4:] @ x.k.mT * x.scale for g in range(2)]
    wanted = torch.maximum(*each).masked_fill(torch.arange(40) > torch.arange(36, 40)[:, None], -torch.inf)
    torch.testing.assert_close(z, wanted)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("p", [0.05, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_rounds_stay_within_their_bounds(metric, p, seed):
    """8: B_lo + W <= kept <= B_up + W; the first and the newest W always stay."""
    method = policy(metric=metric, p=p, B_up=12)
    x = random_context(50, rows=2, pads=(0, 30), seed=seed)
    mask, (low, high) = method.plan(x).mask, method.bounds
    assert (low, high) == (11, 16)
    counts = mask.sum(-1)
    assert ((low <= counts) & (counts <= high)).all() and (mask <= x.valid).all()
    if p == 1.0:
        assert (counts == high).all(), "every positive entry is wanted, and cut"
    if p == 0.05 and metric == "vanilla":
        assert (policy(metric=metric, p=p, calibrate=False).plan(x).counts == low).all(), "few are wanted, and filled up"
    assert mask[0, :, :2].all() and mask[1, :, 30:32].all() and mask[..., -4:].all()


def test_filling_takes_the_heaviest_and_cutting_drops_the_lightest():
    weight = torch.tensor([[[0.1, 0.4, 0.3, 0.2, 0.05, 0.0]]])
    valid = torch.tensor([[[True, True, True, True, True, False]]])
    first, wanted = torch.zeros_like(valid), torch.zeros_like(valid)
    first[..., 4], wanted[..., [0, 2]] = True, True
    stays = lambda low, high: kept(bounded(wanted, first, weight, valid, low, high)[0, 0])  # noqa: E731
    assert stays(1, 6) == {0, 2, 4}
    assert stays(4, 6) == {0, 1, 2, 4}
    assert stays(1, 2) == {2, 4}
    assert stays(9, 9) == {0, 1, 2, 3, 4}, "no more than there are"
    assert stays(1, 1) == {4}


def test_heads_keep_different_numbers():
    x = random_context(80, heads=8, kv_heads=4)
    x.k *= torch.tensor([0.2, 0.5, 1.0, 2.0])[:, None, None]
    counts = policy(B_up=70, p=0.7).plan(x).mask.sum(-1)[0]
    assert counts.tolist() == sorted(set(counts.tolist()), reverse=True), "the flatter its attention, the more a head keeps"


# -------------------------------------------------------------------------------------------------------- temperatures


def test_temperatures_are_found_in_the_first_round_and_used_again():
    method, x = policy(), random_context(40)
    method.plan(x)
    T = x.stats[TEMPERATURE]
    z = method.logits(x)
    assert T.shape == (1, 2) and torch.equal(T, calibrate(pooled(z, 7), top_p_sizes(z, 0.9), 0.9, shared=True))
    later = dataclasses.replace(random_context(40, seed=3), stats=dict(x.stats))
    method.plan(later)
    assert torch.equal(later.stats[TEMPERATURE], T)
    wide = policy(p=0.5, B_up=30)
    noted = [{TEMPERATURE: torch.full((1, 2), t)} for t in (0.1, 10)]
    counts = [wide.plan(dataclasses.replace(random_context(40), stats=stats)).counts for stats in noted]
    assert (counts[0] < counts[1]).all(), "a noted temperature is what counts"


def test_a_row_that_waits_is_calibrated_in_its_own_first_round():
    method = policy()
    x = random_context(40, rows=2, pads=(0, 33))
    method.plan(x)
    T = x.stats[TEMPERATURE]
    assert not T[0].isnan().any() and T[1].isnan().all()
    longer = dataclasses.replace(random_context(60, rows=2, pads=(0, 33)), stats=dict(x.stats))
    method.plan(longer)
    assert torch.equal(longer.stats[TEMPERATURE][0], T[0]) and not longer.stats[TEMPERATURE][1].isnan().any()


@pytest.mark.parametrize("metric", METRICS)
def test_rows_of_a_batch_are_on_their_own(metric):
    x = random_context(40, rows=3, pads=(0, 9, 33))
    together = policy(metric=metric).plan(x)
    for row in range(3):
        alone = select_rows(random_context(40, rows=3, pads=(0, 9, 33)), torch.tensor([row]))
        assert torch.equal(policy(metric=metric).plan(alone).mask[0], together.mask[row])
        if row < 2:
            assert torch.equal(alone.stats[TEMPERATURE][0], x.stats[TEMPERATURE][row])


def test_a_temperature_of_every_row_or_none():
    free = {"p": 0.6, "B_up": 30}
    x, y, z = (random_context(40) for _ in range(3))
    plain = policy(calibrate=False, **free).plan(x)
    rowwise = policy(per_row=True, **free).plan(y)
    shared = policy(**free).plan(z)
    assert TEMPERATURE not in x.stats and TEMPERATURE not in y.stats and TEMPERATURE in z.stats
    assert plain.counts.sum() > shared.counts.sum(), "pooled logits are flatter, so their own sets are larger"
    assert not torch.equal(rowwise.mask, shared.mask)
    identity = policy(metric="vanilla", per_row=True, **free).plan(random_context(40))
    assert torch.equal(identity.mask, policy(metric="vanilla", calibrate=False, **free).plan(random_context(40)).mask)


# -------------------------------------------------------------------------------------------------------- in a model


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("store", ["", "tiered(sparse_rounds=1)", "tiered(sparse_rounds=9)", "ragged"])
def test_decoding_equals_the_masked_oracle(metric, store):
    """5 and 7 in a model: whatever the tier, attention is over what is live, in every round."""
    ids, mask = left_padded(tiny_ids(1, 40), tiny_ids(1, 34, seed=1))
    pieces = [24, 1, 4, 3, 1, 1, 5, 1]
    cache = check_against_oracle(tiny("llama"), recipe(f"metric={metric}", store), ids, 24, mask, pieces=pieces)
    assert cache.achieved().compressions == 6 and cache.achieved().kept_fraction < 0.5
    low, high = recipe().cache.chooser.bounds
    for layer in cache.policy_layers:
        assert ((low <= layer.record.kept) & (layer.record.kept <= high)).all()


def test_sparse_and_rewriting_stores_give_the_same_logits():
    """5: masked attention over everything in place = attention over what was moved together."""
    model, ids, found = tiny("llama"), tiny_ids(1, 44), []
    for store in ("tiered", "tiered(sparse_rounds=99)"):
        with recipe(store=store).on(model) as run:
            found.append(forced_logits(run, model, ids, 24)[0])
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("text", ["hard-kv", f"hard-kv({SMALL}, schedule=every(steps=16, at_prompt=False))",
                                  "hard-kv(W=4, B_lo=40, schedule=every(steps=1))"])
def test_short_caches_and_early_steps_change_no_bit(text):
    """9: too short for a round, before the first round is due, or B_lo + W not reached."""
    model, ids = tiny("llama"), tiny_ids(1, 39)
    found = []
    for each in ("full", text):
        with Recipe.parse(each).on(model) as run:
            found.append(forced_logits(run, model, ids, 24)[0])
            assert run.achieved.kept_fraction == 1.0
    assert torch.equal(*found)


def test_lengths_stay_bounded_while_a_model_writes():
    model = tiny("llama")
    with recipe(schedule="every(steps=4)").on(model) as run, torch.no_grad():
        new_tokens(model, tiny_ids(1, 30), 40)
        lengths = torch.stack([layer.store.lengths() for layer in run.cache.policy_layers])
        assert run.achieved.compressions == 10
        low, high = recipe().cache.chooser.bounds
        assert ((low <= lengths) & (lengths <= high + 4)).all()
        temperatures = [layer.notes[0].stats[TEMPERATURE] for layer in run.cache.policy_layers]
        assert all(not T.isnan().any() for T in temperatures)


def test_a_saved_context_goes_on_with_its_temperatures(tmp_path):
    loaded = load(str(write_tiny_folder(tmp_path / "model")))
    text = "the cat sat on the mat and the dog ate the hat. " * 4
    context = Context.read(loaded, text, str(recipe(store="tiered(sparse_rounds=2)")))
    again = Context.load(context.save(tmp_path / "saved"), loaded)
    for a, b in zip(context.cache.policy_layers, again.cache.policy_layers):
        assert torch.equal(a.notes[0].stats[TEMPERATURE], b.notes[0].stats[TEMPERATURE])
    assert context.ask("who sat?", 12).ids == again.ask("who sat?", 12).ids


def test_rows_with_recipes_of_their_own():
    from longspan.recipe import per_row

    model, ids = tiny("llama"), tiny_ids(2, 30)
    store = "schedule=every(steps=4), store=tiered(sparse_rounds=1)"
    texts = [f"hard-kv({SMALL}, {store})", f"hard-kv({SMALL}, metric=vanilla, {store})"]
    with per_row([Recipe.parse(t) for t in texts], model), torch.no_grad():
        both = new_tokens(model, ids, 12)
    for row, text in enumerate(texts):
        with Recipe.parse(text).on(model), torch.no_grad():
            assert new_tokens(model, ids[row : row + 1], 12)[0] == both[row]


# ---------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(("text", "message"), [
    ("p=0.0", r"expected a mass in \(0, 1\], such as 0.9"),
    ("p=1.5", "expected at most 1.0"),
    ("B_lo=33", "expected more than the W \\+ sink = 33 entries that always stay, such as 34"),
    ("B_up=1023", "expected at least B_lo=1024"),
    ("kernel=6", "expected an odd width, such as 7"),
    ("W=0", "expected at least 1"),
    ("metric=snap", "did you mean 'snapkv'"),
    ("schedule=every(steps=0)", "expected at least 1"),
    ("store=dense", "store=dense would pad with dead entries"),
])
def test_bad_settings_are_refused(text, message):
    with pytest.raises(Refused, match=message):
        Recipe.parse(f"hard-kv({text})")


def test_bad_contexts():
    x = random_context(40)
    x.k[0, 0, 3, 2] = torch.nan
    with pytest.raises(Refused, match="hard-kv met NaN in layer 0"):
        policy().plan(x)
    x = random_context(40)
    x.valid[0, 1] = False
    with pytest.raises(ValueError, match="holds no entry at all"):
        policy().plan(x)
    with pytest.raises(ValueError, match="3 query heads don't divide among 2 KV heads"):
        policy().plan(dataclasses.replace(random_context(40), q=torch.zeros(1, 3, 4, 8)))


def test_how_it_is_written_and_what_it_expects():
    own = Recipe.parse("hard-kv").cache
    assert isinstance(own, OwnPolicy) and str(own.store) == "tiered" and str(own.schedule) == "every"
    assert HardKV().bounds == (1056, 2080) and HardKV().expected(500) == 500 and HardKV().expected(10**6) == 2080
    assert str(Recipe.parse("hard-kv(p=0.6)").cache.chooser) == "hard-kv(p=0.6)"

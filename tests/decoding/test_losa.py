"""LoSA's exact checks, page by page and row by row, with a plain oracle for Quest."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_blocks import BLOCK, a_prefix, close, dense, masks, queries, read, record, tiny_blocks

from longspan.decoding.block_sampler import ONE_A_STEP, block_logits, denoise, replay
from longspan.decoding.blocks import Denoising, Reads, block_attention, padded, read_blocks
from longspan.decoding.denoising.flashblock import FlashBlock
from longspan.decoding.denoising.losa import LoSA, movement
from longspan.decoding.denoising.pages import attend_pages, chosen_pages, page_bounds, page_scores, union_over_rows
from longspan.decoding.denoising.quest_rows import QuestRows
from longspan.kernels import attend_reference
from longspan.layers.positions import inverse_frequencies, rotate
from longspan.recipe import Recipe
from longspan.registry import Refused


@pytest.fixture(scope="module")
def model():
    return tiny_blocks()


def after_first(method, prefix, q, length=None):
    """A reader that has done a block's first step."""
    reader = method.begin(prefix, q.shape[2] if length is None else length, BLOCK)
    reader.begin(0)
    reader.read(0, q)
    reader.begin(1)
    return reader


def moved_rows(q, *rows, by=3.0, seed=11):
    """The same queries with some rows moved, the first of `rows` the farthest."""
    out = q.clone()
    noise = torch.randn(q.shape, generator=torch.Generator().manual_seed(seed))
    for rank, row in enumerate(rows):
        out[:, :, row] += by / (1 + rank) * noise[:, :, row]
    return out


def quest_oracle(q, prefix, page, budget):
    """Quest row by row and head by head, in plain loops: (out, lse, pages of every head and row)."""
    k, v = prefix.k[0][0].double(), prefix.v[0][0].double()
    total, count = k.shape[1], math.ceil(budget / page)
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.zeros(q.shape[:3], dtype=torch.float64)
    chosen = {}
    for h, i in itertools.product(range(q.shape[1]), range(q.shape[2])):
        group, row = h // (q.shape[1] // k.shape[0]), q[0, h, i].double()
        bounds = []
        for start in range(0, total, page):
            keys = k[group, start : start + page]
            bounds.append(float(torch.maximum(row * keys.amin(0), row * keys.amax(0)).sum()))
        pages = sorted(range(len(bounds)), key=lambda p: (-bounds[p], p))[:count]
        chosen[h, i] = set(pages)
        at = [j for p in sorted(pages) for j in range(p * page, min(total, (p + 1) * page))]
        scores = k[group, at] @ row / math.sqrt(q.shape[3])
        out[0, h, i], lse[0, h, i] = scores.softmax(0) @ v[group, at], scores.logsumexp(0)
    return out.float(), lse.float(), chosen


# --------------------------------------------------------------------------------------------------------------- pages


@pytest.mark.parametrize("page, total", [(1, 9), (4, 18), (16, 10)])
def test_bounds_are_never_below_a_key_of_the_page(page, total):
    prefix, q = a_prefix(total, dtype=torch.float64), queries(dtype=torch.float64)
    u = page_scores(q, page_bounds(prefix, 0, page))
    for h, p in itertools.product(range(4), range(-(-total // page))):
        keys = prefix.k[0][0, h // 2, p * page : (p + 1) * page].float()
        best = (q[0, h].float() @ keys.T).amax(-1)
        assert bool((u[0, h, :, p] >= best - 1e-5).all())
        if page == 1:
            close(u[0, h, :, p], best)


def test_bounds_grow_with_the_prefix():
    """Whole pages are kept; the last, incomplete one keeps bounds of its own until it is filled."""
    whole = a_prefix(23)
    prefix = a_prefix(0)
    for a, b in ((0, 10), (10, 16), (16, 23)):
        prefix = prefix.extended([whole.k[0][:, :, a:b]], [whole.v[0][:, :, a:b]])
        found, want = page_bounds(prefix, 0, 4), page_bounds(type(prefix)([whole.k[0][:, :, :b]], [whole.v[0][:, :, :b]]), 0, 4)
        close(found.low, want.low, atol=0.0)
        close(found.high, want.high, atol=0.0)
        assert found.valid.shape == (1, -(-b // 4)) and bool(found.valid.all())
    assert page_bounds(prefix, 0, 4) is page_bounds(prefix, 0, 4)
    close(page_bounds(prefix, 0, 4).high[0, 0, -1], whole.k[0][0, 0, 20:].amax(0), atol=0.0)


def test_pages_of_padded_rows_count_from_their_first_token():
    alone = [a_prefix(10, seed=1), a_prefix(23, seed=2)]
    together, q = padded(alone), queries(rows=2)
    bounds = page_bounds(together, 0, 4)
    assert bounds.valid.sum(1).tolist() == [3, 6]
    own = chosen_pages(q, bounds, 2)
    for row, prefix in enumerate(alone):
        mine = page_bounds(prefix, 0, 4)
        close(page_scores(q, bounds)[row, :, :, : mine.low.shape[2]], page_scores(q[row : row + 1], mine)[0])
        assert torch.equal(own[row, :, :, : mine.low.shape[2]], chosen_pages(q[row : row + 1], mine, 2)[0])
        assert not bool(own[row, :, :, mine.low.shape[2] :].any())


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 5), st.integers(1, 4), st.integers(0, 3))
def test_the_union_lies_between_its_bounds_and_grows(total, page, count, rows, seed):
    prefix, q = a_prefix(total, seed=seed), queries(t=6, seed=seed + 9)
    bounds, pages, group = page_bounds(prefix, 0, page), -(-total // page), 2

    def union(rows, count):
        return union_over_rows(chosen_pages(q[:, :, :rows], bounds, count), 2)

    found = union(rows, count)
    sizes = found.sum(-1)
    assert bool((sizes <= min(pages, rows * group * count)).all()) and bool((sizes >= min(pages, count)).all())
    for wider in (union(rows + 1, count), union(rows, count + 1)):
        assert bool((wider | ~found).all()), "what was chosen stays chosen"
    keys = attend_pages(q[:, :, :rows], prefix, 0, found, page)[2]
    last = total - (pages - 1) * page
    assert int(keys) == sum((int(n) - bool(u[-1])) * page + bool(u[-1]) * last for n, u in zip(sizes[0], found[0], strict=True))


def test_attention_to_chosen_pages_touches_no_others():
    prefix, q = a_prefix(22), queries(t=3)
    own = chosen_pages(q, page_bounds(prefix, 0, 4), 1)
    chosen = union_over_rows(own, 2)
    see = chosen.repeat_interleave(4, -1)[:, :, None, :22]
    for mine, mask in ((None, see), (own, own.repeat_interleave(4, -1)[..., :22])):
        want = attend_reference(q, prefix.k[0], prefix.v[0], causal=False, mask=mask)
        poisoned = a_prefix(22)
        for t in (poisoned.k[0], poisoned.v[0]):
            t.masked_fill_(~see[:, :, 0, :, None], math.nan)
        out, lse, _ = attend_pages(q, poisoned, 0, chosen, 4, mine)
        close(out, want[0])
        close(lse, want[1])
        whole = dense(prefix, q)[1]
        assert bool((1 - torch.exp(lse - whole) >= -1e-6).all()), "no subset has more than all of the mass"


# ---------------------------------------------------------------------------------------------------------- LoSA


def test_all_rows_and_all_tokens_are_dense(model):
    trajectory = record(model, read(model, 4 * BLOCK))
    for method in (LoSA(k=BLOCK, budget=1000), LoSA(k=BLOCK, budget=4 * BLOCK, page=4, ref="previous", attend="own")):
        for a, b in zip(replay(model, method, trajectory), trajectory.logits, strict=True):
            close(a, b)


@pytest.mark.parametrize("method", [
    LoSA(k=0), LoSA(k=1, budget=1), LoSA(k=3, budget=8, page=4, ref="previous"), LoSA(k=2, budget=8, page=4, active="random"),
    LoSA(k=8, budget=4, page=4, attend="own")], ids=str)
def test_the_first_step_is_dense(model, method):
    trajectory = record(model, read(model, 4 * BLOCK))
    close(replay(model, method, trajectory)[0], trajectory.logits[0])


def test_no_active_rows_is_flashblock_that_never_refreshes(model):
    prefix = read(model, 4 * BLOCK)
    trajectory = record(model, prefix)
    for a, b in zip(replay(model, LoSA(k=0), trajectory), replay(model, FlashBlock(tau=1000), trajectory), strict=True):
        close(a, b, atol=0.0)
    found = denoise(model, prefix, masks(model), LoSA(k=0, save="dense"))
    want = denoise(model, prefix, masks(model), FlashBlock(tau=1000))
    assert torch.equal(found[0], want[0])
    close(found[1].k[1], want[1].k[1], atol=0.0)


@pytest.mark.parametrize("page, budget, total", [(4, 8, 40), (4, 5, 22), (1, 3, 12), (16, 20, 70)])
def test_all_rows_with_their_own_pages_are_quest(page, budget, total):
    prefix, first, q = a_prefix(total), queries(), queries(seed=4)
    want, want_lse, _ = quest_oracle(q, prefix, page, budget)
    reader = after_first(LoSA(k=BLOCK, budget=budget, page=page, attend="own"), prefix, first)
    out, lse = reader.read(0, q)
    close(out, want)
    close(lse, want_lse)
    quest = QuestRows(budget=budget, page=page, attend="own").begin(prefix, BLOCK, BLOCK)
    quest.begin(0)
    close(quest.read(0, q)[0], want)


def test_rows_that_moved_most_read_the_union_of_their_pages():
    prefix, q = a_prefix(40), queries()
    moved = moved_rows(q, 5, 2, 6)
    reader = after_first(LoSA(k=2, budget=8, page=4), prefix, q)
    before = [t.clone() for t in (reader.parts[0].o, reader.parts[0].lse)]
    keys = reader.reads.keys
    out, lse = reader.read(0, moved)
    _, _, chosen = quest_oracle(moved, prefix, 4, 8)
    unions = [sorted(set().union(*(chosen[h, i] for h in (2 * g, 2 * g + 1) for i in (2, 5)))) for g in (0, 1)]
    for h, i in itertools.product(range(4), (2, 5)):
        at = torch.tensor([j for p in unions[h // 2] for j in range(4 * p, 4 * p + 4)])
        one = moved[:, h : h + 1, i : i + 1]
        want = attend_reference(one, prefix.k[0][:, h // 2, at][:, None], prefix.v[0][:, h // 2, at][:, None], causal=False)
        close(out[:, h, i], want[0][:, 0, 0])
        close(lse[:, h, i], want[1][:, 0, 0])
    stable = [0, 1, 3, 4, 6, 7]
    close(out[:, :, stable], before[0][:, :, stable], atol=0.0)
    close(lse[:, :, stable], before[1][:, :, stable], atol=0.0)
    assert reader.reads.keys - keys == 4 * sum(map(len, unions)) == reader.reads.later_keys
    assert reader.reads.density == pytest.approx(sum(map(len, unions)) * 4 / (2 * 40)) if reader.reads.later_dense else True
    close(reader.parts[0].q_ref[:, :, [2, 5]], moved[:, :, [2, 5]], atol=0.0)
    close(reader.parts[0].q_ref[:, :, stable], q[:, :, stable], atol=0.0)


def test_active_rows_merge_to_softmax_over_their_pages_and_the_block():
    prefix, q, k, v = a_prefix(40), queries(), queries(heads=2, seed=5), queries(heads=2, seed=6)
    reader = after_first(LoSA(k=BLOCK, budget=8, page=4), prefix, queries(seed=2))
    found = block_attention(reader)(0, q, k, v)
    chosen = union_over_rows(chosen_pages(q, page_bounds(prefix, 0, 4), 2), 2).repeat_interleave(4, -1)[:, :, None]
    see = torch.cat([chosen, torch.ones(1, 2, 1, BLOCK, dtype=torch.bool)], -1)
    close(found, attend_reference(q, torch.cat([prefix.k[0], k], 2), torch.cat([prefix.v[0], v], 2), causal=False, mask=see)[0])


def test_drift_is_seen_from_the_latest_refresh_only():
    """A row that creeps a little every step is never the one that moved most since the previous step, but in the end it is
    since its own refresh."""
    prefix, q = a_prefix(24), queries()
    steps = [moved_rows(q, 1, by=0.5 * (n + 1), seed=3) for n in range(6)]
    for n, step in enumerate(steps):
        step[:, :, 4] += 0.8 * (-1) ** n
    chosen = {}
    for ref in ("refresh", "previous"):
        reader = after_first(LoSA(k=1, budget=4, page=4, ref=ref), prefix, q)
        rows = []
        for n, step in enumerate(steps):
            reader.begin(n + 1)
            rows.append(int(reader.active_rows(0, step, reader.parts[0].q_ref)))
            reader.read(0, step)
        chosen[ref] = rows
    assert set(chosen["previous"]) == {4} and 1 in chosen["refresh"]


def test_movement_is_the_mean_square_and_blind_to_rotation():
    q = queries()
    moved = moved_rows(q, 3)
    e = movement(moved, q)
    assert e[0, 3] > 0 and float(e.sum() - e[0, 3]) == 0.0
    assert float(e[0, 3]) == pytest.approx(float((moved - q)[0, :, 3].square().sum()) / (4 * 8))
    places, freq = torch.arange(100, 100 + BLOCK), inverse_frequencies(8)
    close(movement(rotate(moved, places, freq), rotate(q, places, freq)), e)


def test_ties_go_to_lower_rows():
    reader = after_first(LoSA(k=3, budget=4, page=4), a_prefix(24), queries())
    assert reader.active_rows(0, queries(), queries()).tolist() == [[0, 1, 2]]
    even = queries() + 1.0
    assert reader.active_rows(0, even, queries())[0].unique().numel() == 3


def test_unchanged_rows_are_exact_in_layer_0(model):
    prefix, ids = read(model, 4 * BLOCK), masks(model)
    reader = LoSA(k=1, budget=4, page=4).begin(prefix, BLOCK, BLOCK)
    reader.begin(0)
    block_logits(model, reader, ids)
    ids[0, 2] = 65
    reader.begin(1)
    found = {}

    def attention(layer, q, k, v):
        found[layer] = (q, reader.read(layer, q)[0].clone(), dense(prefix, q, layer)[0])
        return torch.zeros_like(q)

    model(ids, prefix.places(BLOCK), attention)
    _, own, want = found[0]
    others = [i for i in range(BLOCK) if i != 2]
    close(own[:, :, others], want[:, :, others], atol=1e-6)
    assert float((own[:, :, 2] - want[:, :, 2]).detach().abs().max()) > 1e-4, "the changed row sees some pages only"


def test_poisoned_pages_outside_the_union_never_show(model):
    prefix = read(model, 5 * BLOCK)
    trajectory = record(model, prefix)
    reader = LoSA(k=2, budget=8, page=4).begin(prefix, BLOCK, BLOCK)
    loads, plain = [], {}
    for name in ("noted", "poisoned"):
        reader = LoSA(k=2, budget=8, page=4).begin(prefix, BLOCK, BLOCK)
        for step in range(3):
            reader.begin(step)
            if name == "poisoned" and step == 1:
                held = [t.clone() for t in (*prefix.k, *prefix.v)]
                for layer in range(2):
                    outside = ~torch.stack([u[layer] for u in loads]).any(0).repeat_interleave(4, -1)[..., None]
                    assert bool(outside.any())
                    prefix.k[layer].masked_fill_(outside, math.nan)
                    prefix.v[layer].masked_fill_(outside, math.nan)
            if name == "noted" and step:
                loads.append(watch(model, reader, trajectory.states[step]))
            else:
                logits = block_logits(model, reader, trajectory.states[step])
                plain[name, step] = logits
            reader.changed(trajectory.commits[step])
    for t, old in zip((*prefix.k, *prefix.v), held, strict=True):
        t.copy_(old)
    assert all(bool(torch.isfinite(logits).all()) for logits in plain.values())


def watch(model, reader, ids):
    """One pass of a reader, noting the union of pages that its active rows choose in every layer."""
    unions = []

    def attention(layer, q, k, v):
        rows = reader.active_rows(layer, q, reader.parts[layer].q_ref)
        at = rows[:, None, :, None].expand(-1, 4, -1, 8)
        unions.append(union_over_rows(chosen_pages(q.gather(2, at), page_bounds(reader.prefix, layer, 4), 2), 2))
        return block_attention(reader)(layer, q, k, v)

    model(ids, reader.prefix.places(ids.shape[1]), attention)
    return unions


def test_random_rows_are_any_and_the_same_again():
    reader = after_first(LoSA(k=3, budget=4, page=4, active="random"), a_prefix(24), queries())
    moved, rows = moved_rows(queries(), 0, 1, 2, by=100.0), []
    for step in range(1, 9):
        reader.begin(step)
        rows.append(reader.active_rows(0, moved, queries()).tolist())
        assert rows[-1] == reader.active_rows(0, queries(), queries()).tolist()
    assert len({tuple(sorted(r[0])) for r in rows}) > 3
    other = after_first(LoSA(k=3, active="random", seed=1), a_prefix(24), queries())
    assert rows[0] != other.active_rows(0, moved, moved).tolist()


def test_always_dense_layers_and_a_sparse_first_step(model):
    prefix = read(model, 5 * BLOCK)
    trajectory = record(model, prefix)
    for a, b in zip(replay(model, LoSA(k=0, dense_layers=2), trajectory), trajectory.logits, strict=True):
        close(a, b)
    first = replay(model, LoSA(k=2, budget=8, page=4, first="sparse"), trajectory)[0]
    quest = replay(model, QuestRows(budget=8, page=4), trajectory)[0]
    close(first, quest)
    assert float((first - trajectory.logits[0]).abs().max()) > 1e-3


def test_saving_passes_are_steps_or_dense(model):
    prefix = read(model, 5 * BLOCK)
    for save, exact in (("dense", True), ("step", False)):
        reads = Reads()
        ids, grown = denoise(model, prefix, masks(model), LoSA(k=1, budget=4, page=4, save=save), ONE_A_STEP, reads=reads)
        same = torch.allclose(grown.k[1][:, :, -BLOCK:], read_blocks(model, prefix, ids).k[1][:, :, -BLOCK:], atol=1e-5)
        assert same == exact and reads.refreshes == 1 + exact


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("text, words", [
    ("losa(k=-1)", "at least 0"), ("losa(budget=0)", "at least 1"), ("losa(page=0)", "at least 1"),
    ("quest-rows(budget=0)", "at least 1"), ("losa(attend=all)", "unknown choice 'all'"), ("losa(ref=last)", "unknown choice")])
def test_knobs_that_make_no_sense_are_refused(text, words):
    with pytest.raises(Refused, match=words):
        Recipe.parse(text)


def test_more_active_rows_than_a_block_has_are_refused_and_a_short_block_clamps():
    with pytest.raises(Refused, match="blocks of 8 tokens; expected k of at most 8"):
        LoSA(k=9).begin(a_prefix(20), BLOCK, BLOCK)
    reader = LoSA(k=5, budget=4, page=4).begin(a_prefix(20), 3, BLOCK)
    assert reader.k == 3 and "short block of 3 tokens" in reader.reads.notes[0]
    assert LoSA(k=5).begin(a_prefix(20), 5, BLOCK).reads.notes == []
    with pytest.raises(ValueError, match="at least one key"):
        page_bounds(a_prefix(4), 0, 0)


def test_queries_that_are_not_finite_are_errors():
    reader, q = after_first(LoSA(k=1), a_prefix(20), queries()), queries()
    q[0, 0, 0, 0] = math.nan
    with pytest.raises(ValueError, match="NaN"):
        reader.read(0, q)


def test_a_cache_of_another_shape_is_an_error_and_a_missing_one_is_made_densely():
    reader = after_first(LoSA(k=1, budget=4, page=4), a_prefix(20), queries())
    with pytest.raises(ValueError, match="queries are"):
        reader.read(0, queries(t=3))
    with pytest.raises(ValueError, match="multiple of Hkv"):
        reader.read(0, queries(heads=3))
    resumed = LoSA(k=1, budget=4, page=4).begin(a_prefix(20), BLOCK, BLOCK)
    resumed.begin(5)
    close(resumed.read(0, queries())[0], dense(a_prefix(20), queries())[0])


def test_an_evicted_prefix_invalidates_kept_parts_and_bounds():
    reader = after_first(LoSA(k=2, budget=4, page=4), a_prefix(20), queries())
    reader.read(0, moved_rows(queries(), 1))
    shorter = a_prefix(9, seed=5)
    reader.use(shorter)
    reader.begin(2)
    close(reader.read(0, queries())[0], dense(shorter, queries())[0])
    reader.begin(3)
    out, _ = reader.read(0, moved_rows(queries(), 1))
    assert bool(torch.isfinite(out).all()) and page_bounds(shorter, 0, 4).low.shape[2] == 3


def test_a_block_reads_nothing_of_the_one_before(model):
    prefix = read(model, 4 * BLOCK)
    trajectory = record(model, prefix)
    first = LoSA(k=2, budget=8, page=4).begin(prefix, BLOCK, BLOCK)
    first.begin(0)
    block_logits(model, first, masks(model))
    for part in first.parts:
        for t in (part.o, part.lse, part.q_ref):
            t.fill_(math.nan)
    for logits in replay(model, LoSA(k=2, budget=8, page=4), trajectory):
        assert bool(torch.isfinite(logits).all())
    close(replay(model, Denoising(), trajectory)[3], trajectory.logits[3], atol=0.0)

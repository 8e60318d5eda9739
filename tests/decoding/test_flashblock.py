"""FlashBlock's exact checks: when it reads the prefix, what it reuses meanwhile, and that nothing old is ever read."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_blocks import BLOCK, a_prefix, close, dense, masks, queries, read, record, tiny_blocks

from longspan.decoding import Noise
from longspan.decoding.block_sampler import ONE_A_STEP, Sampling, block_logits, denoise, replay
from longspan.decoding.blocks import Denoising, Reads, read_blocks
from longspan.decoding.denoising.flashblock import FlashBlock
from longspan.recipe import Recipe
from longspan.registry import Refused


@pytest.fixture(scope="module")
def model():
    return tiny_blocks()


def committing(*places, rows=1):
    where = torch.zeros(rows, BLOCK, dtype=torch.bool)
    where[:, list(places)] = True
    return where


def fill_with_nan(prefix):
    for t in (*prefix.k, *prefix.v):
        t.fill_(math.nan)


@pytest.mark.parametrize("tau, sampling", [
    (0, Sampling(threshold=0.02, temperature=1.0, noise=Noise((4,)))), (-3, ONE_A_STEP), (1, ONE_A_STEP),
    (1, Sampling(threshold=0.02, steps=3))])
def test_without_reuse_tokens_and_keys_are_the_dense_ones(model, tau, sampling):
    prefix = read(model, 4 * BLOCK)
    want, found = (denoise(model, prefix, masks(model), method, sampling) for method in (Denoising(), FlashBlock(tau=tau)))
    assert torch.equal(want[0], found[0])
    for a, b in zip(want[1].k, found[1].k, strict=True):
        close(a, b, atol=0.0)
    trajectory = record(model, prefix, sampling=sampling)
    for a, b in zip(replay(model, FlashBlock(tau=tau), trajectory), trajectory.logits, strict=True):
        close(a, b, atol=0.0)


def test_refreshes_come_after_tau_commits(model):
    """One commit a step, eight steps, tau=2: steps 0, 2, 4, 6 and the saving pass read the prefix."""
    prefix, reads = read(model, 4 * BLOCK), Reads()
    reader = FlashBlock(tau=2).begin(prefix, BLOCK, BLOCK)
    refreshed = []
    for step in range(BLOCK):
        reader.begin(step)
        refreshed.append(bool(reader.refresh))
        block_logits(model, reader, masks(model))
        reader.changed(committing(step))
    assert refreshed == [True, False] * 4
    denoise(model, prefix, masks(model), FlashBlock(tau=2), reads=reads)
    layers_and_heads = 2 * 2
    assert reads.refreshes == 5 and reads.keys == 5 * prefix.length * layers_and_heads
    assert reads.dense == 9 * prefix.length * layers_and_heads and reads.later_keys == 3 * prefix.length * layers_and_heads
    assert reads.cache_bytes == 2 * 4 * BLOCK * (8 + 1) * 4, "B*H*(d+1) numbers in float32 a layer, whatever N is"


def test_several_commits_a_step_count_as_several(model):
    reader = FlashBlock(tau=3).begin(a_prefix(20), BLOCK, BLOCK)
    seen = []
    for step, commits in enumerate([(0,), (1,), (), (2, 3), (4, 5, 6), (7,)]):
        reader.begin(step)
        seen.append(bool(reader.refresh))
        reader.read(0, queries())
        reader.changed(committing(*commits))
    assert seen == [True, False, False, False, True, True]


def test_remasked_positions_are_dirty():
    reader = FlashBlock(tau=2).begin(a_prefix(20), BLOCK, BLOCK)
    for step, where in enumerate([committing(0), committing(0, 1)]):  # token 0 is masked again, token 1 is committed
        reader.begin(step)
        reader.read(0, queries())
        reader.changed(where)
    reader.begin(2)
    assert reader.dirty.tolist() == committing(0, 1).tolist() and bool(reader.refresh)


@pytest.mark.parametrize("tau", [1, 2, 5, 100])
def test_the_first_step_and_the_saving_pass_are_dense(model, tau):
    prefix = read(model, 4 * BLOCK)
    trajectory = record(model, prefix)
    close(replay(model, FlashBlock(tau=tau), trajectory)[0], trajectory.logits[0], atol=0.0)
    ids, grown = denoise(model, prefix, masks(model), FlashBlock(tau=tau))
    want = read_blocks(model, prefix, ids)
    for a, b in zip((*grown.k, *grown.v), (*want.k, *want.v), strict=True):
        close(a, b)


def test_an_unchanged_block_reuses_what_it_would_compute(model):
    prefix = read(model, 4 * BLOCK)
    found = []
    for tau in (0, 100):
        reader = FlashBlock(tau=tau).begin(prefix, BLOCK, BLOCK)
        for step in range(2):
            reader.begin(step)
            found.append(block_logits(model, reader, masks(model)))
            reader.changed(committing())
    close(found[3], found[1], atol=1e-6)


def test_rows_whose_token_did_not_change_are_exact_in_layer_0(model):
    prefix, ids = read(model, 4 * BLOCK), masks(model)
    reader = FlashBlock(tau=100).begin(prefix, BLOCK, BLOCK)
    seen: dict[str, torch.Tensor] = {}

    def step(number, where, name):
        reader.begin(number)

        def attention(layer, q, k, v):
            if layer == 0:
                seen[name] = reader.read(layer, q)[0].clone()
                seen[f"{name}, fresh"] = dense(prefix, q)[0]
            else:
                reader.read(layer, q)
            return torch.zeros_like(q)

        model(where, prefix.places(BLOCK), attention)

    step(0, ids, "before")
    ids[0, 2] = 65
    step(1, ids, "after")
    others = [i for i in range(BLOCK) if i != 2]
    close(seen["after"][:, :, others], seen["after, fresh"][:, :, others], atol=1e-6)
    assert float((seen["after"][:, :, 2] - seen["after, fresh"][:, :, 2]).detach().abs().max()) > 1e-3


def test_edits_of_the_prefix_show_at_the_next_refresh_only(model):
    prefix = read(model, 4 * BLOCK)
    plain, edited = (FlashBlock(tau=2).begin(p, BLOCK, BLOCK) for p in (prefix, read(model, 4 * BLOCK)))
    found = {}
    for step in range(3):
        for name, reader in (("plain", plain), ("edited", edited)):
            if name == "edited" and step == 1:
                for k in reader.prefix.k:
                    k[:, :, 3] += 50.0
            reader.begin(step)
            found[name, step] = block_logits(model, reader, masks(model))
            reader.changed(committing(step))
    for step in (0, 1):
        close(found["plain", step], found["edited", step], atol=0.0)
    assert float((found["plain", 2] - found["edited", 2]).detach().abs().max()) > 1e-3


def test_reuse_never_touches_the_prefix():
    prefix = a_prefix(20)
    reader = FlashBlock(tau=100).begin(prefix, BLOCK, BLOCK)
    reader.begin(0)
    before = [t.clone() for t in reader.read(0, queries())]
    fill_with_nan(prefix)
    reader.changed(committing(1))
    reader.begin(1)
    for a, b in zip(reader.read(0, queries(seed=9)), before, strict=True):
        close(a, b, atol=0.0)


def test_a_prefix_that_was_edited_or_evicted_is_read_anew():
    reader = FlashBlock(tau=100).begin(a_prefix(20), BLOCK, BLOCK)
    reader.begin(0)
    reader.read(0, queries())
    for part in reader.parts:
        part.o.fill_(math.nan)
    shorter = a_prefix(12, seed=3)
    reader.use(shorter)
    reader.begin(1)
    close(reader.read(0, queries())[0], dense(shorter, queries())[0])


@pytest.mark.parametrize("method", [FlashBlock(tau=100), FlashBlock(tau=100, budget=8, page=4)], ids=str)
def test_new_blocks_read_nothing_old(model, method):
    """Poison: what a finished block kept is filled with NaN, and the next one doesn't notice."""
    prefix = read(model, 4 * BLOCK)
    first = method.begin(prefix, BLOCK, BLOCK)
    first.begin(0)
    block_logits(model, first, masks(model))
    for part in first.parts:
        part.o.fill_(math.nan)
        part.lse.fill_(math.nan)
    second = method.begin(prefix, BLOCK, BLOCK)
    second.begin(0)
    logits = block_logits(model, second, masks(model))
    close(logits, record(model, prefix).logits[0])


def test_each_sequence_decides_by_itself():
    prefix, q = a_prefix(20, rows=3), queries(rows=3)
    reader = FlashBlock(tau=2).begin(prefix, BLOCK, BLOCK)
    reader.begin(0)
    first = reader.read(0, q)[0].clone()
    reader.changed(torch.stack([committing(0)[0], committing(0, 1)[0], committing()[0]]))
    reader.begin(1)
    assert reader.refresh.tolist() == [False, True, False]
    moved = queries(rows=3, seed=8)
    before = reader.reads.keys
    out = reader.read(0, moved)[0]
    close(out[[0, 2]], first[[0, 2]], atol=0.0)
    close(out[1:2], dense(a_prefix(20, rows=3).keep(torch.tensor([1])), moved[1:2])[0])
    assert reader.reads.keys - before == 2 * 20
    reader.keep(torch.tensor([2]))
    reader.begin(2)
    close(reader.read(0, moved[2:])[0], first[2:], atol=0.0)


def test_short_blocks_have_a_cache_of_their_size_and_others_are_errors():
    reader = FlashBlock(tau=100).begin(a_prefix(20), 3, BLOCK)
    reader.begin(0)
    reader.read(0, queries(t=3))
    assert reader.parts[0].lse.shape == (1, 4, 3) and reader.parts[0].lse.dtype == torch.float32
    reader.begin(1)
    with pytest.raises(ValueError, match="queries are"):
        reader.read(0, queries(t=4))


def test_the_cache_is_float32_in_a_bfloat16_model():
    model = tiny_blocks().bfloat16()
    reader = FlashBlock(tau=2).begin(read(model, 2 * BLOCK), BLOCK, BLOCK)
    reader.begin(0)
    assert bool(torch.isfinite(block_logits(model, reader, masks(model))).all())
    assert all(p.o.dtype == p.lse.dtype == torch.float32 for p in reader.parts)


# --------------------------------------------------------------------------------------------- with some pages fresh


def test_a_split_prefix_is_exact_where_it_is_fresh(model):
    trajectory = record(model, read(model, 5 * BLOCK))
    for a, b in zip(replay(model, FlashBlock(tau=0, budget=8, page=4), trajectory), trajectory.logits, strict=True):
        close(a, b, atol=2e-5)
    everything = replay(model, FlashBlock(tau=100, budget=1000, page=4), trajectory)
    for a, b in zip(everything, trajectory.logits, strict=True):  # all pages chosen: nothing is left to grow old
        close(a, b, atol=2e-5)


def test_chosen_pages_are_fresh_and_the_rest_is_kept():
    prefix, q, moved = a_prefix(24), queries(), queries(seed=7)
    reader = FlashBlock(tau=100, budget=4, page=4).begin(prefix, BLOCK, BLOCK)
    reader.begin(0)
    close(reader.read(0, q)[0], dense(prefix, q)[0])
    chosen = reader.chosen[0].clone()
    assert bool(chosen.any(-1).all()) and not bool(chosen.all())
    see = chosen.repeat_interleave(4, -1)[:, :, None]
    from longspan.kernels import attend_reference, merge

    rest = attend_reference(q, prefix.k[0], prefix.v[0], causal=False, mask=~see)
    new = attend_reference(moved, prefix.k[0], prefix.v[0], causal=False, mask=see)
    for t in (prefix.k[0], prefix.v[0]):  # the rest is kept, never read
        t.masked_fill_(~see[:, :, 0, :, None], math.nan)
    before = reader.reads.keys
    reader.begin(1)
    out, lse = reader.read(0, moved)
    want, want_lse = merge([new, rest])
    close(out, want)
    close(lse, want_lse)
    assert reader.reads.keys - before == 4 * int(chosen.sum())


# -------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("text, words", [
    ("flashblock(tau=nan)", "tau"), ("flashblock(tau=1.5)", "whole number"), ("flashblock(budget=-1)", "at least 0"),
    ("flashblock(page=0)", "at least 1")])
def test_knobs_that_make_no_sense_are_refused(text, words):
    with pytest.raises(Refused, match=words):
        Recipe.parse(text)


def test_tau_must_be_a_number():
    with pytest.raises(Refused, match="tau=nan"):
        FlashBlock(tau=math.nan)


def test_recipes_hold_one_denoising_part():
    assert Recipe.parse("flashblock(tau=3)").denoising == FlashBlock(tau=3)
    with pytest.raises(Refused, match="already has flashblock"):
        Recipe.parse("flashblock + losa")

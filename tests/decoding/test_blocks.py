"""Parts of attention and their merge, prefixes, and the block sampler with its records."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_blocks import BLOCK, a_prefix, close, dense, masks, queries, random_ids, read, record, tiny_blocks

from longspan.decoding import Noise
from longspan.decoding.block_sampler import ONE_A_STEP, Sampling, choose, denoise, forced_nlls, replay
from longspan.decoding.blocks import (
    BlockReader,
    Denoising,
    Prefix,
    PrefixPart,
    Reads,
    block_attention,
    padded,
    read_blocks,
)
from longspan.decoding.denoising.dense import DenseBlocks
from longspan.decoding.denoising.flashblock import FlashBlock
from longspan.decoding.denoising.losa import LoSA
from longspan.decoding.denoising.quest_rows import QuestRows
from longspan.kernels import attend_reference, merge
from longspan.registry import Refused

METHODS = [DenseBlocks(), FlashBlock(tau=2), FlashBlock(tau=3, budget=8, page=4), LoSA(k=2, budget=8, page=4),
           LoSA(k=3, budget=8, page=4, save="dense", attend="own"), LoSA(k=2, first="sparse", budget=8, page=4),
           LoSA(k=2, budget=8, page=4, ref="previous"), QuestRows(budget=8, page=4)]


@pytest.fixture(scope="module")
def model():
    return tiny_blocks()


# ------------------------------------------------------------------------------------------------------------- merging


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=12, max_size=12), st.permutations(range(4)), st.integers(0, 3))
def test_any_partition_of_keys_merges_to_full_attention(owner, order, seed):
    prefix, q = a_prefix(12, seed=seed), queries(seed=seed + 1)
    whole, whole_lse = dense(prefix, q)
    parts = []
    for part in order:
        at = torch.tensor([i for i, o in enumerate(owner) if o == part], dtype=torch.long)
        parts.append(attend_reference(q, prefix.k[0][:, :, at], prefix.v[0][:, :, at], causal=False))
    out, lse = merge(parts)
    close(out, whole)
    close(lse, whole_lse)
    out, lse = merge([merge(parts[:2]), merge(parts[2:])])
    close(out, whole)
    close(lse, whole_lse)


def test_a_block_attends_to_prefix_and_itself():
    prefix, q = a_prefix(20), queries()
    k, v = queries(heads=2, seed=5), queries(heads=2, seed=6)
    found = block_attention(BlockReader(prefix, BLOCK))(0, q, k, v)
    want = attend_reference(q, torch.cat([prefix.k[0], k], 2), torch.cat([prefix.v[0], v], 2), causal=False)[0]
    close(found, want)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_an_empty_prefix_weighs_nothing(model, method):
    q, k, v = queries(), queries(heads=2, seed=5), queries(heads=2, seed=6)
    reader = method.begin(Prefix.empty(model), BLOCK, BLOCK)
    for step in range(2):
        reader.begin(step)
        out, lse = reader.read(0, q)
        assert bool((lse == -math.inf).all()) and bool((out == 0).all())
        close(block_attention(reader)(0, q, k, v), attend_reference(q, k, v, causal=False)[0])
    assert reader.parts == [None, None], "nothing is remembered of nothing"
    assert (reader.reads.keys, reader.reads.dense) == (0, 0)


# ------------------------------------------------------------------------------------------------------------ prefixes


def test_reading_at_once_is_reading_block_by_block(model):
    ids = random_ids(2, 4 * BLOCK)
    whole = read_blocks(model, Prefix.empty(model, 2), ids)
    piecewise = Prefix.empty(model, 2)
    for b in range(4):
        piecewise = read_blocks(model, piecewise, ids[:, b * BLOCK : (b + 1) * BLOCK])
    for a, b in zip((*whole.k, *whole.v), (*piecewise.k, *piecewise.v), strict=True):
        close(a, b)
    assert whole.length == 4 * BLOCK and whole.nbytes == 2 * 2 * 2 * 2 * 4 * BLOCK * 8 * 4
    with pytest.raises(ValueError, match="whole blocks of 8"):
        read_blocks(model, whole, ids[:, :3])


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_saved_blocks_are_those_of_a_pass_over_the_same_tokens(model, method):
    """Exactly for methods whose saving pass is dense; the others stay near it."""
    prefix = read(model, 4 * BLOCK)
    ids, grown = denoise(model, prefix, masks(model), method)
    want = read_blocks(model, prefix, ids)
    exact = isinstance(method, (DenseBlocks, FlashBlock)) or getattr(method, "save", "") == "dense"
    for a, b in zip((*grown.k, *grown.v), (*want.k, *want.v), strict=True):
        assert a.shape == b.shape
        if exact:
            close(a, b)
    assert 256 not in ids and grown.length == 5 * BLOCK


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_rows_of_a_batch_are_as_if_alone(model, method):
    """Prefixes of different lengths, padded on the left with NaN-free noise, and blocks that end after different steps."""
    alone = [read(model, length, seed=length) for length in (2 * BLOCK, 6 * BLOCK, 4 * BLOCK)]
    together = padded(alone)
    for k in (*together.k, *together.v):
        k[0, :, : 4 * BLOCK] = 1e4  # padding is never looked at
    ids = masks(model, 3)
    ids[1, :5], ids[2, 3] = 65, 66
    sampling = Sampling(threshold=0.02, steps=4)
    out, grown = denoise(model, together, ids, method, sampling)
    for row, prefix in enumerate(alone):
        one, own = denoise(model, prefix, ids[row : row + 1], method, sampling)
        assert out[row].tolist() == one[0].tolist()
        for a, b in zip((*grown.k, *grown.v), (*own.k, *own.v), strict=True):
            close(a[row, :, -BLOCK:], b[0, :, -BLOCK:])


def test_a_row_of_padding_only_reads_nothing():
    prefix = a_prefix(8, rows=2)
    prefix.pad = torch.tensor([8, 3])
    out, lse = BlockReader(prefix, BLOCK).read(0, queries(rows=2))
    assert bool((lse[0] == -math.inf).all()) and bool((out[0] == 0).all()) and bool(torch.isfinite(lse[1]).all())
    want = attend_reference(queries(rows=2)[1:], prefix.k[0][1:, :, 3:], prefix.v[0][1:, :, 3:], causal=False)
    close(out[1:], want[0])
    assert prefix.places(2).tolist() == [[0, 1], [5, 6]]


# ------------------------------------------------------------------------------------------------------ bad input


def test_shapes_that_do_not_fit_are_errors():
    prefix = a_prefix(8)
    with pytest.raises(ValueError, match="at least one token"):
        BlockReader(prefix, 0)
    reader = BlockReader(prefix, BLOCK)
    with pytest.raises(ValueError, match="count from 0"):
        reader.begin(-1)
    with pytest.raises(ValueError, match="multiple of Hkv"):
        reader.read(0, queries(heads=3))
    with pytest.raises(ValueError, match="key-value heads"):
        block_attention(reader)(0, queries(), queries(heads=4), queries(heads=4))
    with pytest.raises(ValueError, match="float32"):
        PrefixPart(queries(), torch.zeros(1, 4, BLOCK, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="with lse"):
        PrefixPart(queries(), torch.zeros(1, 4, 3))
    with pytest.raises(ValueError, match="queries are"):
        PrefixPart(queries(), torch.zeros(1, 4, BLOCK)).check(queries(t=3))


@pytest.mark.parametrize("changes, words", [
    ({"steps": 0}, "steps=0"), ({"threshold": 0.0}, "threshold=0"), ({"threshold": 1.5}, "threshold=1.5"),
    ({"temperature": -1.0}, "temperature=-1"), ({"temperature": math.nan}, "temperature=nan"),
    ({"threshold": math.nan}, "threshold=nan")])
def test_samplings_that_make_no_sense_are_refused(changes, words):
    with pytest.raises(Refused, match=words):
        Sampling(**changes)


# --------------------------------------------------------------------------------------------------------- the sampler


def test_quotas_spread_the_block_over_its_steps():
    assert [Sampling(steps=4).quota(t, 10) for t in range(5)] == [3, 3, 2, 2, 2]
    assert [Sampling(steps=8).quota(t, 4) for t in range(8)] == [1] * 8
    assert Sampling().quota(0, 16) == 1 and Sampling(steps=1).quota(0, 16) == 16


def logits_of(tops):
    """Logits over three tokens with these top probabilities, token 1 on top."""
    p = torch.tensor(tops)
    return torch.log(torch.stack([(1 - p) / 2, p, (1 - p) / 2], -1))[None]


def committed(tops, masked, quota, **changes):
    masked, places = torch.tensor([masked], dtype=torch.bool), torch.arange(len(tops))[None]
    commit = choose(logits_of(tops), masked, quota, Sampling(**changes), places, 0, [0])[1]
    return commit[0].nonzero()[:, 0].tolist()


def test_sure_positions_are_committed_and_at_least_the_quota():
    everywhere = [True] * 4
    assert committed([0.95, 0.5, 0.92, 0.6], everywhere, 1) == [0, 2]
    assert committed([0.5, 0.6, 0.7, 0.8], everywhere, 2) == [2, 3]
    assert committed([0.95, 0.5, 0.6, 0.7], everywhere, 3) == [0, 2, 3], "the quota's most confident ones, sure or not"
    assert committed([0.99, 0.5, 0.6, 0.7], [False, True, True, True], 1) == [3], "what is written stays"
    assert committed([0.5, 0.5, 0.5, 0.5], everywhere, 1) == [0], "of equals the first"
    assert committed([0.5, 0.6], [True, False], 5) == [0]
    assert committed([0.95, 0.97, 0.5, 0.5], everywhere, 1, threshold=1.0) == [1]


def test_noise_belongs_to_place_and_step(model):
    logits = torch.randn(2, 6, 256, generator=torch.Generator().manual_seed(0))
    masked, sampling = torch.ones(2, 6, dtype=torch.bool), Sampling(temperature=1.0)

    def draw(seed=0, step=0):
        given = Sampling(temperature=1.0, noise=Noise((seed,)))
        return choose(logits, masked, 1, given, torch.arange(6).expand(2, -1), step, (0, 1))[0]

    first = draw()
    assert torch.equal(first, draw()) and not torch.equal(first, draw(step=1)) and not torch.equal(first, draw(seed=1))
    alone = choose(logits[1:], masked[1:], 1, sampling, torch.arange(6)[None], 0, [1])[0]
    assert torch.equal(first[1:], alone), "a row's noise is its own, whoever stands beside it"
    counts = torch.bincount(torch.cat([
        choose(logits_of([0.7] * 50), masked[:1, :1].expand(1, 50), 1, sampling, torch.arange(50)[None], step, [0])[0][0]
        for step in range(40)]), minlength=3)
    assert abs(float(counts[1]) / 2000 - 0.7) < 0.04


def test_known_tokens_stay_and_reads_are_counted(model):
    prefix, ids, reads = read(model, 3 * BLOCK), masks(model), Reads()
    ids[0, :3] = torch.tensor([72, 105, 33])
    out, grown = denoise(model, prefix, ids, Denoising(), ONE_A_STEP, reads=reads)
    assert out[0, :3].tolist() == [72, 105, 33] and grown.length == 4 * BLOCK
    assert reads.steps == reads.refreshes == 6 and reads.keys == reads.dense == 6 * 2 * 2 * 3 * BLOCK
    assert reads.later_keys == 4 * 2 * 2 * 3 * BLOCK and reads.share == reads.density == 1.0
    out, same = denoise(model, prefix, ids, Denoising(), finish=False)
    assert same is prefix
    out, grown = denoise(model, prefix, torch.full((1, BLOCK), 65), Denoising())
    close(grown.k[1], read_blocks(model, prefix, out).k[1])


def test_short_last_blocks_are_written(model):
    prefix = read(model, 2 * BLOCK)
    for method in METHODS:
        out, grown = denoise(model, prefix, masks(model, 1, 3), method)
        assert out.shape == (1, 3) and grown.length == 2 * BLOCK + 3


def test_a_record_replays_to_the_bit(model):
    found = record(model, read(model, 3 * BLOCK))
    assert len(found.states) == len(found.commits) == len(found.logits) == BLOCK
    assert all(int(c.sum()) == 1 for c in found.commits) and found.tokens is not None and 256 not in found.tokens
    for a, b in zip(replay(model, Denoising(), found), found.logits, strict=True):
        close(a, b, atol=0.0)
    assert torch.equal(found.states[0], masks(model)) and int((found.states[-1] == 256).sum()) == 1


@torch.no_grad()
def test_forced_likelihoods_by_hand(model):
    """From left to right, every token given all before it, with masks to the right; the last block ends with the answer."""
    prefix, whole = read(model, 2 * BLOCK), random_ids(1, 2 * BLOCK, 9)[0].tolist()
    known, answer = whole[:3], whole[3 : BLOCK + 6]
    found = forced_nlls(model, prefix, known, answer, DenseBlocks())
    assert len(found) == len(answer)
    want = []
    everything = torch.tensor([[*known, *answer]])
    for start, end in ((0, BLOCK), (BLOCK, BLOCK + 6)):
        before = prefix if not start else read_blocks(model, prefix, everything[:, :BLOCK])
        for i in range(max(start, 3), end):
            ids = everything[:, start:end].clone()
            ids[:, i - start :] = 256
            logits = model(ids, before.places(end - start), block_attention(BlockReader(before, end - start))).logits
            want.append(-float(logits[0, i - start].log_softmax(-1)[everything[0, i]]))
    assert found == pytest.approx(want, abs=1e-4)
    assert forced_nlls(model, prefix, known, [], DenseBlocks()) == []

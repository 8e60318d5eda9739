"""The engine's layout: packed bits, tables of one-token pages, flattened heads, freed slots, captured graphs.

HARD-KV's exact checks 5, 6, 10 and 11, and the rule of 7 that a slot is free once every layer cleared it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny, tiny_ids
from torch.fx.experimental.proxy_tensor import make_fx

from longspan.cache.paged import (
    IndexBuffers,
    PageTable,
    SlotBits,
    attend_fixed,
    attend_pages,
    flattened,
    freed,
    masked_table,
    pack_bits,
    page_table,
    unpack_bits,
)
from longspan.kernels import attend, attend_reference
from longspan.recipe import Recipe

B, HQ, H, D, N = 2, 6, 2, 8, 21


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def chosen(*shape, share=0.4, seed=0):
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < share
    mask[..., 0] = True
    return mask


@dataclass
class Pool:
    """Keys and values of two sequences, scattered over 50 token slots."""

    slots: torch.Tensor = field(default_factory=lambda: rand(50, seed=5).argsort()[: B * N].view(B, N))
    k: torch.Tensor = field(default_factory=lambda: rand(50, H, D, seed=1))
    v: torch.Tensor = field(default_factory=lambda: rand(50, H, D, seed=2))

    def dense(self):
        """(B,H,N,D) keys and values in the order of the tokens."""
        return self.k[self.slots].transpose(1, 2), self.v[self.slots].transpose(1, 2)


# ----------------------------------------------------------------------------------------------------------- 10: bits


@settings(max_examples=40, deadline=None)
@given(n=st.integers(0, 41), rows=st.integers(1, 3), seed=st.integers(0, 99))
def test_bits_survive_packing(n, rows, seed):
    mask = torch.rand(rows, 2, n, generator=torch.Generator().manual_seed(seed)) < 0.5
    bits = pack_bits(mask)
    assert bits.dtype == torch.uint8 and bits.shape == (rows, 2, -(-n // 8))
    assert torch.equal(unpack_bits(bits, n), mask)


def test_the_lowest_bit_comes_first_and_the_rest_is_zero():
    mask = torch.zeros(11, dtype=torch.bool)
    mask[[0, 3, 8, 10]] = True
    assert pack_bits(mask).tolist() == [0b1001, 0b101]


# ---------------------------------------------------------------------------------------------------------- 7: slots


def test_a_slot_is_freed_once_all_layers_cleared_it():
    table = SlotBits(3, H, 13)
    assert table.freed().all()
    table.take(torch.arange(11))
    assert not table.freed()[:, :11].any() and table.freed()[:, 11:].all()
    keeps = [chosen(H, 13, seed=s) for s in range(3)]
    for layer, keep in enumerate(keeps):
        table.clear(layer, keep)
        assert torch.equal(table.live(layer), keep & (torch.arange(13) < 11))
    anyone = torch.stack(keeps).any(0) & (torch.arange(13) < 11)
    assert torch.equal(table.freed(), ~anyone) and torch.equal(freed(table.bits, 13), ~anyone)
    assert anyone.any() and not anyone[:, :11].all(), "the case has both"


def test_a_cleared_bit_never_returns():
    table = SlotBits(2, H, 20)
    table.take(torch.arange(20))
    before = table.live(0)
    for round_ in range(6):
        table.clear(0, chosen(H, 20, share=0.7, seed=round_))
        now = table.live(0)
        assert (now <= before).all()
        before = now
    assert table.live(1).all(), "other layers keep theirs"
    old = table.bits
    table.take(torch.tensor([3]))  # the slot is given to a new token
    assert table.live(0)[:, 3].all() and not torch.equal(old, table.bits)


# --------------------------------------------------------------------------------------------------------- the tables


def test_a_table_names_the_slots_of_live_tokens_in_order():
    pool, live = Pool(), chosen(B, H, N)
    table = page_table(pool.slots, live)
    assert table.lengths.tolist() == live.sum(-1).flatten().tolist()
    assert table.seq_to_slot.shape == (B * H, int(live.sum(-1).max()))
    for b in range(B):
        for h in range(H):
            wanted = [int(s) * H + h for s in pool.slots[b][live[b, h]]]
            row = table.seq_to_slot[b * H + h].tolist()
            assert row[: len(wanted)] == wanted and set(row[len(wanted) :]) <= {0}


def oracle(pool, q, live):
    return attend_reference(q, *pool.dense(), scale=0.3, causal=False, mask=live[:, :, None])[0]


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("read", [attend_pages, attend_fixed])
@pytest.mark.parametrize("table", [page_table, masked_table])
def test_compacted_and_masked_tables_give_masked_attention(read, table, T):
    """5: whatever the slots' permutation, compacted equals masked."""
    pool, live, q = Pool(), chosen(B, H, N), rand(B, HQ, T, D, seed=3)
    found = read(q, pool.k, pool.v, table(pool.slots, live), scale=0.3)
    torch.testing.assert_close(found, oracle(pool, q, live), atol=1e-5, rtol=0)


def test_the_order_of_the_slots_does_not_matter():
    pool, live, q = Pool(), chosen(B, H, N), rand(B, HQ, 1, D, seed=3)
    table = page_table(pool.slots, live)
    at = torch.arange(table.seq_to_slot.shape[1])
    turned = torch.where(at < table.lengths[:, None], table.lengths[:, None] - 1 - at, at)
    other = PageTable(table.seq_to_slot.gather(1, turned), table.lengths)
    assert not torch.equal(other.seq_to_slot, table.seq_to_slot)
    torch.testing.assert_close(attend_pages(q, pool.k, pool.v, other), attend_pages(q, pool.k, pool.v, table), atol=1e-6, rtol=0)


@pytest.mark.parametrize("read", [attend_pages, attend_fixed])
def test_flattened_heads_give_ordinary_grouped_attention(read):
    """6: with equal lengths the flattened layout is grouped-query attention."""
    pool, q = Pool(), rand(B, HQ, 1, D, seed=4)
    everything = torch.ones(B, H, N, dtype=torch.bool)
    found = read(q, pool.k, pool.v, page_table(pool.slots, everything), scale=0.3)
    torch.testing.assert_close(found, attend(q, *pool.dense(), scale=0.3, causal=False)[0], atol=1e-6, rtol=0)
    rows = flattened(q, H)
    assert rows.shape == (B * H, HQ // H, 1, D) and torch.equal(rows[3], q[1, 3:])
    with pytest.raises(ValueError, match="6 query heads don't divide among 4 KV heads"):
        flattened(q, 4)


# ------------------------------------------------------------------------------------------------- 11: captured graphs


def test_buffers_stay_where_they_are():
    pool, buffers = Pool(), IndexBuffers(B * H, N)
    q, first = rand(B, HQ, 1, D, seed=6), buffers.table
    places = [t.data_ptr() for t in (first.seq_to_slot, first.lengths, first.bits)]
    for share, table in ((0.8, masked_table), (0.3, page_table), (0.5, page_table), (0.4, masked_table)):
        live = chosen(B, H, N, share=share, seed=int(10 * share))
        held = buffers.load(table(pool.slots, live))
        assert places == [t.data_ptr() for t in (held.seq_to_slot, held.lengths, held.bits)]
        torch.testing.assert_close(attend_fixed(q, pool.k, pool.v, held, scale=0.3), oracle(pool, q, live), atol=1e-5, rtol=0)
    one = buffers.load(page_table(pool.slots[:1], chosen(1, H, N)))
    assert one.lengths[H:].tolist() == [0] * H
    assert (attend_fixed(q, pool.k, pool.v, one)[1] == 0).all(), "rows without pages read nothing"


def test_what_does_not_fit_raises():
    pool, live = Pool(), chosen(B, H, N)
    with pytest.raises(ValueError, match=r"4 rows and 21 pages doesn't fit into buffers \(4, 20\)"):
        IndexBuffers(B * H, 20).load(masked_table(pool.slots, live))
    with pytest.raises(ValueError, match="4 rows of queries need a table of as many, got 2"):
        attend_fixed(rand(B, HQ, 1, D), pool.k, pool.v, page_table(pool.slots[:1], live[:1]))


class Engine:
    """A paged engine in miniature: token slots shared by all layers, bits per layer and head, and rounds that clear some."""

    def __init__(self, model, slots, captured):
        config = model.config
        self.heads, self.captured, self.n = config.num_key_value_heads, captured, 0
        shape = (config.num_hidden_layers, slots, self.heads, config.head_dim)
        self.k, self.v, self.bits = torch.zeros(shape), torch.zeros(shape), SlotBits(shape[0], self.heads, slots)
        self.buffers, self.graph = IndexBuffers(self.heads, slots), None
        self.lengths = []

    def read(self, model, ids):
        """Logits of the last token."""
        n = ids.shape[1]
        self.bits.take(torch.arange(self.n, self.n + n))
        with Recipe().on(model) as run:
            run.attend = self.attend
            out = model(ids, position_ids=torch.arange(self.n, self.n + n)[None], use_cache=False).logits[0, -1]
        self.n += n
        return out

    def attend(self, call):
        new = slice(self.n, self.n + call.k.shape[2])
        self.k[call.layer, new], self.v[call.layer, new] = call.k[0].transpose(0, 1), call.v[0].transpose(0, 1)
        if call.q.shape[2] > 1:
            return attend(call.q, call.k, call.v, scale=call.scale)[0]
        live, slots = self.bits.live(call.layer)[None], torch.arange(self.bits.slots)[None]
        self.lengths.append(int(live.sum()))
        if not self.captured:
            return attend_pages(call.q, self.k[call.layer], self.v[call.layer], page_table(slots, live), scale=call.scale)
        self.buffers.load(page_table(slots, live))
        return self.replay(call.q, self.k[call.layer], self.v[call.layer], call.scale)

    def replay(self, q, k, v, scale):
        """The graph is recorded at the first step; later steps run the same operations of the same shapes."""
        table = self.buffers.table
        if self.graph is None:
            step = lambda q, k, v, slots, lengths, bits: attend_fixed(q, k, v, PageTable(slots, lengths, bits), scale=scale)  # noqa: E731
            self.graph = make_fx(step)(q, k, v, table.seq_to_slot, table.lengths, table.bits)
        return self.graph(q, k, v, table.seq_to_slot, table.lengths, table.bits)

    def round(self, seed):
        """Every layer's heads drop a random third of what they have, but neither the first nor the newest entry."""
        for layer in range(len(self.k)):
            keep = torch.rand(self.heads, self.bits.slots, generator=torch.Generator().manual_seed(10 * seed + layer)) > 0.33
            keep[:, [0, self.n - 1]] = True
            self.bits.clear(layer, keep)


@torch.no_grad()
def write(model, captured, steps=24):
    engine, ids = Engine(model, 64, captured), tiny_ids(1, 30)
    tokens, logits = [], engine.read(model, ids)
    for step in range(steps):
        if step % 5 == 0:
            engine.round(step)
        tokens.append(int(logits.argmax()))
        logits = engine.read(model, torch.tensor([tokens[-1:]]))
    return tokens, engine


def test_captured_and_eager_decoding_write_the_same():
    """11: index buffers of fixed shape, through one recorded graph, against eager tables."""
    model = tiny("llama")
    eager, captured = write(model, False), write(model, True)
    assert eager[0] == captured[0] and len(set(eager[0])) > 3
    assert eager[1].lengths == captured[1].lengths and len(set(eager[1].lengths)) > 5
    assert captured[1].bits.freed().any(), "rounds freed slots"
    tokens, logits = [], None
    whole = tiny_ids(1, 30)
    with torch.no_grad():
        for _ in range(24):
            logits = model(whole).logits[0, -1]
            tokens.append(int(logits.argmax()))
            whole = torch.cat([whole, torch.tensor([tokens[-1:]])], 1)
    assert tokens != eager[0], "the rounds matter"

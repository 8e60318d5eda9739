"""The tiered store: whatever is read, dropped, taken back or repeated, it shows and attends what a ragged store does."""

from __future__ import annotations

import copy

import pytest
import torch
from generating import left_padded, new_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from masked_oracle import check_against_oracle
from tiny_models import tiny, tiny_ids

from longspan.cache.paged import pack_bits, unpack_bits
from longspan.cache.stores.ragged import Ragged
from longspan.cache.stores.tiered import InPlaceBuffer, Tiered
from longspan.recipe import Recipe
from longspan.registry import Refused

B, HQ, H, D = 2, 4, 2, 8


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def randbool(*shape, share=0.6, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < share


class Pair:
    """A tiered layer and a ragged one that live through the same."""

    def __init__(self, sparse_rounds, seed=0):
        self.layers = [Tiered(sparse_rounds=sparse_rounds).make(), Ragged().make()]
        self.at, self.rows, self.seed = 0, B, 100 * seed

    @property
    def tiered(self):
        return self.layers[0]

    def draw(self, *shape):
        self.seed += 1
        return rand(*shape, seed=self.seed)

    def read(self, n, *, pads=False, **more):
        """Append n tokens and attend from them."""
        k, v, q = (self.draw(self.rows, heads, n, D) for heads in (H, H, HQ))
        positions = torch.arange(self.at, self.at + n).expand(self.rows, n)
        valid = None
        if pads:
            valid = randbool(self.rows, n, seed=self.seed)
            valid[:, -1] = True
        self.at += n
        for layer in self.layers:
            layer.append(k, v, positions, valid)
        outs = [layer.attend(q, positions, scale=0.3, **more) for layer in self.layers]
        if valid is not None:  # rows of padding are nobody's business
            outs = [out * valid[:, None, :, None] for out in outs]
        torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-5)  # HARD-KV's check 5: masked = compacted
        self.same()

    def drop(self, share=0.6):
        self.seed += 1
        mask = self.layers[1].view().valid
        mask = mask & randbool(*mask.shape, share=share, seed=self.seed)
        for layer in self.layers:
            layer.keep(mask)
        self.same()

    def same(self):
        """Both show the same entries in the same columns."""
        a, b = (layer.view() for layer in self.layers)
        assert torch.equal(a.valid, b.valid)
        for field in ("k", "v", "positions"):
            assert torch.equal(getattr(a, field)[a.valid], getattr(b, field)[a.valid])
        assert torch.equal(*(layer.lengths() for layer in self.layers))
        assert self.layers[0].width() == self.layers[1].width() == a.k.shape[2]

    def select(self, rows):
        for layer in self.layers:
            layer.select(torch.tensor(rows))
        self.rows = len(rows)
        self.same()

    def crop(self, n):
        for layer in self.layers:
            layer.crop(n)
        self.same()

    def reload(self):
        """Go on from the saved state."""
        fresh = [Tiered(sparse_rounds=self.tiered.sparse_rounds).make(), Ragged().make()]
        for old, new in zip(self.layers, fresh):
            new.load({n: t.clone() for n, t in old.state().items()})
        self.layers = fresh
        self.same()


def run(pair, step):
    if step == "read":
        pair.read(1)
    elif step == "chunk":
        pair.read(5)
    elif step == "padded":
        pair.read(4, pads=True)
    elif step == "window":
        pair.read(2, window=7)
    elif step == "capped":
        pair.read(3, softcap=2.0)
    elif step == "drop":
        pair.drop()
    elif step == "drop most":
        pair.drop(0.15)
    elif step == "beams":
        pair.select([1, 0, 0][: 2 + pair.seed % 2])
    elif step == "crop" and pair.tiered.tail.length - pair.tiered.tail.kept >= 1:
        pair.crop(1)
    elif step == "reload":
        pair.reload()


STEPS = st.sampled_from(["read", "chunk", "padded", "window", "capped", "drop", "drop", "drop most", "beams", "crop", "reload"])


@settings(max_examples=80, deadline=None, derandomize=True)
@given(sparse_rounds=st.integers(0, 3), steps=st.lists(STEPS, min_size=1, max_size=10), seed=st.integers(0, 99))
def test_lives_like_a_ragged_store(sparse_rounds, steps, seed):
    pair = Pair(sparse_rounds, seed)
    pair.read(11)
    for step in steps:
        run(pair, step)
    pair.read(1)


@pytest.mark.parametrize("sparse_rounds", [0, 1, 2, 99])
def test_a_long_life(sparse_rounds):
    """Every step follows a sparse round on a fresh store, on a condensed one, and a rewrite."""
    pair = Pair(sparse_rounds)
    pair.read(20)
    for step in ("read", "window", "capped", "chunk", "padded", "beams", "crop", "reload", "read"):
        pair.drop(0.8)
        pair.read(3)
        run(pair, step)


# -------------------------------------------------------------------------------------------------- rounds and bytes


def storages(layer):
    return {t.untyped_storage().data_ptr() for t in (layer.tail.k, layer.tail.v)}


def test_sparse_rounds_clear_bits_and_move_nothing():
    pair = Pair(2)
    pair.read(24)
    layer, before = pair.tiered, storages(pair.tiered)
    size = layer.nbytes()
    pair.drop(0.5)
    assert storages(layer) == before and layer.tail.kept == 24 and layer.offsets is None
    assert layer.tail.bits.shape == (B, H, 3) and layer.nbytes() == size + B * H * 3
    pair.drop(0.5)
    assert storages(layer) == before and layer.nbytes() == size + B * H * 3, "dead entries are not freed yet"
    pair.drop(0.9)
    entries = int(layer.lengths().sum())
    assert layer.tail.k is None and layer.tail.bits is None
    assert layer.nbytes() == entries * (2 * D * 4 + 4) + (B * H + 1) * 8, "a rewrite frees what is dead"


def test_with_no_sparse_rounds_every_compression_frees():
    pair = Pair(0)
    for _ in range(3):
        pair.read(16)
        pair.drop(0.5)
        assert pair.tiered.nbytes() == pair.layers[1].nbytes() and pair.tiered.rounds == 0


@pytest.mark.parametrize("sparse_rounds", [1, 3])
def test_a_rewrite_follows_so_many_sparse_rounds(sparse_rounds):
    pair, rewritten = Pair(sparse_rounds), []
    pair.read(30)
    for _ in range(2 * (sparse_rounds + 1)):
        pair.drop(0.9)
        rewritten.append(pair.tiered.tail.k is None)
        pair.read(2)
    assert rewritten == 2 * ([False] * sparse_rounds + [True])


def test_the_condensed_tier_has_bits_after_a_sparse_round():
    pair = Pair(1)
    pair.read(20)
    for share in (0.7, 0.7):
        pair.drop(share)
    layer = pair.tiered
    runs = layer.view().valid.shape[-1]
    flat = layer.k.data_ptr()
    pair.read(4)
    pair.drop(0.5)
    assert layer.k.data_ptr() == flat and layer.bits.shape == (B, H, (runs + 7) // 8)
    live = unpack_bits(layer.bits, runs).sum(-1) + layer.tail.kept_valid.sum(-1)
    assert torch.equal(live, layer.lengths()) and "flat_bits" in layer.tensors()


def test_live_sets_only_shrink_between_rewrites():
    """HARD-KV's check 7: except for what was appended since."""
    pair = Pair(99)
    pair.read(20)
    before = live_positions(pair.tiered)
    for _ in range(5):
        pair.drop(0.8)
        pair.read(2)
        new = {pair.at - 1, pair.at - 2}
        now = live_positions(pair.tiered)
        assert all(a <= b | new and new <= a for a, b in zip(now, before))
        before = now


def live_positions(layer):
    view = layer.view()
    return [set(view.positions[b, h][view.valid[b, h]].tolist()) for b in range(B) for h in range(H)]


def test_other_keys_make_a_rewrite():
    pair = Pair(5)
    pair.read(12)
    pair.drop()
    view = pair.tiered.view()
    keys = rand(*view.k.shape, seed=7)
    pair.tiered.keep(view.valid, keys)
    assert pair.tiered.offsets is not None and pair.tiered.rounds == 0
    held = pair.tiered.view()
    assert torch.equal(held.k[held.valid], keys[view.valid])


@pytest.mark.parametrize("sparse_rounds", [0, 2])
def test_what_a_compression_looked_at_cannot_be_taken_back(sparse_rounds):
    pair = Pair(sparse_rounds)
    pair.read(12)
    assert pair.tiered.untouched
    pair.drop()
    assert not pair.tiered.untouched
    pair.read(3)
    pair.crop(2)
    with pytest.raises(Refused, match="can't take back 2 tokens: only the 1 read since the last compression"):
        pair.tiered.crop(2)


def test_a_copy_is_not_touched_by_what_follows():
    """What a layer's snapshot does: shallow copies of store and tail, whose tensors nobody writes into."""
    pair = Pair(2)
    pair.read(15)
    pair.drop()
    pair.read(3)
    saved = copy.copy(pair.tiered)
    saved.tail = copy.copy(saved.tail)
    before, bits = saved.view(), saved.tail.bits.clone()
    for _ in range(4):
        pair.drop(0.5)
        pair.read(2)
    after = saved.view()
    assert torch.equal(before.valid, after.valid) and torch.equal(saved.tail.bits, bits)
    assert torch.equal(before.k[before.valid], after.k[after.valid])


def test_the_buffer_reports_its_bits_and_shares_positions():
    buffer = InPlaceBuffer()
    buffer.append(rand(B, H, 10, D), rand(B, H, 10, D), torch.arange(10).expand(B, 10), None)
    mask = randbool(B, H, 10)
    buffer.settle(mask)
    assert torch.equal(buffer.kept_valid, mask) and torch.equal(buffer.bits, pack_bits(mask))
    assert set(buffer.tensors()) == {"k", "v", "kept_positions", "bits"}
    assert buffer.kept_positions.untyped_storage().nbytes() == B * 10 * 4, "heads share their positions"


# ---------------------------------------------------------------------------------------------------------- in a model


@pytest.mark.parametrize("recipe", [
    "snapkv(window=4, store=tiered(sparse_rounds={n}), schedule=every(steps=3)) @ adakv(budget=0.5)",
    "h2o(budget=0.4, store=tiered(sparse_rounds={n}), schedule=per-chunk(size=7))",
])
@pytest.mark.parametrize("n", [1, 2, 9])
def test_sparse_rounds_equal_the_masked_oracle(recipe, n):
    model = tiny("llama")
    ids, mask = left_padded(tiny_ids(1, 33), tiny_ids(1, 28, seed=1))
    cache = check_against_oracle(model, Recipe.parse(recipe.format(n=n)), ids, 24, mask, pieces=[24, 1, 4, 3, 1])
    assert cache.achieved().compressions == 4 and cache.achieved().kept_fraction < 0.8


def test_drafts_are_taken_back_across_a_sparse_round():
    model, ids = tiny("llama"), tiny_ids(1, 30)
    recipe = Recipe.parse("knorm(budget=0.5, store=tiered(sparse_rounds=2), schedule=every(steps=3))")
    with recipe.on(model) as run_, torch.no_grad():
        plain = new_tokens(model, ids, 12)
        point_free = run_.achieved.compressions
    with recipe.on(model) as run_, torch.no_grad():
        drafted = new_tokens(model, ids, 12, prompt_lookup_num_tokens=4)
    assert plain == drafted and point_free == run_.achieved.compressions == 4


def test_beams_run_through_sparse_rounds():
    model, ids = tiny("llama"), tiny_ids(2, 20)
    found = []
    for store in ("tiered(sparse_rounds=2)", "ragged"):
        with Recipe.parse(f"knorm(store={store}, schedule=every(steps=2)) @ adakv(budget=0.5)").on(model), torch.no_grad():
            found.append(new_tokens(model, ids, 8, num_beams=3))
    assert found[0] == found[1]

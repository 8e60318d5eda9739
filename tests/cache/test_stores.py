"""Stores: what they hold after keeping a part, what attention over it gives, and the bytes it takes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from profiled import ClosedMemory

from longspan import registry
from longspan.cache.store import Buffer, kept_last
from longspan.cache.stores.dense import Dense
from longspan.cache.stores.quantised import Quantised, pack_codes, unpack_codes
from longspan.cache.stores.ragged import Ragged
from longspan.cache.stores.tiered import Tiered
from longspan.kernels import attend
from longspan.registry import Refused, cards

B, HQ, H, D = 2, 4, 2, 8
STORES = {"dense": Dense(), "ragged": Ragged(), "quantised": Quantised(bits=8, group=4), "tiered": Tiered(),
          "latent-memory": ClosedMemory()}


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def filled(store, n=20, valid=None, seed=0, dtype=torch.float32):
    layer = store.make()
    layer.append(rand(B, H, n, D, seed=seed).to(dtype), rand(B, H, n, D, seed=seed + 1).to(dtype),
                 torch.arange(n).expand(B, n), valid)
    return layer


def unequal(n=20):
    mask = torch.zeros(B, H, n, dtype=torch.bool)
    for i, (b, h) in enumerate((b, h) for b in range(B) for h in range(H)):
        mask[b, h, torch.randperm(n, generator=torch.Generator().manual_seed(i))[: 4 + 3 * i]] = True
    return mask


def step(layer, T, start, seed=9, **more):
    """Append T tokens and attend from them: what the layer gives, and dense attention over its view."""
    q = rand(B, HQ, T, D, seed=seed)
    positions = torch.arange(start, start + T).expand(B, T)
    layer.append(rand(B, H, T, D, seed=seed + 1), rand(B, H, T, D, seed=seed + 2), positions, None)
    out = layer.attend(q, positions, scale=0.3, **more)
    view = layer.view()
    mask = (view.positions[:, :, None, :] <= positions[:, None, :, None]) & view.valid[:, :, None]
    if "window" in more:
        mask &= positions[:, None, :, None] - view.positions[:, :, None, :] < more["window"]
    return out, attend(q, view.k, view.v, scale=0.3, causal=False, mask=mask, softcap=more.get("softcap"))[0]


def test_all_stores_of_the_package_are_tested():
    assert {c.name for c in cards(kind="store") if c.module.startswith("longspan.")} <= set(STORES)


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize("more", [{}, {"window": 6}, {"softcap": 3.0}])
@pytest.mark.parametrize("T", [1, 3])
def test_attends_to_what_it_holds(name, more, T):
    layer = filled(STORES[name])
    torch.testing.assert_close(*step(layer, T, 20, **more), atol=2e-6, rtol=1e-5)
    layer.keep(unequal(20 + T))
    for i in range(3):
        torch.testing.assert_close(*step(layer, T, 20 + T + i * T, seed=30 + i, **more), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", STORES)
def test_keeps_what_it_is_told(name):
    layer = filled(STORES[name])
    before, mask = layer.view(), unequal()
    k, v = before.k.clone(), before.v.clone()
    layer.keep(mask)
    after = layer.view()
    assert layer.lengths().tolist() == mask.sum(-1).tolist() == after.valid.sum(-1).tolist()
    assert layer.width() == after.k.shape[2]
    tolerance = 0.02 if name == "quantised" else 0.0
    for b in range(B):
        for h in range(H):
            held = after.valid[b, h]
            assert after.positions[b, h][held].tolist() == mask[b, h].nonzero()[:, 0].tolist()
            torch.testing.assert_close(after.k[b, h][held], k[b, h][mask[b, h]], atol=tolerance, rtol=0)
            torch.testing.assert_close(after.v[b, h][held], v[b, h][mask[b, h]], atol=tolerance, rtol=0)
            assert held.tolist() == sorted(held.tolist()), "dead columns stand before what is held"
    order = kept_last(mask, int(mask.sum(-1).max()))
    assert (mask.gather(-1, order) == after.valid).all()


@pytest.mark.parametrize("name", STORES)
def test_keeps_other_keys_if_given(name):
    layer, mask = filled(STORES[name]), unequal()
    keys = rand(B, H, 20, D, seed=77)
    layer.keep(mask, keys)
    view = layer.view()
    torch.testing.assert_close(view.k[view.valid], keys[mask], atol=0.03 if name == "quantised" else 0, rtol=0)


@pytest.mark.parametrize("name", STORES)
def test_crop_takes_back_the_newest_and_no_more(name):
    layer = filled(STORES[name])
    layer.crop(5)
    assert layer.lengths().tolist() == [[15] * H] * B
    layer.keep(unequal(15))
    kept = layer.lengths()
    step(layer, 3, 15)
    layer.crop(2)
    assert (layer.lengths() == kept + 1).all()
    with pytest.raises(Refused, match="can't take back 2 tokens: only the 1 read since the last compression"):
        layer.crop(2)
    torch.testing.assert_close(*step(layer, 1, 16, seed=50), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", STORES)
def test_rows_are_picked_and_repeated(name):
    layer = filled(STORES[name])
    layer.keep(unequal())
    step(layer, 2, 20)
    before = layer.view()
    rows = torch.tensor([1, 0, 1])
    layer.select(rows)
    after = layer.view()
    live = after.valid
    assert (live == before.valid[rows]).all()
    for field in ("k", "v", "positions"):
        assert torch.equal(getattr(after, field)[live], getattr(before, field)[rows][live])
    layer.select(torch.tensor([2, 2]))
    assert (layer.view().valid == before.valid[[1, 1]]).all()


def test_ragged_rows_share_their_prefix():
    layer = filled(Ragged(), n=200)
    layer.keep(unequal(200))
    before = layer.nbytes()
    layer.select(torch.tensor([0, 0, 0, 1]))
    assert layer.nbytes() <= before + 4 * 8
    layer.keep(torch.ones(4, H, layer.width(), dtype=torch.bool) & layer.view().valid)
    assert layer.rows is None and layer.lengths().shape == (4, H)


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize("tail", [0, 3])
def test_state_is_all_there_is(name, tail):
    layer = filled(STORES[name])
    layer.keep(unequal())
    if tail:
        step(layer, tail, 20)
    other = STORES[name].make()
    other.load({n: t.clone() for n, t in layer.state().items()})
    a, b = layer.view(), other.view()
    for field in ("valid", "positions", "k", "v"):
        assert torch.equal(getattr(a, field)[a.valid], getattr(b, field)[a.valid])
    torch.testing.assert_close(step(layer, 1, 30)[0], step(other, 1, 30)[0], atol=0, rtol=0)


@pytest.mark.parametrize("name", STORES)
def test_padding_is_held_apart(name):
    valid = torch.ones(B, 20, dtype=torch.bool)
    valid[0, :6] = False
    layer = filled(STORES[name], valid=valid)
    assert layer.lengths().tolist() == [[14, 14], [20, 20]]
    torch.testing.assert_close(*step(layer, 1, 20), atol=2e-6, rtol=1e-5)
    held = layer.view().valid
    layer.keep(held)
    assert layer.lengths().tolist() == [[15, 15], [21, 21]]
    torch.testing.assert_close(*step(layer, 2, 21, seed=40), atol=2e-6, rtol=1e-5)
    before, question = layer.lengths(), torch.tensor([[False, True, True], [True, True, True]])
    layer.append(rand(B, H, 3, D), rand(B, H, 3, D), torch.arange(23, 26).expand(B, 3), question)
    assert (layer.lengths() - before).tolist() == [[2, 2], [3, 3]]
    torch.testing.assert_close(*step(layer, 1, 26, seed=60), atol=2e-6, rtol=1e-5)


def test_dense_takes_what_fills_its_storage_and_copies_slices():
    k = rand(B, H, 20, D)
    layer = Dense().make()
    layer.append(k, k[:, :, :20], torch.arange(20).expand(B, 20), None)
    assert layer.tail.k is k
    sliced = rand(B, H, 40, D)[:, :, 20:]
    layer = Dense().make()
    layer.append(sliced, sliced, torch.arange(20).expand(B, 20), None)
    assert layer.tail.k.untyped_storage().nbytes() == 20 * B * H * D * 4


def test_buffer_grows_in_proportion_and_then_by_a_fixed_step():
    buffer = Buffer()
    sizes = []
    for i in range(3000):
        buffer.append(rand(1, 1, 1, 2), rand(1, 1, 1, 2), torch.tensor([[i]]), None)
        if not sizes or sizes[-1] != buffer.k.shape[2]:
            sizes.append(buffer.k.shape[2])
    assert sizes[:3] == [1, 18, 35]
    assert max(b - a for a, b in itertools.pairwise(sizes)) == 257
    assert buffer.all_positions()[0, 0].tolist() == list(range(3000))


def test_a_buffer_of_inference_mode_can_be_written_outside_of_it():
    buffer = Buffer()
    with torch.inference_mode():
        for i in range(2):
            buffer.append(rand(1, 1, 1, 2), rand(1, 1, 1, 2), torch.tensor([[i]]), None)
    buffer.append(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2), torch.tensor([[2]]), None)
    assert buffer.length == 3 and bool((buffer.keys[:, :, 2] == 1).all())


# ------------------------------------------------------------------------------------------------------------ bytes


def test_bytes_are_those_of_storages_counted_once():
    layer = filled(Dense(), n=20)
    assert layer.nbytes() == 2 * B * H * 20 * D * 4 + B * 20 * 4
    layer.tail.v = layer.tail.k
    assert layer.nbytes() == B * H * 20 * D * 4 + B * 20 * 4


@pytest.mark.parametrize("name", STORES)
def test_entry_bytes_foretell_what_is_held(name):
    """Within five percent on a long prefix, scales of the quantised store included; positions come on top."""
    store = STORES[name]
    layer = filled(store, n=600)
    mask = torch.zeros(B, H, 600, dtype=torch.bool)
    mask[:, :, :400] = True
    layer.keep(mask)
    entries = B * H * 400
    assert layer.nbytes() == pytest.approx(entries * (store.entry_bytes(D, 4) + 4), rel=0.05)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_quantised_bytes_shrink_with_the_bits(bits):
    store = Quantised(bits=bits, group=8)
    layer = filled(store, n=600, dtype=torch.bfloat16)
    full = layer.nbytes()
    layer.keep(torch.ones(B, H, 600, dtype=torch.bool))
    # Scales: two float16 a channel and run of 8 tokens (keys), two a token (values, 8 channels); positions four bytes.
    assert layer.nbytes() / full == pytest.approx((bits / 8 * 16 + 4 * 8 / 8 + 4 + 4) / 34, rel=0.05)


# ------------------------------------------------------------------------------------------------------ quantisation


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([8, 4, 2]), st.integers(1, 40), st.integers(0, 1000))
def test_codes_survive_packing(bits, n, seed):
    codes = torch.randint(0, 2**bits, (n, 8), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (n, 8 * bits // 8)
    assert torch.equal(unpack_codes(packed, bits), codes)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_quantisation_error_is_half_a_step(bits):
    layer = filled(Quantised(bits=bits, group=4), n=40)
    k, v = layer.view().k.clone(), layer.view().v.clone()
    layer.keep(torch.ones(B, H, 40, dtype=torch.bool))
    view = layer.view()
    for exact, held, axis in ((k, view.k, 2), (v, view.v, 3)):
        runs = exact.unflatten(axis, (-1, 4))
        step_size = (runs.amax(axis + 1, keepdim=True) - runs.amin(axis + 1, keepdim=True)) / (2**bits - 1)
        bound = (step_size / 2).expand_as(runs).flatten(axis, axis + 1)
        assert ((held - exact).abs() <= 1.05 * bound + 0.005).all()  # scales are stored in float16


def test_runs_of_tokens_never_span_two_heads():
    """A head of large numbers next to one of small numbers doesn't spoil its scale."""
    layer = Quantised(bits=8, group=32).make()
    k = rand(B, H, 10, D)
    k[:, 1] *= 1000
    layer.append(k, k, torch.arange(10).expand(B, 10), None)
    layer.keep(unequal(10) | (torch.arange(10) < 3))
    view = layer.view()
    small = (view.k[:, 0] - _kept(k, layer)[:, 0]).abs()[view.valid[:, 0]]
    assert small.max() < 0.02


def _kept(k, layer):
    view = layer.view()
    index = torch.where(view.valid, view.positions, 0).long()[..., None].expand(*view.positions.shape, D)
    return k.gather(2, index)


def test_constant_runs_are_exact():
    layer = Quantised(bits=2, group=4).make()
    ones = torch.full((B, H, 8, D), 0.5)
    layer.append(ones, ones, torch.arange(8).expand(B, 8), None)
    layer.keep(torch.ones(B, H, 8, dtype=torch.bool))
    assert torch.equal(layer.view().k, ones) and torch.equal(layer.view().v, ones)


def test_a_group_that_does_not_divide_the_head_is_refused():
    layer = filled(Quantised(group=3))
    with pytest.raises(Refused, match=r"group=3.*head dimension 8 is not a multiple.*such as 2"):
        layer.keep(torch.ones(B, H, 20, dtype=torch.bool))
    layer = filled(Quantised(group=64))  # larger than the head: one scale for all of it
    layer.keep(torch.ones(B, H, 20, dtype=torch.bool))
    assert layer.lengths().tolist() == [[20, 20]] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_quantised_gives_the_models_dtype_back(dtype):
    layer = filled(Quantised(bits=8, group=4), dtype=dtype)
    layer.keep(unequal())
    assert layer.view().k.dtype == dtype
    assert layer.flat()[0].dtype == dtype


def test_stores_are_methods():
    for name, store in STORES.items():
        assert registry.card(name).kind == "store"
        assert store.make() is not store.make()

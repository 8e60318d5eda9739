"""Every version of ragged attention against its definition: a loop over the segments in plain float32."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.kernels import attend, attend_ragged, attend_reference, decode_attend, merge, ragged
from longspan.kernels.ragged import Ragged, by_page, by_segment

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
needs_c = pytest.mark.skipif(ragged._kernel() is None, reason="no C compiler")


def draw(lengths, *, rows=1, group=2, steps=1, width=16, dtype=torch.float32, seed=0):
    """Queries strided as in a model, a flat prefix cut out of wider rows, offsets."""
    random = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    kv_heads = len(lengths) // rows
    q = torch.randn(rows, steps, kv_heads * group, width, generator=random).to(dtype).transpose(1, 2)
    k, v = (torch.randn(int(offsets[-1]), width + 5, generator=random).to(dtype)[:, :width] for _ in range(2))
    return q, k, v, offsets, kv_heads


def definition(q, k, v, offsets, kv_heads, rows=None, softcap=None, positions=None, q_positions=None, window=None):
    wide = (x.float() for x in (q, k, v))
    call = Ragged(*wide, offsets, rows, kv_heads, q.shape[-1] ** -0.5, softcap, positions, q_positions, window)
    return by_segment(call, attend_reference)


def assert_close(got, want, dtype):
    assert got[0].dtype == dtype and got[0].shape == want[0].shape
    torch.testing.assert_close(got[0].float(), want[0], rtol=0, atol=TOLERANCE[dtype])
    assert got[1].dtype == torch.float32
    assert torch.equal(got[1].isneginf(), want[1].isneginf())
    torch.testing.assert_close(got[1], want[1], rtol=1e-6, atol=3e-6 if dtype == torch.float32 else 3e-4)


@pytest.fixture(params=["c", "torch"])
def version(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(ragged, "_kernel", lambda: None)
    elif ragged._kernel() is None:
        pytest.skip("no C compiler")
    return request.param


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.sampled_from([0, 0, 1, 2, 15, 16, 17, 31, 33, 130, 200]), min_size=2, max_size=6),
    rows=st.integers(1, 2), group=st.integers(1, 5), steps=st.integers(1, 4),
    width=st.sampled_from([16, 17, 24, 32, 64, 72, 80, 128]), dtype=st.sampled_from(DTYPES),
    softcap=st.sampled_from([None, None, 3.0]), window=st.sampled_from([None, None, 20]), seed=st.integers(0, 99),
)  # fmt: skip
def test_all_versions_equal_the_definition(lengths, rows, group, steps, width, dtype, softcap, window, seed):
    lengths = lengths[: len(lengths) // rows * rows]
    q, k, v, offsets, kv_heads = draw(
        lengths, rows=rows, group=group, steps=steps, width=width, dtype=dtype, seed=seed
    )
    options = {"softcap": softcap}
    if window:
        random = torch.Generator().manual_seed(seed)
        options |= {"positions": torch.randint(0, 40, k.shape[:1], generator=random), "window": window,
                    "q_positions": torch.randint(20, 60, (rows, steps), generator=random)}  # fmt: skip
    want = definition(q, k, v, offsets, kv_heads, **options)
    assert_close(attend_ragged(q, k, v, offsets, **options), want, dtype)  # C, where a compiler is
    call = Ragged(q, k, v, offsets, None, kv_heads, width**-0.5, *(options.get(n) for n in (
        "softcap", "positions", "q_positions", "window")))  # fmt: skip
    assert_close(by_page(call), want, dtype)
    assert_close(by_segment(call), want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(700, 3, 300), (0, 0, 1000), (1, 999, 0), (2000, 0, 0), (340, 330, 335)])
def test_shares_of_several_threads(threads, version, lengths, dtype):
    q, k, v, offsets, kv_heads = draw(lengths, group=3, width=64, dtype=dtype)
    assert_close(attend_ragged(q, k, v, offsets), definition(q, k, v, offsets, kv_heads), dtype)


def test_many_short_segments(threads, version):
    lengths = [(7 * i) % 40 for i in range(80)]
    q, k, v, offsets, kv_heads = draw(lengths, rows=20, group=2, width=64)
    want = definition(q, k, v, offsets, kv_heads)
    assert_close(attend_ragged(q, k, v, offsets), want, torch.float32)


def test_long_questions(version):
    q, k, v, offsets, kv_heads = draw((50, 0, 7, 300), rows=2, group=2, steps=90)
    assert_close(attend_ragged(q, k, v, offsets), definition(q, k, v, offsets, kv_heads), torch.float32)


def test_pages_in_several_chunks(monkeypatch):
    q, k, v, offsets, kv_heads = draw((500, 0, 77, 300), rows=2)
    monkeypatch.setattr(ragged, "PAGED_NUMBERS", ragged.PAGE * 16 * 2)
    call = Ragged(q, k, v, offsets, None, kv_heads, 0.25)
    assert_close(by_page(call), definition(q, k, v, offsets, kv_heads), torch.float32)


def test_beams_read_the_prefix_row_they_point_at(version):
    _, k, v, offsets, kv_heads = draw((5, 40, 0, 9, 11, 3), rows=3, group=2)
    q = torch.randn(5, 4, 1, 16, generator=torch.Generator().manual_seed(1))
    rows = torch.tensor([2, 0, 0, 1, 2])
    got = attend_ragged(q, k, v, offsets, rows=rows, kv_heads=kv_heads)
    assert_close(got, definition(q, k, v, offsets, kv_heads, rows), torch.float32)
    for beam, row in enumerate(rows.tolist()):
        own = attend_ragged(q[beam : beam + 1], k, v, offsets[2 * row : 2 * row + 3])
        torch.testing.assert_close(got[0][beam], own[0][0], rtol=0, atol=1e-6)


def test_a_single_key_gives_its_value_exactly(version):
    """Loads and stores of every number format, subnormal numbers and the largest ones included."""
    for dtype in DTYPES:
        info = torch.finfo(dtype)
        special = [0.0, 1.0, -1.5, info.max, info.min, info.tiny, -info.tiny / 2, info.smallest_normal * 3, math.inf]
        v = torch.tensor(special + [1 / 3] * 7, dtype=dtype)[None]
        q, k = torch.ones(1, 1, 1, 16, dtype=dtype), torch.ones(1, 16, dtype=dtype)
        out, lse = attend_ragged(q, k, v, torch.tensor([0, 1]), scale=0.5)
        assert torch.equal(out[0, 0], v)
        assert lse.item() == pytest.approx(8.0, rel=1e-6)


def test_nan_is_not_hidden(version):
    q, k, v, offsets, _ = draw((30, 20), group=1, width=64)
    k = k.clone()
    k[35, 3] = math.nan
    out, lse = attend_ragged(q, k, v, offsets)
    assert out[0, 0].isfinite().all() and lse[0, 0].isfinite().all()
    assert out[0, 1].isnan().all() and lse[0, 1].isnan().all()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 17, 64, 100]), min_size=2, max_size=4), rows=st.integers(1, 2),
    group=st.integers(1, 3), steps=st.integers(1, 3), spare=st.integers(0, 40), masked=st.booleans(),
    width=st.sampled_from([16, 24, 64]), dtype=st.sampled_from(DTYPES), softcap=st.sampled_from([None, 3.0]),
    native=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_decode_reads_prefix_and_tail(lengths, rows, group, steps, spare, masked, width, dtype, softcap, native, seed):
    lengths = lengths[: len(lengths) // rows * rows]
    q, k, v, offsets, kv_heads = draw(
        lengths, rows=rows, group=group, steps=steps, width=width, dtype=dtype, seed=seed
    )
    random = torch.Generator().manual_seed(seed)
    buffer = torch.randn(2, rows, kv_heads, steps + spare + 5, width, generator=random).to(dtype)
    length = steps + spare
    mask = torch.rand(rows, length + 3, generator=random)[:, :length] < 0.6 if masked else None
    with pytest.MonkeyPatch.context() as patch:
        if not native:
            patch.setattr(ragged, "_kernel", lambda: None)
        got = decode_attend(q, (k, v, offsets, None), *buffer, length, mask, softcap=softcap, return_lse=True)
        dense = decode_attend(q, None, *buffer, length, mask, softcap=softcap, return_lse=True)
    tail = attend_reference(
        q.float(), *buffer[:, :, :, :length].float(), softcap=softcap,
        mask=None if mask is None else mask[:, None, None],
    )  # fmt: skip
    assert_close(dense, tail, dtype)
    assert_close(got, merge((definition(q, k, v, offsets, kv_heads, softcap=softcap), tail)), dtype)


def test_decode_lse_only_when_asked(version):
    q, k, v, offsets, _ = draw((3, 4))
    tail = torch.randn(1, 2, 6, 16)
    assert decode_attend(q, (k, v, offsets, None), tail, tail, 2)[1] is None
    assert attend_ragged(q, k, v, offsets, return_lse=False)[1] is None


def test_gradients_reach_a_trained_prefix():
    q, k, v, offsets, kv_heads = draw((9, 0, 5, 2), rows=2, group=2, steps=2)
    leaves = [x.double().clone().requires_grad_() for x in (q, k, v)]
    out, lse = attend_ragged(*leaves, offsets)
    (out.sum() + lse[lse.isfinite()].sum()).backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in leaves)
    call = Ragged(*leaves, offsets, None, kv_heads, 0.25)
    for function in (by_page, by_segment):

        def read(q, k, v, function=function):
            return function(call._replace(q=q, k_flat=k, v_flat=v))[0]

        assert torch.autograd.gradcheck(read, leaves, fast_mode=True)
    with torch.no_grad():  # without gradients wanted, leaves are read as they are
        assert not attend_ragged(*(x.float() for x in leaves), offsets)[0].requires_grad


def test_what_leads_outside_the_prefix_is_refused(version):
    q, k, v, offsets, kv_heads = draw((3, 4))
    for wrong in ([0, 3, 8], [0, 5, 4], [-1, 3, 7]):
        with pytest.raises(ValueError, match="inside the flat buffer"):
            attend_ragged(q, k, v, torch.tensor(wrong))
    for row in (1, -1):
        with pytest.raises(ValueError, match="row pointers"):
            attend_ragged(q, k, v, offsets, rows=torch.tensor([row]), kv_heads=kv_heads)


def test_wrong_shapes_are_named():
    q, k, v, offsets, kv_heads = draw((3, 4))
    tail = torch.zeros(1, 2, 6, 16)
    with pytest.raises(ValueError, match="bfloat16"):
        attend_ragged(q, k.bfloat16(), v, offsets)
    with pytest.raises(ValueError, match="offsets"):
        attend_ragged(q, k, v, offsets.int())
    with pytest.raises(ValueError, match="kv_heads"):
        attend_ragged(q, k, v, offsets, rows=torch.tensor([0]))
    with pytest.raises(ValueError, match=r"row pointers.*\(2,\)"):
        attend_ragged(q, k, v, offsets, rows=torch.tensor([0, 0]), kv_heads=kv_heads)
    with pytest.raises(ValueError, match="window=4"):
        attend_ragged(q, k, v, offsets, window=4)
    for length, mask in ((0, None), (7, None), (3, torch.ones(1, 4, dtype=torch.bool)), (3, torch.ones(1, 3))):
        with pytest.raises(ValueError, match="decode_attend expects"):
            decode_attend(q, None, tail, tail, length, mask)
    with pytest.raises(ValueError, match="decode_attend expects"):
        decode_attend(q, None, tail, tail.half(), 2)


@needs_c
def test_a_dense_cache_is_the_same_as_attention(threads):
    q, k, v = torch.randn(2, 6, 1, 64), *torch.randn(2, 2, 3, 500, 64)
    assert_close(decode_attend(q, None, k, v, 500, return_lse=True), attend(q, k, v), torch.float32)

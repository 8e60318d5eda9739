"""The low-bit estimate: codes, packing, and the C version against the definition."""

from __future__ import annotations

import ctypes
import math
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.kernels import low_bit, native
from longspan.kernels.low_bit import GROUPS, LowBit, important_blocks, largest_excess, pack, quantise, unpack
from longspan.registry import Refused

compiler = pytest.mark.skipif(
    not native.supported() or not any(map(shutil.which, native.COMPILERS)), reason="no C compiler"
)


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def zeros(x, count=1):
    return x.new_zeros(*x.shape[:2], x.shape[3]).float(), x.new_zeros(*x.shape[:2], count, x.shape[3]).float()


def question(T=150, S=280, B=2, heads=4, key_heads=2, D=32, groups="per_thread", k_block=32, dtype=torch.float32, seed=0):
    """Codes, biases and limits of random queries and keys, and the key blocks to ask about."""
    q, k = draw(B, heads, T, D, seed=seed, dtype=dtype) + 0.3, draw(B, key_heads, S, D, seed=seed + 1, dtype=dtype)
    qm, km = q.mean(2, dtype=torch.float32), k.mean(2, dtype=torch.float32)
    codes, _ = quantise(q, qm, zeros(q)[1], groups=groups, backend="reference")
    keys, bias = quantise(k, km, qm.view(B, key_heads, -1, D), groups=groups, k_block=k_block, backend="reference")
    limit = 3.6 * D**0.5 + draw(B, heads, T, seed=seed + 2)
    n_q = -(-T // 64)
    end = ((S - T + 64 * torch.arange(n_q)) // k_block).expand(B, -1).contiguous()
    begin = torch.arange(B)[:, None].expand_as(end).contiguous()
    return [codes, keys, bias.flatten(1, 2), limit, begin, end], {"q_block": 64, "k_block": k_block}


# --------------------------------------------------------------------------------------------------------------- codes


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("k_block", [None, 32])
def test_round_trip_is_within_half_a_step(backend, groups, k_block):
    for length, size in ((37, 1.0), (64, 1e6), (1, 1e-30)):
        x = draw(2, 3, length, 32, seed=length) * size
        made, _ = quantise(x, *zeros(x), groups=groups, k_block=k_block, backend=backend)
        assert made.codes.dtype == torch.int8 and int(made.codes.abs().max()) <= 7
        assert bool(((x - made.values).abs() <= made.scales[..., None] / 2 * (1 + 1e-5)).all())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-(2.0**126), 2.0**126, width=32), min_size=16, max_size=16))
def test_codes_never_leave_their_range(numbers):
    x = torch.tensor(numbers).view(1, 1, 1, 16)
    for backend in ("reference", "cpu"):
        made, _ = quantise(x, *zeros(x), groups="per_token", backend=backend)
        assert int(made.codes.abs().max()) <= 7 and float(made.scales.min()) > 0
        assert bool(((x - made.values).abs() <= made.scales[..., None] * 0.50001).all())


def test_rounding_is_half_to_even():
    x = torch.tensor([7.0, 0.5, 1.5, 2.5, -0.5, -1.5] + [0.0] * 10).view(1, 1, 1, 16)
    for backend in ("reference", "cpu"):
        made, _ = quantise(x, *zeros(x), groups="per_token", backend=backend)
        assert made.codes.flatten()[:6].tolist() == [7, 0, 2, 2, 0, -2]


def test_rows_share_scales_as_threads_hold_them():
    """Queries: r and r + 8 of every 16. Keys: equal (j mod 8) // 2 in each block. Zero rows have scale 1."""
    x = torch.zeros(1, 1, 64, 16)
    x[0, 0, 3, 0], x[0, 0, 20, 1] = 14.0, -21.0
    for backend in ("reference", "cpu"):
        scales = quantise(x, *zeros(x), groups="per_thread", backend=backend)[0].scales[0, 0]
        assert {i: float(s) for i, s in enumerate(scales) if s != 1} == {3: 2, 11: 2, 20: 3, 28: 3}
        scales = quantise(x, *zeros(x), groups="per_thread", k_block=32, backend=backend)[0].scales[0, 0]
        # 3 -> group 1, 20 -> (20 mod 8) // 2 = 2, both in the first block of 32.
        assert {i for i, s in enumerate(scales) if s == 2} == {2, 3, 10, 11, 18, 19, 26, 27}
        assert {i for i, s in enumerate(scales) if s == 3} == {4, 5, 12, 13, 20, 21, 28, 29}
        assert bool((scales[32:] == 1).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", GROUPS)
def test_the_c_quantiser_is_the_definition(dtype, groups):
    x = draw(2, 50, 3, 48, dtype=dtype).transpose(1, 2)
    mean, weigh = draw(2, 3, 48, seed=1), draw(2, 3, 2, 48, seed=2)
    valid = torch.ones(2, 50, dtype=torch.bool)
    valid[0, :7], valid[1, -3:] = False, False
    for k_block in (None, 16):
        given_ = {"groups": groups, "k_block": k_block, "valid": valid}
        a, dots_a = quantise(x, mean, weigh, backend="reference", **given_)
        b, dots_b = quantise(x, mean, weigh, backend="cpu", **given_)
        assert torch.equal(a.codes, b.codes) and torch.equal(a.scales, b.scales)
        assert torch.allclose(dots_a, dots_b, atol=1e-4)
        assert not a.codes[0, :, :7].any() and not dots_a[1, :, :, -3:].any()


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 1000))
def test_packed_nibbles_unpack_to_the_same_codes(rows, sixteens, seed):
    codes = torch.randint(-7, 8, (rows, 16 * sixteens), generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    packed = pack(codes)
    assert packed.dtype == torch.uint8 and packed.shape == (rows, 8 * sixteens)
    assert torch.equal(unpack(packed), codes)


@pytest.mark.parametrize("D", [15, 24, 8, 0])
def test_channels_that_cannot_be_packed_are_refused(D):
    with pytest.raises(Refused, match=f"{D} channels: expected a multiple of 16"):
        pack(torch.zeros(2, D, dtype=torch.int8))
    with pytest.raises(Refused, match="-7 to 7"):
        pack(torch.full((16,), -8, dtype=torch.int8))


# ------------------------------------------------------------------------------------------------------------ question


def plain(codes, keys, bias, limit, begin, end, q_block, k_block):
    """Pair by pair, in float64; also how near to its limit each block's best pair is, in units of the limit."""
    values, B, heads = codes.values.double(), *codes.codes.shape[:2]
    group = heads // keys.codes.shape[1]
    other = keys.values.double().repeat_interleave(group, 1)
    own = bias.double()[:, :, None]
    if codes.groups == "per_thread":
        step = codes.scales.double()[..., None] * keys.scales.double().repeat_interleave(group, 1)[:, :, None]
        own = (own / step).round() * step
    excess = values @ other.mT + own - limit.double()[..., None]
    n_q, n_k = begin.shape[1], -(-bias.shape[2] // k_block)
    best = torch.full((B, heads, n_q, n_k), -math.inf, dtype=torch.float64)
    for b in range(B):
        for u in range(n_q):
            for v in range(int(begin[b, u]), int(end[b, u])):
                best[b, :, u, v] = excess[b, :, u * q_block : (u + 1) * q_block, v * k_block : (v + 1) * k_block].amax((-2, -1))
    return best


@pytest.mark.parametrize("groups", GROUPS)
def test_the_definition_is_pair_by_pair(groups):
    given_, blocks = question(groups=groups)
    best = plain(*given_, **blocks)
    found = important_blocks(*given_, **blocks, backend="reference")
    clear = best.abs() > 0.3  # a rounded bias may fall to either side: one step of the codes
    assert torch.equal(found[clear], best[clear] > 0) and 0.05 < found.float().mean() < 0.95
    excess = largest_excess(*given_, **blocks)
    assert torch.equal(torch.isneginf(excess), torch.isneginf(best))
    real = ~torch.isneginf(best)
    assert torch.allclose(excess[real].double(), best[real], atol=0.3) and (excess[real] - best[real]).abs().median() < 1e-4


SHAPES = [
    {},
    {"groups": "per_token"},
    {"T": 64, "S": 500, "heads": 3, "key_heads": 1, "D": 64, "dtype": torch.bfloat16},
    {"T": 1, "S": 200, "D": 16, "k_block": 16},
    {"T": 130, "S": 130, "D": 12, "groups": "per_token", "k_block": 16},
    {"T": 100, "S": 257, "D": 40, "k_block": 64},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_c_version_is_the_definition(shape):
    """Odd lengths, groups, key blocks of 16 to 64, keys left out, rows that ask for nothing or for everything."""
    given_, blocks = question(**shape)
    _, _, bias, limit, *_ = given_
    bias[0, :, 40:75] = -math.inf
    limit[-1, 0], limit[-1, 1, ::7], limit[0, -1, -1] = math.inf, math.inf, -math.inf
    expected = important_blocks(*given_, **blocks, backend="reference")
    found = important_blocks(*given_, **blocks, backend="cpu")
    if shape.get("groups") == "per_token":  # a fused multiply-add rounds once: allow what is at the limit
        near = largest_excess(*given_, **blocks).abs() < 1e-4
        expected, found = expected | near, found | near
    assert torch.equal(expected, found)
    assert expected.any() and not expected.all()


def test_a_bias_beyond_whole_numbers_is_no_trouble():
    """The mean query may be huge beside what is left of the queries: then the bias alone decides."""
    given_, blocks = question()
    codes, _, bias, *_ = given_
    given_[0] = LowBit(codes.codes, codes.scales * 1e-12)
    given_[3] = bias.median().expand_as(given_[3]).contiguous()
    for backend in ("reference", "cpu"):
        found = important_blocks(*given_, **blocks, backend=backend)
        best = plain(*given_, **blocks)
        clear = best.abs() > 1e-5
        assert torch.equal(found[clear], best[clear] > 0)


@compiler
@pytest.mark.parametrize("processor", ["x86-64-v4", "x86-64-v3", "x86-64"])
def test_every_instruction_set_gives_the_same(processor, tmp_path):
    if native.platform.machine().lower() not in ("x86_64", "amd64"):
        pytest.skip("these are x86-64 instruction sets")
    compiler_ = next(path for path in map(shutil.which, native.COMPILERS) if path)
    try:
        built = native._compile(native.SOURCES / "low_bit.c", compiler_, tmp_path, (f"-march={processor}",), None)
        library = low_bit.declared(ctypes.CDLL(str(built)))
        if processor == "x86-64-v4" and "avx512bw" not in native._processor():
            pytest.skip("no AVX-512 here")
    except RuntimeError as error:
        pytest.skip(f"the compiler doesn't know {processor}: {error}")
    for shape in ({}, {"groups": "per_token", "D": 20}):
        given_, blocks = question(**shape)
        expected = important_blocks(*given_, **blocks, backend="reference")
        near = largest_excess(*given_, **blocks).abs() < 1e-4
        assert torch.equal(low_bit.compiled_blocks(library, *given_, *blocks.values()) | near, expected | near)
    x = draw(1, 2, 40, 32)
    made = [quantise(x, *zeros(x), groups="per_thread", backend="reference"),
            low_bit._compiled_codes(library, x, *zeros(x), "per_thread", None, None)]
    assert torch.equal(made[0][0].codes, made[1][0].codes)


def test_without_a_compiler_the_definition_answers(monkeypatch):
    given_, blocks = question()
    expected = important_blocks(*given_, **blocks)
    monkeypatch.setattr(low_bit, "_library", lambda: None)
    assert torch.equal(important_blocks(*given_, **blocks), expected)


def test_an_identity_quantiser_gives_exact_scores():
    q, k = draw(1, 2, 64, 16), draw(1, 1, 160, 16, seed=1)
    ones = torch.ones(1, 2, 64), torch.ones(1, 1, 160)
    begin, end = torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), 5)
    given_ = (LowBit(q, ones[0]), LowBit(k, ones[1]), torch.zeros(1, 2, 160), torch.zeros(1, 2, 64), begin, end)
    excess = largest_excess(*given_, 64, 32)
    assert torch.allclose(excess[:, :, 0], (q @ k.mT).unflatten(-1, (5, 32)).amax(-1).amax(2), atol=1e-5)
    assert torch.equal(important_blocks(*given_, q_block=64, k_block=32), excess > 0)


def test_what_does_not_fit_is_refused():
    given_, blocks = question()
    codes, keys, bias, limit, begin, end = given_
    for wrong, match in (
        ((codes, keys, bias[..., 1:], limit, begin, end), "bias"),
        ((codes, keys, bias, limit[:, 1:], begin, end), "limit"),
        ((codes, keys, bias, limit, begin, end[:, 1:]), "begin, end"),
        ((codes, keys, bias, limit, begin, end + 5), "beyond the 280 keys"),
        ((codes, LowBit(keys.codes, keys.scales, "per_token"), bias, limit, begin, end), "scales of one kind"),
    ):
        with pytest.raises(ValueError, match=match):
            important_blocks(*wrong, **blocks)
    with pytest.raises(ValueError, match="backend"):
        important_blocks(*given_, **blocks, backend="gpu")
    x = draw(1, 1, 8, 16)
    with pytest.raises(ValueError, match="per_row"):
        quantise(x, *zeros(x), groups="per_row")
    with pytest.raises(ValueError, match="multiple of 8"):
        quantise(x, *zeros(x), groups="per_thread", k_block=12)

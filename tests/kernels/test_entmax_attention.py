"""α-entmax attention in tiles: the definition, gradients, the tiles' bits, skipping, memory, and what is refused."""

from __future__ import annotations

import shutil

import pytest
import torch
from triton_process import needs_triton, run

from longspan.kernels import entmax_attention as attention
from longspan.kernels import native
from longspan.kernels.entmax import entmax
from longspan.kernels.entmax_attention import entmax_attention
from longspan.kernels.entmax_tiles import packed, unpacked
from longspan.kernels.plan import visible_blocks
from longspan.registry import Refused
from longspan.training.peak import PeakMemory

HAS_COMPILER = native.supported() and any(map(shutil.which, native.COMPILERS))
BACKENDS = ["reference", pytest.param("cpu", marks=pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler"))]


def inputs(T=150, S=None, B=2, H=4, G=2, D=16, E=None, size=3.0, dtype=torch.float32, seed=0):
    """Queries (strong enough for empty tiles), keys, values and a gradient of the output."""
    g, S, E = torch.Generator().manual_seed(seed), S or T, E or D
    shapes = ((B, H, T, D), (B, G, S, D), (B, G, S, E), (B, H, T, E))
    q, k, v, grad = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in shapes)
    made = [(q * size).to(dtype), k.to(dtype), v.to(dtype)]
    return [t.requires_grad_() for t in made], grad.to(dtype)


def local(T=512, size=24.0):
    """One head whose scores are strongest for near keys: most tiles are empty."""
    (q, k, v), grad = inputs(T=T, B=1, H=1, G=1, size=1.0)
    angle = torch.arange(T)[:, None] / 100.0
    wave = torch.cat((angle.cos(), angle.sin()), -1) * size**0.5
    q, k = ((t * 0.1).detach().index_copy(-1, torch.tensor([0, 1]), wave[None, None]) for t in (q, k))
    return [t.requires_grad_() for t in (q * size**0.5, k, v.detach())], grad


def dense(q, k, v, alpha, varlen=None, bias=None, causal=True):
    """The definition, in float64."""
    q, k, v = (t.double() for t in (q, k, v))
    T, S, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5
    scores = scores if bias is None else scores + bias
    seen = torch.arange(S) <= torch.arange(T)[:, None] + S - T if causal else torch.ones(T, S, dtype=torch.bool)
    if varlen is not None:
        real = torch.arange(T) < varlen[:, None]
        seen = seen & (real[:, :, None] & real[:, None])[:, None]
    return entmax(scores.masked_fill(~seen, -torch.inf), alpha, backend="reference") @ v.repeat_interleave(group, 1)


def gradients(out, given, grad):
    return torch.autograd.grad(out, given, grad.to(out.dtype))


CASES = [
    {"T": 150},
    {"T": 64, "D": 64, "B": 1},
    {"T": 1, "S": 40},
    {"T": 20, "S": 100, "D": 7, "E": 5},
    {"T": 130, "S": 200, "D": 40, "G": 4},
    {"T": 100, "varlen": torch.tensor([100, 37])},
    {"T": 140, "varlen": torch.tensor([0, 65], dtype=torch.int32)},
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("alpha", [1.5, 2.0])
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(f"{k}{v if isinstance(v, int) else ''}" for k, v in c.items()))
def test_equals_the_dense_definition_with_its_gradients(case, alpha, backend):
    varlen = case.get("varlen")
    given, grad = inputs(**{k: v for k, v in case.items() if k != "varlen"})
    want = dense(*given, alpha, varlen)
    out, _ = entmax_attention(*given, alpha, varlen=varlen, backend=backend, return_tiles=True)
    torch.testing.assert_close(out.double(), want, atol=2e-5, rtol=0)
    for have, expected in zip(gradients(out, given, grad), gradients(want, given, grad)):
        torch.testing.assert_close(have, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(entmax_attention(*given, alpha, varlen=varlen).double(), want, atol=2e-5, rtol=0)


@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_the_hand_written_backward_in_float64(alpha):
    given, grad = inputs(T=90, S=100, B=1, H=2, G=1, D=4, dtype=torch.float64, size=2.0)
    out, want = entmax_attention(*given, alpha), dense(*given, alpha)
    torch.testing.assert_close(out, want, atol=1e-9, rtol=0)
    for have, expected in zip(gradients(out, given, grad), gradients(want, given, grad)):
        torch.testing.assert_close(have, expected, atol=1e-8, rtol=0)
    small, _ = inputs(T=16, B=1, H=1, G=1, D=3, dtype=torch.float64, size=2.0)
    assert torch.autograd.gradcheck(lambda *t: entmax_attention(*t, alpha), small, eps=1e-7, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_scores_sum_to_zero(backend):
    """A common shift of all keys moves every score of a row alike, so the keys' gradients, weighted by q, add up to nothing."""
    given, grad = inputs(T=100, H=1, G=1, B=1)
    _, dk, _ = gradients(entmax_attention(*given, backend=backend), given, grad)
    shifted = [given[0].detach(), (given[1] + 0.7).detach(), given[2].detach()]
    assert float(dk.sum(2).abs().max()) < 1e-3 * float(dk.abs().sum(2).max())
    torch.testing.assert_close(entmax_attention(*shifted), entmax_attention(*given).detach(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_bits_cover_the_support_and_skipping_changes_nothing(alpha, backend):
    given, grad = local()
    out, tiles = entmax_attention(*given, alpha, backend=backend, return_tiles=True)
    assert tiles.empty_share > 0.3
    q, k = (t.detach().double() for t in given[:2])
    scores = (q @ k.mT / 4).masked_fill(~torch.ones(512, 512, dtype=torch.bool).tril(), -torch.inf)
    support = (entmax(scores, alpha) > 0).view(1, 1, 8, 64, 8, 64).any(-1).any(3)
    assert bool((tiles.mask | ~support).all())
    assert int((tiles.mask & ~support).sum()) <= 1  # and hardly more than the support
    whole, same = entmax_attention(*given, alpha, backend=backend, skip=False, return_tiles=True)
    assert torch.equal(out, whole) and torch.equal(tiles.words, same.words)
    for have, want in zip(gradients(out, given, grad), gradients(whole, given, grad)):
        assert torch.equal(have, want)


@pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")
def test_the_c_version_marks_the_same_tiles():
    for alpha in (1.5, 2.0):
        a, b = (entmax_attention(*local()[0], alpha, backend=name, return_tiles=True)[1] for name in ("reference", "cpu"))
        assert int((a.mask != b.mask).sum()) <= 1


def test_words_hold_thirty_two_tiles():
    bits = torch.zeros(2, 70, dtype=torch.bool)
    bits[0, [0, 31, 32]], bits[1, [63, 69]] = True, True
    words = packed(bits)
    assert words.dtype == torch.int32 and words.tolist() == [[1 - 2**31, 1, 0], [0, -(2**31), 32]]
    assert torch.equal(unpacked(words, 70), bits)


def test_the_share_of_empty_tiles_counts_causal_tiles():
    mask = visible_blocks(130, 130, 64, 64).expand(1, 2, 3, 3).clone()
    assert attention.Tiles(packed(mask), 130, 130).empty_share == pytest.approx(0)
    mask[0, 0, 2, 0] = mask[0, 1, 1, 0] = mask[0, 1, 2, 1] = False
    assert attention.Tiles(packed(mask), 130, 130).empty_share == pytest.approx(3 / 12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_past_varlen_are_zero_in_output_and_gradients(backend):
    given, grad = inputs(T=130)
    varlen = torch.tensor([130, 70])
    out = entmax_attention(*given, varlen=varlen, backend=backend)
    assert not out[1, :, 70:].any() and bool(out[1, :, :70].any())
    for found in gradients(out, given, grad):
        assert not found[1, :, 70:].any() and bool(found[1, :, :70].any())


def test_memory_is_linear_in_the_length():
    for backend in ("reference", None):
        largest = []
        for T in (512, 1024):
            given, grad = inputs(T=T, B=1, H=1, G=1, D=16)
            with PeakMemory() as seen:
                gradients(entmax_attention(*given, backend=backend), given, grad)
            largest.append(seen.largest)
        assert largest[1] <= 2 * largest[0] and largest[1] < 1024 * 1024 / 4


@pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")
def test_narrow_numbers_are_widened():
    given, grad = inputs(T=100, dtype=torch.bfloat16, size=1.0)
    out = entmax_attention(*given)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), dense(*given, 1.5), atol=2e-2, rtol=2e-2)
    assert [g.dtype for g in gradients(out, given, grad)] == [torch.bfloat16] * 3


# ------------------------------------------------------------------------------------------------------------ other paths


@pytest.mark.parametrize("alpha", [1.25, 1.5, 3.0])
def test_attention_that_is_not_causal_and_biases_go_through_all_scores(alpha, monkeypatch):
    given, grad = inputs(T=30, S=50)
    bias = torch.randn(1, 4, 30, 50, generator=torch.Generator().manual_seed(3))
    bias[..., :4] = -torch.inf
    want = dense(*given, alpha, bias=bias, causal=False)
    whole = entmax_attention(*given, alpha, bias=bias, causal=False)
    torch.testing.assert_close(whole.double(), want, atol=2e-5, rtol=0)
    monkeypatch.setattr(attention, "DENSE_SCORES", 7 * 2 * 4 * 50)  # seven rows at a time
    parts = entmax_attention(*given, alpha, bias=bias, causal=False)
    torch.testing.assert_close(parts, whole, atol=2e-5, rtol=0)
    if alpha > 2:  # the derivative has a pole where p is 0: float32 is no match for float64
        return
    for have, expected in zip(gradients(parts, given, grad), gradients(want, given, grad)):
        torch.testing.assert_close(have, expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("alpha", [1.3, 1.5])
def test_masks_and_queries_that_see_nothing(alpha):
    given, grad = inputs(T=40, B=2, G=2)
    mask = torch.ones(2, 1, 40, 40, dtype=torch.bool).tril()
    mask[0, :, :, :10] = False
    out = entmax_attention(*given, alpha, causal=False, mask=mask)
    assert not out[0, :, :10].any() and bool(out[0, :, 10:].any())
    torch.testing.assert_close(out[1:], entmax_attention(*(t[1:] for t in given), alpha), atol=1e-5, rtol=0)
    assert all(bool(g.isfinite().all()) for g in gradients(out, given, grad))


def test_varlen_in_the_dense_path():
    given, _ = inputs(T=40)
    varlen = torch.tensor([40, 11])
    got = entmax_attention(*given, 1.3, varlen=varlen)
    torch.testing.assert_close(got.double(), dense(*given, 1.3, varlen), atol=2e-5, rtol=0)


def test_nothing_to_attend():
    q, k = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 0, 4)
    assert not entmax_attention(q, k, k, causal=False).any()
    assert entmax_attention(q[:, :, :0], k, k).shape == (1, 2, 0, 4)


def test_scores_that_are_no_numbers_show():
    given, _ = inputs(T=80, B=1)
    bad = given[0].detach().clone()
    bad[0, 0, 70, 0] = torch.nan
    out = entmax_attention(bad, *(t.detach() for t in given[1:]))
    assert bool(out[0, 0, 70].isnan().all()) and not out[0, 0, :70].isnan().any()


@needs_triton
def test_triton_computes_the_same():
    run("""
        import torch
        from longspan.kernels.entmax_attention import entmax_attention

        draw, found = torch.Generator().manual_seed(0), {}
        q, k, v = (torch.randn(2, h, 100, 16, generator=draw) for h in (4, 2, 2))
        for backend in ("reference", "triton"):
            given = [t.clone().requires_grad_() for t in (q * 3, k, v)]
            out = entmax_attention(*given, varlen=torch.tensor([100, 70]), backend=backend)
            found[backend] = (out, *torch.autograd.grad(out.square().sum(), given))
        for have, want in zip(found["triton"], found["reference"]):
            assert torch.allclose(have, want, atol=2e-4), (have - want).abs().max()
    """, TRITON_INTERPRET="1")


# -------------------------------------------------------------------------------------------------------------- bad input


def test_alpha_of_one_or_less_is_refused():
    given, _ = inputs(T=20)
    for alpha in (1.0, 0.3, -1.0):
        with pytest.raises(Refused, match=f"alpha={alpha}.*'softmax'"):
            entmax_attention(*given, alpha)


def test_shapes_that_do_not_fit():
    q, k = torch.zeros(2, 4, 20, 8), torch.zeros(2, 2, 20, 8)
    for args, said in (
        ((q[0], k, k), r"expected q \(B,H,T,D\)"),
        ((q, k, k[:, :, :3]), "as many values as keys"),
        ((q[:, :3], k, k), "multiple of the key heads, got 3 and 2"),
        ((q.long(), k.long(), k.long()), "floating-point"),
        ((q, k.double(), k), "one floating-point dtype"),
        ((q, k[:, :, :5], k[:, :, :5]), "at least as many keys, got 5"),
        ((q[..., :4], k, k), r"expected q \(B,H,T,D\)"),
    ):
        with pytest.raises(ValueError, match=said):
            entmax_attention(*args)
    for given, said in (
        ({"mask": torch.ones(2, 3, 20, 20, dtype=torch.bool)}, "mask: expected a shape that broadcasts"),
        ({"mask": torch.ones(2, 1, 20, 20)}, "mask: expected Boolean"),
        ({"bias": torch.zeros(20, 20)}, "bias: expected a shape"),
        ({"varlen": torch.tensor([1.0, 2.0])}, "varlen: expected int32 or int64"),
        ({"varlen": torch.tensor([1])}, r"of shape \(2,\)"),
        ({"scale": 0.0}, "scale: expected a positive number"),
        ({"backend": "cuda"}, "one of reference, cpu, triton"),
        ({"alpha": 1.3, "return_tiles": True}, "tiles are for causal attention with alpha 1.5 or 2"),
        ({"causal": False, "return_tiles": True}, "tiles are for causal attention"),
    ):
        with pytest.raises(ValueError, match=said):
            entmax_attention(q, k, k, **given)
    with pytest.raises(ValueError, match="use backend 'reference'"):
        entmax_attention(q.double(), k.double(), k.double(), backend="cpu")

"""The attention core against softmax attention written out key by key, and transformers' own call bit for bit."""

from __future__ import annotations

import math
import sys
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.kernels import attend, attend_reference, causal_mask, merge

TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def written_out(q, k, v, *, scale=None, causal=True, mask=None, softcap=None):
    """sum_s exp(z_s) v_s / sum_s exp(z_s) and log sum_s exp(z_s) in float64, one query at a time."""
    (B, Hq, T, D), (Hkv, S, Dv) = q.shape, v.shape[1:]
    scale = 1 / math.sqrt(D) if scale is None else scale
    see = torch.ones(B, Hq, T, S, dtype=torch.bool)
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        see &= mask if mask.shape[1] in (1, Hq) else mask.repeat_interleave(Hq // Hkv, 1)
    out, lse = torch.zeros(B, Hq, T, Dv, dtype=torch.float64), torch.full((B, Hq, T), -math.inf, dtype=torch.float64)
    for b in range(B):
        for h in range(Hq):
            keys, values = k[b, h // (Hq // Hkv)].double(), v[b, h // (Hq // Hkv)].double()
            for t in range(T):
                seen = see[b, h, t] & (torch.arange(S) <= S - T + t if causal else True)
                if seen.any():
                    z = keys[seen] @ q[b, h, t].double() * scale
                    z = z if softcap is None else softcap * torch.tanh(z / softcap)
                    lse[b, h, t] = z.logsumexp(0)
                    out[b, h, t] = z.softmax(0) @ values[seen]
    return out, lse


def assert_close(got, want, dtype):
    assert got[0].dtype == dtype
    assert got[1].dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(got[1].isneginf(), want[1].isneginf())
    assert (got[0][want[1].isneginf()] == 0).all()
    torch.testing.assert_close(got[0].double(), want[0], rtol=0, atol=TOLERANCE[dtype])
    atol = 1e-12 if dtype == torch.float64 else 2e-4 if dtype != torch.float32 else 3e-6
    torch.testing.assert_close(got[1].double(), want[1], rtol=1e-6, atol=atol)


def draw(B, Hkv, G, T, S, D, Dv, dtype, seed=0):
    random = torch.Generator().manual_seed(seed)
    q = torch.randn(B, T, Hkv * G, D, generator=random).to(dtype).transpose(1, 2)  # strided as in a model
    k, v = (torch.randn(B, Hkv, S + 3, n, generator=random).to(dtype)[:, :, :S] for n in (D, Dv))
    return q, k, v


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    B=st.integers(1, 2), Hkv=st.integers(1, 3), G=st.integers(1, 3), T=st.integers(1, 9), S=st.integers(0, 12),
    D=st.sampled_from([1, 8, 17]), Dv=st.sampled_from([8, 17]), dtype=st.sampled_from(list(TOLERANCE)),
    causal=st.booleans(), masked=st.sampled_from([None, "1", "kv", "q", "row"]),
    softcap=st.sampled_from([None, None, 2.0]), scale=st.sampled_from([None, 0.3]), seed=st.integers(0, 99),
)  # fmt: skip
def test_equals_written_out_softmax(B, Hkv, G, T, S, D, Dv, dtype, causal, masked, softcap, scale, seed):
    q, k, v = draw(B, Hkv, G, T, S, D, Dv, dtype, seed)
    heads = {"1": 1, "kv": Hkv, "q": Hkv * G, "row": 1}
    mask = None
    if masked:
        shape = (S,) if masked == "row" else (B, heads[masked], T, S)
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.4
    options = {"scale": scale, "causal": causal, "mask": mask, "softcap": softcap}
    want = written_out(q, k, v, **options)
    assert_close(attend_reference(q, k, v, **options), want, dtype)
    assert_close(attend(q, k, v, **options), want, dtype)
    alone, none = attend(q, k, v, **options, return_lse=False)
    assert none is None
    torch.testing.assert_close(alone.double(), want[0], rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(("T", "S"), [(130, 130), (70, 700), (1, 1300), (700, 70), (40, 1300)])
def test_long_queries_and_keys(T, S):
    q, k, v = draw(1, 1, 2, T, S, 16, 16, torch.float32)
    want = attend_reference(q, k, v)
    got = attend(q, k, v)
    torch.testing.assert_close(got[0], want[0], rtol=0, atol=3e-6)
    torch.testing.assert_close(got[1], want[1], rtol=0, atol=5e-6)


def test_chunks_of_rows_change_nothing(monkeypatch):
    q, k, v = draw(2, 2, 2, 11, 13, 8, 8, torch.float64)
    mask = torch.rand(2, 1, 11, 13) < 0.7
    whole = attend_reference(q, k, v, mask=mask)
    monkeypatch.setattr(sys.modules["longspan.kernels.attend"], "PLAIN_SCORES", 2 * 4 * 13 * 3)
    for got, want in zip(attend_reference(q, k, v, mask=mask), whole):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_row_that_sees_nothing_is_zero_and_weighs_nothing(dtype):
    q, k, v = draw(1, 1, 2, 4, 6, 8, 8, dtype)
    mask = torch.ones(1, 2, 4, 6, dtype=torch.bool)
    mask[0, 1, 2] = False
    for function in (attend, attend_reference):
        out, lse = function(q, k, v, mask=mask)
        assert (out[0, 1, 2] == 0).all() and lse[0, 1, 2] == -math.inf
        assert lse.isfinite().sum() == 7 and out.isfinite().all()
    out, lse = attend(q, k, v)
    nothing = attend(q, k[:, :, :0], v[:, :, :0])
    assert (nothing[0] == 0).all() and nothing[1].isneginf().all()
    merged = merge([nothing, (out, lse), nothing])
    assert torch.equal(merged[0], out) and torch.equal(merged[1], lse)
    empty = merge([nothing, nothing])
    assert torch.equal(empty[0], nothing[0]) and empty[1].isneginf().all()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(parts=st.integers(1, 5), T=st.integers(1, 5), S=st.integers(1, 20), seed=st.integers(0, 99),
       dtype=st.sampled_from([torch.float32, torch.float64]))  # fmt: skip
def test_merge_over_any_partition_of_the_keys(parts, T, S, seed, dtype):
    q, k, v = draw(2, 2, 2, T, S, 8, 8, dtype, seed)
    owner = torch.randint(parts, (2, 1, T, S), generator=torch.Generator().manual_seed(seed))
    pieces = [attend(q, k, v, mask=owner == part) for part in range(parts)]
    for got, want in zip(merge(pieces), attend_reference(q, k, v)):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12 if dtype == torch.float64 else 3e-6)


def test_merge_survives_scores_far_apart():
    out = torch.tensor([1.0, 2.0]).view(2, 1, 1, 1, 1)
    for low, high in ((-1e4, 1e4), (500.0, 503.0), (-503.0, -500.0)):
        merged, lse = merge([(out[0], torch.full((1, 1, 1), low)), (out[1], torch.full((1, 1, 1), high))])
        weight = 1 / (1 + math.exp(low - high))
        assert merged.item() == pytest.approx(1 + weight, abs=1e-6)
        assert lse.item() == pytest.approx(high - math.log(weight), rel=1e-6)


def test_gradients_reach_out_and_lse():
    q, k, v = (x.contiguous().requires_grad_() for x in draw(1, 1, 2, 3, 4, 3, 2, torch.float64))
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1] = False  # a row that sees nothing has gradient 0, not NaN
    assert torch.autograd.gradcheck(lambda *x: attend(*x, mask=mask)[0], (q, k, v))
    assert torch.autograd.gradcheck(lambda *x: merge([attend(*x), attend(*x, causal=False)]), (q, k, v))


class TestTransformersCall:
    """Without lse, `attend` reproduces an unmodified model bit for bit."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(("T", "S"), [(37, 37), (1, 300), (1, 1)])
    @pytest.mark.parametrize("groups", [1, 3])
    def test_without_mask(self, dtype, T, S, groups):
        q, k, v = draw(2, 3, groups, T, S, 64, 64, dtype)
        assert torch.equal(attend(q, k, v, return_lse=False)[0], self.theirs(q, k, v, None, groups))

    @pytest.mark.parametrize("T", [1, 5, 37])
    def test_with_padding_or_a_past(self, T):
        q, k, v = draw(2, 3, 3, T, 37, 64, 64, torch.bfloat16)
        valid = torch.ones(2, 1, 1, 37, dtype=torch.bool)
        valid[0, ..., :9] = False
        full = valid & causal_mask(T, 37)
        assert torch.equal(attend(q, k, v, mask=full, return_lse=False)[0], self.theirs(q, k, v, full, 3))
        assert torch.equal(attend(q, k, v, mask=valid, return_lse=False)[0], self.theirs(q, k, v, full, 3))
        if 1 < T < 37:
            past = causal_mask(T, 37).expand(2, 1, T, 37)
            assert torch.equal(attend(q, k, v, return_lse=False)[0], self.theirs(q, k, v, past, 3))

    @staticmethod
    def theirs(q, k, v, mask, groups):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        module = types.SimpleNamespace(num_key_value_groups=groups, is_causal=True)
        return sdpa_attention_forward(module, q, k, v, mask, scaling=q.shape[-1] ** -0.5)[0].transpose(1, 2)


def test_wrong_shapes_are_named():
    q, k, v = draw(1, 2, 2, 3, 4, 8, 8, torch.float32)
    with pytest.raises(ValueError, match=r"q \(1, 3, 3, 8\)"):
        attend(q[:, :3], k, v)
    with pytest.raises(ValueError, match=r"k \(1, 2, 3, 8\)"):
        attend(q, k[:, :, 1:], v)
    with pytest.raises(ValueError, match=r"\(1, 3, 3, 4\)"):
        attend(q, k, v, mask=torch.ones(1, 3, 3, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="float32"):
        attend(q, k, v, mask=torch.zeros(3, 4))
    with pytest.raises(ValueError, match="at least one"):
        merge([])
    out, lse = attend(q, k, v)
    with pytest.raises(ValueError, match="one shape"):
        merge([(out, lse), (out[:, :1], lse[:, :1])])

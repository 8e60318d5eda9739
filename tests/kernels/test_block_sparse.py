"""Block-sparse attention: every version equals the masked softmax of its plan."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.kernels import attend_reference, block_sparse_cpu
from longspan.kernels.block_sparse import block_sparse_attention
from longspan.kernels.plan import ReadPlan, forced_blocks

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def case(*, B=2, Hq=4, Hkv=2, H=4, T=50, S=83, D=16, q_block=16, k_block=16, columns=None, pad=None, causal=True,
         dtype=torch.float32, seed=0):
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, h, n, D, generator=draw).to(dtype) for h, n in ((Hq, T), (Hkv, S), (Hkv, S)))
    n_q, n_k = -(-T // q_block), -(-S // k_block)
    mask = torch.rand(B, H, n_q, n_k, generator=draw) < 0.3
    mask |= forced_blocks(T, S, q_block, k_block)
    singles = None
    if columns is not None:
        singles = torch.rand(*((B, H, S) if columns == "shared" else (B, H, n_q, S)), generator=draw) < 0.1
    plan = ReadPlan.from_mask(mask, q_len=T, k_len=S, q_block=q_block, k_block=k_block, columns=singles, causal=causal)
    valid = None
    if pad:
        valid = torch.ones(B, S, dtype=torch.bool)
        valid[0, slice(S // 3) if pad == "left" else slice(S - S // 4, S)] = False
    return q, k, v, plan, valid


CASES = [
    {"columns": "shared"},
    {"columns": "per block", "pad": "left"},
    {"pad": "left", "T": 83, "H": 1, "q_block": 32, "k_block": 8},
    {"pad": "right", "T": 83, "H": 2, "q_block": 5, "k_block": 3, "D": 7, "columns": "shared"},
    {"B": 1, "T": 300, "S": 333, "D": 64, "q_block": 200, "k_block": 70, "Hkv": 1},
    {"B": 1, "T": 1, "S": 90, "q_block": 1, "D": 40, "Hkv": 4, "columns": "shared"},
    {"causal": False, "pad": "left", "D": 33, "columns": "shared"},
    {"dtype": torch.bfloat16, "columns": "shared", "D": 64, "pad": "left"},
    {"dtype": torch.bfloat16, "D": 19, "T": 83, "columns": "per block"},
    {"dtype": torch.float16, "columns": "shared"},
]


@pytest.mark.parametrize("options", CASES, ids=lambda o: ",".join(f"{k}={v}" for k, v in o.items()))
@pytest.mark.parametrize("version", ["cpu", "gathered"])
def test_versions_equal_the_definition(options, version):
    q, k, v, plan, valid = case(**options)
    expected, expected_lse = block_sparse_attention(q, k, v, plan, valid=valid, return_lse=True, backend="reference")
    if version == "cpu":
        out, lse = block_sparse_attention(q, k, v, plan, valid=valid, return_lse=True, backend="cpu")
        assert out.dtype == q.dtype and lse.dtype == torch.float32
    else:
        out, lse = block_sparse_cpu.gathered(q, k, v, plan, q.shape[-1] ** -0.5, valid)
    assert torch.allclose(out.float(), expected.float(), atol=TOLERANCE[q.dtype], rtol=0)
    assert torch.allclose(lse, expected_lse, atol=1e-5 if q.dtype == torch.float32 else 1e-3)


def test_the_definition_is_a_masked_softmax():
    q, k, v, plan, valid = case(columns="shared", pad="left", T=83)
    mask = plan.token_mask() & valid[:, None, None] & valid[:, None, :, None]
    logits = (q @ k.repeat_interleave(2, 1).mT * 16**-0.5).masked_fill(~mask, -torch.inf)
    expected = torch.nan_to_num(logits.softmax(-1)) @ v.repeat_interleave(2, 1)
    out, lse = block_sparse_attention(q, k, v, plan, valid=valid, return_lse=True, backend="reference")
    assert torch.allclose(out, expected, atol=1e-6)
    assert torch.allclose(lse, logits.logsumexp(-1), atol=1e-5)
    assert not out[0, :, :27].any() and torch.isneginf(lse[0, :, :27]).all()  # rows of padding


@settings(max_examples=25, deadline=None)
@given(
    T=st.integers(1, 70), past=st.integers(0, 70), D=st.sampled_from([1, 8, 16, 24, 64]), q_block=st.integers(1, 40),
    k_block=st.integers(1, 40), columns=st.sampled_from([None, "shared", "per block"]),
    pad=st.sampled_from([None, "left", "right"]), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_shape_agrees(T, past, D, q_block, k_block, columns, pad, seed):
    q, k, v, plan, valid = case(T=T, S=T + past, D=D, q_block=q_block, k_block=k_block, columns=columns, pad=pad,
                                seed=seed)  # fmt: skip
    asked = {"scale": 0.3, "valid": valid, "return_lse": True}
    expected, lse = block_sparse_attention(q, k, v, plan, backend="reference", **asked)
    for out, other in (block_sparse_attention(q, k, v, plan, backend="cpu", **asked),
                       block_sparse_cpu.gathered(q, k, v, plan, 0.3, valid)):  # fmt: skip
        assert torch.allclose(out, expected, atol=3e-6)
        assert torch.allclose(other, lse, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("T", "S"), [(77, 77), (30, 77)])
def test_density_one_is_dense_attention(backend, dtype, T, S):
    q, k, v, _, _ = case(T=T, S=S, D=64, dtype=dtype)
    plan = ReadPlan.dense(q_len=T, k_len=S, q_block=16, k_block=32)
    assert plan.density == 1.0
    mask = torch.arange(S) <= (S - T + torch.arange(T))[:, None]
    dense = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    out = block_sparse_attention(q, k, v, plan, backend=backend)
    assert torch.allclose(out.float(), dense.float(), atol=1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_large_logits_stay_finite(backend):
    q, k, v, plan, _ = case(D=64)
    keys = k * 200.0
    out, lse = block_sparse_attention(q, keys, v, plan, return_lse=True, backend=backend)
    exact = block_sparse_attention(q.double(), keys.double(), v.double(), plan, return_lse=True)
    assert torch.allclose(out.double(), exact[0], atol=2e-3)
    assert torch.allclose(lse.double(), exact[1], rtol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_nan_input_shows_in_the_output(backend):
    q, k, v, plan, _ = case()
    q[0, 1, 7, 3] = torch.nan
    out = block_sparse_attention(q, k, v, plan, backend=backend)
    assert out[0, 1, 7].isnan().all() and not out[0, 1, 8].isnan().any()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_row_without_keys_is_an_error(backend):
    q, k, v, _, _ = case(T=83)
    mask = torch.zeros(1, 1, 6, 6, dtype=torch.bool)
    mask[..., 1:, 0] = True  # the first query block reads nothing
    plan = ReadPlan.from_mask(mask, q_len=83, k_len=83, q_block=16, k_block=16)
    with pytest.raises(ValueError, match="no key to read"):
        block_sparse_attention(q, k, v, plan, backend=backend)
    valid = torch.ones(2, 83, dtype=torch.bool)
    valid[:, :16] = False  # as padding those rows are fine, but then block 0 gives nobody a key
    with pytest.raises(ValueError, match="no key to read"):
        block_sparse_attention(q, k, v, plan, valid=valid, backend=backend)
    full = ReadPlan.dense(q_len=83, k_len=83, q_block=16, k_block=16)
    assert not block_sparse_attention(q, k, v, full, valid=valid, backend=backend)[:, :, :16].any()


def test_strided_input_and_output_layout():
    q, k, v, plan, _ = case(columns="shared")
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(block_sparse_attention(*views, plan), block_sparse_attention(q, k, v, plan))
    odd = torch.stack((q, q), -1)[..., 0]  # last stride 2
    assert torch.equal(block_sparse_attention(odd, k, v, plan), block_sparse_attention(q, k, v, plan))


def test_gradients_take_the_reference():
    q, k, v, plan, _ = case(T=20, S=20)
    q.requires_grad_()
    block_sparse_attention(q, k, v, plan).sum().backward()
    assert q.grad is not None and torch.isfinite(q.grad).all() and q.grad.any()


def test_misfits_are_refused():
    q, k, v, plan, _ = case()
    with pytest.raises(ValueError, match="T=50, S=83"):
        block_sparse_attention(q[:, :, 1:], k, v, plan)
    with pytest.raises(ValueError, match="multiple"):
        block_sparse_attention(q[:, :3], k, v, plan)
    with pytest.raises(ValueError, match="one dtype"):
        block_sparse_attention(q, k.bfloat16(), v.bfloat16(), plan)
    with pytest.raises(ValueError, match="valid"):
        block_sparse_attention(q, k, v, plan, valid=torch.ones(2, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="backend"):
        block_sparse_attention(q, k, v, plan, backend="gpu")
    with pytest.raises(ValueError, match="scale"):
        block_sparse_attention(q, k, v, plan, scale=0.0)


@pytest.mark.parametrize(("T", "S"), [(2, 2), (3, 40), (8, 129), (16, 1000)])
def test_a_few_new_rows_attend_to_all_keys(T, S):
    from longspan.kernels.block_sparse_cpu import attend_few_rows

    g = torch.Generator().manual_seed(T)
    q, k, v = (torch.randn(2, h, n, 32, generator=g).bfloat16() for h, n in ((6, T), (2, S), (2, S)))
    found = attend_few_rows(q, k, v, 0.2)
    if found is None:
        pytest.skip("no compiler here")
    out, lse = attend_reference(q, k, v, scale=0.2)
    assert torch.allclose(found[0].float(), out.float(), atol=2e-2) and torch.allclose(found[1], lse, atol=2e-2)
    assert attend_few_rows(q.float(), k.float(), v.float(), 0.2) is None

"""SampleAttention: columns are those that the sampled rows' exact attention ranks first."""

import pytest
import torch
from tiny_models import tiny, tiny_ids

from longspan import Recipe
from longspan.kernels import attend_reference
from longspan.prefill import ReadContext, read_rows
from longspan.prefill.base import attention_rows
from longspan.prefill.sample_attention import SampleAttention
from longspan.registry import Refused


def context(T=96, S=None, heads=4, key_heads=2, seed=0, valid=None, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    S = S or T
    q, k, v = (torch.randn(2, h, n, 16, generator=g).to(dtype) for h, n in ((heads, T), (key_heads, S), (key_heads, S)))
    return ReadContext(q, k, v, 0.25, valid=valid)


def brute(x):
    """Exact attention of every row."""
    k = x.k.repeat_interleave(x.heads // x.k.shape[1], 1).float()
    logits = x.q.float() @ k.mT * x.scale
    rows, keys = torch.arange(x.q_len)[:, None], torch.arange(x.k_len)
    logits = logits.masked_fill(keys > x.k_len - x.q_len + rows, -torch.inf)
    return logits.softmax(-1)


def test_sampled_rows_are_exact():
    x = context()
    at = torch.tensor([3, 40, 95])
    assert torch.allclose(attention_rows(x, at, 96), brute(x)[:, :, at], atol=1e-6)


@pytest.mark.parametrize("group", [None, 16, 48])
def test_columns_are_the_ones_sampled_rows_rank_first(group):
    x = context()
    method = SampleAttention(columns=5, group=group, rows=4, window=8, n_sink=2, block=8)
    plan, exact = method.plan(x), brute(x)
    size = group or 96
    maps = plan.column_map
    for u in range(12):
        start = u * 8 // size * size
        stop = min(start + size, 96)
        n = min(4, stop - start)
        at = [start + (i + 1) * (stop - start) // n - 1 for i in range(n)]
        local = (torch.arange(96) > torch.tensor(at)[:, None] - 8) | (torch.arange(96) < 2)
        sums = exact[:, :, at].masked_fill(local, 0.0).sum(-2)
        best = sums.topk(5)
        wanted = torch.zeros(2, 4, 96, dtype=torch.bool).scatter(-1, best.indices, best.values > 0)
        got = maps[:, :, 0] if maps.shape[2] == 1 else maps[:, :, u]
        assert torch.equal(got, wanted)


def test_output_is_masked_attention():
    x = context(T=80)
    method = SampleAttention(columns=6, group=16, rows=4, window=8, block=8)
    out, pairs = read_rows(x, method)
    plan = method.plan(x)
    wanted, _ = attend_reference(x.q, x.k, x.v, scale=x.scale, causal=False, mask=plan.token_mask())
    assert torch.allclose(out, wanted, atol=1e-5)
    assert pairs == pytest.approx(float(plan.token_mask().sum()), rel=1e-6) and pairs < x.causal_pairs


def test_alpha_of_the_sampled_attention_is_held():
    x = context(T=128)
    method = SampleAttention(alpha=0.8, rows=8, window=16, n_sink=2, block=8)
    read, exact = method.plan(x).token_mask(), brute(x)
    at = torch.tensor([(i + 1) * 16 - 1 for i in range(8)])
    share = exact.masked_fill(~read, 0.0).sum(-1)[:, :, at].mean(-1)
    assert bool((share >= 0.8 - 1e-5).all())


def test_everything_is_dense():
    x = context()
    out, _ = read_rows(x, SampleAttention(alpha=1.0, window=96, block=8))
    dense, _ = attend_reference(x.q, x.k, x.v, scale=x.scale)
    assert torch.allclose(out, dense, atol=1e-5)
    out, _ = read_rows(x, SampleAttention(columns=96, window=8, block=8))
    assert torch.allclose(out, dense, atol=1e-5)


def test_a_planted_column_is_read():
    x = context(T=128)
    k = x.k.clone()
    k[:, :, 20] = x.q.mean((1, 2))[:, None] * 40
    q = x.q + x.q.mean((1, 2), keepdim=True) * 40
    maps = SampleAttention(columns=1, rows=8, window=8, block=8).plan(ReadContext(q, k, x.v, x.scale)).column_map
    assert bool(maps[..., 20].all()) and int(maps.sum()) == 2 * 4


def test_padding_is_never_read_and_changes_nothing():
    x = context(T=64)
    valid = torch.ones(2, 64, dtype=torch.bool)
    valid[1, :24] = False
    method = SampleAttention(columns=4, rows=64, window=8, block=8)
    padded = ReadContext(x.q, x.k, x.v, x.scale, valid=valid)
    maps = method.plan(padded).column_map
    assert not bool(maps[1, :, :, :24].any())
    out, _ = read_rows(padded, method)
    other = ReadContext(x.q, x.k.masked_fill(~valid[:, None, :, None], 5.0), x.v, x.scale, valid=valid)
    assert torch.equal(out[1, :, 24:], read_rows(other, method)[0][1, :, 24:])


def test_a_prompt_in_pieces():
    x = context(T=40, S=100)
    method = SampleAttention(columns=10, group=16, rows=4, window=8, block=8)
    wanted, _ = attend_reference(x.q, x.k, x.v, scale=x.scale, causal=False, mask=method.plan(x).token_mask())
    assert torch.allclose(read_rows(x, method)[0], wanted, atol=1e-5)


def test_in_a_recipe():
    model, ids = tiny("llama"), tiny_ids(1, 120)
    recipe = Recipe.parse("sample-attention(columns=8, group=16, rows=4, window=8, block=8)")
    with recipe.on(model):
        model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=2)
    assert 0.05 < recipe.achieved.density < 0.6


@pytest.mark.parametrize("text", ["sample-attention(alpha=0)", "sample-attention(group=100)", "sample-attention(rows=0)"])
def test_what_makes_no_sense_is_refused(text):
    with pytest.raises(Refused, match="expected"):
        Recipe.parse(text)

"""Scores written out in parts: equal to the whole, in values and gradients, with bounded memory."""

import pytest
import torch

from longspan.kernels import attend
from longspan.layers import Visible
from longspan.layers.attention.rows import by_rows, check_call, row_parts, scores_of, softmax_seen
from longspan.training.peak import PeakMemory

T, S = 7, 11


def draw(T=T, S=S, dtype=torch.float64, H=4, G=2, D=8, Dv=5):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(2, h, n, d, generator=g, dtype=dtype) for h, n, d in ((H, T, D), (G, S, D), (G, S, Dv))]


def some_mask():
    mask = torch.rand(2, 1, T, S, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[0, 0, 3] = False
    return mask


@pytest.mark.parametrize("most", [1, 100, 1 << 20])
@pytest.mark.parametrize("masked", [False, True])
def test_softmax_by_rows_is_attention(most, masked):
    inputs = [t.requires_grad_() for t in draw()]
    mask = some_mask() if masked else None
    got = by_rows(softmax_seen, *inputs, Visible(T, S, mask, torch.device("cpu")), most=most)
    want = attend(*inputs, causal=not masked, mask=mask)[0]
    torch.testing.assert_close(got, want)
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(2), dtype=got.dtype)
    for have, need in zip(*(torch.autograd.grad((x * weights).sum(), inputs) for x in (got, want))):
        torch.testing.assert_close(have, need)
    if masked:
        assert not got[0, :, 3].any()


def test_parts_cover_every_query_once_and_stay_small():
    q, k, _ = draw()
    for most in (1, 88 * 2, 88 * 3, 10**6):
        parts = row_parts(q, k, most)
        assert [i for p in parts for i in range(p.start, p.stop)] == list(range(T))
        assert all((p.stop - p.start) * 2 * 4 * S <= max(most, 2 * 4 * S) for p in parts)


def test_keys_after_the_last_query_of_a_part_are_left_out():
    q, k, _ = draw()
    scores, see = scores_of(q, k, Visible(T, S, None, q.device), slice(1, 3))
    assert scores.shape == (2, 4, 2, S - T + 3) and see.shape == (1, 1, 2, S - T + 3)
    assert see[0, 0].sum(-1).tolist() == [S - T + 2, S - T + 3]
    torch.testing.assert_close(scores, q[:, :, 1:3] @ k[:, :, : S - T + 3].repeat_interleave(2, 1).mT / 8**0.5)


def test_no_matrix_of_scores_is_kept():
    long = 512
    q, k, v = (t.requires_grad_() for t in draw(long, long, torch.float32))
    with PeakMemory() as seen:
        by_rows(softmax_seen, q, k, v, Visible(long, long, None, q.device), most=8 * long * 16).sum().backward()
    assert seen.largest <= 8 * long * 16
    assert seen.peak < 2 * 4 * long * long * 4 / 2


def test_half_precision_is_read_in_float32():
    q, k, v = (t.bfloat16() for t in draw())
    got = by_rows(softmax_seen, q, k, v, Visible(T, S, None, q.device))
    assert got.dtype == torch.bfloat16
    want = by_rows(softmax_seen, q.float(), k.float(), v.float(), Visible(T, S, None, q.device))
    torch.testing.assert_close(got, want.bfloat16(), atol=0, rtol=0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(by_rows(softmax_seen, q, k, v, Visible(T, S, None, q.device)), got)


def test_without_keys_or_queries_the_result_is_empty_or_zero():
    q, k, v = draw()
    none = Visible(T, 0, torch.ones(1, 1, T, 0, dtype=torch.bool), q.device)
    assert by_rows(softmax_seen, q, k[:, :, :0], v[:, :, :0], none).eq(0).all()
    assert by_rows(softmax_seen, q[:, :, :0], k, v, Visible(0, S, None, q.device)).shape == (2, 4, 0, 5)


def test_calls_that_do_not_fit_are_refused_by_name():
    q, k, v = draw()
    bad = {
        "q should be a floating": (q[0], k, v),
        "k should be a floating": (q, k.long(), v),
        "v should have": (q, k, v[:, :, 1:]),
        "q should have": (q[:, :3], k, v),
        "q has 7 queries, more than the 5 keys": (q, k[:, :, :5], v[:, :, :5]),
    }
    for message, call in bad.items():
        with pytest.raises(ValueError, match=message):
            check_call(*call)

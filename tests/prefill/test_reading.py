"""Reading rows: subsets gather, attend and scatter; everything below them sees a shorter prompt; batches go row by row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from longspan.prefill.base import ReadContext
from longspan.prefill.flexprefill import FlexPrefill
from longspan.prefill.mean_pool import MeanPool
from longspan.prefill.reading import read_rows
from longspan.prefill.vertical_slash import VerticalSlash
from longspan.prefill.xattention import XAttention

SELECTORS = [XAttention(threshold=0.6, block=16, stride=4), FlexPrefill(gamma=0.6, block=16, min_budget=16),
             VerticalSlash(vertical=30, slash=50, block=16), MeanPool(p=0.6, block=16)]  # fmt: skip


class Chosen:
    """A subset that keeps given slots, and notes what it was shown."""

    def __init__(self, *kept):
        self.kept, self.shown = list(kept), []

    def choose(self, x):
        self.shown.append(x)
        return self.kept[(len(self.shown) - 1) % len(self.kept)]


def context(B=1, T=120, S=None, heads=4, key_heads=2, D=16, seed=0, valid=None) -> ReadContext:
    draw = torch.Generator().manual_seed(seed)
    S = S or T
    q, k, v = (torch.randn(B, h, n, D, generator=draw) for h, n in ((heads, T), (key_heads, S), (key_heads, S)))
    return ReadContext(q * 2, k, v, D**-0.5, valid=valid)


def some(x: ReadContext, n: int, seed=0) -> torch.Tensor:
    order = torch.rand(len(x.q), x.heads, x.k_len, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    return order[..., :n].sort(-1).values


def brute_force(x: ReadContext, kept: torch.Tensor) -> torch.Tensor:
    """Row t of head h: softmax over the kept keys up to t; other rows 0."""
    there = torch.zeros(len(x.q), x.heads, x.k_len, dtype=torch.bool).scatter(2, kept, True)
    mask = there[..., None, :] & torch.ones(x.q_len, x.k_len, dtype=torch.bool).tril()
    k, v = (t.repeat_interleave(x.heads // t.shape[1], 1) for t in (x.k, x.v))
    mask = mask | torch.eye(x.k_len, dtype=torch.bool)  # a key for the rows that aren't kept, which become 0
    weights = (x.q @ k.mT * x.scale).masked_fill(~mask, -torch.inf).softmax(-1)
    return (weights @ v).masked_fill(~there[..., None], 0.0)


def plain(x: ReadContext) -> torch.Tensor:
    return F.scaled_dot_product_attention(x.q, x.k, x.v, is_causal=True, scale=x.scale, enable_gqa=True)


def test_selected_rows_are_attention_among_the_selected_and_others_are_zero():
    x = context()
    kept = some(x, 47)
    out, pairs = read_rows(x, None, [Chosen(kept)])
    assert torch.allclose(out, brute_force(x, kept), atol=1e-5)
    left_out = torch.ones(1, 4, 120, dtype=torch.bool).scatter(2, kept, False)
    assert not out[left_out].any() and left_out.sum() == 4 * 73
    assert pairs == 4 * 47 * 48 / 2


def test_nothing_left_out_is_the_models_own_attention_bit_for_bit():
    x = context()
    out, pairs = read_rows(x, None, [Chosen(None), Chosen(None)])
    assert torch.equal(out, plain(x)) and pairs == x.causal_pairs
    everything = torch.arange(120).expand(1, 4, 120)
    assert torch.allclose(read_rows(x, None, [Chosen(everything)])[0], plain(x), atol=1e-6)
    assert not read_rows(x, None, [Chosen(everything[..., :0])])[0].any()


@pytest.mark.parametrize("selector", SELECTORS, ids=str)
def test_every_selector_reads_the_shorter_prompt(selector):
    """Composition: what a selector does within a subset is what it does to the gathered tensors alone."""
    x = context(T=200)
    kept = some(x, 150)
    out, pairs = read_rows(x, selector, [Chosen(kept)])
    rows = kept[..., None].expand(-1, -1, -1, 16)
    short = [t.repeat_interleave(x.heads // t.shape[1], 1).gather(2, rows) for t in (x.q, x.k, x.v)]
    inner, inner_pairs = read_rows(ReadContext(*short, x.scale), selector)
    assert torch.allclose(out.gather(2, rows), inner, atol=1e-6) and pairs == inner_pairs
    assert pairs < 4 * 150 * 151 / 2
    assert not out[torch.ones(1, 4, 200, dtype=torch.bool).scatter(2, kept, False)].any()


def test_groups_read_what_repeated_heads_would():
    x = context()
    kept = some(x, 60)
    repeated = replace(x, k=x.k.repeat_interleave(2, 1), v=x.v.repeat_interleave(2, 1))
    assert torch.equal(read_rows(x, None, [Chosen(kept)])[0], read_rows(repeated, None, [Chosen(kept)])[0])


def test_subsets_lie_inside_one_another_the_last_outermost():
    x = context()
    outer = some(x, 80)
    inner = torch.arange(0, 80, 2).expand(1, 4, 40)
    within = Chosen(inner)
    out, _ = read_rows(x, None, [within, Chosen(outer)])
    assert torch.allclose(out, brute_force(x, outer.gather(2, inner)), atol=1e-5)
    assert within.shown[0].q.shape == within.shown[0].k.shape == (1, 4, 80, 16)


def test_queries_before_rotation_follow_their_tokens():
    x = replace(context(B=2), q_pre_rope=lambda: context(B=2).q + 1)
    kept, inside = some(context(), 50), Chosen(None)
    read_rows(x, None, [inside, Chosen(kept)])
    for row in inside.shown:
        assert torch.equal(row.q_pre_rope(), row.q + 1)


@pytest.mark.parametrize("side", ["left", "right", "none"])
def test_rows_of_a_batch_get_what_they_get_alone(side):
    pad = {"left": slice(0, 40), "right": slice(80, 120), "none": slice(0, 0)}[side]
    valid = torch.ones(2, 120, dtype=torch.bool)
    valid[0, pad] = False
    x = context(B=2, valid=valid if side != "none" else None)
    alone = [ReadContext(*(t[b : b + 1, :, valid[b]] for t in (x.q, x.k, x.v)), x.scale) for b in range(2)]
    kept = [some(alone[0], 33), some(alone[1], 71)]
    together = Chosen(*kept)
    out, pairs = read_rows(x, None, [together])
    for b in range(2):
        expected, own = read_rows(alone[b], None, [Chosen(kept[b])])
        assert torch.equal(out[b, :, valid[b]], expected[0]) and not out[b, :, ~valid[b]].any()
        pairs -= own
        assert torch.equal(together.shown[b].k, alone[b].k) and together.shown[b].valid is None
    assert pairs == 0
    one, _ = read_rows(x, None, [Chosen(None, kept[1])])  # the other row is read densely
    assert torch.allclose(one[0, :, valid[0]], plain(alone[0])[0], atol=1e-6) and torch.equal(one[1], out[1])


def test_rows_that_follow_have_no_subset():
    """A question about a text that was read before: every token takes part."""
    x, never = context(T=10, S=120), Chosen(torch.zeros(1, 4, 1, dtype=torch.int64))
    out, pairs = read_rows(x, None, [never])
    assert never.shown == [] and pairs == x.causal_pairs
    mask = torch.arange(120) <= (110 + torch.arange(10))[:, None]
    k, v = (t.repeat_interleave(2, 1) for t in (x.k, x.v))
    assert torch.allclose(out, (x.q @ k.mT * x.scale).masked_fill(~mask, -torch.inf).softmax(-1) @ v, atol=1e-5)
    padded = replace(x, valid=torch.arange(120)[None] >= 30)
    shorter = ReadContext(x.q, x.k[:, :, 30:], x.v[:, :, 30:], x.scale)
    assert torch.allclose(read_rows(padded, None, [never])[0], read_rows(shorter, None)[0], atol=1e-6)


def test_gradients_flow_through_the_gathered_rows():
    x = context(T=12)
    kept = some(x, 5)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    outs = read_rows(x, None, [Chosen(kept)])[0], brute_force(x, kept)
    found, expected = (torch.autograd.grad(out.square().sum(), leaves) for out in outs)
    for one, other in zip(found, expected):
        assert one.any() and torch.allclose(one, other, atol=1e-5)


def test_bad_choices_and_bad_input_are_refused():
    x = context()
    backwards = some(x, 20).flip(-1)
    for bad, message in ((backwards, "out of order"), (torch.zeros(1, 4, 2, dtype=torch.int64), "out of order"),
                         (some(x, 20)[:, :2], "expected int64"), (some(x, 20).int(), "expected int64"),
                         (some(x, 20) + 110, "rows in 0..119")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            read_rows(x, None, [Chosen(bad)])
    x.q[0, 0, 3, 3] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        read_rows(x, None, [Chosen(some(x, 20))])

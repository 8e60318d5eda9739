"""Chunks of real tokens, compared with counting them one by one."""

import random

import pytest
import torch

from longspan.layers.stacks.chunks import even_chunks, ragged_chunks


def one_by_one(h, w, real, starts, total, fill):
    """Entries of one row (None for a start), their count before and after each token's own chunk, and what is left."""
    entries, before, after = [], [], []
    for t in range(len(h)):
        if real[t]:
            if starts[t]:
                entries.append(None)
                total, fill = torch.zeros_like(total), 0
            total, fill = total + h[t], fill + 1
        before.append(len(entries))
        if real[t] and fill == w:
            entries.append(total / w)
            total, fill = torch.zeros_like(total), 0
        after.append(len(entries))
    return entries, before, after, total, fill


@pytest.mark.parametrize("w", [1, 2, 3, 5])
def test_any_padding_and_any_documents(w):
    draw = random.Random(w)
    for _ in range(20):
        B, T = draw.randint(1, 4), draw.randint(1, 12)
        h, total = torch.randn(B, T, 2, dtype=torch.float64), torch.randn(B, 2, dtype=torch.float64)
        real = torch.tensor([[draw.random() < 0.7 for _ in range(T)] for _ in range(B)])
        starts = real & torch.tensor([[draw.random() < 0.3 for _ in range(T)] for _ in range(B)])
        fill = torch.tensor([draw.randrange(w) for _ in range(B)])
        found = ragged_chunks(h, w, real, starts, total, fill)
        for b in range(B):
            entries, before, after, left, filled = one_by_one(h[b], w, real[b], starts[b], total[b], int(fill[b]))
            assert found.valid[b].sum() == len(entries) and found.valid[b, : len(entries)].all()
            assert found.before[b].tolist() == before and found.after[b].tolist() == after and found.fill[b] == filled
            torch.testing.assert_close(found.total[b], left)
            for i, mean in enumerate(entries):
                assert found.starts[b, i] == (mean is None)
                if mean is not None:
                    torch.testing.assert_close(found.means[b, i], mean)


@pytest.mark.parametrize("w", [1, 2, 5])
def test_rows_that_stand_alike(w):
    for fill, T in [(f, T) for f in range(w) for T in range(1, 12)]:
        h, total = torch.randn(2, T, 3), torch.randn(2, 3)
        means, left = even_chunks(h, w, total, fill)
        everything, nothing = torch.ones(2, T, dtype=torch.bool), torch.zeros(2, T, dtype=torch.bool)
        want = ragged_chunks(h, w, everything, nothing, total, torch.tensor([fill, fill]))
        assert means.shape[1] == (fill + T) // w
        torch.testing.assert_close(means, want.means)
        torch.testing.assert_close(left, want.total, atol=1e-6, rtol=1e-5)


def test_sums_are_float32_at_least():
    h = torch.full((1, 512, 1), 0.1, dtype=torch.bfloat16)
    means, _ = even_chunks(h, 512, torch.zeros(1, 1), 0)
    assert means.dtype == torch.float32 and abs(means.item() - float(h[0, 0, 0])) < 1e-6

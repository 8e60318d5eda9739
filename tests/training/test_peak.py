"""Memory that work holds at once, counted by storages."""

import torch
import torch.nn.functional as F

from longspan.training.peak import PeakMemory, peak_bytes


def test_what_was_freed_no_longer_counts():
    x = torch.zeros(1000)
    with PeakMemory() as seen:
        y = x + 1
        del y
        z = x * 2
        assert seen.now == seen.peak == 4000
        w = z.view(10, 100)
        assert seen.now == 4000
        del z, w
        assert seen.now == 0
    assert seen.largest == 1000


def test_gradients_count():
    x = torch.zeros(1000, requires_grad=True)
    assert peak_bytes(lambda: (x.exp().sin().sum()).backward()) >= 3 * 4000


def test_fused_attention_makes_no_square():
    q = torch.randn(1, 2, 512, 8)
    with PeakMemory() as fused:
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
    with PeakMemory() as plain:
        (q @ q.mT).softmax(-1) @ q
    assert fused.largest < 512 * 512 <= plain.largest

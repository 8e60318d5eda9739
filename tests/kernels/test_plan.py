"""Read plans: what they list, what they count, what they refuse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.kernels.plan import ReadPlan, forced_blocks, visible_blocks


def some_plan(*, T=50, S=83, q_block=16, k_block=8, B=2, H=3, columns="shared", causal=True, seed=0) -> ReadPlan:
    draw = torch.Generator().manual_seed(seed)
    n_q, n_k = -(-T // q_block), -(-S // k_block)
    blocks = torch.rand(B, H, n_q, n_k, generator=draw) < 0.3
    singles = None
    if columns is not None:
        singles = torch.rand(*((B, H, S) if columns == "shared" else (B, H, n_q, S)), generator=draw) < 0.1
    return ReadPlan.from_mask(blocks, q_len=T, k_len=S, q_block=q_block, k_block=k_block, columns=singles,
                              causal=causal)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    T=st.integers(1, 40), past=st.integers(0, 30), q_block=st.integers(1, 20), k_block=st.integers(1, 20),
    columns=st.sampled_from([None, "shared", "per block"]), causal=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_pairs_count_the_token_mask(T, past, q_block, k_block, columns, causal, seed):
    plan = some_plan(T=T, S=T + past, q_block=q_block, k_block=k_block, columns=columns, causal=causal, seed=seed)
    mask = plan.token_mask()
    assert torch.equal(plan.pairs_per_head, mask.sum((-1, -2)))
    rows = plan.k_len - plan.q_len + torch.arange(T) if causal else torch.full((T,), plan.k_len - 1)
    full = torch.arange(plan.k_len) <= rows[:, None]
    assert plan.full_pairs == int(full.sum())
    assert not (mask & ~full).any()


def test_token_mask_is_blocks_and_columns_below_the_diagonal():
    block_mask = torch.tensor([[[[True, False, False], [False, True, False]]]])
    columns = torch.zeros(1, 1, 6, dtype=torch.bool)
    columns[..., [1, 5]] = True
    plan = ReadPlan.from_mask(block_mask, q_len=4, k_len=6, q_block=2, k_block=2, columns=columns)
    expected = torch.tensor([[1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [0, 1, 1, 1, 0, 0], [0, 1, 1, 1, 0, 1]])
    assert torch.equal(plan.token_mask()[0, 0].int(), expected.int())
    assert plan.pairs == 11  # column 1 lies in the first block of the first two rows and is counted once there
    assert plan.density == 11 / (3 + 4 + 5 + 6)


def test_from_mask_keeps_visible_blocks_and_round_trips():
    mask = torch.rand(2, 3, 4, 11, generator=torch.Generator().manual_seed(1)) < 0.5
    plan = ReadPlan.from_mask(mask, q_len=50, k_len=83, q_block=16, k_block=8)
    assert torch.equal(plan.block_map, mask & visible_blocks(50, 83, 16, 8))
    assert torch.equal(plan.counts, plan.block_map.sum(-1))
    for h in range(3):
        u, (start, stop) = 2, plan.offsets[1, h, 2:4].tolist()
        assert plan.blocks[start:stop].tolist() == plan.block_map[1, h, u].nonzero()[:, 0].tolist()


def test_dense_has_density_one():
    plan = ReadPlan.dense(q_len=37, k_len=80, q_block=16, k_block=32)
    assert plan.density == 1.0 and plan.pairs == plan.full_pairs
    assert torch.equal(plan.token_mask()[0, 0], torch.arange(80) <= (43 + torch.arange(37))[:, None])
    assert ReadPlan.dense(q_len=3, k_len=8, causal=False).token_mask().all()


def test_visible_and_forced_blocks_follow_key_slots_of_a_chunk():
    # 5 queries at slots 9..13 in blocks of 2: the query blocks span slots 9-10, 11-12, 13; keys in blocks of 4
    assert visible_blocks(5, 14, 2, 4).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert forced_blocks(5, 14, 2, 4, sink=1, window=1).int().tolist() == [[1, 0, 1, 0], [1, 0, 1, 1], [1, 0, 0, 1]]
    assert forced_blocks(5, 14, 2, 4, sink=0, window=3).int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    assert forced_blocks(5, 14, 2, 4, sink=5, window=0).int().tolist() == [[1, 1, 0, 0]] * 3


def test_forced_sink_starts_behind_left_padding():
    forced = forced_blocks(8, 8, 4, 2, sink=2, window=0, first=torch.tensor([0, 3]))
    assert forced.shape == (2, 1, 2, 4)
    assert forced[:, 0, 1].int().tolist() == [[1, 0, 0, 0], [0, 1, 1, 0]]
    assert not forced_blocks(8, 8, 4, 2, sink=0, window=0, first=torch.tensor([3])).any()


def test_recall_is_the_kept_share_of_attention():
    draw = torch.Generator().manual_seed(0)
    plan = some_plan(H=2, columns="per block")
    q, k = torch.randn(2, 4, 50, 8, generator=draw), torch.randn(2, 2, 83, 8, generator=draw)
    logits = q @ k.repeat_interleave(2, 1).mT * 8**-0.5
    causal = torch.arange(83) <= (33 + torch.arange(50))[:, None]
    weights = logits.masked_fill(~causal, -torch.inf).softmax(-1)
    expected = (weights * plan.token_mask().repeat_interleave(2, 1)).sum(-1)
    assert torch.allclose(plan.recall(q, k), expected.mean(-1), atol=1e-6)
    assert torch.allclose(plan.recall(q, k, first_row=20), expected[..., 20:].mean(-1), atol=1e-6)
    full = ReadPlan.dense(q_len=50, k_len=83, q_block=16, k_block=16)
    valid = torch.ones(2, 83, dtype=torch.bool)
    valid[0, :40] = False
    assert torch.allclose(full.recall(q, k, valid=valid), torch.ones(2, 4), atol=1e-6)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"blocks": torch.tensor([0, 9], dtype=torch.int32)}, "0..3"),
        ({"blocks": torch.tensor([1, 1], dtype=torch.int32)}, "ascending"),
        ({"blocks": torch.tensor([0, 1])}, "int32"),
        ({"offsets": torch.tensor([[[0, 1, 1]]])}, "from 0 to 2"),
        ({"offsets": torch.tensor([[[0, 2]]])}, "expected"),
        ({"q_len": 20}, "T <= S"),
        ({"columns": torch.tensor([1], dtype=torch.int32)}, "come together"),
    ],
)
def test_malformed_plans_are_refused(change, says):
    good = {"q_len": 4, "k_len": 8, "q_block": 2, "k_block": 2, "offsets": torch.tensor([[[0, 2, 2]]]),
            "blocks": torch.tensor([0, 1], dtype=torch.int32)}  # fmt: skip
    assert ReadPlan(**good).pairs == 8
    with pytest.raises(ValueError, match=says):
        ReadPlan(**(good | change))

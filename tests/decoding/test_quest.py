"""Quest: bounds that hold, pages that are chosen by them, and attention to nothing else."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny, tiny_ids

from longspan import Recipe
from longspan.decoding import Proposal, Target, greedy, read, write
from longspan.decoding.drafts.layer_skip import LayerSkip
from longspan.decoding.drafts.suffix import Suffix
from longspan.decoding.verifiers.quest import Quest, attend_pages, bounds_of, choose_pages, page_bounds
from longspan.kernels import attend
from longspan.models import Prompt


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def begun(model, run, length=40):
    ids = tiny_ids(1, length)
    cache = run.new_cache(Prompt(ids, length))
    logits = read(model, ids, cache)[:, 0]
    return Target(model, cache, ids[0].tolist()), logits


def test_no_key_of_a_page_scores_above_its_bound():
    q, k = random(2, 4, 3, 8), random(2, 2, 32, 8, seed=1)
    bound = page_bounds(q, *bounds_of(k, 4))
    logits = q @ k.repeat_interleave(2, 1).mT
    assert bound.shape == (2, 4, 3, 8) and (logits.unflatten(-1, (8, 4)).amax(-1) <= bound + 1e-5).all()
    channel = torch.maximum(q[0, 3, 1] * k[0, 1, 8:12].amin(0), q[0, 3, 1] * k[0, 1, 8:12].amax(0)).sum()
    assert float(bound[0, 3, 1, 2]) == pytest.approx(float(channel), abs=1e-5)


def test_pages_are_gathered_by_group_and_read_by_head():
    q, k, v = random(1, 4, 3, 8), random(1, 2, 27, 8, seed=1), random(1, 2, 27, 8, seed=2)
    picked = choose_pages(page_bounds(q, *bounds_of(k[:, :, :20], 4)), 2)
    union = picked.view(1, 2, -1, 5).any(2)
    assert (picked.sum(-1) == 2).all()
    found = attend_pages(q, k, v, picked, union, 4, scale=0.5, softcap=4.0)
    at, rows = torch.arange(27), torch.arange(24, 27)[:, None]
    mask = torch.cat([picked.repeat_interleave(4, -1), (at[20:] <= rows).expand(1, 4, 3, 7)], -1)
    wanted = attend(q, k, v, scale=0.5, causal=False, mask=mask, softcap=4.0)[0]
    assert torch.allclose(found, wanted, atol=1e-5)


def test_a_budget_of_everything_is_the_plain_text():
    model = tiny("llama", layers=4)
    with Recipe().on(model) as run:
        target, logits = begun(model, run)
        plain = greedy(model, target.cache, logits, 12, ())
        target, logits = begun(model, run)
        done = write(target, LayerSkip(skip=2, adapt="always", verify=Quest(budget=64, page=4)), logits, 12, ())
    assert done.ids == plain.ids


def test_a_round_reads_what_a_model_masked_by_brute_force_reads():
    model = tiny("llama", layers=4)
    quest = Quest(budget=12, page=4, dense_layers=1)
    with Recipe().on(model) as run:
        target, _ = begun(model, run, 42)
        checker = quest.begin(target, Suffix())
        logits = [checker.check(3, Proposal((5, 6, 7))), None]
        checker.keep(2, 4)
        logits[1] = checker.check(9, Proposal((1,)))  # two more entries: the bounds of older pages are not made again
        target.cache.crop(-4)

        def brute(call, q, positions, store):
            k, T = store.tail.keys, q.shape[2]
            history = k.shape[2] - T
            newest = (history - 1) // 4
            at, rows = torch.arange(k.shape[2]), torch.arange(history, history + T)[:, None]
            mask = (at <= rows).expand(4, T, -1).clone()
            if call.layer >= 1:
                for h in range(4):
                    for t in range(T):
                        page = k[0, h // 2, : newest * 4].unflatten(0, (-1, 4))
                        u = torch.maximum(q[0, h, t] * page.amin(1), q[0, h, t] * page.amax(1)).sum(-1)
                        best = u.topk(2).indices
                        mask[h, t, : newest * 4] = torch.isin(at[: newest * 4] // 4, best)
            return attend(q, k, store.tail.values, scale=call.scale, causal=False, mask=mask[None])[0]

        target.cache.reads = brute
        wanted = [read(model, torch.tensor([[3, 5, 6, 7]]), target.cache, last=4)[0]]
        target.cache.crop(-2)
        wanted.append(read(model, torch.tensor([[9, 1]]), target.cache, last=2)[0])
    for found, right in zip(logits, wanted):
        assert torch.allclose(found, right, atol=1e-5)
    assert 0 < checker.loaded < checker.held


def test_the_union_of_a_group_is_what_is_loaded():
    model = tiny("llama", layers=4)
    with Recipe().on(model) as run:
        target, _ = begun(model, run, 41)  # ten whole pages, and one entry in the newest
        checker = Quest(budget=12, page=4, dense_layers=4).begin(target, Suffix())
        checker.check(3, Proposal())
        assert checker.loaded == checker.held == 41 * 2 * 4
        target.cache.crop(-1)
        checker = Quest(budget=12, page=4, dense_layers=0).begin(target, Suffix())
        checker.check(3, Proposal())
        # Each of 4 layers and 2 key heads loads the newest entry and 2 to 4 pages: one row, two query heads.
        assert 4 * 2 * (1 + 2 * 4) <= checker.loaded <= 4 * 2 * (1 + 4 * 4) and checker.held == 41 * 2 * 4


def test_it_is_written_in_a_recipe():
    text = "suffix(verify=quest(budget=64))"
    assert str(Recipe.parse(text)) == text and Quest(budget=16).pages == 3

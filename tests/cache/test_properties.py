"""Whatever the lengths, heads, padding, chunks, budgets and continuation: a compressed cache equals the masked oracle."""

from __future__ import annotations

import functools

import pytest
import torch
from generating import left_padded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from masked_oracle import check_against_oracle
from tiny_models import tiny, tiny_ids

from longspan.cache.base import LayerContext
from longspan.recipe import Recipe
from longspan.registry import Refused


@functools.lru_cache(maxsize=8)
def model_of(heads: int, kv_heads: int):
    return tiny("llama", heads=heads, kv_heads=kv_heads)


def cut(total, sizes):
    """Pieces of `sizes`, over and over, that add up to `total`."""
    pieces, at, i = [], 0, 0
    while at < total:
        pieces.append(min(sizes[i % len(sizes)], total - at))
        at, i = at + pieces[-1], i + 1
    return pieces


scores = st.sampled_from(["h2o", "snapkv(window=3, kernel=3)", "tova", "knorm", "keydiff", "random", "streaming-llm(n_sink=2)",
                          "expected-attention(n_sink=1, n_future=4)", "criticalkv(base=h2o)",
                          "obcache(window=3, kernel=3)", "obcache(variant=VK, fullhist=True, window=2, kernel=1)"])
budgets = st.sampled_from(["uniform", "adakv", "adakv(alpha=0.0)", "pyramid", "pyramid(beta=3)"])
amounts = st.one_of(st.sampled_from([0.15, 0.3, 0.5, 0.99, 1.0]), st.sampled_from(['"6 tokens"', '"13 tokens"', '"2 KiB"']))
stores = st.sampled_from(["", "store=ragged", "store=quantised(bits=4, group=4)", "store=quantised(bits=2, group=8)",
                          "store=tiered", "store=tiered(sparse_rounds=2)"])
schedules = st.sampled_from(["", "schedule=every(steps=1)", "schedule=every(steps=4)", "schedule=per-chunk(size=5)"])


def with_settings(score, *more):
    extra = ", ".join(m for m in more if m)
    if not extra:
        return score
    return f"{score[:-1]}, {extra})" if score.endswith(")") else f"{score}({extra})"


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(score=scores, budget=budgets, amount=amounts, store=stores, schedule=schedules,
       heads=st.sampled_from([(4, 4), (4, 2), (4, 1), (8, 2)]), prompt=st.integers(1, 40), more=st.integers(1, 9),
       pads=st.integers(0, 12), sizes=st.lists(st.integers(1, 11), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_compressed_caches_equal_the_oracle(score, budget, amount, store, schedule, heads, prompt, more, pads, sizes, seed):
    model = model_of(*heads)
    pads = min(pads, prompt - 1)
    ids, mask = left_padded(tiny_ids(1, prompt + more, seed=seed), tiny_ids(1, prompt + more - pads, seed=seed + 1))
    name, knobs = budget.partition("(")[::2]
    recipe = Recipe.parse(f"{with_settings(score, store, schedule)} @ {name}(budget={amount}{', ' + knobs if knobs else ')'}")
    pieces = cut(prompt, sizes) + cut(more, sizes[::-1])
    try:
        check_against_oracle_in_pieces(model, recipe, ids, prompt, mask if pads else None, pieces)
    except Refused as error:
        assert "budget of" in str(error) and "smaller than" in str(error)


policies = st.sampled_from(["hard-kv(W=2, B_lo=4, p=0.6{})", "hard-kv(W=3, sink=0, B_lo=5, B_up=7, metric=vanilla{})",
                            "hard-kv(W=2, B_lo=4, per_row=True, metric=rkv{})", "shotkv(r_p=0.6, W=2{})",
                            "shotkv(r_p=0.7, W=2, r_d=0.5, W_d=2, rows=window{})"])


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(policy=policies, store=st.sampled_from(["", ", store=ragged", ", store=tiered(sparse_rounds=1)"]),
       schedule=st.sampled_from(["", ", schedule=every(steps=1)", ", schedule=every(steps=3, at_prompt=False)"]),
       heads=st.sampled_from([(4, 4), (4, 2), (4, 1)]), prompt=st.integers(12, 40), more=st.integers(1, 9),
       pads=st.integers(0, 4), sizes=st.lists(st.integers(1, 11), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_policies_equal_the_oracle(policy, store, schedule, heads, prompt, more, pads, sizes, seed):
    model = model_of(*heads)
    ids, mask = left_padded(tiny_ids(1, prompt + more, seed=seed), tiny_ids(1, prompt + more - pads, seed=seed + 1))
    recipe = Recipe.parse(policy.format(store + schedule))
    pieces = cut(prompt, sizes) + cut(more, sizes[::-1])
    spans = {"shots": [(0, 3), (3, 5), (5, 9)]}
    try:
        cache = check_against_oracle(model, recipe, ids, prompt, mask if pads else None, tolerance=5e-4, pieces=pieces,
                                     spans=spans)
    except Refused as error:
        assert "protected" in str(error) or "always stay" in str(error)
        return
    assert cache.achieved().cache_bytes == sum(layer.record.bytes for layer in cache.policy_layers if layer.record) or not any(
        layer.record for layer in cache.policy_layers)


def check_against_oracle_in_pieces(model, recipe, ids, prompt, mask, pieces):
    """Chunks of the prompt give logits too: only rows from the prompt's last on are compared."""
    cache = check_against_oracle(model, recipe, ids, prompt, mask, pieces=pieces, tolerance=5e-4)
    for layer in cache.policy_layers:
        view = layer.store.view()
        real = (ids.shape[1] - (0 if mask is None else (mask == 0).sum(1)))
        assert (layer.store.lengths() <= torch.as_tensor(real).view(-1, 1)).all()
        for row in range(len(ids)):
            for head in range(view.k.shape[1]):
                held = view.positions[row, head][view.valid[row, head]].tolist()
                assert held == sorted(set(held)), "positions ascend, and no entry is held twice"


@settings(max_examples=25, deadline=None, derandomize=True)
@given(length=st.integers(2, 60), ratio=st.floats(0.02, 1.0), heads=st.sampled_from([(4, 4), (4, 2), (4, 1)]),
       score=scores, budget=budgets, seed=st.integers(0, 99))
def test_what_is_kept_is_what_was_asked_for(length, ratio, heads, score, budget, seed):
    model, ids = model_of(*heads), tiny_ids(1, length, seed=seed)
    name, knobs = budget.partition("(")[::2]
    recipe = Recipe.parse(f"{score} @ {name}(budget={ratio}{', ' + knobs if knobs else ')'}")
    with recipe.on(model) as run:
        try:
            model(ids)
            run.commit()
        except Refused:
            return
        kept = torch.tensor(run.achieved.kept)
    B = min(length, int(ratio * length + 1e-9))
    if kept.sum() == length * kept.numel():
        return  # a no-op: the window, the sinks or the budget cover the text
    if name == "uniform":
        assert (kept == B).all()
    elif name == "adakv":
        assert (kept.sum(-1) == B * heads[1]).all()
    else:
        assert abs(kept.mean() - B) <= 1
    assert isinstance(recipe.cache.budget.amount.tokens(length, 1.0), int)


def test_helpers_cut_what_they_are_told():
    assert cut(7, [3]) == [3, 3, 1] and cut(5, [2, 1]) == [2, 1, 2]
    with pytest.raises(TypeError):
        LayerContext()

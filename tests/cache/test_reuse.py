"""Joining caches of documents: the engine against one masked forward of the unchanged model, and what methods choose."""

from __future__ import annotations

import pytest
import torch
from reuse_oracle import CONTEXT, LENGTHS, PREFIX, Fixed, edges_of, flat, full, joined, method, model_of, oracle, texts
from tiny_models import tiny

from longspan.cache.reuse import Joint, Piece, assemble, join, read_alone, repair
from longspan.cache.reuse.assemble import moved
from longspan.cache.reuse.cacheblend import deviation
from longspan.cache.reuse.probe import importance, probe
from longspan.cache.reuse.stage import parts_of
from longspan.models.profiles import model_key
from longspan.registry import cards

FAMILIES = ["llama", "gemma3"]
METHODS = ["naive-reuse", "full-recompute", "prophetkv(r=0.4)", "cacheblend(r=0.4)", "epic(k=3)", "kvshare(r=0.4)"]
TOTAL = sum(LENGTHS)


def test_every_method_is_tested_here():
    assert {m.split("(")[0] for m in METHODS} == {c.name for c in cards(kind="reuse") if c.module.startswith("longspan")}


# ------------------------------------------------------------------------------------------------------------ the engine


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chosen", [[], [6, 7, 13, 20, 33, 48], list(range(20, 49)), list(range(PREFIX, CONTEXT))])
def test_repair_is_the_masked_forward(family, chosen):
    model, context, ids, suffix = joined(family)
    found = join(model, context, suffix, Fixed(positions=tuple(chosen)), last=5)
    wanted = oracle(model, ids, edges_of(context), chosen, suffix).logits[0, -5:]
    assert torch.allclose(found.fused.logits, wanted, atol=1e-4)
    assert found.fused.recomputed.tolist() == chosen and found.recomputed == len(chosen)


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputing_all_is_a_full_prefill(family):
    model, context, ids, suffix = joined(family)
    whole = read_alone(model, ids + suffix)
    for text in ("full-recompute", "prophetkv(r=1.0)", "cacheblend(r=1.0)", "kvshare(r=1.0)", f"epic(k={max(LENGTHS)})"):
        found = join(model, context, suffix, method(text), last=5).fused
        assert torch.allclose(found.logits, full(model, ids, suffix)[-5:], atol=1e-4), text
        assert torch.allclose(torch.cat(found.k), whole.k, atol=1e-4) and torch.allclose(torch.cat(found.v), whole.v, atol=1e-4)


def test_a_document_read_alone_is_what_transformers_caches():
    model = model_of()
    ids = texts()[1][1]
    cached = model(torch.tensor([ids]), use_cache=True).past_key_values
    found = read_alone(model, ids)
    for layer, (k, v) in enumerate(zip(found.k, found.v)):
        assert torch.allclose(k, cached.layers[layer].keys[0], atol=1e-5)
        assert torch.allclose(v, cached.layers[layer].values[0], atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputing_nothing_is_plain_joining(family):
    model, context, ids, suffix = joined(family)
    wanted = oracle(model, ids, edges_of(context), [], suffix).logits[0, -5:]
    for text in ("naive-reuse", "prophetkv(r=0.0)", "cacheblend(r=0.0)", "epic(k=0)", "epic(r=0.0)", "kvshare(r=0.0)"):
        found = join(model, context, suffix, method(text), last=5)
        assert torch.allclose(found.fused.logits, wanted, atol=1e-4), text
        assert found.recomputed == 0 and torch.equal(torch.cat(found.fused.k)[:, :, :CONTEXT], context.k)
    assert not torch.allclose(wanted, full(model, ids, suffix)[-5:], atol=1e-2)  # it does matter


@pytest.mark.parametrize("text", [*METHODS, "prophetkv(r=0.0)", "prophetkv(r=1.0)"])
def test_one_document_without_a_prefix_is_exact_whatever_is_recomputed(text):
    model, context, ids, suffix = joined("llama", prefix=0, lengths=(30,))
    assert torch.equal(context.k, read_alone(model, ids).k)  # not moved, not touched
    found = join(model, context, suffix, method(text), last=5).fused
    assert torch.allclose(found.logits, full(model, ids, suffix)[-5:], atol=1e-4)


@pytest.mark.parametrize("family", [*FAMILIES, "phi3", "qwen3"])
def test_layer_zero_is_exact_after_moving(family):
    model, context, ids, _ = joined(family)
    whole = read_alone(model, ids)
    assert (context.k[0] - whole.k[0]).abs().max() < 2e-4
    assert (context.v[0] - whole.v[0]).abs().max() < 1e-6  # the projection of other row counts rounds in its own way
    apart = torch.cat([read_alone(model, ids[a:b]).v for a, b in edges_of(context)], 2)
    assert torch.equal(context.v, apart)  # values are taken as they are
    assert (context.k[1] - whole.k[1]).abs().max() > 0.05


def yarn():
    return tiny("llama", rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                                          "original_max_position_embeddings": 64})


@pytest.mark.parametrize("family", [*FAMILIES, "yarn"])
def test_moving_is_a_group_action(family):
    model = yarn() if family == "yarn" else model_of(family)
    parts = parts_of(model)
    k = read_alone(model, texts()[1][1]).k
    assert torch.allclose(moved(parts, moved(parts, k, 31), 12), moved(parts, k, 43), atol=1e-5)
    assert torch.allclose(moved(parts, moved(parts, k, 31), -31), k, atol=1e-5)
    assert torch.allclose(moved(parts, k, 31).norm(dim=-1), k.norm(dim=-1), atol=1e-5)
    assert torch.equal(moved(parts, k, 0), k)


def test_a_scaled_rotation_is_not_scaled_twice():
    model = yarn()
    first, documents, suffix = texts()
    pieces = [Piece(read_alone(model, d)) for d in documents]
    context = assemble(parts_of(model), model_key(model), read_alone(model, first), pieces)
    ids = [*first, *flat(documents)]
    assert parts_of(model).rope(torch.tensor([0]), 0)[0][0, 0] > 1.05  # it is scaled
    assert (context.k[0] - read_alone(model, ids).k[0]).abs().max() < 2e-4
    found = join(model, context, suffix, method("full-recompute"), last=5).fused
    assert torch.allclose(found.logits, full(model, ids, suffix)[-5:], atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_order_of_the_chosen_does_not_matter(family):
    model, context, _, suffix = joined(family)
    rows = torch.tensor([8, 14, 15, 29, 33, 34, 40])
    a = repair(model, context, rows, suffix, last=5)
    b = repair(model, context, rows[torch.tensor([3, 0, 6, 2, 5, 1, 4])], suffix, last=5)
    assert torch.allclose(torch.cat(a.k), torch.cat(b.k), atol=1e-5) and torch.allclose(torch.cat(a.v), torch.cat(b.v), atol=1e-5)
    assert torch.allclose(a.logits, b.logits, atol=1e-5) and torch.equal(a.recomputed, b.recomputed)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", METHODS)
def test_only_the_chosen_rows_differ(family, text):
    model, context, _, suffix = joined(family)
    before = context.k.clone(), context.v.clone()
    done = join(model, context, suffix, method(text))
    others = torch.ones(CONTEXT, dtype=torch.bool)
    others[done.chosen] = False
    for fused, cached in ((done.fused.k, context.k), (done.fused.v, context.v)):
        assert torch.equal(torch.cat(fused)[:, :, :CONTEXT][:, :, others], cached[:, :, others])
    if len(done.chosen):
        assert not torch.equal(torch.cat(done.fused.v)[1:, :, done.chosen], context.v[1:, :, done.chosen])
    assert torch.equal(before[0], context.k) and torch.equal(before[1], context.v)  # good for the next question


@pytest.mark.parametrize("text", ["cacheblend(r=0.4)", "kvshare(r=0.4)", "epic(k=3)", "prophetkv(r=0.4)"])
def test_methods_differ_in_what_they_choose_only(text):
    model, context, _, suffix = joined()
    own = join(model, context, suffix, method(text), last=5)
    same = join(model, context, suffix, Fixed(positions=tuple(own.chosen.tolist())), last=5)
    assert torch.equal(own.fused.logits, same.fused.logits)
    assert all(torch.equal(a, b) for a, b in zip(own.fused.k + own.fused.v, same.fused.k + same.fused.v))


# ------------------------------------------------------------------------------------------------------------ the probe


@pytest.mark.parametrize("family", FAMILIES)
def test_importance_is_the_attention_of_the_question(family):
    """The unchanged model's attention over the joined context, renormalised to context keys."""
    model, context, ids, suffix = joined(family)
    found = probe(model, context, suffix, (1, 4), range(len(context.k)))
    maps = oracle(model, ids, edges_of(context), [], suffix, output_attentions=True).attentions
    for layer, attention in enumerate(maps):
        rows = attention[0, :, CONTEXT + 1 : CONTEXT + 4, :CONTEXT]
        assert torch.allclose(found[layer], (rows / rows.sum(-1, keepdim=True)).mean((0, 1)), atol=1e-5)
        assert found[layer].sum() == pytest.approx(1, abs=1e-4) and bool((found[layer] >= 0).all())


def test_importance_in_tiles_is_importance_at_once(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(4, 6, 8, generator=draw) * 3, torch.randn(2, 50, 8, generator=draw)
    positions = torch.arange(50, 56)
    wanted = (q.view(2, 2, 6, 8) @ k.mT[:, None] * 0.3).softmax(-1).mean((0, 1, 2))
    monkeypatch.setattr("longspan.cache.reuse.probe.TILE", 7)
    assert torch.allclose(importance(q, k, positions, 0.3), wanted, atol=1e-6)
    capped = (5 * torch.tanh(q.view(2, 2, 6, 8) @ k.mT[:, None] * 0.3 / 5)).softmax(-1).mean((0, 1, 2))
    assert torch.allclose(importance(q, k, positions, 0.3, softcap=5.0), capped, atol=1e-6)
    heads = torch.tensor([1, 0])
    swapped = q.view(2, 2, 6, 8)[heads][:, heads].reshape(4, 6, 8)
    assert torch.allclose(importance(swapped, k[heads], positions, 0.3), wanted, atol=1e-6)
    near = importance(q, k, positions, 0.3, window=4)
    assert torch.isfinite(near).all() and (near[:47] == 0).all() and near.sum() == pytest.approx(3 / 6, abs=1e-5)


def test_what_follows_the_question_changes_nothing():
    model, context, _, suffix = joined()
    a = Joint(model, context, suffix, (0, 3)).importance()
    for other in (suffix[:3], [*suffix[:3], 77, 78, 79, 80, 81], [*suffix[:4], 5]):
        assert torch.equal(a, Joint(model, context, other, (0, 3)).importance())
    assert not torch.equal(a, Joint(model, context, suffix, (0, 3)).importance(whole_suffix=True))
    assert not torch.equal(a, Joint(model, context, [9, *suffix[1:]], (0, 3)).importance())


def test_the_probe_stops_at_the_highest_layer_asked():
    model, context, _, suffix = joined()
    ran = []
    handle = model.model.layers[2].register_forward_hook(lambda *_: ran.append(1))
    some = probe(model, context, suffix, (0, 5), [0, 1])
    handle.remove()
    assert not ran and torch.equal(some, probe(model, context, suffix, (0, 5), range(3))[:2])
    chosen = join(model, context, suffix, method('prophetkv(r=0.3, probe_layers="1, 0")')).chosen
    assert torch.equal(chosen, Joint(model, context, suffix, None).top(some.mean(0), int(0.3 * TOTAL)))


# --------------------------------------------------------------------------------------------------------- what is chosen


@pytest.mark.parametrize("name", ["prophetkv", "cacheblend", "kvshare"])
def test_sets_are_nested_and_of_the_right_size(name):
    model, context, _, suffix = joined()
    before: set[int] = set()
    for r in (0.0, 0.05, 0.2, 0.4, 0.7, 1.0):
        chosen = join(model, context, suffix, method(f"{name}(r={r})")).chosen.tolist()
        assert len(chosen) == int(r * TOTAL) and chosen == sorted(chosen) and before <= set(chosen)
        assert min(chosen, default=PREFIX) >= PREFIX
        before = set(chosen)


def test_a_share_that_rounding_puts_below_a_whole_number_counts_as_that_number():
    model, context, _, suffix = joined("llama", prefix=0, lengths=(50, 50))
    assert 0.29 * 100 < 29 and len(join(model, context, suffix, method("prophetkv(r=0.29)")).chosen) == 29


def test_ties_go_to_the_earlier_position():
    model, context, _, suffix = joined()
    x = Joint(model, context, suffix, None)
    scores = torch.ones(CONTEXT)
    scores[30] = 2
    scores[2] = 3  # in the prefix
    assert x.top(scores, 4).tolist() == [6, 7, 8, 30] and x.top(scores, 0).tolist() == []


def test_prophetkv_chooses_what_the_question_attends_to():
    model, context, _, suffix = joined()
    scores = probe(model, context, suffix, (0, 5), range(3)).mean(0)
    chosen = join(model, context, suffix, method("prophetkv(r=0.2)")).chosen.tolist()
    assert chosen == sorted(sorted(range(PREFIX, CONTEXT), key=lambda i: -scores[i])[: int(0.2 * TOTAL)])
    stem = join(model, context, suffix, method('prophetkv(r=0.2, query="suffix")'), question=(0, 1)).chosen
    assert torch.equal(stem, torch.tensor(chosen))
    assert join(model, context, suffix, method("prophetkv(r=0.2)"), question=(0, 1)).chosen.tolist() != chosen


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_zero_does_not_deviate(family):
    model, context, ids, suffix = joined(family)
    x = Joint(model, context, suffix, None)
    assert deviation(x.fresh(0)[0], context.k[0]).max() < 1e-3
    whole = read_alone(model, ids)
    assert torch.allclose(x.fresh(1)[0], whole.k[1], atol=1e-5) and torch.allclose(x.fresh(1)[1], whole.v[1], atol=1e-5)
    found = deviation(x.fresh(1)[0], context.k[1])
    assert torch.allclose(found, (whole.k[1] - context.k[1]).abs().sum((0, 2)), atol=1e-4)
    assert found[:PREFIX].max() < 1e-4 < found[PREFIX:].max()
    chosen = join(model, context, suffix, method("cacheblend(r=0.3)")).chosen
    assert torch.equal(chosen, x.top(found, int(0.3 * TOTAL)))
    squares = join(model, context, suffix, method("cacheblend(r=0.3, squared=True)")).chosen
    assert torch.equal(squares, x.top((whole.k[1] - context.k[1]).square().sum((0, 2)), int(0.3 * TOTAL)))
    both = join(model, context, suffix, method("kvshare(r=0.3)")).chosen
    assert torch.equal(both, x.top(found + (whole.v[1] - context.v[1]).abs().sum((0, 2)), int(0.3 * TOTAL)))


def test_the_gradual_filter_drops_tokens_layer_by_layer():
    model, context, _, suffix = joined()
    done = join(model, context, suffix, method("cacheblend(r=0.4, gradual=1.5)"))
    counts = done.fused.layer_counts
    assert counts == [int(0.6 * TOTAL), int(0.6 * TOTAL), int(0.2 * TOTAL)] and len(done.chosen) == counts[0]
    plain = join(model, context, suffix, Fixed(positions=tuple(done.chosen.tolist())))
    top, cached, fresh = done.fused.k[2][0, :, :CONTEXT], context.k[2], plain.fused.k[2][0, :, :CONTEXT]
    kept = (top == fresh).all(-1).all(0) & ~(top == cached).all(-1).all(0)
    assert int(kept.sum()) == counts[2]  # the others were put back to what was cached
    change = (fresh - cached).abs().sum((0, 2))
    assert change[kept].min() >= change[done.chosen][~kept[done.chosen]].max()


def test_epic_takes_the_first_tokens_of_documents_that_do_not_begin_the_context():
    model, context, _, suffix = joined()
    starts = [a for a, _ in context.documents]
    wanted = sorted({i for a, b in context.documents for i in range(a, min(a + 3, b))})
    assert join(model, context, suffix, method("epic(k=3)")).chosen.tolist() == wanted and starts[0] == PREFIX
    model, context, _, suffix = joined("llama", prefix=0, lengths=(20, 10, 12))
    assert join(model, context, suffix, method("epic(k=2)")).chosen.tolist() == [20, 21, 30, 31]
    assert join(model, context, suffix, method("epic(r=0.2)")).chosen.tolist() == [20, 21, 22, 23, 30, 31, 32, 33]  # 8 // 2


def test_missing_documents_are_recomputed_and_cost_no_budget():
    model, context, ids, suffix = joined("llama", missing=(1,))
    done = join(model, context, suffix, method("prophetkv(r=0.5)"), last=5)
    first, last = context.documents[1]
    missing = set(range(first, last))
    assert missing <= set(done.fused.recomputed.tolist()) and not missing & set(done.chosen.tolist())
    assert len(done.chosen) == (TOTAL - LENGTHS[1]) // 2
    wanted = oracle(model, ids, edges_of(context), done.fused.recomputed.tolist(), suffix).logits[0, -5:]
    assert torch.allclose(done.fused.logits, wanted, atol=1e-4)
    gradual = join(model, context, suffix, method("cacheblend(r=0.4, gradual=2.0)"))
    assert gradual.fused.layer_counts[-1] == LENGTHS[1]  # they are never dropped


def test_without_eligible_tokens_it_is_a_plain_prefill():
    model, context, ids, suffix = joined("llama", missing=(0, 1, 2, 3))
    for text in METHODS:
        done = join(model, context, suffix, method(text), last=5)
        assert torch.allclose(done.fused.logits, full(model, ids, suffix)[-5:], atol=1e-4) and not len(done.chosen)


def test_requests_of_different_shapes_do_not_mix():
    alone = {}
    for turn in range(2):
        for key in (("llama", PREFIX, LENGTHS), ("llama", 3, (9, 4)), ("llama", 0, (12, 12))):
            model, context, _, suffix = joined(*key)
            found = join(model, context, suffix, method("prophetkv(r=0.3)"), last=5).fused.logits
            assert turn == 0 or torch.equal(found, alone[key])
            alone[key] = found

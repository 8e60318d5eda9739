"""Joined caches: decoding goes on in an ordinary cache, prompts without a question, and everything that is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from reuse_oracle import CONTEXT, LENGTHS, LONGROPE, Fixed, flat, full, joined, method, model_of, texts
from tiny_models import tiny, tiny_ids

from longspan.cache.reuse import Piece, assemble, fill, join, read_alone, repair
from longspan.cache.reuse.stage import parts_of
from longspan.decoding import greedy
from longspan.models import Prompt
from longspan.models.profiles import model_key
from longspan.recipe import Recipe
from longspan.registry import Refused

FAMILIES = ["llama", "gemma3"]
TOTAL = sum(LENGTHS)


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_goes_on_in_an_ordinary_cache(family):
    model, context, ids, suffix = joined(family)
    wanted = model.generate(torch.tensor([ids + suffix]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    with Recipe().on(model) as run:
        done = join(model, context, suffix, method("full-recompute"))
        cache = fill(run.new_cache(Prompt(done.fused.ids[None], len(done.fused.ids))), done.fused)
        point = cache.snapshot()
        first = greedy(model, cache, done.fused.logits, 8, []).ids
        cache.restore(point)
        assert greedy(model, cache, done.fused.logits, 8, []).ids == first == wanted[0, CONTEXT + 5 :].tolist()
        cache.restore(point)
        assert cache.get_seq_length() == CONTEXT + 5
        achieved = cache.achieved()
    assert achieved.seen == CONTEXT + 5 and achieved.kept_fraction == 1
    windowed = family == "gemma3"  # one of its layers holds the newest 15 tokens only
    assert achieved.cache_bytes < achieved.full_bytes if windowed else achieved.cache_bytes == achieved.full_bytes


def test_without_a_suffix_the_last_token_is_read_again():
    model, context, ids, _ = joined()
    done = join(model, context, [], method("full-recompute"))
    assert torch.allclose(done.fused.logits[0], full(model, ids, [])[-1], atol=1e-4) and done.fused.ids.tolist() == ids
    with pytest.raises(Refused, match="no question to choose by"):
        join(model, context, [], method("prophetkv"))
    assert len(join(model, context, [], method("cacheblend(r=0.5)")).chosen) == (TOTAL - 1) // 2


# ---------------------------------------------------------------------------------------------------------------- refusals


def test_questions_outside_the_suffix_are_refused():
    model, context, _, suffix = joined()
    for question in ((0, 6), (-1, 3), (4, 2)):
        with pytest.raises(Refused, match="lie outside the 5 that follow"):
            join(model, context, suffix, method("prophetkv"), question=question)
    with pytest.raises(Refused, match="no question to choose by"):
        join(model, context, suffix, method("prophetkv"), question=(2, 2))


def test_prompts_longer_than_the_window_are_refused():
    model, context, _, _ = joined()
    with pytest.raises(Refused, match="reads at most 256; leave out a document"):
        join(model, context, [5] * 220, method("naive-reuse"))
    with pytest.raises(Refused, match="a document has 300 tokens"):
        read_alone(model, tiny_ids(1, 300)[0])
    with pytest.raises(Refused, match="a document has no tokens"):
        read_alone(model, [])


@pytest.mark.parametrize(("change", "words"), [
    (lambda c: {"k": c.k[:, :, :-1]}, "a document's keys are"), (lambda c: {"v": c.v[:, :1]}, "a document's values are"),
    (lambda c: {"k": c.k[:1], "v": c.v[:1]}, "a document's keys are"), (lambda c: {"model": "other"}, "made by another model"),
    (lambda c: {"k": c.k.bfloat16(), "v": c.v.bfloat16()}, "holds bfloat16 numbers, but the model runs in float32"),
    (lambda c: {"rotary": "other"}, "other rotary parameters"),
])
def test_caches_that_do_not_fit_are_refused(change, words):
    model = model_of()
    good = read_alone(model, texts()[1][0])
    bad = dataclasses.replace(good, **change(good))
    with pytest.raises(Refused, match=words):
        assemble(parts_of(model), model_key(model), good, [Piece(bad)])
    with pytest.raises(Refused, match="nothing to join"):
        assemble(parts_of(model), model_key(model), None, [])


def test_other_rotary_parameters_are_refused():
    model = tiny("llama")
    cache = read_alone(model, texts()[1][0])
    model.model.rotary_emb.inv_freq.mul_(0.9)
    with pytest.raises(Refused, match="other rotary parameters"):
        assemble(parts_of(model), model_key(model), None, [Piece(cache)])


def test_frequencies_that_follow_the_length_are_refused_once_they_change():
    model = tiny("llama", rope_parameters=LONGROPE)
    short = [Piece(read_alone(model, tiny_ids(1, 20, seed=s)[0])) for s in range(2)]
    context = assemble(parts_of(model), model_key(model), None, short)
    ids = context.ids.tolist()
    found = join(model, context, [5, 6], method("full-recompute"), last=2).fused.logits
    assert torch.allclose(found, full(model, ids, [5, 6])[-2:], atol=1e-4)
    with pytest.raises(Refused, match="turns keys by other rotary parameters in a prompt of 100 tokens"):
        join(model, context, [5] * 60, method("naive-reuse"))
    again = assemble(parts_of(model), model_key(model), None, short)  # the long prompt is forgotten
    assert torch.equal(again.k, context.k)
    assert torch.equal(join(model, again, [5, 6], method("full-recompute"), last=2).fused.logits, found)


def test_knobs_out_of_range_are_refused():
    for text, words in (("prophetkv(r=1.2)", "at most 1"), ("cacheblend(r=-0.1)", "at least 0"),
                        ("epic(k=4, r=0.2)", "exclude each"),
                        ('prophetkv(probe_layers="a")', "layer numbers"), ('prophetkv(query="stem")', "choice"),
                        ("prophetkv(chunk=0)", "at least 1")):
        with pytest.raises(Refused, match=words):
            Recipe.parse(text)
    model, context, _, suffix = joined()
    for text in ('prophetkv(probe_layers="1, 3")', "cacheblend(check_layer=3)"):
        with pytest.raises(Refused, match="the model has 3 layers"):
            join(model, context, suffix, method(text))


def test_scores_that_are_not_finite_are_refused():
    model, context, _, suffix = joined()
    broken = dataclasses.replace(context, k=torch.full_like(context.k, torch.nan))
    for text in ("prophetkv", "cacheblend"):
        with pytest.raises(Refused, match="not finite"):
            join(model, broken, suffix, method(text))


def test_sets_that_can_not_be_repaired_are_errors():
    model, context, _, suffix = joined()
    for rows in ([2], [CONTEXT], [8, 8]):
        with pytest.raises(ValueError, match="distinct and in"):
            repair(model, context, torch.tensor(rows), suffix)
    with pytest.raises(ValueError, match="not eligible"):
        join(model, context, suffix, Fixed(positions=(1,)))
    with pytest.raises(ValueError, match="at least one token after"):
        repair(model, context, torch.tensor([8]), [])


def test_reuse_stands_alone_in_a_recipe_and_needs_documents():
    for other in ("snapkv(budget=0.2)", "xattention"):
        with pytest.raises(Refused, match="prophetkv stands alone in a recipe"):
            Recipe.parse(f"prophetkv + {other}")
    model = model_of()
    with pytest.raises(Refused, match="joins documents for a question"), Recipe.parse("epic").on(model):
        pass


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_half_precision_stays_close(dtype):
    model = tiny("llama").to(dtype)
    first, documents, suffix = texts()
    pieces = [Piece(read_alone(model, d)) for d in documents]
    context = assemble(parts_of(model), model_key(model), read_alone(model, first), pieces)
    assert context.k.dtype == dtype
    whole = read_alone(model, [*first, *flat(documents)])
    assert (context.k[0].float() - whole.k[0].float()).abs().max() < 0.03 * whole.k[0].float().abs().max()
    found = join(model, context, suffix, method("full-recompute"), last=5).fused
    wanted = full(model, [*first, *flat(documents)], suffix)[-5:].float()
    assert (found.logits - wanted).abs().max() < 0.2

"""Reading and changing heads, and asking over one cached text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import tiny, tiny_ids
from tiny_tokenizer import tiny_tokenizer

from longspan.evaluation.order import (
    ablate,
    ask,
    averaging,
    by_head,
    changed,
    find_heads,
    find_segments,
    opened,
    prepare,
    recorded,
    sample_pairs,
    steer,
    suffix,
    time_code,
)
from longspan.evaluation.order.prompts import orders
from longspan.evaluation.order.rotation import unrotated, unrotated_calls
from longspan.evaluation.texts import load_text
from longspan.models import Loaded
from longspan.models.decoder import Decoder, DecoderConfig
from longspan.registry import Refused

SPANS = [(3, 5), (7, 8)]
LABELS = ("1", "2")
"""The small vocabulary has no token " A"."""


def decoder(**parts):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Decoder(DecoderConfig(128, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, **parts)).eval()


def logits_of(model, ids):
    with torch.no_grad():
        return model(ids).logits


def loaded(positions=4096):
    tokenizer = tiny_tokenizer()
    return Loaded(tiny("llama", vocab=len(tokenizer), positions=positions), tokenizer, "tiny", "", Path())


def some_pairs(reader, sentences=40, count=8):
    text = prepare(reader.tokenizer, " ".join(load_text("pydoc").sentences[40 : 40 + sentences]))
    return text, sample_pairs(find_segments(text.text, 8, text.starts), text.n, count)


@pytest.mark.parametrize("make", [decoder, tiny])
def test_heads_are_query_heads_and_are_read_before_the_projection(make):
    model = make()
    heads = find_heads(model)
    assert heads.n_heads == 4 and len(heads.projections) == 2
    ids, seen = tiny_ids(2, 12), []
    handle = heads.projections[1].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with recorded(heads, averaging([SPANS], 12)) as found:
        logits_of(model, ids)
    handle.remove()
    assert len(found) == 2 and found[1].shape == (2, 2, 4, heads.head_dim)
    x = seen[0].view(2, 12, 4, heads.head_dim)
    torch.testing.assert_close(found[1][:, 0], x[:, 3:5].mean(1))
    torch.testing.assert_close(found[1][:, 1], x[:, 7])
    samples = by_head(found)
    assert samples.shape == (2, 4, 4, heads.head_dim)
    assert torch.equal(samples[1, 2, 3], found[1][1, 1, 2])  # row 1, span 1


def test_the_bundled_model_has_nine_heads_of_64():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, num_hidden_layers=1, vocab_size=8,
                         intermediate_size=8, head_dim=64)
    heads = find_heads(LlamaForCausalLM(config))
    assert (heads.n_heads, heads.head_dim) == (9, 64)


@pytest.mark.parametrize("make", [decoder, tiny])
def test_one_head_is_changed_at_its_places_only(make):
    model, ids = make(), tiny_ids(2, 12)
    heads = find_heads(model)
    places = torch.zeros(2, 12, dtype=torch.bool)
    places[0, 3:5] = True
    plain = logits_of(model, ids)
    mean = torch.full((heads.head_dim,), 9.0)
    seen = []
    handle = heads.projections[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].view(2, 12, 4, -1)))
    before = logits_of(model, ids) is not None and seen.pop()
    handle.remove()
    with changed(heads, 0, 2, ablate(mean), places):
        handle = heads.projections[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].view(2, 12, 4, -1)))
        new = logits_of(model, ids)
        handle.remove()
    assert (seen[0][0, 3:5, 2] == 9.0).all()
    seen[0][0, 3:5, 2] = before[0, 3:5, 2]
    assert torch.equal(seen[0], before)
    assert torch.equal(new[1], plain[1]) and torch.equal(new[0, :3], plain[0, :3]) and not torch.equal(new[0, 3:], plain[0, 3:])
    assert torch.equal(logits_of(model, ids), plain)  # the hooks are gone
    with pytest.raises(ValueError, match="no head 4"), changed(heads, 0, 4, ablate(mean), places):
        pass


def test_steering_by_nothing_changes_no_logit():
    model, ids = decoder(), tiny_ids(1, 12)
    heads = find_heads(model)
    o = torch.randn(60, heads.head_dim, generator=torch.Generator().manual_seed(0))
    code = time_code(o, torch.linspace(0, 1, 60), torch.arange(60) // 6)
    everywhere = torch.ones(1, 12, dtype=torch.bool)
    with changed(heads, 1, 0, steer(code, 0.0), everywhere):
        same = logits_of(model, ids)
    assert torch.equal(same, logits_of(model, ids))
    with changed(heads, 1, 0, steer(code, 1.0), everywhere):
        assert not torch.equal(logits_of(model, ids), same)


def test_questions_over_the_cached_text_equal_full_prefills():
    reader = loaded()
    text, pairs = some_pairs(reader)
    for pair in pairs[:2]:
        for order in orders(pair):
            question = suffix(reader.tokenizer, order)
            with opened(reader, text.ids) as open_text:
                first, again = open_text.logits(question.ids), open_text.logits(question.ids)
            whole = logits_of(reader.model, torch.tensor([text.ids + question.ids]))[0, -1]
            assert torch.equal(first, again)
            torch.testing.assert_close(first, whole, atol=1e-4, rtol=0)


def test_asking_gives_margins_and_outputs_of_copies_and_originals():
    reader = loaded()
    text, pairs = some_pairs(reader)
    found = ask(reader, text, pairs, labels=LABELS, heads=find_heads(reader.model))
    assert found.margins.m.shape == (8,)
    assert found.copies.shape == found.originals.shape == (2, 4, 16, 8)
    # The later copy of the first pair: B of the first question, A of the second.
    seen = []
    for order, slot in zip(orders(pairs[0]), (1, 0)):
        question = suffix(reader.tokenizer, order, LABELS)
        span = tuple(len(text.ids) + at for at in question.spans[slot])
        with recorded(find_heads(reader.model), averaging([[span]], len(text.ids + question.ids))) as layers:
            logits_of(reader.model, torch.tensor([text.ids + question.ids]))
        seen.append(by_head(layers)[:, :, 0])
    torch.testing.assert_close(found.copies[:, :, 1], (seen[0] + seen[1]) / 2, atol=1e-4, rtol=1e-4)
    # The first original of the last pair, read in a full prefill of the text alone.
    s = pairs[-1].earlier
    with recorded(find_heads(reader.model), averaging([[(s.start + text.offset, s.end + text.offset)]], len(text.ids))) as layers:
        logits_of(reader.model, torch.tensor([text.ids]))
    torch.testing.assert_close(found.originals[:, :, 14], by_head(layers)[:, :, 0], atol=1e-5, rtol=1e-5)


def test_a_compressed_cache_and_no_text_can_be_asked_too():
    reader = loaded()
    text, pairs = some_pairs(reader)
    full = ask(reader, text, pairs, labels=LABELS).margins.m
    assert (ask(reader, text, pairs, "knorm(budget=0.3)", labels=LABELS).margins.m != full).any()
    assert (ask(reader, prepare(reader.tokenizer, ""), pairs, labels=LABELS).margins.m != full).any()


def test_text_and_question_beyond_the_window_are_refused():
    reader = loaded()
    text, pairs = some_pairs(reader)
    small = loaded(len(text.ids) + 20)
    with pytest.raises(Refused, match="text and question"):
        ask(small, text, pairs, labels=LABELS)
    with pytest.raises(Refused, match="the text"):
        ask(loaded(len(text.ids) - 1), text, pairs, labels=LABELS)


def test_models_without_attention_heads_can_only_be_asked():
    with pytest.raises(Refused, match="only the task can be asked"):
        find_heads(torch.nn.Linear(2, 2))
    with pytest.raises(Refused, match="only the task can be asked"):
        find_heads(decoder(mixer="linear-attention"))


def test_spans_are_checked():
    with pytest.raises(ValueError, match="should lie in 0 to 4"):
        averaging([[(2, 5)]], 4)
    with pytest.raises(ValueError, match="hold a token"):
        averaging([[(2, 2)]], 4)
    with pytest.raises(ValueError, match="different numbers"):
        averaging([[(0, 1)], []], 4)
    heads = find_heads(model := decoder())
    with pytest.raises(ValueError, match="a pass of 12 tokens"), recorded(heads, averaging([SPANS], 11)):
        logits_of(model, tiny_ids(1, 12))


def test_without_rotation_a_decoder_without_positions_is_itself():
    for position, same in (("nope", True), ("rope", False)):
        model, ids = decoder(position=position), tiny_ids(2, 12)
        heads, pool = find_heads(model), averaging([SPANS], 12)
        mixers = [m for m in model.modules() if hasattr(m, "o_proj")]
        with recorded(heads, pool) as plain, unrotated(mixers[1], pool) as bare:
            logits_of(model, ids)
        assert len(bare) == 1 and torch.allclose(bare[0], plain[1], atol=1e-6) == same


def test_without_rotation_a_model_of_transformers():
    reader = loaded()
    text, pairs = some_pairs(reader)
    question = suffix(reader.tokenizer, orders(pairs[0])[0])
    heads, pool = find_heads(reader.model), averaging([question.spans], len(question.ids))
    with opened(reader, text.ids) as open_text, recorded(heads, pool) as plain, unrotated_calls(open_text.run, 0, pool) as bare:
        open_text.logits(question.ids)
    # By hand, in layer 0: queries and keys straight from the projections.
    layer = reader.model.model.layers[0]
    with torch.no_grad():
        x = layer.input_layernorm(reader.model.model.embed_tokens(torch.tensor([text.ids + question.ids])))
        q, k, v = (p(x).view(1, x.shape[1], -1, 8).transpose(1, 2) for p in
                   (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    first, end = question.spans[0]
    wanted = out[0, :, len(text.ids) + first : len(text.ids) + end].mean(1)
    torch.testing.assert_close(bare[0][0, 0], wanted, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(bare[0], plain[0], atol=1e-4)


def test_left_padded_batches_have_spans_of_their_own():
    model, ids = tiny(), tiny_ids(1, 12)
    heads = find_heads(model)
    with recorded(heads, averaging([SPANS], 12)) as plain:
        logits_of(model, ids)
    padded = torch.cat((torch.full((1, 3), 2), ids), 1)
    longer = tiny_ids(1, 15, seed=4)
    mask = torch.tensor([[0] * 3 + [1] * 12, [1] * 15])
    rows = [[(a + 3, b + 3) for a, b in SPANS], SPANS]
    with torch.no_grad(), recorded(heads, averaging(rows, 15)) as both:
        model(torch.cat((padded, longer)), attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    for one, two in zip(plain, both):
        torch.testing.assert_close(two[:1], one, atol=1e-5, rtol=1e-5)

"""Plain decoding against `generate`, and likelihoods against one pass over the whole text."""

from __future__ import annotations

import pytest
import torch
from generating import new_tokens
from tiny_models import TOKENS, tiny, tiny_ids, tiny_tokenizer
from transformers import DynamicCache

from longspan.decoding import Generated, end_ids, greedy, read, token_nlls


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


def begun(model, ids):
    cache = DynamicCache()
    return cache, read(model, ids, cache)[:, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_read_gives_the_last_logits_in_float32(dtype):
    model, ids = tiny("llama").to(dtype), tiny_ids(1, 12)
    found = read(model, ids, DynamicCache(), last=3)
    assert found.shape == (1, 3, 128) and found.dtype == torch.float32
    torch.testing.assert_close(found, model(ids).logits[:, -3:].float(), atol=1e-5 if dtype == torch.float32 else 0.05, rtol=1e-3)
    assert found.is_inference()


def test_greedy_is_generate(model):
    ids = tiny_ids(1, 12)
    cache, logits = begun(model, ids)
    done = greedy(model, cache, logits, 10, [])
    assert done.ids == new_tokens(model, ids, 10)[0]
    assert not done.stopped and done.seconds > 0
    assert cache.get_seq_length() == 12 + 9, "the last token is not read"


def test_greedy_ends_before_an_end_token(model):
    ids = tiny_ids(1, 12)
    whole = new_tokens(model, ids, 10)[0]
    end = next(t for t in whole if t != whole[0])
    done = greedy(model, *begun(model, ids), 10, [end])
    assert done.stopped and done.ids == whole[: whole.index(end)]
    assert greedy(model, *begun(model, ids), 10, [whole[0]]) .ids == []


def test_greedy_ends_with_a_stop_text():
    model, tokenizer, ids = tiny("llama", vocab=len(TOKENS)), tiny_tokenizer(), tiny_ids(1, 12)
    whole = greedy(model, *begun(model, ids), 10, []).ids
    stop = tokenizer.decode(whole[2:4])
    done = greedy(model, *begun(model, ids), 10, [], ["never seen", stop], tokenizer)
    assert done.stopped and stop in tokenizer.decode(done.ids)
    assert stop not in tokenizer.decode(done.ids[:-1])


@pytest.mark.parametrize("n", [0, 1])
def test_greedy_of_nothing_and_of_one(model, n):
    cache, logits = begun(model, tiny_ids(1, 12))
    done = greedy(model, cache, logits, n, [])
    assert len(done.ids) == n and cache.get_seq_length() == 12
    assert Generated().ids == []


@pytest.mark.parametrize("chunk", [None, 1, 2, 3, 7, 50])
def test_likelihoods_are_those_of_one_pass(model, chunk):
    ids, answer = tiny_ids(1, 12), tiny_ids(1, 7, seed=1)[0].tolist()
    logits = model(torch.tensor([ids[0].tolist() + answer])).logits[0].log_softmax(-1)
    wanted = [-float(logits[11 + i, t]) for i, t in enumerate(answer)]
    cache, before = begun(model, ids)
    assert token_nlls(model, cache, before, answer, chunk) == pytest.approx(wanted, abs=1e-4)
    assert token_nlls(model, cache, before, []) == []


def test_end_tokens_come_from_model_and_tokenizer():
    model, tokenizer = tiny("llama"), tiny_tokenizer()
    assert end_ids(model, tokenizer) == [2]
    model.generation_config.eos_token_id = [7, 5]
    assert end_ids(model, tokenizer) == [2, 5, 7]
    model.generation_config.eos_token_id = None
    tokenizer.eos_token = None
    assert end_ids(model, tokenizer) == []
    del model.generation_config
    assert end_ids(model, tokenizer) == []

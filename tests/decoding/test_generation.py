"""`generate` of transformers under a recipe with a draft: the same text, options and streams as without."""

import pytest
import torch
from tiny_models import tiny, tiny_ids
from tiny_tokenizer import tiny_tokenizer
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from longspan import Recipe, per_row
from longspan.registry import Refused

OPTIONS = {"do_sample": False, "pad_token_id": 2, "max_new_tokens": 24}


def generate(recipe, ids=None, **options):
    model = tiny("llama", layers=4)
    ids = tiny_ids(1, 40) if ids is None else ids
    given = {"attention_mask": torch.ones_like(ids), **OPTIONS, **options}
    with Recipe.parse(recipe).on(model):
        return model.generate(ids, **given)


@pytest.mark.parametrize("draft", ["suffix", "layer-skip(skip=1)", "layer-skip(skip=2, adapt=always)"])
@pytest.mark.parametrize("rest", ["", " + knorm(budget=0.5)", " + streaming-llm(budget=0.5, schedule=every(steps=8))"])
def test_the_text_is_the_same(draft, rest):
    assert torch.equal(generate(draft + rest), generate(rest.strip(" +") or "full"))


def test_penalties_are_kept_to():
    options = {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2}
    plain = generate("full", **options)
    assert torch.equal(generate("suffix(adapt=always)", **options), plain)
    assert torch.equal(generate("layer-skip(skip=1, adapt=always)", **options), plain)
    assert not torch.equal(plain, generate("full"))


def test_it_ends_at_the_end_token():
    plain = generate("full")[0, 40:].tolist()
    end = plain[5]
    wanted = generate("full", eos_token_id=end)
    assert torch.equal(generate("layer-skip(skip=1, adapt=always)", eos_token_id=end), wanted)
    assert wanted.shape[1] == 40 + plain.index(end) + 1


def test_padded_rows_are_written_as_if_alone():
    ids = torch.cat([tiny_ids(1, 40), tiny_ids(1, 40, seed=1)])
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    ids[1, :7] = 2
    for draft in ("suffix", "layer-skip(skip=1, adapt=always)"):
        assert torch.equal(generate(draft, ids, attention_mask=mask), generate("full", ids, attention_mask=mask))


def test_sampling_follows_the_callers_seed():
    torch.manual_seed(3)
    one = generate("suffix", do_sample=True, temperature=0.9)
    torch.manual_seed(3)
    same = generate("layer-skip(skip=1, adapt=always)", do_sample=True, temperature=0.9)
    other = generate("suffix", do_sample=True, temperature=0.9)
    assert torch.equal(one, same) and not torch.equal(one, other)


class Collector(BaseStreamer):
    def __init__(self):
        self.got, self.ended = [], False

    def put(self, value):
        self.got += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_a_streamer_gets_every_token():
    plain, drafted = Collector(), Collector()
    generate("full", streamer=plain)
    generate("layer-skip(skip=1, adapt=always)", streamer=drafted)
    assert drafted.ended and drafted.got == plain.got


def test_stop_strings_end_the_text_where_they_would():
    model, tokenizer = tiny("llama", layers=4, vocab=len(tiny_tokenizer())), tiny_tokenizer()
    ids = tiny_ids(1, 40)
    options = {**OPTIONS, "attention_mask": torch.ones_like(ids), "tokenizer": tokenizer}
    words = tokenizer.decode(model.generate(ids, **options)[0, 40:], skip_special_tokens=True)
    stop = next(c for c in words[3:] if c.isprintable() and c.strip() and c.isascii())
    plain = model.generate(ids, stop_strings=[stop], **options)
    assert plain.shape[1] < 64
    for given in ({"stop_strings": [stop]}, {"generation_config": GenerationConfig(stop_strings=[stop])}):
        with Recipe.parse("layer-skip(skip=1, adapt=always)").on(model):
            assert torch.equal(model.generate(ids, **given, **options), plain)


def test_padded_rows_are_forced_to_end_where_they_would():
    ids = torch.cat([tiny_ids(1, 40), tiny_ids(1, 40, seed=1)])
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    ids[1, :7] = 2
    options = {"attention_mask": mask, "forced_eos_token_id": 1, "eos_token_id": 1}
    assert torch.equal(generate("layer-skip(skip=1, adapt=always)", ids, **options), generate("full", ids, **options))


def test_rows_with_recipes_of_their_own_have_no_draft():
    model = tiny("llama")
    with pytest.raises(Refused, match="one by one"), per_row([Recipe.parse("suffix")] * 2, model):
        model.generate(torch.cat([tiny_ids(1, 20)] * 2), **OPTIONS)


def test_a_dictionary_if_asked_for():
    found = generate("suffix", return_dict_in_generate=True)
    assert torch.equal(found.sequences, generate("full"))


@pytest.mark.parametrize(("options", "what"), [
    ({"num_beams": 2}, "num_beams=2"), ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
    ({"prompt_lookup_num_tokens": 3}, "a draft of its own"),
    ({"guidance_scale": 1.5}, "guidance_scale"), ({"custom_generate": lambda *a, **k: None}, "custom_generate"),
])
def test_what_drafts_cannot_serve_is_refused(options, what):
    with pytest.raises(Refused, match=what):
        generate("suffix", **options)


def test_the_model_is_afterwards_what_it_was():
    model = tiny("llama")
    ids = tiny_ids(1, 20)
    before = model.generate(ids, GenerationConfig(**OPTIONS))
    with Recipe.parse("suffix").on(model):
        model.generate(ids, **OPTIONS)
    assert torch.equal(model.generate(ids, GenerationConfig(**OPTIONS)), before)

import gc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from longspan.evaluation import base
from longspan.evaluation.base import Draft, Example, Key, answer_ids, fit, prompt_parts, token_spans, total_length
from longspan.registry import Refused

EXAMPLE = Example("The sky is blue. The key is 42.", "\nWhat is the key?", "The key is", ("42",), 8,
                  {"index": 0, "spans": [[17, 31]]})


@pytest.fixture()
def tokenizer():
    return tiny_tokenizer()


def plain_tokenizer(bos: bool = False, metaspace: bool = False):
    """Characters as tokens, no chat template; with a beginning-of-sequence token or a space before any text."""
    symbols = ["<s>", *map(chr, range(32, 127)), "\n", "▁"]
    made = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, []))
    if metaspace:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        made.decoder = decoders.Metaspace(prepend_scheme="always")
    else:
        made.decoder = decoders.Fuse()
    if bos:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>")


def test_keys_give_independent_generators():
    key = Key("task", 1024, 0, 3)
    assert key.rng("a").random() == Key("task", 1024, 0, 3).rng("a").random()
    others = [key.rng("b"), Key("task", 1024, 0, 4).rng("a"), Key("task", 1024, 1, 3).rng("a"),
              Key("task", 512, 0, 3).rng("a"), Key("other", 1024, 0, 3).rng("a")]
    assert len({key.rng("a").random(), *(rng.random() for rng in others)}) == 6


def test_prompt_is_the_chat_template_cut_before_the_question(tokenizer):
    parts = prompt_parts(EXAMPLE, tokenizer)
    shown = tokenizer.apply_chat_template([{"role": "user", "content": EXAMPLE.context + EXAMPLE.question}],
                                          tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(parts.ids) == shown + EXAMPLE.answer_prefix
    assert tokenizer.decode(parts.context_ids) == shown.split("\nWhat")[0]
    assert parts.question_ids[-len(parts.prefix_ids):] == parts.prefix_ids
    assert tokenizer.decode(parts.prefix_ids) == EXAMPLE.answer_prefix
    assert parts.ids.count(tokenizer.bos_token_id) == shown.count("<|turn|>")


def test_prompt_without_template(tokenizer):
    for parts in (prompt_parts(EXAMPLE, tokenizer, template=False),
                  prompt_parts(Example(**{**EXAMPLE.__dict__, "meta": {"chat_template": False}}), tokenizer)):
        assert tokenizer.decode(parts.ids) == EXAMPLE.context + EXAMPLE.question + "\n" + EXAMPLE.answer_prefix
        assert tokenizer.decode(parts.context_ids) == EXAMPLE.context


def test_beginning_of_sequence_comes_once_and_only_if_added():
    assert prompt_parts(EXAMPLE, plain_tokenizer(bos=True)).ids.count(0) == 1
    assert prompt_parts(EXAMPLE, plain_tokenizer(bos=True)).context_ids[0] == 0
    assert prompt_parts(EXAMPLE, plain_tokenizer()).ids.count(0) == 0


def test_pieces_get_no_space_of_their_own():
    tokenizer = plain_tokenizer(metaspace=True)
    space = tokenizer.convert_tokens_to_ids("▁")
    parts = prompt_parts(EXAMPLE, tokenizer)
    assert tokenizer.encode("What", add_special_tokens=False)[0] == space  # what this tokenizer does on its own
    assert space not in (parts.question_ids[0], parts.prefix_ids[0])
    assert answer_ids(EXAMPLE, tokenizer).count(space) == 1


def test_chat_template_has_to_show_the_text_once(tokenizer):
    broken = plain_tokenizer()
    broken.chat_template = "{% for m in messages %}{{ m['content'] }}{{ m['content'] }}{% endfor %}"
    with pytest.raises(Refused, match="2 times"):
        prompt_parts(EXAMPLE, broken)


def test_a_changed_chat_template_is_noticed():
    tokenizer = plain_tokenizer()
    tokenizer.chat_template = "A{{ messages[0]['content'] }}B"
    assert tokenizer.decode(prompt_parts(EXAMPLE, tokenizer).context_ids)[0] == "A"
    tokenizer.chat_template = "C{{ messages[0]['content'] }}D"
    assert tokenizer.decode(prompt_parts(EXAMPLE, tokenizer).context_ids)[0] == "C"


@pytest.mark.parametrize("prefix,answers,meta,expected", [
    ("The key is", ("42",), {}, " 42"),
    ('"k": "', ("42",), {}, "42"),
    ("They are: ", ("1", "2"), {}, "1, 2"),
    ("They are", ("1", "2"), {"answers_are": "any"}, " 1"),
    ("They are", ("1", "2"), {"answer_text": "1. 1 2. 2"}, " 1. 1 2. 2"),
    ("", ("42",), {}, "42"),  # the template's generation prompt ends in a newline
    ("", ("42",), {"chat_template": False}, " 42"),  # here the question is what comes before
    ("", (), {"target": " and so on"}, " and so on"),
])
def test_answer_as_it_continues_the_prompt(tokenizer, prefix, answers, meta, expected):
    example = Example("C", "\nQ?", prefix, answers, 4, {"index": 0, **meta})
    assert tokenizer.decode(answer_ids(example, tokenizer)) == expected


def test_token_spans_cover_the_needle(tokenizer):
    for template in (True, False):
        (start, end), = token_spans(EXAMPLE, tokenizer, template=template)
        found = tokenizer.decode(prompt_parts(EXAMPLE, tokenizer, template).context_ids[start:end])
        assert found.strip() == "The key is 42."


def test_token_spans_without_offsets():
    class Slow:
        """A tokenizer that gives no offsets."""

        bos_token_id = 0

        def __init__(self):
            self.inner = plain_tokenizer(bos=True)

        def encode(self, text, add_special_tokens=True):
            return self.inner.encode(text, add_special_tokens=add_special_tokens)

    assert token_spans(EXAMPLE, Slow()) == token_spans(EXAMPLE, plain_tokenizer(bos=True)) == [(18, 32)]


def test_tokenizers_that_lose_text_are_refused():
    lossy = Tokenizer(models.WordLevel({"[UNK]": 0, "One": 1}, unk_token="[UNK]"))
    lossy.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(Refused, match="gives text back"):
        base.check_round_trip(PreTrainedTokenizerFast(tokenizer_object=lossy, unk_token="[UNK]"))
    base.check_round_trip(tiny_tokenizer())


def test_what_is_known_of_a_tokenizer_goes_with_it():
    gc.collect()
    before = len(base._memories)
    tokenizer = plain_tokenizer()
    prompt_parts(EXAMPLE, tokenizer)
    assert len(base._memories) == before + 1
    del tokenizer
    gc.collect()
    assert len(base._memories) == before


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=2, max_size=400), st.integers(0, 3000), st.integers(2, 500),
       st.none() | st.integers(1, 300))
def test_largest_is_the_largest(sizes, extra, guess, most):
    def cost(units):
        rounds, rest = divmod(units, len(sizes))
        return 10 + rounds * sum(sizes) + sum(sizes[:rest])

    limit = cost(1) + extra
    found = base.largest(cost, limit, 1, most, cost(1), guess)
    assert cost(found) <= limit
    assert cost(found + 1) > limit or found == most


def test_largest_takes_few_calls():
    calls = []

    def cost(units):
        calls.append(units)
        return 100 + sum(20 + (7 * i) % 11 for i in range(units))

    base.largest(cost, 30_000, 1, None, cost(1), 9)
    assert len(calls) < 12


def draft(estimate=None, most=None, exhausted=""):
    return Draft(lambda units: Example("word " * units, "\nQ?", "A", ("x",), 8, {"index": 0}), 1, most, exhausted,
                 estimate)


@pytest.mark.parametrize("estimate", [None, lambda units: 2.0 * units, lambda units: 0.1 * units])
def test_fit_fills_the_length(tokenizer, estimate):
    found = fit(draft(estimate), 500, tokenizer)
    assert total_length(found, tokenizer) <= 500
    longer = Example(found.context + "word ", *list(found.__dict__.values())[1:])
    assert total_length(longer, tokenizer) > 500


def test_fit_refuses_too_short_and_exhausted(tokenizer):
    with pytest.raises(Refused, match=r"niah at length 10: .* at least \d+"):
        fit(draft(), 10, tokenizer, "niah")
    with pytest.raises(Refused, match="name a longer text"):
        fit(draft(most=5, exhausted="name a longer text."), 500, tokenizer)
    assert fit(draft(most=5), 500, tokenizer).context == "word " * 5


def test_length_counts_what_is_generated_or_scored(tokenizer):
    parts = prompt_parts(EXAMPLE, tokenizer)
    assert total_length(EXAMPLE, tokenizer) == len(parts.ids) + 8
    scored = Example("Some text", "", "", (), 0, {"index": 0, "target": " and more", "chat_template": False})
    assert total_length(scored, tokenizer) == len(tokenizer.encode("Some text and more", add_special_tokens=False))

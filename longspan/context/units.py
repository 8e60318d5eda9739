"""Where a text's sentences lie among its tokens, for methods that keep whole units of text.

A sentence ends at ``.``, ``?`` or ``!`` before white space, and at a newline. The text is read back from the tokens, so that
the units are those of what the model sees, chat template included; a token that straddles an end belongs to what it ends.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from longspan.recipe import Recipe

Span = tuple[int, int]
END = re.compile(r"[.?!](?=\s)(?:\s*\n)?|\s*\n")
"""A sentence's end with the line breaks after it; blanks after it open the next sentence, as they do in tokens."""


def with_units(spans: dict[str, list[Span]] | None, recipe: Recipe, tokenizer: Any, ids: Sequence[int]) -> dict[str, list[Span]]:
    """`spans`, and the sentences where the recipe keeps whole units of text and no shots are marked."""
    found = dict(spans or {})
    if recipe.cache is not None and recipe.cache.can("units") and not found.get("shots"):
        found.setdefault("sentences", sentence_spans(tokenizer, ids))
    return found


def sentence_spans(tokenizer: Any, ids: Sequence[int]) -> list[Span]:
    """Sentences of the text that `ids` spell, as token ranges (first, end): in order, together all tokens.

    Args:
        tokenizer: a transformers tokenizer.
        ids: token ids of the whole text.
    """
    text, starts = token_starts(tokenizer, ids)
    firsts, at = [0], 0
    for match in END.finditer(text):
        while at < len(starts) and starts[at] < match.end():
            at += 1
        if firsts[-1] < at < len(starts):
            firsts.append(at)
    spans = [(first, end) for first, end in zip(firsts, [*firsts[1:], len(starts)]) if first < end]
    assert sum(end - first for first, end in spans) == len(ids), "sentences must cover every token"
    return spans


def token_starts(tokenizer: Any, ids: Sequence[int]) -> tuple[str, list[int]]:
    """The text, and the character at which every token starts.

    By the tokenizer's offsets where the text gives the same tokens again; otherwise by what each token adds to the one
    before it.
    """
    ids = list(ids)
    text = _decode(tokenizer, ids)
    if getattr(tokenizer, "is_fast", False):
        again = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        if list(again["input_ids"]) == ids:
            return text, [start for start, _ in again["offset_mapping"]]
    pieces = [_decode(tokenizer, ids[max(0, i - 1) : i + 1])[len(_decode(tokenizer, ids[max(0, i - 1) : i])) :]
              for i in range(len(ids))]
    return "".join(pieces), list(accumulate(map(len, pieces), initial=0))[:-1]


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

"""What tasks over the user's files share: a context that is given, and too long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from longspan.evaluation.base import Draft, Example, Key, encode_continuation
from longspan.registry import Refused, nearest

T = TypeVar("T")


def middle_cut(ids: list[int], kept: int, after: int, tokenizer: Any) -> str:
    """Text of `kept` of the tokens, the middle cut out so that both halves of the prompt are equally long.

    The last half ends with the `after` tokens of the question, so less of the context remains before it.
    """
    first = min(kept, (kept + after + 1) // 2)
    last = kept - first
    halves = [ids[:first], ids[len(ids) - last:]]
    return "".join(tokenizer.decode(half, skip_special_tokens=True, clean_up_tokenization_spaces=False)
                   for half in halves)


def cut_to_fit(whole: str, question: str, tokenizer: Any, make: Callable[[str, bool], Example]) -> Draft:
    """A draft that keeps as many tokens of `whole` as fit, first and last half; `make(context, truncated)` is the example."""
    ids = encode_continuation(tokenizer, whole)
    after = len(encode_continuation(tokenizer, question))

    def build(kept: int) -> Example:
        truncated = kept < len(ids)
        return make(middle_cut(ids, kept, after, tokenizer) if truncated else whole, truncated)

    return Draft(build, least=min(16, len(ids)), most=len(ids))


def row_of(rows: Sequence[T], key: Key, size: Callable[[T], int]) -> T:
    """The row of `key`, in the order of the file; for the probes that find the floor, the rows of the greatest `size`."""
    if key.index < 0:
        return sorted(rows, key=lambda row: -size(row))[(-1 - key.index) % len(rows)]
    return rows[key.index % len(rows)]


def file_in(card: str, path: str, name: str, what: str) -> Path:
    """The file a task reads: `path` itself, or ``NAME.jsonl`` in the folder `path`.

    Args:
        what: what the user is asked for, such as "your copy of LV-Eval's data folder or one of its .jsonl files".

    Raises:
        Refused: no path, or no such file in the folder.
    """
    if not path:
        raise Refused(f"{card} needs path=, {what}.")
    found = Path(path).expanduser()
    if not found.is_dir():
        return found
    known = sorted(file.stem for file in found.glob("*.jsonl"))
    if name not in known:
        raise Refused(f"{card} in {path!r}: {nearest(name, known, 'name')}")
    return found / f"{name}.jsonl"

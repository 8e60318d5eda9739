"""Examples that are drawn once: kept on disk by the hash of all that decides them.

Fitting an example to a length tokenises it several times, which on a small model can take a good part of a run. The key holds
the task with its knobs, its text, the length, the seed, the tokenizer and the code that draws; a longer run of the same key
draws only what it needs beyond. What is kept in ``examples/`` of longspan's cache folder can be deleted at any time; what
wasn't used for a month is. The environment variable LONGSPAN_EXAMPLES=0 turns this off.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from longspan.evaluation.base import Example, Task, tokenizer_memory
from longspan.evaluation.digests import code_digest
from longspan.models.bundled import cache_folder

MONTH = 30 * 24 * 3600
FILES = ("path", "file")
"""Knobs that name a file of the user's: reading it is quick, and what is in it may change."""


def draw(task: Task, length: int, n: int, seed: int, tokenizer: Any) -> list[Example]:
    """The first `n` examples of a task, from disk where they were drawn before; same as ``task.examples``.

    Raises:
        Refused: as ``task.examples``.
    """
    file = _file(task, length, seed, tokenizer)
    if file is None:
        return [_plain(example) for example in task.examples(length, n, seed, tokenizer)]
    kept, complete = _read(file)
    if len(kept) < n and not complete:
        fresh = list(task.examples(length, n, seed, tokenizer, first=len(kept)))
        kept += [_plain(example) for example in fresh]
        _write(file, kept, complete=len(kept) < n)
    return kept[:n]


def _plain(example: Example) -> Example:
    """An example as it comes back from disk, so that it is the same whether it was there or not."""
    return _made(json.loads(json.dumps(asdict(example))))


def _made(data: dict[str, Any]) -> Example:
    return Example(**(data | {"answers": tuple(data["answers"])}))


def _file(task: Task, length: int, seed: int, tokenizer: Any) -> Path | None:
    if os.environ.get("LONGSPAN_EXAMPLES", "1") == "0" or any(getattr(task, name, "") for name in FILES):
        return None
    known = tokenizer_digest(tokenizer)
    if known is None:
        return None
    text, source = task.text, inspect.getsourcefile(type(task))
    own = "" if type(task).__module__.startswith("longspan.") or source is None else Path(source).read_text(encoding="utf-8")
    named = {"task": str(task), "text": "" if text is None else text.sha256, "length": length, "seed": seed, "tokenizer": known,
             "code": code_digest(("evaluation",)), "own": own}
    key = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder() / "examples" / f"{key}.json"


def tokenizer_digest(tokenizer: Any) -> str | None:
    """A hash of how a tokenizer cuts text and frames a chat; None for one that doesn't show it."""
    fast, template = getattr(tokenizer, "backend_tokenizer", None), str(getattr(tokenizer, "chat_template", None))
    known, key = tokenizer_memory(tokenizer), ("digest", template)
    if key not in known and fast is not None:
        special = json.dumps({name: str(token) for name, token in tokenizer.special_tokens_map.items()}, sort_keys=True)
        shown = "\0".join([type(tokenizer).__name__, fast.to_str(), special, template])
        known[key] = hashlib.sha256(shown.encode("utf-8", "surrogatepass")).hexdigest()
    return known.get(key)


def _read(file: Path) -> tuple[list[Example], bool]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        os.utime(file)
        return [_made(example) for example in data["examples"]], data["complete"]
    except (OSError, ValueError, KeyError, TypeError):
        return [], False  # not there, or not ours: drawn again


def _write(file: Path, examples: list[Example], *, complete: bool) -> None:
    """Best effort: a folder that can't be written costs time, nothing else."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_name(f".{file.name}.{os.getpid()}")
        data = {"complete": complete, "examples": [asdict(example) for example in examples]}
        beside.write_text(json.dumps(data), encoding="utf-8")
        beside.replace(file)
        for old in file.parent.iterdir():
            if time.time() - old.stat().st_mtime > MONTH:
                old.unlink(missing_ok=True)

"""Hashes of code: what was made by other code is made again."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from longspan import registry

SOURCES = (".py", ".c", ".h", ".json", ".safetensors")


@functools.cache
def code_digest(rooms: tuple[str, ...]) -> str:
    """A hash of every file of these rooms, and of the modules that stand beside them."""
    root = Path(registry.__file__).parent
    files = [*root.glob("*.py"), *(f for room in rooms for f in (root / room).rglob("*") if f.suffix in SOURCES)]
    found = hashlib.sha256()
    for file in sorted(files):
        found.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return found.hexdigest()

"""The store of documents' caches: each document is read once, alone, and found again by what it says.

An entry's key is a digest of the document's tokens, the model's fingerprint, the dtype, the rotary parameters and how it
was read (alone, positions from 0). So a changed document, another model or other positions are other entries, and nothing
stale is served. Entries are never written into; a prompt gets a copy.

In memory the least recently used leave first. On disk (if a folder is named) every entry is one safetensors file, written
aside and renamed, with a digest of its content: a file that doesn't match is made again, never served.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import safe_open, save_file

from longspan.cache.amount import parse_amount
from longspan.cache.digest import content_digest
from longspan.cache.reuse.document import DocumentCache, depends_on_length, read_alone, rotary_digest
from longspan.cache.reuse.stage import parts_of
from longspan.models.bundled import cache_folder
from longspan.models.hook import turn
from longspan.models.load import Loaded
from longspan.models.profiles import model_key
from longspan.registry import Refused

FORMAT = "longspan-document-1"
SCHEME = "read alone, positions from 0"
USER_CACHE = "cache"
"""Names the user's cache folder where a folder is asked for."""


@dataclass
class Counts:
    """What a library did so far."""

    hits: int = 0
    """Documents that were there, in memory or on disk."""
    from_disk: int = 0
    misses: int = 0
    damaged: int = 0
    """Files that didn't match their digest; each is a miss too, and was made again."""
    evicted: int = 0
    """Entries that left memory for others."""
    documents: int = 0
    """In memory now."""
    bytes: int = 0
    """In memory now."""


class Library:
    """Documents' caches of one model.

    Args:
        loaded: the model that reads documents.
        folder: where entries are kept on disk as well; "cache" means the user's cache folder. None: in memory only.
        memory: most bytes of entries in memory, such as "1 GiB".

    Threads may share a library; each document is read by one of them at a time.
    """

    def __init__(self, loaded: Loaded, folder: str | Path | None = None, memory: str | int = "1 GiB") -> None:
        self.loaded = loaded
        folder = cache_folder() / "documents" if folder == USER_CACHE else folder
        self.folder = None if folder in (None, "") else Path(folder).expanduser()  # type: ignore[arg-type]
        self.memory = _bytes(memory)
        self._held: OrderedDict[str, DocumentCache] = OrderedDict()
        self._counts = Counts()
        self._lock = threading.RLock()

    @property
    def counts(self) -> Counts:
        """Hits, misses and sizes so far."""
        return Counts(**asdict(self._counts))

    # -- looking up

    def get(self, ids: Sequence[int]) -> tuple[DocumentCache, bool]:
        """The cache of a document, read now if it has to be; and whether it was there.

        Raises:
            Refused: no tokens, or more than the model's window.
        """
        with turn(self.loaded.model), self._lock:
            found = self.find(ids)
            if found is not None:
                self._counts.hits += 1
                return found, True
            self._counts.misses += 1
            made = read_alone(self.loaded.model, ids)
            name = self.key(ids)
            self._keep(name, made)
            self._write(name, made)
            return made, False

    def find(self, ids: Sequence[int]) -> DocumentCache | None:
        """The cache of a document if it is there. Counts nothing as a hit or miss."""
        with turn(self.loaded.model), self._lock:
            name = self.key(ids)
            found = self._held.get(name)
            if found is not None:
                self._held.move_to_end(name)
                return found
            found = self._read(name, ids)
            if found is not None:
                self._counts.from_disk += 1
                self._keep(name, found)
            return found

    def __contains__(self, ids: Sequence[int]) -> bool:
        return self.find(ids) is not None

    def forget(self) -> None:
        """Drop every entry from memory; files stay."""
        with self._lock:
            self._held.clear()
            self._counts.documents = self._counts.bytes = 0

    def key(self, ids: Sequence[int]) -> str:
        """The name of a document's entry: a digest of all that its cache depends on."""
        return hashlib.sha256(json.dumps(self._facts(ids), sort_keys=True).encode()).hexdigest()

    def _facts(self, ids: Sequence[int]) -> dict[str, str]:
        model = self.loaded.model
        # Frequencies that follow the length are those of the latest forward; the config, part of the fingerprint, says them.
        rotary = "by length" if depends_on_length(model) else rotary_digest(parts_of(model))
        tokens = torch.as_tensor(ids, dtype=torch.int64).numpy().tobytes()
        return {"tokens": hashlib.sha256(tokens).hexdigest(), "model": model_key(model), "dtype": str(model.dtype),
                "rotary": rotary, "scheme": SCHEME, "format": FORMAT}

    # -- in memory

    def _keep(self, name: str, entry: DocumentCache) -> None:
        """Hold an entry, and let go of the least recently used until all fit."""
        counts = self._counts
        if entry.nbytes > self.memory:
            return
        self._held[name] = entry
        counts.bytes += entry.nbytes
        while counts.bytes > self.memory:
            _, gone = self._held.popitem(last=False)
            counts.bytes -= gone.nbytes
            counts.evicted += 1
        counts.documents = len(self._held)

    # -- on disk

    def path(self, ids: Sequence[int]) -> Path | None:
        """Where a document's entry lies on disk, whether or not it is there; None without a folder."""
        return None if self.folder is None else self._path(self.key(ids))

    def _path(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / name[:2] / f"{name}.safetensors"

    def _write(self, name: str, entry: DocumentCache) -> None:
        if self.folder is None:
            return
        file = self._path(name)
        tensors = {n: getattr(entry, n).detach().cpu().contiguous() for n in ("ids", "k", "v")}
        meta = {"format": FORMAT, "key": name, "model": entry.model, "rotary": entry.rotary}
        part = file.with_name(f"{name}.{uuid.uuid4().hex[:8]}.part")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            try:
                save_file(tensors, part, metadata=meta | {"digest": content_digest(tensors, meta)})
                os.replace(part, file)
            finally:
                part.unlink(missing_ok=True)
        except Exception as error:  # safetensors has an exception of its own for a full disk or a closed folder
            raise Refused(f"can't keep a document's cache in {str(self.folder)!r} ({error}); name a folder with room that you "
                          "may write to.") from error

    def _read(self, name: str, ids: Sequence[int]) -> DocumentCache | None:
        """An entry from disk, if it is there and whole."""
        if self.folder is None or not (file := self._path(name)).is_file():
            return None
        try:
            with safe_open(file, "pt") as stored:
                meta = stored.metadata() or {}
                tensors = {n: stored.get_tensor(n) for n in stored.keys()}  # noqa: SIM118 (not a mapping)
            whole = meta.pop("digest", None) == content_digest(tensors, meta) and meta["key"] == name and meta["format"] == FORMAT
            if whole and tensors["ids"].tolist() == list(map(int, ids)):
                device = self.loaded.model.device
                k, v = tensors["k"].to(device), tensors["v"].to(device)
                return DocumentCache(tensors["ids"], k, v, meta["model"], meta["rotary"])
        except Exception:  # cut off or overwritten: the reader of safetensors raises its own exceptions
            whole = False
        self._counts.damaged += 1
        return None


def _bytes(memory: str | int) -> int:
    """A limit in bytes."""
    if isinstance(memory, int) and memory >= 0:
        return memory
    amount = parse_amount(str(memory))
    if amount.unit != "bytes":
        raise Refused(f'memory={memory!r}: expected bytes, such as "1 GiB".')
    return int(amount.value)

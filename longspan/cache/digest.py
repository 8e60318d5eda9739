"""One key for everything in a file of tensors, so that damage is seen before anything is served from it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor


def content_digest(tensors: dict[str, Tensor], meta: dict[str, Any]) -> str:
    """SHA-256 over names, dtypes, shapes, values and metadata: one flipped bit gives another."""
    found = hashlib.sha256(json.dumps(sorted(meta.items())).encode())
    for name, t in sorted(tensors.items()):
        found.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        found.update(t.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()

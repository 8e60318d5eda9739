"""Loading a model that a retrofit changed: its config names the method, which knows how to build it again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from longspan import registry
from longspan.registry import Refused

ENTRY = "longspan_retrofit"
"""The config's entry: ``{"name": …, "knobs": {…}, "pruned": [layers]}``."""


def read_retrofit(folder: Path, dtype: Any, device: torch.device, device_map: Any = None) -> Any | None:
    """The model in `folder` if a retrofit made it, else None. Raises `Refused` for a `device_map`."""
    config = folder / "config.json"
    entry = json.loads(config.read_text(encoding="utf-8")).get(ENTRY) if config.is_file() else None
    if entry is None:
        return None
    if device_map is not None:
        raise Refused(f"device_map={device_map!r}: a model with a retrofit is loaded to one device; give device instead.")
    method: Any = registry.get(entry["name"])
    return method.load(folder, dtype=dtype, device=device)

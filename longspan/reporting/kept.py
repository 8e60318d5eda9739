"""Which tokens each recipe kept, per layer and head, packed for the page that shows the text.

One bit per (layer, head, token): a 4,000-token prompt of a model with 30 layers and 3 key-value heads takes 45 KB per
recipe, 60 KB as text in the page.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def kept_payload(
    tokens: Sequence[str],
    recipes: Iterable[tuple[str, ArrayLike]],
    spans: Iterable[tuple[str, int, int]] = (),
    title: str = "",
) -> dict[str, Any]:
    """What `write_page(kept=…)` shows, as plain JSON values.

    Args:
        tokens: the N tokens as decoded text, so that joining them gives the prompt back.
        recipes: (name, kept) pairs; kept is boolean (L, H, N): layer, key-value head, token.
        spans: (label, start, end) of parts worth finding, such as the needle and the question; end is exclusive.
        title: of this text, where the page shows several.

    Returns:
        tokens, layers, heads, spans, title and recipes, each with its name and "bits": base64 of L * H rows of
        ceil(N / 8) bytes, lowest bit first.

    Raises:
        ValueError: shapes that don't belong together, values other than true and false, or a span outside the text.
    """
    tokens = list(tokens)
    packed, shape = [], None
    for name, kept in recipes:
        mask = np.asarray(kept)
        if mask.ndim != 3 or mask.shape[2] != len(tokens):
            raise ValueError(
                f"kept_payload: {name!r} has shape {mask.shape}; expected (layers, heads, {len(tokens)} tokens)."
            )
        if shape not in (None, mask.shape):
            raise ValueError(f"kept_payload: {name!r} has shape {mask.shape}, the recipe before it {shape}.")
        if mask.dtype != np.bool_ and not np.isin(mask, (0, 1)).all():
            raise ValueError(f"kept_payload: {name!r} holds values other than true and false.")
        shape = mask.shape
        packed.append({"name": str(name), "bits": _pack(mask.astype(np.bool_))})
    if shape is None:
        raise ValueError("kept_payload: expected at least one recipe.")
    found = []
    for label, start, end in spans:
        if not 0 <= start < end <= len(tokens):
            raise ValueError(f"kept_payload: span {label!r} is [{start}, {end}) in a text of {len(tokens)} tokens.")
        found.append([str(label), int(start), int(end)])
    return {
        "title": title, "tokens": tokens, "layers": shape[0], "heads": shape[1], "spans": found, "recipes": packed,
    }  # fmt: skip


def kept_mask(payload: dict[str, Any], recipe: str) -> NDArray[np.bool_]:
    """The boolean (L, H, N) array of one recipe in a payload; KeyError if it isn't there."""
    bits = {found["name"]: found["bits"] for found in payload["recipes"]}[recipe]
    layers, heads, n = payload["layers"], payload["heads"], len(payload["tokens"])
    rows = np.frombuffer(base64.b64decode(bits), dtype=np.uint8).reshape(layers * heads, -1)
    return np.unpackbits(rows, axis=1, count=n, bitorder="little").astype(np.bool_).reshape(layers, heads, n)


def _pack(mask: NDArray[np.bool_]) -> str:
    return base64.b64encode(np.packbits(mask, axis=2, bitorder="little").tobytes()).decode("ascii")

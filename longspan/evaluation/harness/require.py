"""The harness, or the sentence that says how to get it."""

from __future__ import annotations

from typing import Any

from longspan.registry import Refused


def harness() -> Any:
    """The package `lm_eval`.

    Raises:
        Refused: it isn't installed.
    """
    try:
        import lm_eval
    except ImportError as error:
        raise Refused(f"lm-evaluation-harness is missing ({error}); expected the package lm_eval: pip install "
                      "longspan[harness].") from None
    return lm_eval

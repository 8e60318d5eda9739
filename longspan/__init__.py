"""longspan: more context for less memory and time, and what that costs in quality, measured.

    from longspan import Context, load

    context = Context.read(load(), open("report.txt").read(), "snapkv(budget=0.2)")
    print(context.ask("What was decided?").text, context.achieved.cache_bytes)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from longspan.registry import Method, Refused, knob, method

if TYPE_CHECKING:
    from longspan.context import Context
    from longspan.models.load import Loaded, load
    from longspan.recipe import Recipe, per_row

__version__ = "0.1.0"
__all__ = ["Context", "Loaded", "Method", "Recipe", "Refused", "knob", "load", "method", "per_row"]

_LAZY = {"Context": "context", "Loaded": "models", "load": "models", "Recipe": "recipe", "per_row": "recipe"}


def __getattr__(name: str) -> Any:
    # PyTorch takes a second to import; `longspan --help` must not wait for it.
    if name not in _LAZY:
        raise AttributeError(f"module 'longspan' has no attribute {name!r}")
    value = getattr(import_module(f"longspan.{_LAZY[name]}"), name)
    globals()[name] = value
    return value

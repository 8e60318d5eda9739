"""The hot loops: one function each, with a plain PyTorch reference that defines it and faster versions beside it.

`attend` and `merge` are the attention core: exact attention over a part of the keys, and the exact sum of such parts.
`attend_ragged` and `decode_attend` read caches whose heads keep different numbers of keys. `ReadPlan` says which
query-key pairs are computed, and `block_sparse_attention` computes those; `attend_rows` computes some of the queries.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from longspan.kernels.attend import attend, attend_reference, causal_mask, merge

if TYPE_CHECKING:
    from longspan.kernels.block_sparse import block_sparse_attention
    from longspan.kernels.plan import ReadPlan
    from longspan.kernels.query_rows import attend_rows
    from longspan.kernels.ragged import attend_ragged, decode_attend

# Loaded on first use: the command line's help must not pay for kernels it doesn't run.
_LAZY = {
    "ReadPlan": "plan",
    "attend_ragged": "ragged",
    "attend_rows": "query_rows",
    "block_sparse_attention": "block_sparse",
    "decode_attend": "ragged",
}

__all__ = [
    "ReadPlan",
    "attend",
    "attend_ragged",
    "attend_reference",
    "attend_rows",
    "block_sparse_attention",
    "causal_mask",
    "decode_attend",
    "merge",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

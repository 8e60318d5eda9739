"""Writing the answer."""

from longspan.decoding.plain import Generated, end_ids, greedy, read, token_nlls

__all__ = ["Generated", "end_ids", "greedy", "read", "token_nlls"]

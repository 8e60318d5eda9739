"""What is kept: scores x budgets x stores of keys and values, on a schedule."""

from longspan.cache.base import (
    Budget,
    CachePolicy,
    KeepPlan,
    LayerContext,
    Schedule,
    Score,
    Store,
    group_mean,
    newest,
    oldest,
    protect,
    top_mask,
)
from longspan.cache.cache import Achieved, RecipeCache, Rows, achieved_from_json

__all__ = [
    "Achieved", "Budget", "CachePolicy", "KeepPlan", "LayerContext", "RecipeCache", "Rows", "Schedule", "Score", "Store",
    "achieved_from_json", "group_mean", "newest", "oldest", "protect", "top_mask",
]

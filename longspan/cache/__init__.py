"""What is kept: scores x budgets x stores of keys and values, on a schedule."""

from longspan.cache.base import (
    Budget,
    KeepPlan,
    LayerContext,
    Policy,
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
from longspan.cache.fork import can_share, fork, gatherer
from longspan.cache.policy import AnyPolicy, CachePolicy, OwnPolicy

__all__ = [
    "Achieved", "AnyPolicy", "Budget", "CachePolicy", "KeepPlan", "LayerContext", "OwnPolicy", "Policy", "RecipeCache", "Rows",
    "Schedule", "Score", "Store", "achieved_from_json", "can_share", "fork", "gatherer",
    "group_mean", "newest", "oldest", "protect", "top_mask",
]

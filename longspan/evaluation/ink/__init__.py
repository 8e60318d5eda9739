"""The First Drop of Ink (arXiv:2605.10828): damage against the share of hard distractors at fixed length."""

from longspan.evaluation.ink.answers import holds, scored
from longspan.evaluation.ink.construction import GRID, Mix, Nested, Question, grid, hard_count, nested, text_of, token_totals
from longspan.evaluation.ink.curve import Curve, Fit, drop_ratio, fit, normalised
from longspan.evaluation.ink.lemma import (
    Competition,
    competition,
    damage,
    g_of_attention,
    hard_share,
    ink_index,
    recovered_by_replacing,
)
from longspan.evaluation.ink.pools import bm25, cut, easy_pool, hard_pool, random_pool

__all__ = ["GRID", "Competition", "Curve", "Fit", "Mix", "Nested", "Question", "bm25", "competition", "cut", "damage",
           "drop_ratio", "easy_pool", "fit", "g_of_attention", "grid", "hard_count", "hard_pool", "hard_share", "holds",
           "ink_index", "nested", "normalised", "random_pool", "recovered_by_replacing", "scored", "text_of", "token_totals"]

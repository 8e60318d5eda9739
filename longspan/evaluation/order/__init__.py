"""Temporal order: which of two segments came first, and which head knows (arXiv:2607.22575).

Part A asks (`segments`, `prompts`, `asking`, `judge`), part B maps what heads tell about time (`heads`, `information`), part C
changes one head's output and asks again (`edits`, `rotation`).
"""

from longspan.evaluation.order.asking import Asked, ask, by_head, opened
from longspan.evaluation.order.edits import ablate, erase, random_directions, remove_direction, steer
from longspan.evaluation.order.heads import Heads, averaging, changed, find_heads, recorded
from longspan.evaluation.order.information import TimeCode, TimeMap, dimension_share, time_code, time_map
from longspan.evaluation.order.judge import Margins, distance_effect, margins, summary
from longspan.evaluation.order.prompts import label_ids, prepare, suffix
from longspan.evaluation.order.segments import Pair, Segment, find_segments, locate, sample_pairs, shuffled

__all__ = ["Asked", "Heads", "Margins", "Pair", "Segment", "TimeCode", "TimeMap", "ablate", "ask", "averaging", "by_head",
           "changed", "dimension_share", "distance_effect", "erase", "find_heads", "find_segments", "label_ids", "locate",
           "margins", "opened", "prepare", "random_directions", "recorded", "remove_direction", "sample_pairs", "shuffled",
           "steer", "suffix", "summary", "time_code", "time_map"]

"""MGAL (arXiv:2608.20853): long context by language, grain and place, over aligned paragraphs."""

from longspan.evaluation.mgal.analysis import (
    context_need,
    crowding_slope,
    cue_overlap,
    fluency_gap,
    language_gap,
    option_reuse,
    position_curve,
    rotation_accuracy,
    surface_cue_index,
)
from longspan.evaluation.mgal.corpus import LANGUAGES, Aligned, folder, handbook, load_corpus, own
from longspan.evaluation.mgal.drawing import cloze_items, document_items, paragraph_items, word_items
from longspan.evaluation.mgal.items import TASKS, Gap, Item, Spot, neighbours, restored
from longspan.evaluation.mgal.options import LETTERS, Choices, chosen_letter
from longspan.evaluation.mgal.prompts import Prompt, prompt
from longspan.evaluation.mgal.scores import bleu, chrf, contained, entity_consistency, exact, judged, rouge_l, scores
from longspan.evaluation.mgal.units import Unit, balanced, units, units_of_tokens

__all__ = ["LANGUAGES", "LETTERS", "TASKS", "Aligned", "Choices", "Gap", "Item", "Prompt", "Spot", "Unit", "balanced", "bleu",
           "chosen_letter", "chrf", "cloze_items", "contained", "context_need", "crowding_slope", "cue_overlap",
           "document_items", "entity_consistency", "exact", "fluency_gap", "folder", "handbook", "judged", "language_gap",
           "load_corpus", "neighbours", "option_reuse", "own", "paragraph_items", "position_curve", "prompt", "restored",
           "rotation_accuracy", "rouge_l", "scores", "surface_cue_index", "units", "units_of_tokens", "word_items"]

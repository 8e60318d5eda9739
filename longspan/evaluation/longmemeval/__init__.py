"""LongMemEval (arXiv:2410.10813): sessions of a chat over months, questions about them, answers judged without a model."""

from longspan.evaluation.longmemeval.files import read_histories
from longspan.evaluation.longmemeval.history import Asked, Session, Turn, shown
from longspan.evaluation.longmemeval.judge import JUDGES, abstains, accuracies, judge, judge_prompt, judged_by
from longspan.evaluation.longmemeval.questions import ABSTENTION, KINDS, TYPES, ask

__all__ = ["ABSTENTION", "JUDGES", "KINDS", "TYPES", "Asked", "Session", "Turn", "abstains", "accuracies", "ask", "judge",
           "judge_prompt", "judged_by", "read_histories", "shown"]

"""L-CUBE: how much of a past that is known exactly does an architecture use, at which distance, as the context grows?

`plan` makes the sequences, `truth` knows their conditionals and information, `scores` judges any predictor against them,
`references` are predictors that need no training, `model` and `judge` train a model; `command` is for the command line.
"""

from longspan.evaluation.lcube.judge import Size, at_length, build, fit, judged, utilisation_of
from longspan.evaluation.lcube.model import GaussianBatches, GaussianModel, GaussianNLL, Predicted, WithBackbone, shifted, split
from longspan.evaluation.lcube.plan import LCube
from longspan.evaluation.lcube.references import Predict, Reference, budget, marginal, oracle, window
from longspan.evaluation.lcube.scores import Scores, divergence, expected_divergence, nll, score, utilised_length
from longspan.evaluation.lcube.truth import (
    Prediction,
    available,
    bipartite,
    conditional,
    covariance,
    entropy,
    log_det,
    owned,
    past,
    variances,
)

__all__ = [
    "GaussianBatches",
    "GaussianModel",
    "GaussianNLL",
    "LCube",
    "Predict",
    "Predicted",
    "Prediction",
    "Reference",
    "Scores",
    "Size",
    "WithBackbone",
    "at_length",
    "available",
    "bipartite",
    "budget",
    "build",
    "conditional",
    "covariance",
    "divergence",
    "entropy",
    "expected_divergence",
    "fit",
    "judged",
    "log_det",
    "marginal",
    "nll",
    "oracle",
    "owned",
    "past",
    "score",
    "shifted",
    "split",
    "utilisation_of",
    "utilised_length",
    "variances",
    "window",
]

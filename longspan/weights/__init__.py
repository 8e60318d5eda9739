"""Smaller or richer weights: what is changed in a model's weights while a recipe is on."""

from longspan.weights.base import WeightTransform

__all__ = ["WeightTransform"]

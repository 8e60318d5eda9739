"""Retrofits: changes of a pretrained transformers model that training then makes use of."""

from longspan.training.retrofits.base import CONTEXT, ENTRY, Retrofit, Tuned, retrofit_of

__all__ = ["CONTEXT", "ENTRY", "Retrofit", "Tuned", "retrofit_of"]

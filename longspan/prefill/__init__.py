"""Reading the prompt: which query-key pairs attention computes.

A selector looks at the queries and keys of one layer and returns a `ReadPlan`; one executor in `longspan.kernels`
computes it. Selectors never compute attention themselves, and a plan of density 1 is dense attention.
"""

from longspan.prefill.base import ReadContext, Selector

__all__ = ["ReadContext", "Selector"]

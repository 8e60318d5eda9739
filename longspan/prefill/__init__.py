"""Reading the prompt: which query-key pairs attention computes.

A selector looks at the queries and keys of one layer and returns a `ReadPlan`; one executor in `longspan.kernels`
computes it. Selectors never compute attention themselves, and a plan of density 1 is dense attention. A token subset
says which tokens take part in a layer at all; selectors then plan among those.
"""

from longspan.prefill.base import ReadContext, Selector, TokenSubset
from longspan.prefill.reading import PairCount, read_rows

__all__ = ["PairCount", "ReadContext", "Selector", "TokenSubset", "read_rows"]

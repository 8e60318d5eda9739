"""Passkey retrieval (Mohtashami and Jaggi, arXiv:2305.16300) as InfiniteBench (arXiv:2402.13718) measures it.

Lines of noise, one line that states a five-digit key twice, and the question what the key is. The first integer of the
answer has to be the key.
"""

from __future__ import annotations

from typing import Any

from longspan.evaluation import metrics
from longspan.evaluation.base import Draft, Example, Key, Task
from longspan.evaluation.tasks.haystack import insert, noise, spread_depth
from longspan.registry import knob, method

HEADER = "Some important information is hidden in a lot of irrelevant text. Find it and remember it.\n\n"


@method("passkey", kind="task", system="standard-suites", paper="arXiv:2402.13718",
        summary="A five-digit key, stated twice in a line of repeated noise.")
class Passkey(Task):
    """InfiniteBench's passkey: the line with the key at depths that spread evenly over the examples."""

    digits: int = knob(5, "digits of the key", low=1, high=64)

    def draft(self, key: Key, tokenizer: Any) -> Draft:
        rng = key.rng("key")
        hidden = "".join(rng.choices("0123456789", k=self.digits))
        line = f"The pass key is {hidden}. Remember it. {hidden} is the pass key."
        depth = spread_depth(key.seed, key.index)

        def build(units: int) -> Example:
            body, spans = insert(noise(units), [line], [int(depth * (units + 1))], "\n", len(HEADER))
            return Example(
                context=HEADER + body, question="\n\nWhat is the pass key?", answer_prefix="The pass key is",
                answers=(hidden,), max_new_tokens=self.digits + 1,
                meta={"index": key.index, "depth": depth, "spans": spans})

        return Draft(build)

    def metric(self, prediction: str, example: Example) -> float:
        return metrics.passkey(prediction, example.answers[0])

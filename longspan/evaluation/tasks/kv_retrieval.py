"""Key-value retrieval as InfiniteBench (arXiv:2402.13718) measures it: look up one UUID in a JSON object of UUIDs.

Nothing in the object tells one pair from another, so a method that drops pairs before the question is read loses just
the share it drops.
"""

from __future__ import annotations

from typing import Any, ClassVar

from longspan.evaluation import metrics
from longspan.evaluation.base import Draft, Example, Key, Task
from longspan.evaluation.tasks.haystack import spread_depth
from longspan.evaluation.words import Draws
from longspan.registry import method

HEADER = "Look up the value that belongs to a key in the JSON object below.\n\nJSON data:\n{"


@method("kv-retrieval", kind="task", system="standard-suites", paper="arXiv:2402.13718",
        summary="The value of one key in a JSON object of random UUIDs.")
class KeyValueRetrieval(Task):
    """InfiniteBench's kv_retrieval: pairs of UUIDs, the pair asked for at depths that spread evenly."""

    new_tokens: ClassVar[int] = 50
    least: ClassVar[int] = 2

    def draft(self, key: Key, tokenizer: Any) -> Draft:
        draws = Draws(key.rng("pairs"))
        pairs: list[tuple[str, str]] = []
        depth = spread_depth(key.seed, key.index)

        def build(units: int) -> Example:
            while len(pairs) < units:
                pairs.append((draws.draw("uuids"), draws.draw("uuids")))
            asked = int(depth * units)
            lines = [f'"{name}": "{value}"' for name, value in pairs[:units]]
            start = len(HEADER) + sum(len(line) + 2 for line in lines[:asked])
            name, value = pairs[asked]
            question, prefix = self.ask(key, pairs[:units], asked)
            return Example(
                context=HEADER + ", ".join(lines) + "}", question=question, answer_prefix=prefix, answers=(value,),
                max_new_tokens=self.new_tokens,
                meta={"index": key.index, "depth": depth, "spans": [[start, start + len(lines[asked])]],
                      "query": [name]})

        return Draft(build, least=self.least)

    def ask(self, key: Key, pairs: list[tuple[str, str]], asked: int) -> tuple[str, str]:
        """Question and answer prefix for pair number `asked`."""
        name, _ = pairs[asked]
        return f'\n\nWhich value belongs to the key "{name}"?', f'"{name}": "'

    def metric(self, prediction: str, example: Example) -> float:
        return metrics.kv_label(prediction, example.answers[0])

"""HELMET's synthetic recall (arXiv:2410.02694): a key of a JSON object, after two others with their values.

As `kv-retrieval`, with worked examples from the same object before the key that is asked for. An answer counts when it contains
the value, in normal form.
"""

from __future__ import annotations

from typing import ClassVar

from longspan.evaluation import metrics
from longspan.evaluation.base import Example, Key
from longspan.evaluation.tasks.kv_retrieval import KeyValueRetrieval
from longspan.registry import knob, method


@method("json-kv", kind="task", system="standard-suites", paper="arXiv:2410.02694",
        summary="The value of one key in a JSON object of random UUIDs, after two worked examples.")
class JsonKeyValue(KeyValueRetrieval):
    """HELMET's json_kv: substring match, 2 shots."""

    shots: int = knob(2, "other pairs of the object shown before the key asked for", low=0, high=16)

    new_tokens: ClassVar[int] = 100
    least: ClassVar[int] = 18

    def ask(self, key: Key, pairs: list[tuple[str, str]], asked: int) -> tuple[str, str]:
        others = [pair for i, pair in enumerate(pairs) if i != asked]
        shown = key.rng("shots").sample(others, self.shots)
        shots = "".join(f"Key: {name}\nCorresponding value: {value}\n\n" for name, value in shown)
        question = f"\n\nGive the value that belongs to the key in the JSON object above.\n\n{shots}Key: {pairs[asked][0]}"
        return question, "Corresponding value:"

    def metric(self, prediction: str, example: Example) -> float:
        return metrics.substring_match(prediction, example.answers)

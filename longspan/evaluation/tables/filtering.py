"""The difficulty filter: how often a model answers a question right, and which questions teach it something.

N answers to each question are sampled from the current policy. P is the share that is right. Questions with 0 < P < 1 are kept:
P = 0 is taken as ambiguous or broken, P = 1 as trivial.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from longspan.context.document import check_window
from longspan.decoding import Law, end_ids
from longspan.decoding.rollouts.step import Policy, Running, Sampling
from longspan.evaluation.base import Example, Task, prompt_parts, tokenizer_memory
from longspan.models import Loaded
from longspan.registry import Refused

ROLLOUTS = 8


@dataclass(frozen=True)
class Judged:
    """A question's sampled answers and the reward of each."""

    answers: tuple[str, ...]
    rewards: tuple[float, ...]

    @property
    def p(self) -> float:
        """The pass rate P."""
        return sum(reward == 1 for reward in self.rewards) / len(self.rewards)

    @property
    def kept(self) -> bool:
        """Whether 0 < P < 1."""
        return 0 < self.p < 1


def check_rollouts(rollouts: int) -> None:
    """Refuse fewer than two: no pass rate of one answer lies between 0 and 1."""
    if rollouts < 2:
        raise Refused(f"{rollouts} rollouts: expected at least 2, such as {ROLLOUTS}.")


def judge(loaded: Loaded, task: Task, example: Example, rollouts: int = ROLLOUTS, *, temperature: float = 1.0,
          seed: int = 0) -> Judged:
    """Sample answers to one question. The prompt is read once for all of them.

    Raises:
        Refused: fewer than two rollouts; a question longer than the model's window; a model that writes in blocks.
    """
    check_rollouts(rollouts)
    if getattr(loaded.model, "denoises_blocks", False):
        raise Refused(f"pass rates with {loaded.name}, which writes in blocks: expected a model that writes token by token.")
    prompt = prompt_parts(example, loaded.tokenizer).ids
    check_window(loaded, len(prompt) + example.max_new_tokens, "prompt and answer")
    ends = (*end_ids(loaded.model, loaded.tokenizer), *stop_ids(loaded.tokenizer, example.meta.get("stop", ())))
    running = Running(Policy(loaded.model), Sampling(Law(temperature), max_new_tokens=example.max_new_tokens, ends=ends))
    running.add([((seed, example.meta["index"], sample), prompt) for sample in range(rollouts)])
    answers = [loaded.tokenizer.decode(done.tokens, skip_special_tokens=True) for done in running.run()]
    return Judged(tuple(answers), tuple(task.metric(answer, example) for answer in answers))


def stop_ids(tokenizer: Any, stops: Sequence[str]) -> tuple[int, ...]:
    """Tokens whose text holds one of some strings."""
    known, key = tokenizer_memory(tokenizer), ("stop tokens", tuple(stops))
    if key not in known:
        known[key] = tuple(i for i in range(len(tokenizer)) if any(stop in tokenizer.decode([i]) for stop in stops))
    return known[key]

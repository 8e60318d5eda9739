"""Stored rollouts: token ids by prompt, each with the key of its noise and the version of the policy that wrote it.

A pool belongs to one vocabulary. A rollout whose policy has no version is not taken in, nor read from a file: what can't
be told apart from drafts of another model is dropped, never guessed at. Saved are ids, keys, versions and
log-probabilities, as one safetensors file of 4 bytes a token and 4 a log-probability; full laws, which rule ``reject``
needs, stay in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from longspan.decoding.drafts.index import RunIndex
from longspan.registry import Refused

Key = tuple[int, int, int]
"""Step, place of the prompt among the step's prompts, sample."""


@dataclass
class Rollout:
    """One answer to one prompt, finished or not, and what it took."""

    key: Key
    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    """What was written, with the token that ended it."""
    version: str | None = None
    ended: bool = False
    """Whether an end token or the length ended it; a draft that was cut short has not ended."""
    logprobs: list[float] = field(default_factory=list)
    """Of each token, under the law it was drawn from (nats)."""
    laws: list[Float[Tensor, " V"]] | None = None
    """The laws themselves, where they were asked for."""
    passes: int = 0
    proposed: int = 0
    accepted: int = 0

    @property
    def accepted_length(self) -> float:
        """Tokens written per pass."""
        return len(self.tokens) / max(1, self.passes)

    def into(self, index: RunIndex) -> None:
        """Add the answer to an index, behind the end of its prompt, so that runs may begin there."""
        before = self.prompt[-index.longest :]
        index.add([*before, *self.tokens], first=len(before))


class RolloutPool:
    """Rollouts to propose from. Equal prompts share what is known of them."""

    def __init__(self, vocabulary: int, rollouts: Iterable[Rollout] = ()) -> None:
        if vocabulary < 1:
            raise Refused(f"a pool with a vocabulary of {vocabulary} tokens: expected at least 1.")
        self.vocabulary = vocabulary
        self.dropped = 0
        """Rollouts that were not taken in, for want of a version."""
        self._of: dict[tuple[int, ...], list[Rollout]] = {}
        self._own: dict[Key, Rollout] = {}
        self._indexes: dict[tuple[tuple[int, ...], int, int], RunIndex] = {}
        for rollout in rollouts:
            self.add(rollout)

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def __iter__(self):
        return (rollout for found in self._of.values() for rollout in found)

    @property
    def tokens(self) -> int:
        """Tokens stored, prompts not counted."""
        return sum(len(r.tokens) for r in self)

    def add(self, rollout: Rollout) -> None:
        """Take in a rollout; one without a version is dropped.

        Raises:
            Refused: ids outside the vocabulary.
        """
        wrong = [t for t in (*rollout.prompt, *rollout.tokens) if not 0 <= t < self.vocabulary]
        if wrong:
            raise Refused(f"rollout {rollout.key} holds token {wrong[0]}: expected ids of 0 to {self.vocabulary - 1}, the "
                          "pool's vocabulary.")
        if rollout.version is None:
            self.dropped += 1
            return
        if not rollout.tokens:
            return
        self._of.setdefault(rollout.prompt, []).append(rollout)
        self._own[rollout.key] = rollout
        for (prompt, _, _), index in self._indexes.items():
            if prompt == rollout.prompt:
                rollout.into(index)

    def of(self, prompt: Sequence[int]) -> list[Rollout]:
        """All rollouts of a prompt, oldest first."""
        return self._of.get(tuple(prompt), [])

    def own(self, key: Key, prompt: Sequence[int]) -> Rollout | None:
        """The rollout of this key, if it is one of this prompt."""
        found = self._own.get(key)
        return found if found is not None and found.prompt == tuple(prompt) else None

    def index(self, prompt: Sequence[int], shortest: int, longest: int) -> RunIndex:
        """The runs in all rollouts of a prompt; what is added later is found too."""
        key = (tuple(prompt), shortest, longest)
        if key not in self._indexes:
            self._indexes[key] = RunIndex(shortest, longest)
            for rollout in self.of(prompt):
                rollout.into(self._indexes[key])
        return self._indexes[key]

    def drop(self, step: int) -> None:
        """Forget what was stored for `step` and before."""
        kept = [r for r in self if r.key[0] > step]
        self._of, self._own, self._indexes = {}, {}, {}
        for rollout in kept:
            self.add(rollout)

    def check(self, vocabulary: int) -> None:
        """Refuse a model whose vocabulary is another one."""
        if vocabulary != self.vocabulary:
            raise Refused(f"the pool's drafts are of a vocabulary of {self.vocabulary} tokens and the model has {vocabulary}: "
                          "expected the same; start with an empty pool.")

    # -- files

    def save(self, path: str | Path) -> None:
        """Write ids, keys, versions and log-probabilities to a safetensors file."""
        from safetensors.torch import save_file

        all_ = list(self)
        prompts = list(dict.fromkeys(r.prompt for r in all_))
        rows = [{"key": list(r.key), "prompt": prompts.index(r.prompt), "tokens": len(r.tokens), "version": r.version,
                 "ended": r.ended, "logprobs": len(r.logprobs)} for r in all_]
        tensors = {"prompts": _ids(t for p in prompts for t in p), "tokens": _ids(t for r in all_ for t in r.tokens),
                   "logprobs": torch.tensor([x for r in all_ for x in r.logprobs], dtype=torch.float32)}
        about = {"vocabulary": self.vocabulary, "prompts": [len(p) for p in prompts], "rollouts": rows}
        save_file(tensors, str(path), metadata={"rollouts": json.dumps(about)})

    @classmethod
    def load(cls, path: str | Path) -> RolloutPool:
        """Read what `save` wrote. Rollouts without a version are dropped and counted.

        Raises:
            Refused: no such file, or not one of a pool.
        """
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise Refused(f"pool {str(path)!r}: no such file; expected one that RolloutPool.save wrote.")
        try:
            with safe_open(str(path), "pt") as file:
                about = json.loads((file.metadata() or {})["rollouts"])
                prompts, tokens, logprobs = (file.get_tensor(n).tolist() for n in ("prompts", "tokens", "logprobs"))
            pool = cls(int(about["vocabulary"]))
            of, at, scored = _pieces(prompts, about["prompts"]), 0, 0
            for row in about["rollouts"]:
                n, m = int(row["tokens"]), int(row["logprobs"])
                step, place, sample = map(int, row["key"])
                rollout = Rollout((step, place, sample), tuple(of[row["prompt"]]), tokens[at : at + n], row.get("version"),
                                  bool(row["ended"]), logprobs[scored : scored + m])
                at, scored = at + n, scored + m
                pool.add(rollout)
        except Refused:
            raise
        except (SafetensorError, KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise Refused(f"pool {str(path)!r} can't be read as one: expected a file that RolloutPool.save wrote.") from error
        return pool


def _ids(tokens: Iterable[int]) -> Tensor:
    return torch.tensor(list(tokens), dtype=torch.int32)


def _pieces(flat: list[int], lengths: Sequence[int]) -> list[list[int]]:
    out, at = [], 0
    for n in lengths:
        out.append(flat[at : at + n])
        at += n
    return out

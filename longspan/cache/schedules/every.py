"""Compress at the prompt's end and again every few generated tokens, so that long answers stay within the budget."""

from __future__ import annotations

from longspan.cache.base import Schedule
from longspan.registry import knob, method


@method("every", kind="schedule", summary="Compress at the prompt's end and every `steps` tokens after it.")
class Every(Schedule):
    """With ``steps=1`` H2O and TOVA run as published: one token in, one out. Fractions count all tokens seen so far."""

    steps: int = knob(128, "tokens between two compressions", low=1)
    at_prompt: bool = knob(True, "also compress when the prompt ends")

    def cuts(self, start: int, stop: int, prompt: int | None) -> list[int]:
        if prompt is None:
            return []
        if not self.at_prompt and start < prompt:
            start = prompt
        first = prompt if start < prompt else prompt + ((start - prompt) // self.steps + 1) * self.steps
        return list(range(first, stop + 1, self.steps))

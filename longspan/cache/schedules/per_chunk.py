"""Compress after every chunk of the prompt, so that memory stays bounded while a long prompt is read."""

from __future__ import annotations

from longspan.cache.base import Schedule
from longspan.registry import knob, method


@method("per-chunk", kind="schedule", summary="Compress after every `size` prompt tokens and at the prompt's end.")
class PerChunk(Schedule):
    """Chunk boundaries count tokens of the prompt, however it arrives. A fraction counts the tokens read so far."""

    size: int = knob(1024, "prompt tokens between two compressions", low=1)

    def cuts(self, start: int, stop: int, prompt: int | None) -> list[int]:
        if prompt is None:
            return []
        first = (start // self.size + 1) * self.size
        inside = list(range(first, min(stop, prompt) + 1, self.size))
        if start < prompt <= stop and prompt not in inside:
            inside.append(prompt)
        return inside

    def watches(self, seen: int, prompt: int | None) -> bool:
        return prompt is None or seen <= prompt

"""Compress once, when the prompt has been read."""

from __future__ import annotations

from longspan.cache.base import Schedule
from longspan.registry import method


@method("at-prompt", kind="schedule", summary="Compress once, right after the prompt's last token (the default).")
class AtPrompt(Schedule):
    """The boundary lies inside the call that crosses it, so chunked prefill and drafts change nothing."""

    def cuts(self, start: int, stop: int, prompt: int | None) -> list[int]:
        return [prompt] if prompt is not None and start < prompt <= stop else []

    def watches(self, seen: int, prompt: int | None) -> bool:
        return prompt is None or seen <= prompt

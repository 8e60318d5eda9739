"""A plan as a table."""

from __future__ import annotations

from typing import Any

from longspan.reporting.tables import human_bytes


def plan_table(plan: Any) -> Any:
    """A `rich` table of a plan: what fits and is good enough first."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    title = (f"{plan.model} · {plan.context:,} tokens" + (f" × {plan.rows} rows" if plan.rows > 1 else "")
             + f" · {human_bytes(plan.memory)} · at least {plan.floor:.0%} of the dense accuracy")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("recipe", "cache", "accuracy kept", "nats above dense", "measured at", "verdict"):
        table.add_column(column, overflow="fold")
    for choice in plan.choices:
        behind = f"n={choice.examples}" if choice.interval is None else f"{choice.interval[0]:.0%} to {choice.interval[1]:.0%}"
        kept = "unknown" if choice.quality is None else f"{choice.quality:.0%} ({behind})"
        above = "unknown" if choice.nll_increase is None else f"{choice.nll_increase:+.2f}"
        verdict = Text(choice.reason, style="dim") if choice.reason else Text("fits", style="bold green")
        at = "predicted" if choice.measured_at is None else f"{choice.measured_at:,}"
        table.add_row(choice.recipe, human_bytes(choice.bytes), kept, above, at, verdict)
    parts: list[Any] = [Text(title, style="bold"), table]
    if not plan.recommended:
        parts.append(Text(advice(plan.choices), style="yellow"))
    if plan.note:
        parts.append(Text(f"Note: {plan.note}.", style="yellow"))
    return Group(*parts)


def advice(choices: list[Any]) -> str:
    """What would help where nothing is recommended."""
    fitting = [choice for choice in choices if choice.fits]
    if not fitting:
        return "Nothing fits; raise --memory, or shorten the context."
    if all(choice.quality is None for choice in fitting):
        return "Of what fits, the quality isn't known; measure it where the dense run is right at least half of the time."
    return ("Nothing that fits is shown to keep that much; lower --floor, raise --memory, shorten the context, or measure more "
            "examples.")

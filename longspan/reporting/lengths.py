"""Small multiples of quality over length, as one SVG text: a panel for each arm, one arm drawn faintly behind all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from longspan.reporting.palette import Look
from longspan.reporting.scales import Scale, scale
from longspan.reporting.svg import head, wrap

ACROSS, PANEL, HEIGHT, TOP, GAP, LEFT = 5, 150, 96, 74, 34, 40
INK, FAINT = Look("#1f6feb", "#58a6ff", "circle"), Look("#8c959f", "#6e7681", "circle")


def lengths_svg(
    curves: Mapping[str, Mapping[int, float]], behind: str, title: str, subtitle: str,
    *, low: float | None = None, high: float | None = None, digits: int = 2,
) -> str:  # fmt: skip
    """One panel for each of `curves` (name -> length -> value), all on one scale; lengths stand at equal distances.

    Args:
        behind: the arm whose curve is drawn faintly in every panel.
        low, high: ends of the scale; values beyond are drawn at its edge. Found from the values if left out.

    Raises:
        ValueError: `behind` isn't among the curves, or there is nothing to draw.
    """
    if behind not in curves:
        raise ValueError(f"lengths_svg: no curve {behind!r}; expected one of {', '.join(curves) or 'none'}.")
    values = [v for curve in curves.values() for v in curve.values()]
    lengths = sorted({n for curve in curves.values() for n in curve})
    rows = -(-len(curves) // ACROSS)
    width, height = LEFT + ACROSS * (PANEL + 14) + 10, TOP + rows * (HEIGHT + GAP)
    lo, hi = min(values) if low is None else low, max(values) if high is None else high
    parts = head(title, subtitle, width, height)
    for i, (name, curve) in enumerate(curves.items()):
        x, y = LEFT + (i % ACROSS) * (PANEL + 14), TOP + (i // ACROSS) * (HEIGHT + GAP)
        up = scale([lo, hi], y + HEIGHT - 16, y + 4, pad=0.02, count=3)
        across = Scale(0, max(1, len(lengths) - 1), x, x + PANEL)
        parts += _frame(name, x, y, up, lengths, across, labelled=i % ACROSS == 0, digits=digits)
        if name != behind:
            parts.append(_line("m1", curves[behind], lengths, across, up))
        parts.append(_line("m0", curve, lengths, across, up))
    return wrap(parts, [INK, FAINT], width, height, title)


def _frame(name: str, x: float, y: float, up: Scale, lengths: Sequence[int], across: Scale, *, labelled: bool,
           digits: int) -> list[str]:
    parts = [f'<text class="ink" x="{x}" y="{y - 4}">{escape(name)}</text>']
    for tick in up.ticks:
        py = up(tick)
        parts.append(f'<line class="grid" x1="{x}" x2="{x + PANEL}" y1="{py:.1f}" y2="{py:.1f}"/>')
        if labelled:
            parts.append(f'<text class="soft" x="{x - 6}" y="{py + 4:.1f}" text-anchor="end">{tick:.{digits}f}</text>')
    for i, n in enumerate(lengths):
        anchor = "start" if i == 0 else "end" if i == len(lengths) - 1 else "middle"
        if i in (0, len(lengths) // 2, len(lengths) - 1):
            parts.append(f'<text class="soft" x="{across(i):.1f}" y="{y + HEIGHT}" text-anchor="{anchor}">{n:,}</text>')
    return parts


def _line(kind: str, curve: Mapping[int, float], lengths: Sequence[int], across: Scale, up: Scale) -> str:
    points = [(across(lengths.index(n)), up(min(max(curve[n], up.lo), up.hi))) for n in lengths if n in curve]
    path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in points)
    width = 2.2 if kind == "m0" else 1.4
    return f'<path class="{kind}" style="fill:none;stroke-width:{width}" stroke="currentColor" d="{path}"/>'

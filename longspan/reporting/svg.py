"""A trade-off picture as one SVG text, for a README: no browser, no plotting library, no font files.

Every recipe is a mark with its 95% interval; the stepped line is the Pareto front: no recipe gives more for less.
The picture brings its own paper and switches with the reader's light or dark preference; when a viewer ignores that
preference, it stays readable as dark ink on light paper.
"""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from longspan.reporting.labels import Box, place
from longspan.reporting.palette import Look, looks
from longspan.reporting.points import Point, points
from longspan.reporting.scales import Scale, scale
from longspan.reporting.tables import human_bytes, human_seconds

LEFT, TOP, RIGHT, BOTTOM = 64, 62, 24, 56
GLYPH, LINE_HEIGHT, WRAP = 7.0, 15.0, 30
"""Pixels per character of 11.5 px monospace type, per line of a label, and characters per line."""


class Measure(NamedTuple):
    """A quantity on an axis."""

    key: str
    title: str
    text: Callable[[float], str]
    base: float = 10.0
    rising: bool = False
    """Whether more is better."""


def _short(text: str) -> str:
    """A tick without the zeros behind its point: ``8.00 MiB`` -> ``8 MiB``."""
    return re.sub(r"(\.\d*?)0+(?!\d)", r"\1", text).replace(". ", " ")


MEASURES = {
    "cache_bytes": Measure("cache_bytes", "KV cache right after compression", lambda v: _short(human_bytes(v)), 1024),
    "ttft_s": Measure("ttft_s", "time to first token", lambda v: _short(human_seconds(v))),
    "accuracy": Measure("accuracy", "accuracy", lambda v: f"{100 * v:.0f}%", rising=True),
    "answer_nll": Measure("answer_nll", "answer NLL (nats per token)", lambda v: f"{v:.2f}"),
}

STYLE = """
.paper{fill:#fff;stroke:#d8dee4}.grid{stroke:#d8dee4;stroke-width:1}.ink{fill:#1f2328}.soft{fill:#59636e}
.front{fill:none;stroke:#59636e;stroke-width:1.5;stroke-dasharray:1 4;stroke-linecap:round}
.leader{stroke:#8c959f;stroke-width:.8}
.halo{paint-order:stroke;stroke:#fff;stroke-width:4px;stroke-linejoin:round}
text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif;font-size:12px}
.name{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace;font-size:11.5px}
.title{font-size:15px;font-weight:600}
"""
DARK = """
.paper{fill:#0d1117;stroke:#30363d}.grid{stroke:#262c34}.ink{fill:#e6edf3}.soft{fill:#9aa4b2}
.front{stroke:#9aa4b2}.leader{stroke:#6e7681}.halo{stroke:#0d1117}
"""


def pareto_svg(
    summary: Iterable[dict[str, Any]], x: str = "cache_bytes", y: str = "accuracy", title: str | None = None,
    subtitle: str | None = None, width: int = 760, height: int = 440,
) -> str:  # fmt: skip
    """One SVG picture of what recipes cost (`x`) and give (`y`), pooled over the summary's tasks and lengths.

    Args:
        summary: lines of `summarise`.
        x: "cache_bytes" or "ttft_s".
        y: "accuracy" or "answer_nll".
        title, subtitle: texts above the picture; made from the summary where not given.
        width, height: size in pixels.

    Raises:
        ValueError: an unknown measure, or no recipe with both measures.
    """
    from longspan.evaluation import statistics  # here, because its room loads the models' libraries

    for name in (x, y):
        if name not in MEASURES:
            raise ValueError(f"pareto_svg: unknown measure {name!r}; expected one of {', '.join(MEASURES)}.")
    lines = list(summary)
    cost, gain = MEASURES[x], MEASURES[y]
    shown = [p for p in points(lines) if getattr(p, x) is not None and getattr(p, y) is not None]
    if not shown:
        raise ValueError(f"pareto_svg: no recipe has both {x} and {y}.")
    names = looks(p.recipe for p in shown)
    spans = [_interval(p, y) for p in shown]
    across = scale([getattr(p, x) for p in shown], LEFT, width - RIGHT, pad=0.12, low=0, base=cost.base, log=None,
                   least=0.1 * max(getattr(p, x) for p in shown), count=6)  # fmt: skip
    high, least = (1.0, 0.1) if y == "accuracy" else (math.inf, 0.05)
    up = scale([v for span in spans for v in span], height - BOTTOM, TOP, pad=0.08, count=5, low=0, high=high,
               least=least)  # fmt: skip
    at = [(across(getattr(p, x)), up(getattr(p, y))) for p in shown]
    front = statistics.pareto(
        [((1 if gain.rising else -1) * getattr(p, y), getattr(p, x)) for p in shown]  # the front wants "more"
    )
    steps = _steps([at[i] for i in front], width - RIGHT)
    parts = [
        *head(title or f"{gain.title} against {cost.title}", subtitle or _subtitle(lines), width, height),
        *_axes(across, up, cost, gain, width, height),
        f'<path class="front" d="{_path(steps)}"/>' if steps else "",
        *(_bar(px, up, span) for (px, _), span in zip(at, spans)),
        *_names(shown, at, [(up(lo), up(hi)) for lo, hi in spans], steps, width, height),
        *(_mark(px, py, names[p.recipe], f"m{i}") for i, (p, (px, py)) in enumerate(zip(shown, at))),
    ]
    return wrap(parts, [names[p.recipe] for p in shown], width, height, title or f"{gain.title} / {cost.title}")


def _interval(p: Point, y: str) -> tuple[float, float]:
    lo, hi = (p.lo, p.hi) if y == "accuracy" else (p.nll_lo, p.nll_hi)
    middle = getattr(p, y)
    return (middle if lo is None else lo), (middle if hi is None else hi)


def _subtitle(lines: Sequence[dict[str, Any]]) -> str:
    tasks = list(dict.fromkeys(str(line["task"]) for line in lines))
    lengths = sorted({line["length"] for line in lines if isinstance(line["length"], int)})
    examples = max(p.n for p in points(lines))
    found = [", ".join(tasks) if len(tasks) <= 3 else f"{len(tasks)} tasks"]
    if lengths:
        found.append(" and ".join(f"{n:,}" for n in lengths) + " tokens")
    return " · ".join([*found, f"{examples} examples per recipe", "95% intervals"])


def wrap(parts: Sequence[str], found: Sequence[Look], width: int, height: int, title: str) -> str:
    """The whole picture: ``m0``, ``m1``, … are the classes of the looks `found`."""
    light = "".join(f".m{i}{{fill:{look.light};color:{look.light}}}" for i, look in enumerate(found))
    dark = "".join(f".m{i}{{fill:{look.dark};color:{look.dark}}}" for i, look in enumerate(found))
    style = f"{STYLE}{light}\n@media (prefers-color-scheme:dark){{{DARK}{dark}}}\n"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title, {chr(34): "&quot;"})}">\n<style>{style}</style>\n'
        + "\n".join(part for part in parts if part)
        + "\n</svg>\n"
    )


def head(title: str, subtitle: str, width: int, height: int) -> list[str]:
    """The paper with its title and subtitle."""
    return [
        f'<rect class="paper" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="10"/>',
        f'<text class="ink title" x="20" y="28">{escape(title[:1].upper() + title[1:])}</text>',
        f'<text class="soft" x="20" y="47">{escape(subtitle)}</text>',
    ]


def _axes(across: Scale, up: Scale, cost: Measure, gain: Measure, width: int, height: int) -> list[str]:
    bottom = height - BOTTOM
    out = []
    for value in up.ticks:
        py = up(value)
        out.append(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{py:.1f}" y2="{py:.1f}"/>')
        out.append(f'<text class="soft" x="{LEFT - 8}" y="{py + 4:.1f}" text-anchor="end">{gain.text(value)}</text>')
    for value in across.ticks:
        px = across(value)
        out.append(f'<line class="grid" x1="{px:.1f}" x2="{px:.1f}" y1="{bottom}" y2="{bottom + 5}"/>')
        out.append(
            f'<text class="soft" x="{px:.1f}" y="{bottom + 20}" text-anchor="middle">{cost.text(value)}</text>'
        )
    out.append(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    ends = cost.title + (", logarithmic" if across.log else "")
    out.append(
        f'<text class="soft" x="{(LEFT + width - RIGHT) / 2:.0f}" y="{height - 14}" text-anchor="middle">'
        f"{escape(ends)}</text>"
    )
    corner = "↖ better" if gain.rising else "↙ better"
    out.append(f'<text class="soft" x="{width - RIGHT}" y="28" text-anchor="end">{corner}</text>')
    return out


def _steps(at: Sequence[tuple[float, float]], right: float) -> list[tuple[float, float]]:
    """Corners of the stepped line through the front's points, level to the right edge: more cost buys no less."""
    corners = list(at[:1])
    for px, py in at[1:]:
        corners += [(px, corners[-1][1]), (px, py)]
    return [*corners, (right, corners[-1][1])] if corners else []


def _path(corners: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in corners)


def _bar(px: float, up: Scale, span: tuple[float, float]) -> str:
    lo, hi = up(span[0]), up(span[1])
    return f'<path class="leader" fill="none" d="M{px:.1f} {lo:.1f}V{hi:.1f}"/>' if abs(lo - hi) > 1 else ""


def _names(
    shown: Sequence[Point], at: Sequence[tuple[float, float]], bars: Sequence[tuple[float, float]],
    steps: Sequence[tuple[float, float]], width: int, height: int,
) -> list[str]:  # fmt: skip
    texts = [_lines(p.recipe) for p in shown]
    sizes = [(GLYPH * max(map(len, text)), LINE_HEIGHT * len(text)) for text in texts]
    marks = [Box(px - 8, py - 8, px + 8, py + 8) for px, py in at]
    thin = [Box(px - 1.5, min(bar), px + 1.5, max(bar)) for (px, _), bar in zip(at, bars)]
    thin += [
        Box(min(a[0], b[0]) - 2, min(a[1], b[1]) - 2, max(a[0], b[0]) + 2, max(a[1], b[1]) + 2)
        for a, b in itertools.pairwise(steps)
    ]
    boxes = place(at, sizes, [*marks, *thin], Box(LEFT + 2, TOP, width - RIGHT, height - BOTTOM - 2))
    out = []
    for i, ((px, py), box, text) in enumerate(zip(at, boxes, texts)):
        qx, qy = min(max(px, box.left), box.right), min(max(py, box.top), box.bottom)
        if math.hypot(qx - px, qy - py) > 16:
            out.append(f'<line class="leader" x1="{px:.1f}" y1="{py:.1f}" x2="{qx:.1f}" y2="{qy:.1f}"/>')
        anchor, tx = ("end", box.right) if box.right < px else ("start", box.left)
        for row, piece in enumerate(text):
            ty = box.top + LINE_HEIGHT * row + 11.5
            out.append(
                f'<text class="m{i} name halo" x="{tx:.1f}" y="{ty:.1f}" text-anchor="{anchor}">{escape(piece)}</text>'
            )
    return out


def _lines(recipe: str) -> list[str]:
    """The name in at most three lines; an operator begins a line rather than ending one."""
    kept = re.sub(r" ([@+]) ", " \\1\u00a0", recipe)
    found = textwrap.wrap(kept, WRAP, break_on_hyphens=False, max_lines=3, placeholder="…")
    return [line.replace("\u00a0", " ") for line in found] or [""]


SHAPES = {
    "circle": "M-6 0a6 6 0 1 0 12 0a6 6 0 1 0-12 0Z",
    "square": "M-5.3-5.3H5.3V5.3H-5.3Z",
    "diamond": "M0-7.2L7.2 0L0 7.2L-7.2 0Z",
    "triangle": "M0-7L6.6 5H-6.6Z",
    "cross": "M-2.2-6.5H2.2V-2.2H6.5V2.2H2.2V6.5H-2.2V2.2H-6.5V-2.2H-2.2Z",
    "star": "M0-7.5L2-2.4L7.3-2.2L3.2 1.2L4.6 6.4L0 3.4L-4.6 6.4L-3.2 1.2L-7.3-2.2L-2-2.4Z",
}


def _mark(px: float, py: float, look: Look, kind: str) -> str:
    return f'<path class="{kind}" transform="translate({px:.1f} {py:.1f})" d="{SHAPES[look.mark]}"/>'

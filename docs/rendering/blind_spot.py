"""The picture of what mean pooling leaves of rotary frequencies, from docs/data/pooling_blind_spot.json.

One panel per head size: the closed form as a line, brute force as dots on it, the bundled model's own keys as diamonds
where they were measured, the bands that Prism scores apart as bars below.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from longspan.reporting.palette import DARK as DARK_INKS
from longspan.reporting.palette import LIGHT as LIGHT_INKS
from longspan.reporting.scales import Scale, scale
from longspan.reporting.svg import DARK, SHAPES, STYLE
from rendering.results import stored

NAME = "blind-spot.svg"
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, GAP = 760, 380, 56, 92, 96, 36
SERIES = (("closed_form", "closed form"), ("measured", "measured, same content"), ("keys", "the bundled model's keys"))
BANDS = (("fast band", "band0"), ("slow band", "band1"))


def pictures(docs: Path) -> dict[str, str]:
    """File name and content of the picture."""
    return {NAME: picture(stored(docs, "pooling_blind_spot"))}


def picture_link(docs: Path) -> str:
    stored(docs, "pooling_blind_spot")
    return f"![What is left of each rotary frequency in the mean of a block](images/{NAME})\n"


def picture(found: dict[str, Any]) -> str:
    """The SVG of a result of benchmarks/pooling_blind_spot.py."""
    heads = found["heads"]
    width = (WIDTH - LEFT - 24 - GAP * (len(heads) - 1)) / len(heads)
    title = "Mean pooling is blind to fast rotary frequencies"
    parts = [
        f'<rect class="paper" x=".5" y=".5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10"/>',
        f'<text class="ink title" x="20" y="28">{title}</text>',
        f'<text class="soft" x="20" y="47">length of the mean of {found["block"]} tokens over that of a token, by channel</text>',
        *legend(heads),
    ]
    for i, head in enumerate(heads):
        parts += panel(head, LEFT + i * (width + GAP), width, labelled=i == 0)
    return wrapped(parts, title)


def legend(heads: list[dict[str, Any]]) -> list[str]:
    """The marks and their names, those that are drawn."""
    out, left = [], 20.0
    for key, name in SERIES:
        if any(key in row for head in heads for row in head["rows"]):
            out += [mark(key, left + 8, 66), f'<text class="soft" x="{left + 20:.0f}" y="70">{escape(name)}</text>']
            left += 44 + 6.4 * len(name)
    return out


def panel(head: dict[str, Any], left: float, width: float, labelled: bool) -> list[str]:
    """One head size."""
    rows, bottom = head["rows"], HEIGHT - BOTTOM
    across = Scale(-1, head["dim"] + 1, left, left + width)
    up = scale([0, 1], bottom, TOP, pad=0, low=0, high=1.02, count=4)
    out = []
    for tick in up.ticks:
        y = up(tick)
        out.append(f'<line class="grid" x1="{left:.1f}" x2="{left + width:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        if labelled:
            out.append(f'<text class="soft" x="{left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for channel in range(0, head["dim"] + 1, head["dim"] // 4):
        out.append(f'<text class="soft" x="{across(channel):.1f}" y="{bottom + 18}" text-anchor="middle">{channel}</text>')
    cut = across(head["cut_off"])
    out.append(f'<path class="front" d="M{cut:.1f} {TOP}V{bottom}"/>')
    out.append(f'<text class="soft halo" x="{cut + 6:.1f}" y="{bottom - 8}">one turn per block</text>')
    line = "L".join(f"{across(row['channel']):.1f} {up(row['closed_form']):.1f}" for row in rows)
    out.append(f'<path class="closed" d="M{line}"/>')
    out += [mark(key, across(row["channel"]), up(row[key])) for key in ("keys", "measured") for row in rows if key in row]
    spans = ((0, head["dh"]), (head["dim"] - head["dl"], head["dim"]))
    for i, ((name, kind), (first, last)) in enumerate(zip(BANDS, spans)):
        y = bottom + 28 + 17 * i
        out.append(f'<rect class="{kind}" x="{across(first):.1f}" y="{y}" width="{across(last) - across(first):.1f}" '
                   'height="13" rx="3"/>')
        out.append(f'<text class="on" x="{across((first + last) / 2):.1f}" y="{y + 10.5}" text-anchor="middle">'
                   f"{name}, {last - first} channels</text>")
    out.append(f'<text class="soft" x="{left + width / 2:.1f}" y="{HEIGHT - 16}" text-anchor="middle">channel 2j of '
               f"{head['dim']}, base {head['base']:,.0f}: fast to slow</text>")
    return out


def mark(key: str, x: float, y: float) -> str:
    """A series' mark at a point."""
    if key == "closed_form":
        return f'<path class="closed" d="M{x - 8:.1f} {y:.1f}H{x + 8:.1f}"/>'
    if key == "keys":
        return f'<path class="keys" transform="translate({x:.1f} {y:.1f}) scale(.6)" d="{SHAPES["diamond"]}"/>'
    return f'<circle class="measured" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>'


def wrapped(parts: list[str], title: str) -> str:
    """The document, with its colours for light and for dark paper."""

    def inks(colours: tuple[str, ...]) -> str:
        line, keys, slow, fast = colours[:4]
        return (f".closed{{fill:none;stroke:{line};stroke-width:1.5}}.measured{{fill:{line}}}.keys{{fill:{keys}}}"
                f".band0{{fill:{fast}}}.band1{{fill:{slow}}}")

    on = ".on{fill:#fff;font-size:10.5px}"
    style = (f"{STYLE}{inks(LIGHT_INKS)}{on}\n@media (prefers-color-scheme:dark){{{DARK}{inks(DARK_INKS)}"
             ".on{fill:#0d1117}}\n")
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
            f'role="img" aria-label="{escape(title)}">\n<style>{style}</style>\n' + "\n".join(parts) + "\n</svg>\n")

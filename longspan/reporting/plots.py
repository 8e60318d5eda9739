"""Pictures for notebooks, as plotly figures; `longspan.reporting.svg` writes the README picture without plotly.

Trade-offs: accuracy against cache bytes and against time to first token, answer NLL against cache bytes, each with
95% intervals and the Pareto front. Needles: accuracy by depth and length.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from longspan.reporting.needles import needle_maps
from longspan.reporting.palette import looks
from longspan.reporting.points import Point, points
from longspan.reporting.scales import scale
from longspan.reporting.svg import MEASURES
from longspan.reporting.tables import human_bytes, human_seconds, percent

if TYPE_CHECKING:
    import plotly.graph_objects as go

SYMBOLS = {"triangle": "triangle-up"}
SCALE = ((0.0, "#b3400a"), (0.35, "#f0a868"), (0.5, "#f3ead9"), (0.65, "#7cc0bd"), (1.0, "#0b6b73"))
"""Colours from missed to found; told apart by readers with any colour vision."""


def accuracy_vs_bytes(summary: Iterable[dict[str, Any]]) -> go.Figure:
    """Accuracy against the cache right after compression, pooled over the summary's tasks and lengths."""
    return trade_off(summary, "cache_bytes", "accuracy")


def accuracy_vs_ttft(summary: Iterable[dict[str, Any]]) -> go.Figure:
    """Accuracy against the time to the first token."""
    return trade_off(summary, "ttft_s", "accuracy")


def nll_vs_bytes(summary: Iterable[dict[str, Any]]) -> go.Figure:
    """Answer NLL against the cache right after compression; intervals are those of the paired difference from full."""
    return trade_off(summary, "cache_bytes", "answer_nll")


def trade_off(summary: Iterable[dict[str, Any]], x: str, y: str) -> go.Figure:
    """What recipes cost (`x`: "cache_bytes", "ttft_s") and give (`y`: "accuracy", "answer_nll").

    Raises:
        ValueError: an unknown measure.
    """
    import plotly.graph_objects as go

    from longspan.evaluation import statistics  # here, because its room loads the models' libraries

    if x not in MEASURES or y not in MEASURES:
        raise ValueError(f"trade_off: unknown measure in {(x, y)}; expected two of {', '.join(MEASURES)}.")
    cost, gain = MEASURES[x], MEASURES[y]
    shown = [p for p in points(summary) if getattr(p, x) is not None and getattr(p, y) is not None]
    look = looks(p.recipe for p in shown)
    figure = go.Figure()
    sign = 1 if gain.rising else -1
    front = [shown[i] for i in statistics.pareto([(sign * getattr(p, y), getattr(p, x)) for p in shown])]
    figure.add_trace(go.Scatter(
        x=[getattr(p, x) for p in front], y=[getattr(p, y) for p in front], mode="lines", name="Pareto front",
        line={"color": "#8c959f", "dash": "dot", "shape": "hv"}, hoverinfo="skip",
    ))  # fmt: skip
    for p in shown:
        lo, hi = (p.lo, p.hi) if y == "accuracy" else (p.nll_lo, p.nll_hi)
        middle = getattr(p, y)
        bars = {"type": "data", "symmetric": False, "thickness": 1, "width": 0,
                "array": [(middle if hi is None else hi) - middle],
                "arrayminus": [middle - (middle if lo is None else lo)]}  # fmt: skip
        mark = {"size": 11, "color": look[p.recipe].light,
                "symbol": SYMBOLS.get(look[p.recipe].mark, look[p.recipe].mark)}  # fmt: skip
        figure.add_trace(go.Scatter(
            x=[getattr(p, x)], y=[middle], error_y=bars, mode="markers", name=p.recipe, marker=mark,
            hovertemplate=hover(p) + "<extra></extra>",
        ))  # fmt: skip
    across = scale([getattr(p, x) for p in shown], 0, 1, base=cost.base, low=0, log=None)
    ticks = {"tickvals": list(across.ticks), "ticktext": [cost.text(v) for v in across.ticks]}
    figure.update_xaxes(title=cost.title, type="log" if across.log else "linear", **ticks)
    figure.update_yaxes(title=gain.title, tickformat=".0%" if y == "accuracy" else ".2f")
    figure.update_layout(template="plotly_white", legend={"orientation": "h", "y": -0.2}, margin={"t": 30})
    return figure


def hover(p: Point) -> str:
    """What a point says when pointed at; names are escaped, since plotly reads a little HTML."""
    interval = f" [{percent(p.lo)}, {percent(p.hi)}]" if p.lo is not None else ""
    nll = "–" if p.answer_nll is None else f"{p.answer_nll:.3f}"
    return (
        f"<b>{_escaped(p.recipe)}</b><br>accuracy {percent(p.accuracy)}{interval}, n = {p.n}<br>answer NLL {nll}"
        f"<br>cache {human_bytes(p.cache_bytes)} ({percent(p.share)} of full)<br>first token {human_seconds(p.ttft_s)}"
    )


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _wrapped(text: str, width: int) -> str:
    return "<br>".join(_escaped(line) for line in textwrap.wrap(text, max(width, 10), break_on_hyphens=False))


def needle_heatmap(rows: Iterable[dict[str, Any]], metric: str = "score") -> go.Figure:
    """One heat map per recipe and task: needle depth downwards, length to the right.

    Args:
        rows: result rows with a depth.
        metric: "score" (0 to 1) or "answer_nll" (smaller is better; colours run the other way).

    Raises:
        ValueError: no row has both a depth and the metric.
    """
    from plotly.subplots import make_subplots

    maps = needle_maps(rows, metric)
    if not maps:
        raise ValueError(f"needle_heatmap: no row has both a depth and {metric}.")
    import plotly.graph_objects as go

    several = len({m.task for m in maps}) > 1
    titles = [_wrapped(f"{m.recipe} · {m.task}" if several else m.recipe, 110 // len(maps)) for m in maps]
    figure = make_subplots(rows=1, cols=len(maps), subplot_titles=titles, shared_yaxes=True, horizontal_spacing=0.02)
    known = [v for m in maps for line in m.values for v in line if v is not None]
    top = 1.0 if metric == "score" else max(known)
    for column, m in enumerate(maps, 1):
        figure.add_trace(go.Heatmap(
            z=m.values, x=[f"{n:,}" for n in m.lengths], y=[f"{d:.0%}" for d in m.depths], zmin=0, zmax=top,
            colorscale=[list(stop) for stop in SCALE], reversescale=metric != "score", customdata=m.counts,
            hovertemplate=f"length %{{x}}, depth %{{y}}<br>{metric} %{{z:.2f}}, n = %{{customdata}}<extra></extra>",
            showscale=column == len(maps), xgap=2, ygap=2,
        ), row=1, col=column)  # fmt: skip
    figure.update_yaxes(autorange="reversed", type="category")
    figure.update_xaxes(title="tokens", type="category")
    figure.update_yaxes(title="needle depth", row=1, col=1)
    figure.update_annotations(font_size=12, yanchor="bottom")
    figure.update_layout(template="plotly_white", height=380, margin={"t": 90})
    return figure

from __future__ import annotations

from typing import Any

import pytest

from longspan.evaluation.statistics import pareto
from longspan.reporting.needles import needle_maps
from longspan.reporting.plots import accuracy_vs_bytes, accuracy_vs_ttft, needle_heatmap, nll_vs_bytes, trade_off
from longspan.reporting.points import points

Row = dict[str, Any]


def test_trade_off_shows_every_recipe_with_its_interval_and_the_front(summary: list[Row]) -> None:
    figure = accuracy_vs_bytes(summary)
    shown = points(summary)
    front = pareto([(p.accuracy, p.cache_bytes) for p in shown])
    assert list(figure.data[0].x) == [shown[i].cache_bytes for i in front]
    for p, trace in zip(shown, figure.data[1:]):
        assert trace.name == p.recipe and list(trace.y) == [p.accuracy]
        assert p.lo is not None and p.hi is not None
        assert trace.y[0] - trace.error_y.arrayminus[0] == pytest.approx(p.lo)
        assert trace.y[0] + trace.error_y.array[0] == pytest.approx(p.hi)
    assert figure.layout.xaxis.type == "log" and "MiB" in figure.layout.xaxis.ticktext[0]


def test_other_trade_offs(summary: list[Row]) -> None:
    assert accuracy_vs_ttft(summary).layout.xaxis.title.text == "time to first token"
    nll = nll_vs_bytes(summary)
    shown = points(summary)
    front = pareto([(-p.answer_nll if p.answer_nll is not None else None, p.cache_bytes) for p in shown])
    assert list(nll.data[0].y) == [shown[i].answer_nll for i in front]
    assert nll.data[1].name == "full" and nll.data[1].error_y.array[0] == 0
    with pytest.raises(ValueError, match="speed"):
        trade_off(summary, "speed", "accuracy")


def test_names_are_escaped_in_what_plotly_reads_as_markup(summary: list[Row]) -> None:
    figure = accuracy_vs_bytes([summary[0] | {"recipe": "<b>x&y"}])
    assert "&lt;b>x&amp;y" in figure.data[1].hovertemplate


def test_needle_map_is_the_mean_by_depth_and_length() -> None:
    rows = [
        {"recipe": "x", "task": "niah", "length": n, "depth": d, "score": s, "answer_nll": 1.0}
        for n, d, s in [(10, 0, 1.0), (10, 0, 0.0), (20, 0, 1.0), (20, 0.5, None), (10, 0.5, 0.25), (10, None, 1.0)]
    ]  # fmt: skip
    (found,) = needle_maps(rows)
    assert (found.depths, found.lengths) == ([0.0, 0.5], [10, 20])
    assert found.values == [[0.5, 1.0], [0.25, None]] and found.counts == [[2, 1], [1, 0]]
    (nll,) = needle_maps(rows, "answer_nll")
    assert nll.counts == [[2, 1], [1, 1]]


def test_many_depths_are_binned_without_losing_an_example() -> None:
    rows = [{"recipe": "x", "task": "t", "length": 1, "depth": i / 40, "score": 1.0} for i in range(41)]
    (found,) = needle_maps(rows)
    assert len(found.depths) == 10 and sum(c for (c,) in found.counts) == 41
    assert min(c for (c,) in found.counts) >= 3


def test_heat_maps_one_per_recipe(rows: list[Row]) -> None:
    figure = needle_heatmap(rows)
    assert len(figure.data) == 5 and list(figure.data[0].x) == ["1,000", "4,000"]
    assert list(figure.data[0].y) == ["0%", "25%", "50%", "75%", "100%"]
    assert figure.data[0].zmax == 1.0 and needle_heatmap(rows, "answer_nll").data[0].reversescale is True
    with pytest.raises(ValueError, match="no row has both"):
        needle_heatmap([row | {"depth": None} for row in rows])

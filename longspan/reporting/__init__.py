"""Showing results: tables for the terminal and Markdown, pictures, and one HTML page that opens without a network."""

from __future__ import annotations

from longspan.reporting.kept import kept_mask, kept_payload
from longspan.reporting.needles import NeedleMap, needle_maps
from longspan.reporting.page import page_html, write_page
from longspan.reporting.plots import accuracy_vs_bytes, accuracy_vs_ttft, needle_heatmap, nll_vs_bytes, trade_off
from longspan.reporting.points import Point, points
from longspan.reporting.svg import pareto_svg
from longspan.reporting.sweeps import CellState, cells_of, named_apart, sweep_html, write_sweep
from longspan.reporting.tables import human_bytes, human_seconds, markdown_table, oracle_table, summary_table

__all__ = [
    "CellState", "NeedleMap", "Point", "accuracy_vs_bytes", "accuracy_vs_ttft", "cells_of", "human_bytes", "human_seconds",
    "kept_mask", "kept_payload", "markdown_table", "named_apart", "needle_heatmap", "needle_maps", "nll_vs_bytes",
    "oracle_table", "page_html", "pareto_svg", "points", "summary_table", "sweep_html", "trade_off", "write_page", "write_sweep",
]  # fmt: skip

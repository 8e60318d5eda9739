"""Showing results: tables for the terminal and Markdown, pictures, and one HTML page that opens without a network."""

from __future__ import annotations

from longspan.reporting.kept import kept_mask, kept_payload
from longspan.reporting.needles import NeedleMap, needle_maps
from longspan.reporting.page import page_html, write_page
from longspan.reporting.plots import accuracy_vs_bytes, accuracy_vs_ttft, needle_heatmap, nll_vs_bytes, trade_off
from longspan.reporting.points import Point, points
from longspan.reporting.svg import pareto_svg
from longspan.reporting.tables import human_bytes, human_seconds, markdown_table, oracle_table, summary_table

__all__ = [
    "NeedleMap", "Point", "accuracy_vs_bytes", "accuracy_vs_ttft", "human_bytes", "human_seconds", "kept_mask",
    "kept_payload", "markdown_table", "needle_heatmap", "needle_maps", "nll_vs_bytes", "oracle_table", "page_html",
    "pareto_svg", "points", "summary_table", "trade_off", "write_page",
]  # fmt: skip

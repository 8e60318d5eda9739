from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from longspan.reporting.palette import LIGHT, looks
from longspan.reporting.svg import pareto_svg

NS = "{http://www.w3.org/2000/svg}"
Line = dict[str, Any]


def texts(svg: str) -> list[ET.Element]:
    return ET.fromstring(svg).findall(f".//{NS}text")


@pytest.mark.parametrize("x", ["cache_bytes", "ttft_s"])
@pytest.mark.parametrize("y", ["accuracy", "answer_nll"])
def test_picture_is_whole_and_stands_alone(summary: list[Line], x: str, y: str) -> None:
    svg = pareto_svg(summary, x, y)
    words = " ".join(element.text or "" for element in texts(svg))
    squeezed = words.replace(" ", "")
    for recipe in dict.fromkeys(line["recipe"] for line in summary):
        assert recipe.replace(" ", "") in squeezed
    assert "48 examples per recipe" in words and "1,000 and 4,000 tokens" in words
    assert svg.count("http") == 1  # the namespace; nothing to load
    assert "href" not in svg and "url(" not in svg and "@import" not in svg
    assert "prefers-color-scheme:dark" in svg
    assert len(ET.fromstring(svg).findall(f'.//{NS}path[@transform]')) == 5
    assert svg == pareto_svg(summary, x, y)


def boxes(svg: str) -> list[tuple[float, float, float, float]]:
    """Rectangles of all texts, from their anchors and a generous width per character."""
    found = []
    for element in texts(svg):
        kind = element.get("class") or ""
        width = len(element.text or "") * (7.0 if "name" in kind else 8.4 if "title" in kind else 6.4)
        shift = {"end": -width, "middle": -width / 2}.get(element.get("text-anchor") or "", 0)
        left, bottom = float(element.get("x") or 0) + shift, float(element.get("y") or 0)
        found.append((left, bottom - 10, left + width, bottom + 2))
    return found


@pytest.mark.parametrize("x", ["cache_bytes", "ttft_s"])
@pytest.mark.parametrize("y", ["accuracy", "answer_nll"])
def test_no_text_covers_another_or_leaves_the_picture(summary: list[Line], x: str, y: str) -> None:
    found = boxes(pareto_svg(summary, x, y, width=760, height=440))
    for i, a in enumerate(found):
        assert a[0] >= 0 and a[1] >= 0 and a[2] <= 760 and a[3] <= 440
        for b in found[i + 1 :]:
            assert min(a[2], b[2]) <= max(a[0], b[0]) or min(a[3], b[3]) <= max(a[1], b[1]), (a, b)


def front(svg: str) -> list[tuple[float, float]]:
    path = re.search(r'class="front" d="M([^"]*)"', svg)
    assert path
    return [(float(x), float(y)) for x, y in (corner.split() for corner in path.group(1).split("L"))]


def marks(svg: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r'transform="translate\(([\d.]+) ([\d.]+)\)"', svg)]


@pytest.mark.parametrize("y", ["accuracy", "answer_nll"])
def test_the_front_is_a_stair_through_the_points_that_no_other_beats(summary: list[Line], y: str) -> None:
    svg = pareto_svg(summary, "ttft_s", y)
    corners, shown = front(svg), marks(svg)
    up = -1 if y == "accuracy" else 1  # pixels grow downwards; less NLL is better and lies lower

    def beaten(a: tuple[float, float]) -> bool:
        return any(b[0] <= a[0] and up * b[1] >= up * a[1] and b != a for b in shown)

    best = sorted(point for point in shown if not beaten(point))
    assert corners[0] == best[0] and set(best) <= set(corners) and not (set(shown) - set(best)) & set(corners)
    assert len(best) >= 3
    for a, b in itertools.pairwise(corners):
        assert a[0] == b[0] or a[1] == b[1]  # steps only
        assert b[0] >= a[0]
    for i in range(0, len(corners) - 1, 2):
        assert corners[i][1] == corners[i + 1][1]  # level first, then up: between two points only the cheaper is had


def test_texts_are_escaped_and_names_are_wrapped(summary: list[Line]) -> None:
    odd = summary[0] | {"recipe": "a<b>&c(" + "x" * 100 + ")"}
    svg = pareto_svg([odd], title='5 < 6 & "so"')
    words = [element.text or "" for element in texts(svg)]
    assert '5 < 6 & "so"' in words and any(word.startswith("a<b>&c(") for word in words)
    assert max(len(word) for word in words if "x" * 20 in word) <= 30


def test_unknown_measures_and_empty_summaries_are_refused(summary: list[Line]) -> None:
    with pytest.raises(ValueError, match="'speed'"):
        pareto_svg(summary, y="speed")
    with pytest.raises(ValueError, match="no recipe has both"):
        pareto_svg([])


def test_every_recipe_looks_different_and_the_dense_run_is_grey() -> None:
    names = ["a", "full", *map(str, range(20)), "a"]
    found = looks(names)
    assert found["a"].light == LIGHT[0] and found["full"].light not in LIGHT
    assert len(set(found.values())) == len(set(names))

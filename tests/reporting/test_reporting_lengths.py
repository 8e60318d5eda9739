"""Small multiples of quality over length."""

import re
from xml.etree import ElementTree

import pytest

from longspan.reporting.lengths import lengths_svg

CURVES = {"rope": {64: 2.0, 128: 2.5, 256: 3.0}, "a < b": {64: 2.0, 128: 2.0, 256: 2.0}}


def test_a_panel_for_each_arm_on_one_scale():
    text = lengths_svg(CURVES, "rope", "title", "subtitle")
    ElementTree.fromstring(text)
    assert text.count('class="m0"') == 2 and text.count('class="m1"') == 1
    assert "a &lt; b" in text and ">256<" in text
    ends = [re.findall(r"([\d.]+) ([\d.]+)", d) for d in re.findall(r'class="m0"[^>]* d="M([^"]*)"', text)]
    first, second = ([float(y) for _, y in line] for line in ends)
    assert first[0] == second[0] and first[2] < first[1] < first[0] and len(set(second)) == 1


def test_values_beyond_the_scale_stay_on_the_paper():
    inside, cut = lengths_svg(CURVES, "rope", "t", "s", high=3.0), lengths_svg(CURVES, "rope", "t", "s", high=2.5)
    last = [float(re.findall(r'class="m0"[^>]* d="M[^"]* ([\d.]+)"', text)[0]) for text in (inside, cut)]
    assert last[1] == pytest.approx(last[0], abs=2)


def test_the_arm_behind_must_be_there():
    with pytest.raises(ValueError, match="no curve 'alibi'; expected one of rope"):
        lengths_svg(CURVES, "alibi", "t", "s")

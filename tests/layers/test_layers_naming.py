"""Methods by name and as JSON."""

import json

import pytest

from longspan.layers import choose, to_json
from longspan.layers.attention.softmax import Softmax
from longspan.layers.memory.linear import LinearAttention
from longspan.layers.positions.rope import Rope
from longspan.registry import Refused


def test_by_name_by_object_and_by_json():
    made = Softmax(window=7)
    assert choose("softmax", "mixer") == Softmax() and choose(made, "mixer") is made
    assert choose(json.loads(json.dumps(to_json(made))), "mixer") == made


def test_json_names_every_knob():
    assert to_json(Rope(theta=5e5)) == {"name": "rope", "knobs": {"theta": 5e5}}
    assert to_json(LinearAttention())["knobs"]["feature"] == "elu"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("sotfmax", "unknown mixer 'sotfmax'; did you mean 'softmax'?"),
        ("rope", "'rope' is a position; expected a mixer: "),
        (Rope(), "rope is a position; expected a mixer."),
        ({"name": "softmax", "knobs": {"windw": 3}}, "did you mean 'window'?"),
        ({"name": "softmax", "knobs": {"window": 0}}, "expected at least 1"),
    ],
)
def test_refusals_name_the_nearest(value, message):
    with pytest.raises(Refused) as refused:
        choose(value, "mixer")
    assert message in str(refused.value)


def test_a_text_may_set_knobs():
    made = choose("softmax(window=4)", "mixer")
    assert made.card.name == "softmax" and made.window == 4
    with pytest.raises(Refused, match="did you mean 'window'"):
        choose("softmax(windw=4)", "mixer")
    with pytest.raises(Refused, match="is a position; expected a mixer"):
        choose("yarn(factor=2.0)", "mixer")
    with pytest.raises(Refused, match="expected one mixer"):
        choose("softmax(window=4) + softmax(window=2)", "mixer")

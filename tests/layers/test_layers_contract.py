"""Every registered mixer and side path keeps the contract, with every position scheme it can be combined with."""

import pytest

from longspan import registry
from longspan.layers.attention.softmax import Softmax
from longspan.layers.memory.linear import LinearAttention
from longspan.layers.positions.alibi import Alibi
from longspan.layers.positions.none import NoPositions
from longspan.layers.positions.rope import Rope
from longspan.layers.sidepaths.short_conv import ShortConv


def methods(kind):
    return [registry.get(card.name)() for card in registry.cards(kind=kind) if card.room == "layers"]


VARIANTS = [
    Softmax(window=4),
    Softmax(window=1),
    LinearAttention(gated=True, chunk=4),
    LinearAttention(gated=True, normalise=False, feature="identity"),
    LinearAttention(feature="relu", chunk=1),
]
PAIRS = [(m, p) for m in methods("mixer") + VARIANTS for p in methods("position") if p.hooks <= m.positions]


def test_the_known_methods_are_in_the_grid():
    names = {(m.card.name, p.card.name) for m, p in PAIRS}
    assert {("softmax", "rope"), ("softmax", "alibi"), ("softmax", "nope"), ("linear-attention", "nope")} <= names
    assert ("linear-attention", "rope") not in names
    assert {type(m) for m in (Rope(), Alibi(), NoPositions())} <= {type(p) for _, p in PAIRS}


@pytest.mark.parametrize(("mixer", "position"), PAIRS, ids=[f"{m}-{p}" for m, p in PAIRS])
def test_mixer(contract, mixer, position):
    contract(mixer, position).check_all()


SIDE_PATHS = methods("side-path") + [ShortConv(kernel=1), ShortConv(kernel=9)]


@pytest.mark.parametrize("side_path", SIDE_PATHS, ids=str)
def test_side_path(contract, side_path):
    contract(side_path).check_all()

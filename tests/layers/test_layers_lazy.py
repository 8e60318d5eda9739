"""The doors open on demand."""

import subprocess
import sys

import pytest

import longspan.layers


def test_every_name_of_the_doors_is_there():
    for door in (longspan.layers, longspan.layers.attention, longspan.layers.positions):
        for name in door.__all__:
            assert getattr(door, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        longspan.layers.Nothing  # noqa: B018


def test_methods_are_not_read_before_they_are_asked_for():
    code = (
        "import sys, longspan.layers as l; assert not any(m.endswith(('.softmax', '.rope', '.linear')) and "
        "m.startswith('longspan.layers') for m in sys.modules); assert l.Rope().theta == 1e4"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

"""Lets every test import the helpers beside this file (``import tiny_models``), and takes methods of one's own in.

``pytest --load=my_score.py tests/cache`` registers the methods of a file before tests are collected, so that the grids,
which read method cards, run on them too.
"""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("LONGSPAN_EXAMPLES", "0")  # what tests change of tasks must not be kept


def pytest_addoption(parser):
    parser.addoption(
        "--load", action="append", default=[], metavar="FILE", help="register the methods of a Python file"
    )


def pytest_configure(config):
    from longspan.registry import Refused, load_file

    for file in config.getoption("--load"):
        try:
            load_file(file)
        except Refused as refusal:
            raise pytest.UsageError(str(refusal)) from None


@pytest.fixture
def call(monkeypatch, capsys):
    """Run ``longspan WORDS``: (exit code, standard output, standard error)."""
    from longspan import cli

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["longspan", *words])
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run

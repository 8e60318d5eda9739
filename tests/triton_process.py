"""Running Triton code in a process of its own: the interpreter is chosen when Triton is imported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def run(code: str, **environment: str) -> str:
    """What `code` prints; fails with its error otherwise."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False,
                          env=os.environ | environment, timeout=600)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout

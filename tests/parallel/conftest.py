"""One group of processes per number of ranks, in which all cases run; tests read what it found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from longspan.parallel import Communicator, launch

sys.path.insert(0, str(Path(__file__).parent))  # spawned ranks import the cases by name


@pytest.fixture(scope="session")
def alone():
    import context_parallel_cases as cases

    return [cases.run_all(Communicator())]


@pytest.fixture(scope="session")
def pair():
    import context_parallel_cases as cases

    return launch(cases.run_all, 2, timeout=120, operation_timeout=30)


@pytest.fixture(scope="session")
def four():
    import context_parallel_cases as cases

    return launch(cases.run_all, 4, timeout=240, operation_timeout=60)

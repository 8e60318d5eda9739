"""What an experiment is: a published claim, and what is measured of it here.

One file per system, named like the system; it defines `EXPERIMENT`. Three scales share the code: ``smoke`` (seconds,
in the tests), ``small`` (minutes on two cores) and ``paper`` (the original models and data, for those who have them).
"""

from __future__ import annotations

import importlib
import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longspan.registry import Refused, nearest

SCALES = ("smoke", "small", "paper")
VERDICTS = ("reproduced", "mechanism-only", "failed")
FOLDER = Path(__file__).parent
NOT_EXPERIMENTS = ("__init__", "base", "block_replay", "byte_lm", "hidden", "pooling", "l2a_identities", "noted", "ordering",
                   "slots", "spread_recall", "table_profile", "table_questions", "timing")


@dataclass
class Outcome:
    """What one run of an experiment found."""

    measured: dict[str, Any]
    expected: dict[str, Any]
    checks: dict[str, bool]
    """Statements about the measurement, each true or false."""
    verdict: str
    """``reproduced``; ``mechanism-only``: shown, but the claim's size needs what this machine can't give; ``failed``."""
    reason: str = ""
    """Why the verdict is not ``reproduced``."""
    seeds: list[int] = field(default_factory=list)
    table: list[dict[str, Any]] = field(default_factory=list)
    """Rows behind the figures."""

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(nearest(self.verdict, VERDICTS, "verdict"))
        if self.verdict != "reproduced" and not self.reason:
            raise ValueError(f"an outcome that is {self.verdict} needs a reason")


def by_checks(checks: dict[str, bool]) -> tuple[str, str]:
    """Verdict and reason where nothing but the checks decides."""
    failed = [name for name, holds in checks.items() if not holds]
    return ("failed", f"not so here: {'; '.join(failed)}.") if failed else ("reproduced", "")


Run = Callable[[str, Callable[[str], None]], Outcome]


@dataclass(frozen=True)
class Experiment:
    """A claim and how it is measured: ``run(scale, progress) -> Outcome``."""

    id: str
    system: str
    claim: str
    run: Run
    lines: Callable[[list[dict[str, Any]]], tuple[list[str], list[list[str]]]] | None = None
    """Head and cells of the table a reader wants to see, made of the outcome's rows; None where the figures say it all."""


@dataclass(frozen=True)
class Done:
    """An outcome with what it was run on."""

    id: str
    system: str
    scale: str
    claim: str
    outcome: Outcome
    seconds: float
    machine: str

    @property
    def verdict(self) -> str:
        return self.outcome.verdict

    def as_json(self) -> dict[str, Any]:
        o = self.outcome
        return _numbers({
            "id": self.id, "system": self.system, "scale": self.scale, "claim": self.claim, "measured": o.measured,
            "expected": o.expected, "checks": o.checks, "verdict": o.verdict, "reason": o.reason, "seeds": o.seeds,
            "seconds": round(self.seconds, 1), "machine": self.machine, "table": o.table})


def _numbers(value: Any) -> Any:
    """The value with None for NaN and infinities, which JSON doesn't know."""
    if isinstance(value, dict):
        return {key: _numbers(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_numbers(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def names() -> list[str]:
    """Ids of all experiments: the files of this folder."""
    return sorted(f.stem.replace("_", "-") for f in FOLDER.glob("*.py") if f.stem not in NOT_EXPERIMENTS)


def find(ids: Sequence[str]) -> list[Experiment]:
    """The experiments of these ids; all when none is given.

    Raises:
        Refused: an unknown id, with the nearest one.
    """
    known = names()
    for name in ids:
        if name not in known:
            raise Refused(nearest(name, known, "experiment"))
    return [importlib.import_module(f"{__package__}.{name.replace('-', '_')}").EXPERIMENT for name in ids or known]


def perform(experiment: Experiment, scale: str, out: Path | None = None,
            progress: Callable[[str], None] = lambda what: None) -> Done:
    """Run an experiment; with `out`, write ``<id>.json`` there."""
    if scale not in SCALES:
        raise Refused(f"--scale: {nearest(scale, SCALES, 'scale')}")
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Refused(f"--out {str(out)!r} can't be made a folder ({error.strerror}).") from error
    start = time.perf_counter()
    outcome = experiment.run(scale, lambda what: progress(f"{experiment.id}: {what}"))
    done = Done(experiment.id, experiment.system, scale, experiment.claim, outcome, time.perf_counter() - start, machine())
    if out is not None:
        path = out / f"{experiment.id}.json"
        path.write_text(json.dumps(done.as_json(), indent=1, default=str) + "\n", encoding="utf-8")
    return done


def machine() -> str:
    """Processor architecture, cores that PyTorch uses, versions: what figures depend on."""
    import torch
    import transformers

    return (f"{platform.machine()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}, "
            f"torch {torch.__version__}, transformers {transformers.__version__}")

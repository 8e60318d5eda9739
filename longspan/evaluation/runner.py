"""Running recipes over tasks: one row per example, kept the moment it is known.

Rows go to ``rows.jsonl`` in the run's folder, one line each, flushed to disk; a run that is killed goes on where it
stopped, repeats nothing and loses nothing. When all rows are there they are written to ``rows.parquet`` as well.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from longspan import grammar
from longspan.context import shareable
from longspan.evaluation.agreement import Judge
from longspan.evaluation.base import Example, Task
from longspan.evaluation.drawn import draw
from longspan.evaluation.measure import AFTER, BEFORE, Measured, Row, measure
from longspan.evaluation.once import VERBATIM, measure_once
from longspan.evaluation.oracles import Oracle
from longspan.models import Loaded
from longspan.recipe import Recipe
from longspan.registry import Refused, card

KEY = ("model", "recipe", "task", "length", "seed", "index", "compress", "text_hash", "dtype", "max_new_tokens", "score_name")
Progress = Callable[[int, int, str], None]
"""Called with rows done, rows in all, and what comes next."""


@dataclass
class Request:
    """What to compare."""

    recipes: list[Recipe]
    tasks: list[Task]
    lengths: list[int]
    examples: int = 10
    seed: int = 0
    compress: str = BEFORE
    out: Path | None = None
    max_new_tokens: int | None = None
    """A cap on generated tokens, below what the tasks ask for; stated in every row."""
    keep_view: bool = False
    """Also record which tokens were kept, for the first example of every task at the shortest length."""
    kept: dict[str, dict[str, Any]] = field(default_factory=dict)
    oracle: Oracle | None = None
    """Also compare every score's ranking of the prompt with this reference."""
    read_once: bool = False
    """Read each example once for all recipes: quality and bytes, no times, and nothing is generated."""

    def __post_init__(self) -> None:
        # What is given twice is measured and counted once.
        self.recipes = list({recipe.name or str(recipe): recipe for recipe in self.recipes}.values())
        self.tasks = list({str(task): task for task in self.tasks}.values())
        self.lengths = list(dict.fromkeys(self.lengths))
        if self.read_once:
            self._check_read_once()
        if self.compress not in (BEFORE, AFTER):
            raise Refused(f"--compress {self.compress!r}: expected {BEFORE} or {AFTER}.")
        if self.examples < 1:
            raise Refused(f"--examples {self.examples}: expected at least 1.")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise Refused(f"--max-new-tokens {self.max_new_tokens}: expected at least 1.")
        for length in self.lengths:
            if length < 1:
                raise Refused(f"--length {length}: expected a number of tokens, such as 1024.")


    def _check_read_once(self) -> None:
        if self.compress != BEFORE:
            raise Refused(f"--read-once with --compress {self.compress}: contexts are shared before their question is known; "
                          f"expected {BEFORE}.")
        if self.oracle is not None:
            raise Refused(f"--read-once with --oracle {self.oracle}: the oracle reads examples in its own way; leave one out.")
        for recipe in self.recipes:
            if not shareable(recipe):
                raise Refused(f"--read-once: recipe {str(recipe)!r} changes how a context is read; expected recipes that only "
                              "choose what stays when it ends (schedule=at-prompt).")


def parse_task(text: str) -> Task:
    """A task as text: a name, with knobs in parentheses if wanted."""
    parts = grammar.parse(text)
    if len(parts) != 1 or parts[0].at is not None:
        raise Refused(f"--task {text!r}: expected one task, such as niah; repeat --task for more.")
    call = parts[0].call
    if card(call.name).kind != "task":
        raise Refused(f"--task {call.name}: {call.name} is a {card(call.name).kind}; expected a task, such as niah.")
    made = grammar.build(call)
    assert isinstance(made, Task)
    return made


def run(loaded: Loaded, request: Request, progress: Progress | None = None) -> list[Row]:
    """All rows of a request, in its order; rows of an earlier run in ``request.out`` are taken over."""
    journal = Journal(request.out)
    judge = None if request.oracle is None else Judge(loaded, request.oracle, request.recipes, request.compress)
    jobs = list(plan(loaded, request))
    for n, job in enumerate(jobs):
        if progress is not None:
            progress(n, len(jobs), f"{job.recipe.name or job.recipe} · {job.base['task']} · {job.base['length']}")
        if request.read_once and job.key not in journal.rows:
            _read_once(loaded, [j for j in jobs[n:] if j.example is job.example], journal)
        if job.key not in journal.rows or job.wants_view:
            done = measure(loaded, job.recipe, job.task, job.example, compress=request.compress, want_kept=job.wants_view)
            if done.kept is not None:
                _note_view(request, job, done, loaded)
            if job.key not in journal.rows:
                agreed = {} if judge is None else judge.row(job.example, job.recipe)
                journal.add(job.key, {**job.base, **done.row, **agreed})
    if progress is not None:
        progress(len(jobs), len(jobs), "")
    rows = [journal.rows[job.key] for job in jobs]
    journal.close(rows)
    return rows


def _read_once(loaded: Loaded, jobs: Sequence[Job], journal: Journal) -> None:
    """Measure those of one example's jobs that are missing, on one reading."""
    missing = {id(job.recipe): job for job in jobs if job.key not in journal.rows}
    for recipe, row in measure_once(loaded, [job.recipe for job in missing.values()], jobs[0].example):
        if isinstance(row, Refused):
            raise row
        job = missing[id(recipe)]
        journal.add(job.key, {**job.base, **row})


@dataclass(frozen=True)
class Job:
    """One example under one recipe."""

    recipe: Recipe
    task: Task
    example: Example
    base: Row
    wants_view: bool

    @property
    def key(self) -> str:
        return row_key(self.base)


def plan(loaded: Loaded, request: Request) -> Iterator[Job]:
    """Every job: recipes change fastest, so that pairs are measured next to each other."""
    for task in request.tasks:
        for length in request.lengths:
            for example in draw(task, length, request.examples, request.seed, loaded.tokenizer):
                if request.max_new_tokens is not None:
                    example = replace(example, max_new_tokens=min(example.max_new_tokens, request.max_new_tokens))
                for recipe in request.recipes:
                    first = example.meta["index"] == 0 and length == min(request.lengths)
                    base = describe(loaded, recipe, task, length, request, example)
                    yield Job(recipe, task, example, base, request.keep_view and first)


def describe(loaded: Loaded, recipe: Recipe, task: Task, length: int, request: Request, example: Example) -> Row:
    """What identifies a row."""
    text = task.text
    return {
        "model": loaded.name, "fingerprint": loaded.fingerprint, "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "recipe": recipe.name or str(recipe), "task": str(task), "length": length,
        "score_name": VERBATIM if request.read_once else task.score_name,
        "index": example.meta["index"], "seed": request.seed, "compress": request.compress,
        "max_new_tokens": example.max_new_tokens,
        "text_source": text.source if text else "", "text_hash": text.sha256 if text else "",
    } | ({} if request.oracle is None else {"oracle_name": str(request.oracle)}) | own_code(recipe)


def own_code(recipe: Recipe) -> Row:
    """A digest of the files of the recipe's methods that aren't part of the package: who edits one measures anew."""
    files = {inspect.getsourcefile(type(m)) for m in nested(recipe.methods) if not type(m).__module__.startswith("longspan.")}
    content = [Path(file).read_bytes() for file in sorted(f for f in files if f)]
    return {"own_code": hashlib.sha256(b"\0".join(content)).hexdigest()[:16]} if content else {}


def nested(methods: Iterable[Any]) -> Iterator[Any]:
    """Methods, and those that are their knobs' values."""
    for m in methods:
        yield m
        yield from nested(getattr(m, knob.name) for knob in m.card.knobs if knob.kind)


def row_key(row: Row) -> str:
    named = {name: row[name] for name in KEY} | {"fingerprint": row["fingerprint"]}
    if row.get("oracle_name"):
        named["oracle"] = row["oracle_name"]
    if row.get("own_code"):
        named["own_code"] = row["own_code"]
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()


class Journal:
    """Rows on disk, one JSON line each. Without a folder rows live in memory only."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.rows: dict[str, Row] = {}
        self.file: Any = None
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Refused(f"--out {str(folder)!r} can't be made a folder ({error.strerror}).") from error
        path = folder / "rows.jsonl"
        whole = self._read(path) if path.exists() else 0
        self.file = path.open("ab")
        # A line that was cut off by a kill is dropped, so that the next one starts clean.
        self.file.truncate(whole)

    def _read(self, path: Path) -> int:
        """Load complete rows; returns how many bytes of the file they take."""
        whole = 0
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
            if not line.endswith(b"\n"):
                break
            try:
                row = json.loads(line)
                self.rows[row_key(row)] = row
            except (ValueError, KeyError, TypeError) as error:
                raise Refused(f"--out {str(path.parent)!r}: line {number} of rows.jsonl is not a result row; "
                              "move the file away to start anew.") from error
            whole += len(line)
        return whole

    def add(self, key: str, row: Row) -> None:
        self.rows[key] = row
        if self.file is not None:
            self.file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            self.file.flush()
            os.fsync(self.file.fileno())

    def close(self, rows: list[Row]) -> None:
        """Write the request's rows as Parquet too."""
        if self.file is not None and self.folder is not None:
            self.file.close()
            write_parquet(self.folder / "rows.parquet", rows)


def write_parquet(path: Path, rows: Iterable[Row]) -> None:
    """Write rows, atomically."""
    import pyarrow
    import pyarrow.parquet

    temporary = path.with_suffix(".part")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), temporary)
    temporary.replace(path)


def read_parquet(path: Path) -> list[Row]:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(path).to_pylist()


def _note_view(request: Request, job: Job, done: Measured, loaded: Loaded) -> None:
    """Remember which tokens a recipe kept of an example, for the page."""
    from longspan.evaluation.base import prompt_parts, token_spans

    parts = prompt_parts(job.example, loaded.tokenizer)
    ids = parts.context_ids if request.compress == BEFORE else parts.ids
    name = f"{job.base['task']} at {job.base['length']}"
    view = request.kept.setdefault(name, {
        "title": name, "tokens": [loaded.tokenizer.decode([i]) for i in ids], "recipes": [],
        "spans": [("needle", a, b) for a, b in token_spans(job.example, loaded.tokenizer) if b <= len(ids)],
    })
    view["recipes"].append((job.base["recipe"], done.kept))

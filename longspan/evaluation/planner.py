"""The planner: which recipes fit a memory limit and keep the quality, cheapest first, from measured results.

Bytes are predicted from the model's shape and the recipe's budget; a test holds the prediction against real caches.
Quality is read from measured rows: at the measured length nearest to the one asked for, the recipe's accuracy as a
share of the dense run's on the same examples, over the tasks that the dense run can do at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from longspan.cache.amount import parse_amount
from longspan.cache.cache import POSITION_BYTES
from longspan.evaluation.runner import read_parquet
from longspan.evaluation.statistics import summarise
from longspan.recipe import Recipe
from longspan.registry import Refused

MEASURED = Path(__file__).parent / "measured.json"
"""Summary rows on the bundled model; made again by `make measure`."""
SOLVABLE = 0.5
"""Least accuracy of the dense run for a task to say anything about a recipe."""

@dataclass(frozen=True)
class Shape:
    """What a model's cache takes: layers, key-value heads, head dimension, bytes per number."""

    layers: int
    kv_heads: int
    head_dim: int
    itemsize: int

    def bytes(self, recipe: Recipe, context: int, rows: int = 1) -> int:
        """Bytes right after compression, for `rows` sequences of `context` tokens."""
        entries = self.layers * self.kv_heads * rows
        dense = 2 * self.head_dim * self.itemsize
        policy = recipe.cache
        if policy is None:
            return entries * context * dense + rows * self.layers * context * POSITION_BYTES
        entry = (policy.store.entry_bytes(self.head_dim, self.itemsize) if policy.store else dense) + POSITION_BYTES
        return round(entries * policy.expected(context, entry * entries) * entry)


@dataclass(frozen=True)
class Choice:
    """One recipe, judged."""

    recipe: str
    bytes: int
    fits: bool
    quality: float | None
    """Accuracy as a share of the dense run's; None where nothing was measured that says so."""
    nll_increase: float | None
    """Nats per answer token above the dense run."""
    tokens_per_s: float | None
    ttft_s: float | None
    measured_at: int | None
    """Length of the measured prompts."""
    examples: int = 0
    reason: str = ""
    """Why it isn't recommended; empty if it is."""


@dataclass
class Plan:
    """What was asked, and the recipes: recommended ones first, cheapest first."""

    model: str
    context: int
    memory: int
    floor: float
    rows: int
    measured_on: str
    note: str = ""
    choices: list[Choice] = field(default_factory=list)

    @property
    def recommended(self) -> list[Choice]:
        return [c for c in self.choices if not c.reason]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "recommended": [c.recipe for c in self.recommended]}


def make_plan(model: str | None, context: int, memory: str, floor: float = 0.9, *, rows: int = 1,
              results: Path | None = None, dtype: str | None = None) -> Plan:
    """Plan for a model that is not loaded: only its shape is read.

    Raises:
        Refused: a memory limit that isn't in bytes, a context beyond the model's window, results that aren't there.
    """
    limit = parse_memory(memory)
    name, shape, window = model_shape(model, dtype)
    if context > window:
        raise Refused(f"--context {context}: {name} reads at most {window} tokens; ask for at most {window}.")
    summary, measured_on = measured_summary(results)
    note = "" if measured_on == name else (
        f"quality was measured on {measured_on}, not on {name}; run `longspan compare --out DIR` with it and pass "
        "--results DIR")
    choices = [judge(recipe, lines, shape, context, limit, floor, rows) for recipe, lines in by_recipe(summary).items()]
    choices.sort(key=lambda c: (bool(c.reason), c.bytes))
    return Plan(name, context, limit, floor, rows, measured_on, note, choices)


def choose(loaded: Any, length: int, floor: float = 0.9) -> Recipe:
    """The recipe `auto` stands for: the cheapest one that keeps `floor` of the dense accuracy at this length."""
    if getattr(loaded.model, "denoises_blocks", False):
        raise Refused(f"recipe 'auto' stands for a cache policy, and {loaded.name} denoises blocks; expected full, or a "
                      "denoising part such as flashblock.")
    summary, _ = measured_summary(None)
    shape = shape_of(loaded.model)
    judged = [judge(r, lines, shape, length, 2**62, floor, 1) for r, lines in by_recipe(summary).items()]
    good = sorted((c for c in judged if not c.reason), key=lambda c: c.bytes)
    made = Recipe.parse(good[0].recipe if good else "full")
    made.name = f"auto: {made.name}"
    return made


def judge(recipe: str, lines: list[dict[str, Any]], shape: Shape, context: int, limit: int, floor: float,
          rows: int) -> Choice:
    """Predict the bytes of one recipe and read its quality off the measured lines nearest in length."""
    size = shape.bytes(Recipe.parse(recipe), context, rows)
    lengths = sorted({line["length"] for line in lines}, key=lambda n: (abs(n - context), n))
    near = [line for line in lines if line["length"] == lengths[0]]
    quality, increase, n = quality_of(recipe, near)
    reason = ""
    if size > limit:
        reason = f"takes {size / limit:.1f} times the memory"
    elif quality is None:
        reason = "no measured task that the dense run can do"
    elif quality < floor:
        reason = f"keeps {quality:.0%} of the dense accuracy"
    return Choice(recipe, size, size <= limit, quality, increase, mean(near, "tokens_per_s"), mean(near, "ttft_s"),
                  lengths[0], n, reason)


def quality_of(recipe: str, lines: list[dict[str, Any]]) -> tuple[float | None, float | None, int]:
    """Share of the dense accuracy (at most 1), nats above the dense run, examples behind it."""
    if recipe == "full":
        return 1.0, 0.0, sum(line["n"] for line in lines)
    shares, increases, n = [], [], 0
    for line in lines:
        versus = line.get("vs_full")
        if versus is None:
            continue
        if versus.get("nll_difference") is not None:
            increases.append(versus["nll_difference"])
        if line.get("accuracy") is None or versus.get("accuracy_difference") is None:
            continue
        dense = line["accuracy"] - versus["accuracy_difference"]
        if dense >= SOLVABLE:
            shares.append(min(1.0, line["accuracy"] / dense))
            n += line["n"]
    quality = sum(shares) / len(shares) if shares else None
    return quality, sum(increases) / len(increases) if increases else None, n


def by_recipe(summary: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for line in summary:
        found.setdefault(line["recipe"], []).append(line)
    return found


def mean(lines: list[dict[str, Any]], key: str) -> float | None:
    values = [line[key] for line in lines if line.get(key) is not None]
    return sum(values) / len(values) if values else None


def parse_memory(memory: str) -> int:
    """Bytes of a limit such as ``2GiB``."""
    try:
        amount = parse_amount(memory)
    except Refused:
        amount = None
    if amount is None or amount.unit != "bytes":
        raise Refused(f'--memory {memory!r}: expected bytes with a unit, such as "2GiB" or "512 MiB".')
    return int(amount.value)


def measured_summary(results: Path | None) -> tuple[list[dict[str, Any]], str]:
    """Summary lines and the model they were measured on."""
    if results is None:
        stored = json.loads(MEASURED.read_text(encoding="utf-8"))
        return stored["rows"], stored["model"]
    file = results / "rows.parquet"
    if not file.is_file():
        raise Refused(f"--results {str(results)!r}: no rows.parquet there; expected the --out folder of a finished "
                      "`longspan compare`.")
    rows = read_parquet(file)
    if not rows:
        raise Refused(f"--results {str(results)!r} holds no rows.")
    return summarise(rows), rows[0]["model"]


def model_shape(model: str | None, dtype: str | None) -> tuple[str, Shape, int]:
    """Name, cache shape and window of a model whose weights stay on disk."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from longspan.models.block_diffusion import is_block_diffusion
    from longspan.models.load import context_window, default_dtype, resolve

    folder, name = resolve(model)
    if is_block_diffusion(folder):
        raise Refused(f"{name} denoises blocks, and what its recipes cost hasn't been measured; expected a model that writes "
                      "token by token.")
    config = AutoConfig.from_pretrained(folder)
    wanted = default_dtype()[0] if dtype is None else getattr(torch, dtype, None)
    if not isinstance(wanted, torch.dtype):
        raise Refused(f"--dtype {dtype!r}: expected float32, bfloat16 or float16.")
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, dtype=wanted)
    return name, shape_of(skeleton), context_window(skeleton)


def shape_of(model: Any) -> Shape:
    from longspan.models import find_parts

    parts = find_parts(model)
    return Shape(parts.n_layers, parts.n_kv_heads, parts.head_dim, parts.dtype.itemsize)

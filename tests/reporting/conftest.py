"""Made-up results with the shape of real ones: five recipes, three tasks, two lengths, eight examples."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

RECIPES = {  # share of the cache kept, chance of a right answer at 1,000 tokens, extra nats per token, seconds saved
    "full": (1.0, 0.90, 0.00, 0.0),
    "streaming(budget=0.2)": (0.2, 0.35, 1.30, 0.25),
    "snapkv(budget=0.2)": (0.2, 0.80, 0.22, 0.10),
    "criticalkv(base=snapkv()) @ adakv(budget=0.2)": (0.2, 0.86, 0.10, 0.05),
    "expected-attention(budget=0.5, store=quantised(bits=4))": (0.14, 0.88, 0.06, -0.3),
}
TASKS = ("niah", "ruler-vt", "kv-retrieval")
LENGTHS = (1000, 4000)
BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 2


def make_rows(recipes: dict[str, tuple[float, ...]] = RECIPES, examples: int = 8, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    hard = {(t, n, i): rng.normal() for t in TASKS for n in LENGTHS for i in range(examples)}
    rows = []
    for recipe, (share, chance, nats, saved) in recipes.items():
        for t, task in enumerate(TASKS):
            for length in LENGTHS:
                for index in range(examples):
                    at = hard[task, length, index]
                    p = chance - 0.08 * t - (0.12 if length > 2000 else 0) + 0.12 * at
                    right = float(rng.random() < p)
                    answer = f"{4871632 + 7919 * index}"
                    bytes_full = BYTES_PER_TOKEN * length
                    rows.append({
                        "model": "SmolLM2-135M-Instruct", "recipe": recipe, "task": task, "length": length,
                        "index": index, "seed": 0, "compress": "before-question",
                        "prediction": answer if right else f"It is <b>{int(rng.integers(1e6))}</b> & that's it.",
                        "answers": json.dumps([answer]), "score": right if task != "ruler-vt" else round(p, 2),
                        "answer_nll": max(0.02, 0.8 - 0.5 * at + nats * (1 + 0.3 * rng.normal())),
                        "answer_tokens": 5, "prompt_tokens": length, "cache_bytes": int(bytes_full * share),
                        "full_cache_bytes": bytes_full, "kept_tokens": int(length * share),
                        "ttft_s": length / 900 + 0.05 * rng.random() - saved * length / 2500, "decode_s": 0.5,
                        "new_tokens": 12, "tokens_per_s": 24.0,
                        "depth": [0.0, 0.25, 0.5, 0.75, 1.0][index % 5] if task == "niah" else None,
                        "text_source": "pydoc_data.topics", "text_hash": "9f2c41d07be1",
                        "achieved": json.dumps({"kept_share": share, "layers": [share] * 3}),
                    })  # fmt: skip
    return rows


@pytest.fixture(scope="session")
def rows() -> list[dict[str, Any]]:
    return make_rows()


@pytest.fixture(scope="session")
def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from longspan.evaluation.statistics import summarise

    return summarise(rows)

"""Questions over tables, made and put to the bundled model: the generator's part of the experiment `tablelong`.

200 questions at 2K, 4K and 8K tokens (the families take turns): how long one takes, how near it comes to its length, how broadly
cells and tables are spread. Every answer was agreed on by two executors, and verified, before it was counted.

Then P, the share of sampled answers that are right, by family, at 2K tokens only: on one thread a prompt takes seconds. So few
samples can't tell small rates apart; beside them stands the probability, at the sampling temperature of 1, that the gold answer
is written as JSON writes it: one of the ways to be right, so a lower bound of P, without the noise of sampling. It favours short
answers, so nats a token stand there too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from longspan.decoding import read
from longspan.evaluation import parse_task
from longspan.evaluation.base import Example, answer_ids, prompt_parts, total_length
from longspan.evaluation.tables.command import spread
from longspan.evaluation.tables.filtering import judge
from longspan.evaluation.tables.generator import WITHIN
from longspan.evaluation.tables.queries import FAMILIES
from longspan.models import Loaded, load

Progress = Callable[[str], None]
SEED = 0
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"questions": {2048: 6}, "length": 768, "asked": 1, "sampled": 1, "rollouts": 2, "answer": 3},
    "small": {"questions": {2048: 200, 4096: 200, 8192: 200}, "length": 2048, "asked": 10, "sampled": 3, "rollouts": 4,
              "answer": 24},
}
"""Questions made, by length. Then what is put to the model: how long a prompt; of each family, the questions whose gold answer's
probability is taken, and those that are answered; answers to each, and most tokens of one."""


def generator_part(scale: str, progress: Progress) -> dict[str, Any]:
    """Figures on the generator, and the bundled model's P by family: `measured`, `rows` and `seconds`."""
    size, start = SIZES[scale], time.perf_counter()
    loaded = load()
    made = [generated(loaded.tokenizer, length, n, progress) for length, n in size["questions"].items()]
    rows = asked(loaded, size, progress)
    p, gold = by_family(rows, "P"), by_family(rows, "gold")
    measured: dict[str, Any] = {f"questions of {length} tokens": row for length, row in zip(size["questions"], made)} | {
        "P by family": p, "probability of the gold answer by family": gold,
        "nats a token of the gold answer by family": by_family(rows, "nats"),
        "retrieval above computation": {"P": p["retrieval"] > p["computation"],
                                        "probability": gold["retrieval"] > gold["computation"]},
        "put to the model": f"{size['asked']} questions a family of {size['length']} tokens, {size['sampled']} of them with "
                            f"{size['rollouts']} sampled answers each: a prompt takes seconds on one thread"}
    return {"measured": measured, "rows": rows, "seconds": round(time.perf_counter() - start, 1)}


def generated(tokenizer: Any, length: int, n: int, progress: Progress) -> dict[str, Any]:
    """What `n` questions of a length are like."""
    progress(f"{n} questions of {length} tokens")
    task = parse_task("tablelong")
    task.floor(tokenizer)  # found once, not for each question
    start = time.perf_counter()
    examples = list(task.examples(length, n, SEED, tokenizer))
    seconds = (time.perf_counter() - start) / n
    lengths = [total_length(example, tokenizer) for example in examples]
    return {
        "questions": len(examples), "seconds each": round(seconds, 4), "tokens": spread(lengths),
        "within 2%": all((1 - WITHIN) * length <= tokens <= length for tokens in lengths),
        "cells needed": spread([example.meta["cells_needed"] for example in examples]),
        "median cells by family": {family: median(e.meta["cells_needed"] for e in examples if e.meta["family"] == family)
                                   for family in FAMILIES},
        "tables": spread([example.meta["tables"] for example in examples]),
        "different questions": len({example.question for example in examples}),
    }


# --------------------------------------------------------------------------------------------------------- the model


def asked(loaded: Loaded, size: dict[str, Any], progress: Progress) -> list[dict[str, Any]]:
    """A row for each question put to the model."""
    rows = []
    for family in FAMILIES:
        task = parse_task(f"tablelong(family={family})")
        for number, example in enumerate(task.examples(size["length"], size["asked"], SEED, loaded.tokenizer)):
            progress(f"{family}, question {number + 1} of {size['asked']}")
            nats = gold_nats(loaded, example)
            row = {"family": family, "gold": math.exp(-sum(nats)), "nats": sum(nats) / len(nats), "P": None,
                   "cells": example.meta["cells_needed"]}
            if number < size["sampled"]:
                short = replace(example, max_new_tokens=size["answer"])
                row["P"] = judge(loaded, task, short, size["rollouts"], seed=SEED).p
            rows.append(row)
    return rows


def gold_nats(loaded: Loaded, example: Example) -> list[float]:
    """Negative log-likelihood of each token of the gold answer, in nats."""
    from transformers import DynamicCache

    prompt, answer = prompt_parts(example, loaded.tokenizer).ids, answer_ids(example, loaded.tokenizer)
    device = loaded.model.device
    logits = read(loaded.model, torch.tensor([prompt + answer], device=device), DynamicCache(), last=len(answer) + 1)[0, :-1]
    wanted = torch.tensor(answer, device=device)[:, None]
    return (-logits.log_softmax(-1).gather(-1, wanted)[:, 0]).tolist()


def by_family(rows: Sequence[dict[str, Any]], name: str) -> dict[str, float]:
    """Means over the questions that have the figure."""
    found = {family: [row[name] for row in rows if row["family"] == family and row[name] is not None] for family in FAMILIES}
    return {family: sum(own) / len(own) for family, own in found.items() if own}

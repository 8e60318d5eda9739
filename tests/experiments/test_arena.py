"""The arena's tasks, its arms, and its cells."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise

import pytest
import torch

from longspan import registry
from longspan.experiments import arena
from longspan.experiments.slots import Slots
from longspan.experiments.spread_recall import SpreadRecall
from longspan.training import IGNORE

SIZE = arena.SIZES["smoke"]
ROPE, YARN = (next(a for a in arena.ARMS if a.name == name) for name in ("softmax, rope", "rope, yarn"))


@pytest.mark.parametrize("time", [64, 200])
def test_every_question_has_one_answer_above_it(time):
    batch = SpreadRecall(time, 5)(3)
    assert batch.ids.shape == (5, time)
    for ids, labels in zip(batch.ids, batch.labels):
        told = {k: v for k, v in pairwise(ids[: time // 2].tolist()) if k < 16 <= v < 32}
        asked = (labels != IGNORE).nonzero()[:, 0].tolist()
        assert len(told) == len(asked) == 8 and min(asked) >= time // 2
        assert all(labels[t] == ids[t + 1] == told[int(ids[t])] for t in asked)


def test_slots_ask_for_one_of_their_pairs():
    batch = Slots(48, 6, within=1 / 3)(0)
    first, second = batch.ids, batch.extra["second"]
    assert (second[:, -1] == Slots().vocab_size - 1).all()
    for row in range(6):
        pairs = {int(k): int(v) for k, v in zip(first[row, :-1], second[row, :-1]) if k < 24}
        assert len(pairs) == 6 and pairs[int(first[row, -1])] == batch.labels[row, -1]
        assert max(i for i, k in enumerate(first[row, :-1]) if k < 24) < 16
    assert (batch.labels[:, :-1] == IGNORE).all()


def test_batches_are_a_function_of_their_number_and_split():
    for task in (SpreadRecall(64, 2), Slots(48, 2)):
        assert torch.equal(task(1).ids, task(1).ids) and not torch.equal(task(1).ids, task(2).ids)
        assert not torch.equal(task(1).ids, dataclasses.replace(task, split="held-out")(1).ids)


@pytest.mark.parametrize("arm", arena.ARMS, ids=lambda a: a.name)
def test_every_arm_can_be_made_for_every_task_and_length(arm):
    for task in arena.TASKS:
        model = arena.made(arm, task, arena.SIZES["small"], 0, 16)
        assert sum(p.numel() for p in model.parameters()) < 400_000
    assert registry.card(arm.objective).kind == "objective"


def test_a_finished_cell_is_read_and_a_changed_budget_is_another_cell(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path))
    found = arena.cell(ROPE, "recall", 0, SIZE, [YARN])
    assert set(found) == {"softmax, rope", "rope, yarn"} and set(found["rope, yarn"]) == {"1", "2", "4", "8", "16"}
    assert found["rope, yarn"]["1"] == found["softmax, rope"]["1"]  # a factor of 1 changes nothing
    monkeypatch.setattr(arena, "trained", lambda *_: pytest.fail("a finished cell was run again"))
    assert arena.cell(ROPE, "recall", 0, SIZE, [YARN]) == found
    keys = {arena.key(ROPE, "recall", seed, size, [YARN]) for seed in (0, 1)
            for size in (SIZE, dataclasses.replace(SIZE, steps={"recall": 3, "slots": 2}))}
    assert len(keys) == 4
    (file,) = (tmp_path / "arena").glob("*") if (tmp_path / "arena").is_dir() else tmp_path.rglob("*.json")
    assert json.loads(file.read_text()) == found


def test_the_table_shows_every_arm_once():
    row = {n: 1.0 for n in ("parameters", "tokens/s at 1x", "peak bytes at 1x", "tokens/s at 16x", "peak bytes at 16x")}
    scores = {"text": {"softmax, rope": {"1": [[1.0, 2.0], [3.0]], "2": [[1.0]], "4": [[1.0]], "8": [[1.0]], "16": [[1.0]]}},
              "recall": {}, "slots": {}}
    made = arena.row_of(ROPE, scores, {"softmax, rope": row}, SIZE)
    assert made["text"]["1"] == pytest.approx(2.25) and made["text by seed"]["1"] == [1.5, 3.0]
    head, cells = arena.lines([made])
    assert len(cells) == 1 and len(cells[0]) == len(head) and cells[0][2].startswith("2.250 1.000")

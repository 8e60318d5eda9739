"""The word stream holds what it promises, and the verdict follows the checks."""

import math

import pytest
import torch
from torch import nn

from longspan.experiments.contextlm import BACK, OfAnotherRow, W, WordStream, outcome
from longspan.training import IGNORE


def test_words_follow_from_earlier_ones_nine_times_in_ten():
    task = WordStream(batch=200)
    batch, (spelled, follows) = task(3), task.book
    number = {tuple(word): i for i, word in enumerate(spelled.tolist())}
    assert len(number) == 32 and sorted(follows) == list(range(32))
    words = torch.tensor([[number[tuple(word)] for word in row] for row in batch.ids.view(200, -1, W).tolist()])
    kept = (words[:, BACK:] == torch.from_numpy(follows)[words[:, :-BACK]]).double().mean()
    assert abs(kept - (0.9 + 0.1 / 32)) < 4 * math.sqrt(0.09 / 2200)
    assert torch.equal(batch.labels[:, 23:63], batch.ids[:, 24:]) and (batch.labels != IGNORE).sum() == 200 * 40
    assert torch.equal(task(3).ids, batch.ids) and not torch.equal(WordStream(200, split="held-out")(3).ids, batch.ids)
    assert round(task.entropy, 3) == 0.163


def test_the_control_takes_the_predictions_of_another_row():
    class Difference(nn.Module):
        def forward(self, h, chat):
            return h - chat

    h = torch.arange(3.0)[:, None, None].expand(3, 2, 1)
    assert OfAnotherRow(Difference())(h, h)[:, 0, 0].tolist() == [-2.0, 1.0, 1.0]


@pytest.mark.parametrize(("nats", "failed"), [(0.17, None), (0.21, "lead 1: at most"), (0.14, "looks ahead")])
def test_the_word_stream_decides(nats, failed):
    figures = {"lead 1": nats, "lead 0": 0.17, "windowed decoder": 0.87, "predictions of another row": 0.86}
    stream = [{"run": name, "seed": 0, "parameters": 1, "nats": x, "cosine": None} for name, x in figures.items()]
    language = [{"run": "ContextLM", "nats": 1.5}, {"run": "predictions of another row", "nats": 1.4}]
    found = outcome("small", stream, language, [0])
    assert found.verdict == ("failed" if failed else "mechanism-only") and (failed or "1.500 nats with its own") in found.reason

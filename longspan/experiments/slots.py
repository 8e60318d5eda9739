"""Recall among fillers, in one slot a pair: does a model find a key's value wherever it stands, and however far?

A row has `time` slots. A few of them hold a pair, the rest a filler, and the last one asks for a key. A slot's embedding is
the sum of two symbols' embeddings (key and value; the filler twice; the asked key and a mark), so that one attention step
from the last slot finds the pair. Only the last slot is labelled, with the value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor, nn

from longspan.models.decoder import Decoder, DecoderConfig, DecoderOutput
from longspan.training import IGNORE, Batch, dice


@dataclass(frozen=True)
class Slots:
    """Batches of rows by number. `within` is the share of the row, from its start, in which pairs may stand."""

    time: int = 48
    batch: int = 64
    within: float = 1.0
    seed: int = 0
    split: str = "train"
    pairs: int = 6
    keys: int = 24
    values: int = 12
    fillers: int = 12

    @property
    def vocab_size(self) -> int:
        return self.keys + self.values + self.fillers + 1

    def __call__(self, index: int) -> Batch:
        draw = dice(self.seed, self.split, index)
        B, room = self.batch, max(self.pairs, int((self.time - 1) * self.within))
        first = draw.integers(self.keys + self.values, self.vocab_size - 1, (B, self.time))
        second = first.copy()
        where = draw.permuted(np.tile(np.arange(room), (B, 1)), axis=1)[:, : self.pairs]
        keys = draw.permuted(np.tile(np.arange(self.keys), (B, 1)), axis=1)[:, : self.pairs]
        values = draw.integers(self.keys, self.keys + self.values, (B, self.pairs))
        np.put_along_axis(first, where, keys, 1)
        np.put_along_axis(second, where, values, 1)
        asked = draw.integers(0, self.pairs, (B, 1))
        first[:, -1:], second[:, -1] = np.take_along_axis(keys, asked, 1), self.vocab_size - 1
        labels = np.full((B, self.time), IGNORE)
        labels[:, -1:] = np.take_along_axis(values, asked, 1)
        ids, second_ids, target = (torch.from_numpy(part) for part in (first, second, labels))
        return Batch(ids, target, extra={"second": second_ids}, index=index)


class SlotModel(nn.Module):
    """A decoder that reads slots: `read` gives the embeddings of a batch, calling it gives the decoder's output."""

    def __init__(self, task: Slots, seed: int = 0, **decoder: Any):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.decoder = Decoder(DecoderConfig(task.vocab_size, **({"dim": 64, "n_layers": 2, "n_heads": 4} | decoder)))

    def read(self, batch: Batch) -> Tensor:
        """Embeddings (B,T,C): the sum of a slot's two symbols."""
        return self.decoder.embed(batch.ids) + self.decoder.embed(batch.extra["second"])

    def forward(self, batch: Batch, positions: Int[Tensor, "B T"] | None = None, keep: int | None = None) -> DecoderOutput:
        return self.decoder(embeds=self.read(batch), positions=positions, keep=keep)


def answer_loss(model: SlotModel, batch: Batch, positions: Int[Tensor, "B T"] | None = None) -> Tensor:
    """Cross-entropy of the value at the last slot."""
    return F.cross_entropy(model(batch, positions, keep=1).logits[:, 0], batch.labels[:, -1])


@torch.no_grad()
def accuracy(model: SlotModel, task: Slots, batches: int, positions: Int[Tensor, " T"] | None = None) -> float:
    """Share of right values over held-out batches; `positions` (T) move the slots' places."""
    right, count = 0.0, 0
    model.eval()
    for index in range(batches):
        batch = task(index)
        places = None if positions is None else positions.expand(task.batch, -1)
        right += float((model(batch, places, keep=1).logits[:, 0].argmax(-1) == batch.labels[:, -1]).sum())
        count += task.batch
    return right / count

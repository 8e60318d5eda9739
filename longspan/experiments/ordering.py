"""A small model that learns which of two items came first, and what its heads know about time.

A row is BOS, 16 different items out of 64, SEP, then 8 questions of two items each; every item shown is asked about once. At a
question's second item the label says whether its first item came earlier. The decoder is the project's own (RMSNorm, SwiGLU,
no biases) where the published check has LayerNorm and GELU; learned absolute positions, which it has no scheme for, are a
table added to its embeddings. Heads are read and changed at the items of the questions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from longspan.evaluation.order import (
    ablate,
    averaging,
    by_head,
    changed,
    dimension_share,
    erase,
    find_heads,
    random_directions,
    recorded,
    remove_direction,
    steer,
    time_code,
    time_map,
)
from longspan.evaluation.order.edits import ALONG, STEPS, Change
from longspan.evaluation.order.information import TimeCode, fold_of, out_of_fold, r2
from longspan.evaluation.order.rotation import unrotated
from longspan.layers.attention.base import AttentionModule
from longspan.models.decoder import Decoder, DecoderConfig
from longspan.training import IGNORE, Batch, Outcome, TrainConfig, Trainer, dice

GROUPS = ((1, 1), (2, 3), (4, 7), (8, 15))
"""Distances that accuracy is reported for together."""
STD = 0.5
"""Of the embeddings and the table of positions at the start."""


@dataclass(frozen=True)
class Ordering:
    """Batches of rows by number. With `foils`, questions are about items that weren't shown; their places are drawn."""

    batch: int = 64
    seed: int = 0
    split: str = "train"
    foils: bool = False
    items: int = 64
    shown: int = 16

    @property
    def vocab_size(self) -> int:
        return self.items + 2

    @property
    def first(self) -> int:
        """Column of the first question."""
        return self.shown + 2

    @property
    def length(self) -> int:
        return self.first + self.shown

    def __call__(self, index: int) -> Batch:
        draw = dice(self.seed, self.split, index)
        items = draw.permuted(np.tile(np.arange(self.items), (self.batch, 1)), axis=1)
        places = draw.permuted(np.tile(np.arange(self.shown), (self.batch, 1)), axis=1)
        shown, others = items[:, : self.shown], items[:, self.shown : 2 * self.shown]
        asked = np.take_along_axis(others if self.foils else shown, places, 1)
        edge = np.ones((self.batch, 1), dtype=np.int64)
        ids = np.concatenate((self.items * edge, shown, (self.items + 1) * edge, asked), 1)
        labels = np.full(ids.shape, IGNORE)
        labels[:, self.first + 1 :: 2] = places[:, ::2] < places[:, 1::2]
        return Batch(torch.from_numpy(ids), torch.from_numpy(labels), extra={"places": torch.from_numpy(places)}, index=index)


class OrderModel(nn.Module):
    """A decoder with a two-way read-out at every token; with `table`, learned absolute positions and no others."""

    def __init__(self, task: Ordering, table: bool, seed: int = 0, dim: int = 48, layers: int = 3, heads: int = 4):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.decoder = Decoder(DecoderConfig(task.vocab_size, dim=dim, n_layers=layers, n_heads=heads,
                                                 position="nope" if table else "rope"))
            nn.init.normal_(self.decoder.embed.weight, std=STD)
            self.table = nn.Embedding(task.length, dim) if table else None
            if self.table is not None:
                nn.init.normal_(self.table.weight, std=STD)
            self.answer = nn.Linear(dim, 2)

    def forward(self, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T 2"]:
        x = self.decoder.embed(ids)
        if self.table is not None:
            x = x + self.table.weight[: ids.shape[1]]
        return self.answer(self.decoder(embeds=x, keep=0).hidden)


def order_loss(model: nn.Module, batch: Batch, state: Any = None) -> Outcome:
    """Cross-entropy of the labels, and their accuracy."""
    asked = batch.labels != IGNORE
    logits, labels = model(batch.ids)[asked], batch.labels[asked]
    right = (logits.argmax(-1) == labels).float().mean()
    return Outcome(F.cross_entropy(logits, labels), float(len(labels)), {"accuracy": float(right)})


@torch.no_grad()
def answers(model: OrderModel, batch: Batch) -> Float[Tensor, "B Q"]:
    """l(first came earlier) - l(it didn't) of every question."""
    logits = model(batch.ids)[batch.labels != IGNORE].view(len(batch.ids), -1, 2)
    return logits[..., 1] - logits[..., 0]


def accuracy(model: OrderModel, batch: Batch) -> float:
    return float(_right(model, batch).mean())


def _right(model: OrderModel, batch: Batch) -> Float[Tensor, "B Q"]:
    earlier = batch.labels[batch.labels != IGNORE].view(len(batch.ids), -1) == 1
    return ((answers(model, batch) > 0) == earlier).float()


def by_distance(model: OrderModel, batch: Batch) -> dict[str, float]:
    """Accuracy of the groups of distances."""
    right, places = _right(model, batch), batch.extra["places"]
    far = (places[:, ::2] - places[:, 1::2]).abs()
    return {str(a) if a == b else f"{a}-{b}": float(right[(far >= a) & (far <= b)].mean()) for a, b in GROUPS}


@dataclass(frozen=True)
class Course:
    """Sizes of a run: training steps, and rows that heads are read on and judged on."""

    steps: int = 2000
    batch: int = 64
    read: int = 256
    judge: int = 512
    permutations: int = 200
    every: int = 100
    lr: float = 3e-3


def fit(course: Course, table: bool, seed: int, progress: Callable[[str], None]) -> tuple[OrderModel, list[dict[str, Any]]]:
    """A trained model, and its accuracy by distance on the way."""
    model, rows = OrderModel(Ordering(), table, seed), []
    held_out = Ordering(course.judge, seed, "held-out")(2)

    def note(step: int, metrics: dict[str, float]) -> None:
        row = {"step": step, "accuracy": accuracy(model, held_out)} | by_distance(model, held_out)
        rows.append(row)
        if step % (5 * course.every) == 0:
            progress(f"step {step}: accuracy {row['accuracy']:.2f}")

    config = TrainConfig(steps=course.steps, lr=course.lr, warmup=min(100, course.steps), schedule="linear", final_lr=0.0,
                         weight_decay=0.01, betas=(0.9, 0.999), clip=1.0, seed=seed, log_every=course.every)
    Trainer(model, Ordering(course.batch, seed), config, order_loss, progress=note).run()
    return model.eval(), rows


# ------------------------------------------------------------------------------------------------------------ what heads know


@dataclass(frozen=True, eq=False)
class Knowledge:
    """The time map, the best head's code, and mean outputs of all heads at the items of the questions."""

    found: dict[str, Any]
    layer: int
    head: int
    code: TimeCode
    means: Float[Tensor, "layers heads d"]


@torch.no_grad()
def outputs(model: OrderModel, batch: Batch, columns: range) -> Float[Tensor, "layers heads n d"]:
    """Head outputs at these columns, rows of the batch first."""
    spans = [[(c, c + 1) for c in columns]]
    with recorded(find_heads(model), averaging(spans, batch.ids.shape[1])) as layers:
        model(batch.ids)
    return by_head(layers)


def knowledge(model: OrderModel, course: Course, seed: int) -> Knowledge:
    """Read the heads on held-out rows: time at the questions' items (retrieval) and at the items shown (encoding)."""
    task = Ordering(course.read, seed, "held-out")
    batch, copies, shown = task(0), range(task.first, task.length), range(1, task.shown + 1)
    read = outputs(model, batch, copies)
    tau = batch.extra["places"].double().flatten() / task.shown
    rows = torch.arange(course.read).repeat_interleave(task.shown)
    retrieval = time_map(read, tau, rows, course.read * task.shown // 2, course.permutations, seed)
    ordered = torch.arange(task.shown).repeat(course.read).double() / task.shown
    encoding = time_map(outputs(model, batch, shown), ordered, rows, course.read * task.shown // 2, 0, seed)
    best = read[retrieval.layer, retrieval.head]
    code = time_code(best, tau, rows, seed)
    foils = Ordering(course.read, seed, "held-out", foils=True)(3)
    unseen = outputs(model, foils, copies)[retrieval.layer, retrieval.head]
    found: dict[str, Any] = {
        "best head": [retrieval.layer, retrieval.head], "R2": retrieval.best, "chance": retrieval.chance,
        "dimension share": dimension_share(best, tau, seed=seed, units=torch.arange(len(tau)) // 2),
        "R2 of foils": r2(code.decode(unseen), foils.extra["places"].double().flatten() / task.shown),
        "retrieval map": _rounded(retrieval.r2), "encoding map": _rounded(encoding.r2),
    }
    if model.table is None:
        mixers = [m for m in model.modules() if isinstance(m, AttentionModule)]
        pool = averaging([[(c, c + 1) for c in copies]], task.length)
        with torch.no_grad(), unrotated(mixers[retrieval.layer], pool) as bare:
            model(batch.ids)
        without = by_head(bare)[0, retrieval.head][None].double()
        found["R2 without rotation"] = float(out_of_fold(without, tau[:, None], fold_of(rows, seed=seed)))
    return Knowledge(found, retrieval.layer, retrieval.head, code, read.mean(2))


def _rounded(r2_map: Tensor) -> list[list[float]]:
    return [[round(x, 3) for x in row] for row in r2_map.tolist()]


# -------------------------------------------------------------------------------------------------------------- causal tests


def interventions(model: OrderModel, known: Knowledge, course: Course, seed: int) -> dict[str, Any]:
    """Accuracy on other held-out rows under each change of one head at the questions' items."""
    task = Ordering(course.judge, seed, "held-out")
    batch, heads = task(1), find_heads(model)
    copies = (torch.arange(task.length) >= task.first)[None]
    code, best = known.code, (known.layer, known.head)

    def under(change: Change, where: tuple[int, int] = best) -> float:
        with changed(heads, *where, change, copies):
            return accuracy(model, batch)

    every = [(layer, h) for layer in range(len(heads.projections)) for h in range(heads.n_heads)]
    others = [where for where in every if where != best]
    ablated = {where: under(ablate(known.means[where]), where) for where in every}
    drawn = random_directions(heads.head_dim, seed=seed)
    moved = [under(remove_direction(code.u, known.means[where]), where) for where in others]
    return {
        "accuracy": accuracy(model, batch), "head ablated": ablated[best],
        "exact erasure": under(erase(code.v, code.w, code.mean)),
        "orthogonal removal": under(remove_direction(code.u, code.mean)),
        "random directions, mean": float(np.mean([under(remove_direction(u, code.mean)) for u in drawn])),
        "the direction at other heads, mean": float(np.mean(moved)),
        "other heads ablated": {f"{a}.{b}": round(ablated[a, b], 3) for a, b in others},
        "steering": {along: steering(model, known, batch, task, along) for along in ALONG},
    }


def steering(model: OrderModel, known: Knowledge, batch: Batch, task: Ordering, along: str) -> dict[str, Any]:
    """The mean margin of "first came earlier" as the first item's time is moved by s, and the share of decisions that flip
    when both items exchange the times that the head tells."""
    heads, columns = find_heads(model), torch.arange(task.length)
    first = ((columns >= task.first) & ((columns - task.first) % 2 == 0))[None]
    margins = []
    for s in STEPS:
        with changed(heads, known.layer, known.head, steer(known.code, s, along), first):
            margins.append(float(answers(model, batch).mean()))
    told = known.code.decode(outputs(model, batch, range(task.first, task.length))[known.layer, known.head])
    told = told.view(len(batch.ids), -1, 2)
    move = torch.zeros(len(batch.ids), task.length, dtype=told.dtype)
    move[:, task.first :] = (told.flip(-1) - told).flatten(1)
    before = answers(model, batch) > 0
    with changed(heads, known.layer, known.head, steer(known.code, move, along), (columns >= task.first)[None]):
        flipped = (answers(model, batch) > 0) != before
    monotone = all(b < a for a, b in pairwise(margins))
    return {"margin by s": {str(s): round(m, 3) for s, m in zip(STEPS, margins, strict=True)}, "monotone": monotone,
            "changes sign": margins[0] > 0 > margins[-1], "flipped by the swap": float(flipped.float().mean())}

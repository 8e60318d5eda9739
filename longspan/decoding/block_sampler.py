"""Writing block by block: which masked tokens are committed after a step, and the record of how a block came about.

"Low confidence dynamic": after a step every masked position whose likeliest token has a probability above a threshold is
committed; where these are fewer than the step's quota, the quota's most confident ones are. Quotas spread a block's
tokens over its steps, larger ones first, at least one a step. With one commit a step the threshold is out of play.

A `Trajectory` holds the token states of a block's steps. Other methods can be replayed on them: they see exactly the
states that the dense run saw, so what differs is attention alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longspan.decoding.blocks import BlockReader, Denoising, Prefix, Reads, block_attention
from longspan.decoding.noise import Noise
from longspan.models.block_diffusion import BlockDiffusion
from longspan.registry import Refused


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen and committed."""

    steps: int | None = None
    """Denoising steps of a block; as many as it has tokens if None."""
    threshold: float = 0.9
    """Probability above which a position is committed without waiting; 1 turns it off, leaving the quotas."""
    temperature: float = 0.0
    """0 takes the likeliest token."""
    noise: Noise = field(default_factory=Noise)
    """Random numbers, a function of the token's place and the step."""

    def __post_init__(self) -> None:
        if self.steps is not None and (isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1):
            raise Refused(f"steps={self.steps!r}: expected a whole number of at least 1.")
        if not 0 < self.threshold <= 1:
            raise Refused(f"threshold={self.threshold}: expected a probability above 0 and at most 1, such as 0.9.")
        if not 0 <= self.temperature < float("inf"):
            raise Refused(f"temperature={self.temperature}: expected 0 or more, such as 1.0.")

    def quota(self, step: int, block: int) -> int:
        """Tokens that step `step` of a block commits at least."""
        steps = self.steps or block
        return max(1, block // steps + (step < block % steps))


ONE_A_STEP = Sampling(threshold=1.0)
"""Greedy, one commit a step."""


@dataclass(eq=False)
class Trajectory:
    """How one block came about, step by step."""

    prefix: Prefix
    states: list[Int[Tensor, "B T"]] = field(default_factory=list)
    """Tokens before each step."""
    commits: list[Bool[Tensor, "B T"]] = field(default_factory=list)
    """Where each step committed."""
    logits: list[Float[Tensor, "B T V"]] = field(default_factory=list)
    tokens: Tensor | None = None
    """The finished block."""


def block_logits(model: BlockDiffusion, reader: BlockReader, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T V"]:
    """Logits of every position of a block in the pass that `reader` has begun, float32."""
    return model(ids, reader.prefix.places(ids.shape[1]), block_attention(reader)).logits.float()


def choose(logits: Float[Tensor, "B T V"], masked: Bool[Tensor, "B T"], quota: int, sampling: Sampling,
           places: Int[Tensor, "B T"], step: int, rows: Sequence[int]) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """The token for every position, and which positions are committed now. Of equally confident ones the first is.

    Args:
        rows: which sequence each row is; noise belongs to it.
    """
    top, tokens = logits.softmax(-1).max(-1)
    if sampling.temperature > 0:
        noise = torch.stack([_gumbel(sampling.noise.of(row, step), place, logits) for row, place in zip(rows, places.tolist())])
        tokens = (logits.double() / sampling.temperature + noise).argmax(-1)
    confidence = top.masked_fill(~masked, -1.0)
    sure = masked & (confidence > sampling.threshold)
    first = confidence.argsort(dim=1, descending=True, stable=True)[:, :quota]
    most = torch.zeros_like(masked).scatter_(1, first, True) & masked
    enough = sure.sum(1, keepdim=True) >= torch.minimum(masked.sum(1, keepdim=True), torch.tensor(quota))
    return tokens, torch.where(enough, sure, most)


def _gumbel(noise: Noise, places: Sequence[int], logits: Float[Tensor, "B T V"]) -> Float[Tensor, "T V"]:
    return torch.stack([noise.gumbel(place, logits.shape[-1], logits.device) for place in places])


@torch.no_grad()
def denoise(model: BlockDiffusion, prefix: Prefix, ids: Int[Tensor, "B T"], method: Denoising,
            sampling: Sampling = ONE_A_STEP, *, reads: Reads | None = None, record: Trajectory | None = None,
            after_step: Callable[[], None] = lambda: None, finish: bool = True) -> tuple[Int[Tensor, "B T"], Prefix]:
    """Write one block of every sequence.

    Args:
        ids: the block, the mask token where it isn't written yet. Known tokens stay as they are.
        reads: where to add what was read of the prefix.
        record: where to note every step; for a block whose sequences all take the same number of steps, such as one row.
        after_step: called after every denoising step.
        finish: read the finished block once more, so that it joins the prefix.

    Returns:
        The finished block, and the prefix it joined (`prefix` itself without `finish`).
    """
    mask_id, length, step = model.config.mask_id, ids.shape[1], 0
    reader, ids = method.begin(prefix, length, model.config.block), ids.clone()
    rows, saved = torch.arange(len(ids), device=ids.device), _Saved(prefix, ids)
    while len(rows):
        open_ = (ids[rows] == mask_id).any(1)
        if not bool(open_.all()):  # finished sequences are read once more and leave the batch
            if finish:
                saved.read(model, reader, (~open_).nonzero()[:, 0], rows, step)
            reader.keep(open_.nonzero()[:, 0])
            rows = rows[open_]
            continue
        reader.begin(step)
        now, places = ids[rows], reader.prefix.places(length)
        logits = block_logits(model, reader, now)
        tokens, commit = choose(logits, now == mask_id, sampling.quota(step, length), sampling, places, step, rows.tolist())
        if record is not None:
            record.states.append(now)
            record.commits.append(commit)
            record.logits.append(logits)
        ids[rows] = torch.where(commit, tokens, now)
        reader.changed(commit)
        after_step()
        step += 1
    if record is not None:
        record.tokens = ids
    if reads is not None:
        reads.add(reader.reads)
    return ids, prefix.extended(saved.k, saved.v) if finish else prefix


class _Saved:
    """Keys and values of a finished block, sequence by sequence."""

    def __init__(self, prefix: Prefix, ids: Int[Tensor, "B T"]) -> None:
        self.ids = ids
        self.k, self.v = ([t.new_empty(*t.shape[:2], ids.shape[1], t.shape[3]) for t in given] for given in (prefix.k, prefix.v))

    def read(self, model: BlockDiffusion, reader: BlockReader, done: Tensor, rows: Tensor, step: int) -> None:
        """The saving pass of those of the reader's sequences that are `done`; `rows` says which they are in the batch."""
        leaving = copy.copy(reader)  # `keep` makes new tensors, and both count into one `Reads`
        leaving.keep(done)
        leaving.begin(step, save=True)
        found = model(self.ids[rows[done]], leaving.prefix.places(self.ids.shape[1]), block_attention(leaving))
        for held, new in ((self.k, found.k), (self.v, found.v)):
            for layer, t in zip(held, new, strict=True):
                layer[rows[done]] = t


@torch.no_grad()
def replay(model: BlockDiffusion, method: Denoising, trajectory: Trajectory, *,
           reads: Reads | None = None) -> list[Float[Tensor, "B T V"]]:
    """Logits of every step when a method reads the prefix, on the token states of a recorded block."""
    reader = method.begin(trajectory.prefix, trajectory.states[0].shape[1], model.config.block)
    found = []
    for step, (ids, commit) in enumerate(zip(trajectory.states, trajectory.commits, strict=True)):
        reader.begin(step)
        found.append(block_logits(model, reader, ids))
        reader.changed(commit)
    if reads is not None:
        reads.add(reader.reads)
    return found


@torch.no_grad()
def forced_nlls(model: BlockDiffusion, prefix: Prefix, known: Sequence[int], answer: Sequence[int], method: Denoising, *,
                reads: Reads | None = None) -> list[float]:
    """Negative log-likelihood (nats) of each token of a given continuation of one sequence.

    The answer is denoised from left to right, one token a step: by the chain rule these are the parts of its likelihood
    under the model, in an order that is the same for every method. The last block ends with the answer.

    Args:
        known: tokens after the prefix that the first block begins with, fewer than a block.
    """
    block, mask_id, found = model.config.block, model.config.mask_id, []
    whole, at = [*known, *answer], len(known)
    for start in range(0, len(whole), block):
        wanted = torch.tensor([whole[start : start + block]], device=model.device)
        length = wanted.shape[1]
        reader = method.begin(prefix, length, block)
        for step, place in enumerate(range(at - start, length)):
            ids = wanted.clone()
            ids[:, place:] = mask_id
            reader.begin(step)
            found.append(-float(block_logits(model, reader, ids)[0, place].log_softmax(-1)[wanted[0, place]]))
            reader.changed(torch.arange(length, device=model.device)[None] == place)
        if start + block < len(whole):
            reader.begin(length, save=True)
            kept = model(wanted, prefix.places(length), block_attention(reader))
            prefix = prefix.extended(kept.k, kept.v)
        at = start + block
        if reads is not None:
            reads.add(reader.reads)
    return found

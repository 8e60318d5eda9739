"""An event simulation of synchronous rollouts: what drafts made in bubbles give for ranks that aren't there.

The events are the ends of passes. Each rank runs the passes of its share, then those of bubble mode, until the last rank's
share is done; a pass that is under way then is finished. A pass takes what a table of measured times says for its number of
sequences and of tokens read for each. In it a sequence inside its draft writes `tokens_per_pass` tokens, any other writes one. As
the engine may, a rank leaves its drafts alone in passes where checking them would cost more than it gains.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Lengths = Sequence[Sequence[Sequence[int]]]
"""Tokens of each answer: by step, rank and sequence."""


@dataclass(frozen=True)
class PassTimes:
    """Seconds of a pass, from measurements by (sequences, tokens of each); linear in between and, where it grows, beyond."""

    seconds: Mapping[tuple[int, int], float]
    known: dict[tuple[int, int], float] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        batches, widths = self._axes()
        missing = [(b, w) for b in batches for w in widths if (b, w) not in self.seconds]
        if missing or not self.seconds:
            raise ValueError(f"pass times for {missing[0] if missing else 'nothing'}: expected a whole table")
        if min(self.seconds.values()) <= 0:
            raise ValueError("pass times must be above 0")

    def __call__(self, sequences: int, tokens: int) -> float:
        if (sequences, tokens) not in self.known:
            batches, widths = self._axes()
            columns = [_linear(batches, [self.seconds[b, w] for b in batches], sequences) for w in widths]
            self.known[sequences, tokens] = _linear(widths, columns, tokens)
        return self.known[sequences, tokens]

    def _axes(self) -> tuple[list[int], list[int]]:
        return sorted({b for b, _ in self.seconds}), sorted({w for _, w in self.seconds})


MEMORY_BOUND = PassTimes({(1, 1): 1.0})
"""Every pass takes one unit of time, whatever it reads: what a large GPU does at small batches."""


@dataclass(frozen=True)
class Drafted:
    """What checking drafts was measured to give."""

    tokens_per_pass: float
    width: int
    """Tokens read for each sequence in a pass that checks drafts; none are spent on padding."""
    leaves: float = 0.0
    """Chance, at every token, that a sequence leaves its draft for good; 0 where `tokens_per_pass` holds to a draft's end."""

    def __post_init__(self) -> None:
        if self.tokens_per_pass < 1 or self.width < 1 or not 0 <= self.leaves < 1:
            raise ValueError(f"{self}: expected at least one token read and written in a pass, and a chance below 1")


@dataclass(frozen=True)
class Simulated:
    """One step: its seconds until the barrier, and what the ranks did with them."""

    seconds: float
    own_seconds: list[float]
    """Until each rank's share was done."""
    tokens: int
    bubble_tokens: int
    drafted_share: float
    """Share of this step's tokens that had been drafted before it began."""

    @property
    def utilisation(self) -> float:
        """Share of the ranks' time spent on the step's own answers."""
        return sum(self.own_seconds) / max(self.seconds * len(self.own_seconds), 1e-300)


def simulate(lengths: Lengths, times: PassTimes = MEMORY_BOUND, drafted: Drafted | None = None, *, slots: int | None = None,
             samples: int = 1, seed: int = 0) -> list[Simulated]:
    """Run the steps of `lengths` one after another.

    Args:
        drafted: None writes plainly and leaves bubbles empty. A draft is as long as the answer it is for.
        slots: drafts written at once; by default as many as the rank has answers.
        samples: a rank's sequences are its prompts' answers in turn; one draft of every prompt is made before a second.
            Drafts are made for the next step, then for the one after it.
        seed: of where sequences leave their drafts.
    """
    rng = np.random.default_rng(seed)
    drafts = [[np.zeros(len(rank)) for rank in step] for step in lengths]
    found = []
    for t, step in enumerate(lengths):
        ahead = range(t + 1, min(t + 3, len(lengths))) if drafted is not None else range(0)
        ranks = []
        for r, own in enumerate(step):
            coming = np.concatenate([np.zeros(0), *(lengths[s][r] for s in ahead)])
            begun = np.concatenate([np.zeros(0), *(drafts[s][r] for s in ahead)]) > 0
            turns = [(s, i % samples, i) for s in ahead for i in range(len(lengths[s][r]))]
            queue = [i for i in sorted(range(len(turns)), key=turns.__getitem__) if not begun[i]]
            have = np.minimum(drafts[t][r], own)
            if drafted is not None and drafted.leaves:
                have = np.minimum(have, rng.geometric(drafted.leaves, len(own)) - 1)
            ranks.append(_Rank(np.array(own, float), have, coming, queue, times, drafted, slots or max(1, len(own))))
        seconds = _until_barrier(ranks)
        tokens = sum(map(sum, step))
        share = sum(float(have.sum()) for have in drafts[t]) / max(1, tokens)
        found.append(Simulated(seconds, [r.done_at for r in ranks], tokens, int(sum(r.made.sum() for r in ranks)), share))
        for r, rank in enumerate(ranks):
            at = 0
            for s in ahead:
                drafts[s][r] += rank.made[at : at + len(drafts[s][r])]
                at += len(drafts[s][r])
    return found


def _until_barrier(ranks: Sequence[_Rank]) -> float:
    """Run one step; ranks whose passes end at the same time see each other done."""
    now = 0.0
    events = [] if all(rank.done for rank in ranks) else [(rank.go_on(0.0), i) for i, rank in enumerate(ranks)]
    heapq.heapify(events)
    while events:
        now, ending = events[0][0], []
        while events and events[0][0] <= now * (1 + 1e-12):
            ending.append(heapq.heappop(events)[1])
        for i in ending:
            ranks[i].arrive(now)
        if all(rank.done for rank in ranks):
            return max([now, *(ranks[i].stop(now) for _, i in events)])
        for i in ending:
            heapq.heappush(events, (ranks[i].go_on(now), i))
    return now


@dataclass(eq=False)
class _Rank:
    """A rank in one step: tokens still to write, and those of them that a draft has. Passes that are alike are one event."""

    left: NDArray[np.float64]
    have: NDArray[np.float64]
    coming: NDArray[np.float64]
    """Lengths of the answers that may be drafted, those of `queue` in that order."""
    queue: list[int]
    times: PassTimes
    drafted: Drafted | None
    slots: int
    done_at: float = 0.0

    def __post_init__(self) -> None:
        self.made = np.zeros(len(self.coming))
        self.open: list[int] = []

    @property
    def done(self) -> bool:
        return not (self.left > 0).any()

    def go_on(self, now: float) -> float:
        """Begin the passes that are alike; when they will end, infinity where there is nothing to do."""
        self.begun = now
        if self.done:
            self._fill()
            self.seconds = self.times(len(self.open), 1) if self.open else np.inf
            self.passes = int((self.coming - self.made)[self.open].min()) if self.open else 1
        else:
            self._plan()
        return now + self.seconds * self.passes

    def arrive(self, now: float) -> None:
        """They have ended."""
        if self.done:
            self.made[self.open] += self.passes
            return
        self.left = np.maximum(self.left - self.step * self.passes, 0)
        self.have = np.where(self.have > 0, np.maximum(self.have - self.step * self.passes, 0), 0)
        self.left[self.left < 1e-9] = self.have[self.have < 1e-9] = 0
        if self.done:
            self.done_at = now

    def stop(self, now: float) -> float:
        """Bubble mode is over: the pass under way is finished; when."""
        if not self.open:
            return now
        self.passes = math.ceil((now - self.begun) / self.seconds * (1 - 1e-12))
        self.made[self.open] += self.passes
        return self.begun + self.passes * self.seconds

    def _fill(self) -> None:
        self.open = [i for i in self.open if self.made[i] < self.coming[i]]
        while self.queue and len(self.open) < self.slots:
            self.open.append(self.queue.pop(0))

    def _plan(self) -> None:
        """Seconds of a pass over the share, what it writes of each sequence, and how many such passes follow."""
        running, inside = self.left > 0, (self.left > 0) & (self.have > 0)
        n, drafted = int(running.sum()), int(inside.sum())
        self.seconds, self.step = self.times(n, 1), running.astype(float)
        if self.drafted is not None and drafted:
            checked, gain = self.times(n, self.drafted.width), self.drafted.tokens_per_pass
            if (n - drafted + drafted * gain) / checked > n / self.seconds:
                self.seconds = checked
                self.step = np.where(inside, np.minimum(gain, np.maximum(self.have, 1)), self.step)
        lasts = np.where(inside, self.have, self.left)[running] / self.step[running]
        self.passes = max(1, int((lasts + 1e-9).min()))


def _linear(xs: Sequence[int], ys: Sequence[float], x: float) -> float:
    """Between the two nearest points; before the first level, beyond the last on their line but never below it."""
    if len(xs) == 1 or x <= xs[0]:
        return ys[0]
    i = min(int(np.searchsorted(xs, x)), len(xs) - 1)
    slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
    found = ys[i - 1] + slope * (x - xs[i - 1])
    return found if x <= xs[-1] else max(found, ys[-1])

"""MInference: each head reads the prompt in the pattern that suits it, found once per model (arXiv:2407.02490).

Heads attend in three ways: to the first tokens and a window (A-shape), to single columns and diagonals
(vertical-slash), or to blocks anywhere (block-sparse). Which of the three, and how it spends its budget, hardly depends
on the prompt, so `minference_calibration` finds for every head the candidate that retains most attention on one sample.
While a prompt is read, the head's pattern is filled in from that prompt: columns and diagonals from its last queries,
blocks from block means.

The candidates' sizes are published for long prompts; shorter ones get them in proportion, or nothing would be sparse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Int
from torch import Tensor

from longspan.kernels.plan import ReadPlan
from longspan.models import profiles
from longspan.prefill.a_shape import AShape
from longspan.prefill.base import ReadContext, Selector, plan_from_blocks
from longspan.prefill.mean_pool import MeanPool
from longspan.prefill.vertical_slash import LEAST_COLUMNS, LEAST_OFFSETS, VerticalSlash
from longspan.registry import knob, method

BLOCKS_READ = 100
"""Blocks that each row of blocks of a block-sparse head reads."""


@dataclass(frozen=True)
class Candidate:
    """A pattern and its sizes: (first tokens, window), (columns, diagonals), or nothing."""

    pattern: str
    sizes: tuple[int, int] = (0, 0)

    def scaled(self, share: float) -> tuple[int, int]:
        """The sizes for a prompt with so large a share of the length they are published for (at most 1)."""
        least = (LEAST_COLUMNS, LEAST_OFFSETS) if self.pattern == "vertical-slash" else (1, 1)
        one, other = (max(round(size * min(1.0, share)), low) for size, low in zip(self.sizes, least))
        return one, other


CANDIDATES = (
    Candidate("a-shape", (100, 800)), Candidate("vertical-slash", (30, 800)), Candidate("vertical-slash", (100, 750)),
    Candidate("vertical-slash", (500, 700)), Candidate("vertical-slash", (3500, 100)), Candidate("block-sparse"),
)  # fmt: skip
"""What a head may be; profiles hold places in this list."""


@method("minference", kind="selector", system="baselines", paper="arXiv:2407.02490",
        summary="Read by each head's own pattern: A-shape, vertical-slash or block-sparse, found once per model.",
        capabilities=("block-plan", "columns", "query-window", "all-queries", "profile", "trains"))
class MInference(Selector):
    """Needs the heads' patterns, which `longspan profile minference` finds; those of the bundled model come with the
    package."""

    family: ClassVar[str] = "minference-patterns"
    trainer: ClassVar[str] = "longspan.prefill.minference_calibration"

    scaled_to: int = knob(32_768, "from this length on patterns have the published sizes, shorter prompts in proportion", low=1)
    last_q: int = knob(64, "last queries whose exact attention shows columns and diagonals", low=1)
    block: int = knob(64, "tokens per query and key block", low=1)
    patterns: str = knob(profiles.AUTO, 'file of the heads\' patterns; "auto" finds those of the model')

    # -- the profile

    def profile_settings(self) -> dict[str, Any]:
        return {"last_q": self.last_q, "scaled_to": self.scaled_to}

    def profile_tensors(self) -> tuple[str, ...]:
        return ("pattern",)

    def profile_recipe(self) -> str:
        changed = {name: value for name, value in self.profile_settings().items() if value != self.card.knob(name).default}
        return f"minference({', '.join(f'{n}={v}' for n, v in changed.items())})" if changed else "minference"

    def heads_patterns(self, x: ReadContext) -> Int[Tensor, " Hq"]:
        """Places in `CANDIDATES` of the heads of this layer.

        Raises:
            Refused: nobody has found them for this model, with the command that does.
            ValueError: a context without a model, or of other heads than the model has.
        """
        if x.parts is None:
            raise ValueError("minference reads the patterns of a model's heads, and the context names no model")
        found = profiles.find_trained(x.parts.model, self, self.patterns).tensors["pattern"]
        if x.layer >= len(found) or found.shape[1] != x.heads:
            raise ValueError(f"the patterns are for {tuple(found.shape)} layers and heads; got layer {x.layer} with {x.heads}")
        return found[x.layer].to(x.q.device)

    # -- reading

    def select(self, x: ReadContext) -> ReadPlan:
        own = self.heads_patterns(x)
        blocks = columns = None
        for place in own.unique().tolist():
            plan = self.selector(CANDIDATES[place], x.k_len).select(x)
            these = own == place
            chosen = plan.block_map & these[:, None, None]
            blocks = chosen if blocks is None else blocks | chosen
            if plan.column_map is not None:
                listed = plan.column_map[:, :, 0] & these[:, None]
                columns = listed if columns is None else columns | listed
        assert blocks is not None
        if columns is not None and len(columns) != len(blocks):
            blocks = blocks.expand(len(columns), -1, -1, -1)
        return plan_from_blocks(x, blocks, self.block, columns=columns, sink=0)

    def selector(self, candidate: Candidate, length: int) -> Selector:
        """The selector that fills in a candidate's pattern on a prompt of `length` tokens."""
        share = length / self.scaled_to
        one, other = candidate.scaled(share)
        if candidate.pattern == "a-shape":
            return AShape(sink=one, window=other, block=self.block)
        if candidate.pattern == "vertical-slash":
            return VerticalSlash(vertical=one, slash=other, last_q=self.last_q, block=self.block)
        return MeanPool(k=max(1, round(BLOCKS_READ * min(1.0, share))), block=self.block)  # type: ignore[call-arg]

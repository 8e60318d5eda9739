"""Suffix drafts: what followed the longest repetition of the latest tokens, in the text itself.

The latest tokens of prompt and answer are looked up in everything before them; the tokens after the longest match (the
latest of those) are proposed, as many as the match is long times `alpha`. Text that repeats its context (code, quotes,
rewritten documents) is written several tokens at a time; elsewhere nothing matches and nothing is lost (prompt lookup
and suffix decoding, arXiv:2411.04975).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from longspan.decoding.base import Draft, Drafter, Proposal, Target
from longspan.decoding.drafts.index import RunIndex
from longspan.registry import Refused, knob, method


class SuffixDrafter(Drafter):
    """An index of the text so far."""

    def __init__(self, draft: Suffix) -> None:
        self.draft = draft
        self.index = RunIndex(draft.min_match, draft.max_match)

    def propose(self, ids: Sequence[int], limit: int) -> Proposal:
        self.index.follow(ids)
        found = self.index.find(ids, self.draft.candidates)
        wanted = min(limit, self.draft.gamma, math.ceil(self.draft.alpha * found.length))
        return Proposal(self.index.after(found.places[-1:], wanted))


@method("suffix", kind="draft", paper="arXiv:2411.04975", summary="Propose what followed the latest tokens earlier in the text.")
class Suffix(Draft):
    """Needs no model: a look-up in prompt and answer."""

    gamma: int = knob(7, "most tokens proposed at once", low=1)
    min_match: int = knob(2, "shortest repetition that counts, in tokens", low=1)
    max_match: int = knob(16, "repetitions are compared up to this length", low=1)
    alpha: float = knob(2.0, "tokens proposed for each matched one", low=0.1)
    candidates: int = knob(64, "latest places looked at", low=1)

    def check(self) -> None:
        if self.max_match < self.min_match:
            raise Refused(f"{self}: expected max_match of at least min_match={self.min_match}.")
        if self.rule == "reject":
            raise Refused(f"{self}: rule=reject needs the law of a draft model, and these proposals are certain; expected "
                          "match or point-mass.")

    def begin(self, target: Target) -> SuffixDrafter:
        return SuffixDrafter(self)

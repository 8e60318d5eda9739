"""Which rank attends which head in which stage: the order of untied Ulysses, for any grouping of queries over keys.

P ranks share H query heads in nu = H/U stages of U heads, u = U/P a rank. A stage is only as cheap as the keys it needs,
so queries that read one key head follow each other: a *round* exchanges P (or more) key heads once, and all stages of
the round read them. With fewer key heads than ranks each is held by several ranks (He = max(Hkv, P) effective heads).

Untied Ulysses (arXiv:2602.21196). The rule for u > 1 with grouped queries is ours; with u = 1 and one round it is the
order of the published code. Ulysses (arXiv:2309.14509) is the case U = H.
"""

from __future__ import annotations

from dataclasses import dataclass

from longspan.registry import Refused


@dataclass(frozen=True)
class Deal:
    """How `heads` query and `kv_heads` key heads are dealt to `ranks`, `stage` query heads (over all ranks) at a time.

    Raises `Refused`, naming the numbers, where they don't divide.
    """

    heads: int
    kv_heads: int
    ranks: int
    stage: int

    def __post_init__(self) -> None:
        H, K, P, U = self.heads, self.kv_heads, self.ranks, self.stage
        if min(H, K, P, U) < 1:
            raise Refused(f"H={H}, Hkv={K}, P={P}, U={U}: expected numbers of heads and ranks of at least 1.")
        if H % K:
            raise Refused(f"H={H} query heads don't divide into Hkv={K} groups; expected a multiple, such as {_up(H, K)}.")
        if H % P:
            fit = max(p for p in range(1, P + 1) if H % p == 0)
            raise Refused(f"H={H} query heads don't divide over P={P} ranks; expected a divisor of {H}, such as P={fit}.")
        if K % P and P % K:
            fit = max(p for p in range(1, P + 1) if H % p == 0 and (K % p == 0 or p % K == 0))
            raise Refused(f"Hkv={K} key heads neither divide over P={P} ranks nor repeat onto them; expected P to divide "
                          f"Hkv or Hkv to divide P, such as P={fit}.")
        if U > H:
            raise Refused(f"U={U} query heads a stage are more than H={H}; expected at most U={H}.")
        if U % P:
            raise Refused(f"U={U} query heads a stage don't divide over P={P} ranks; expected {self._valid()}.")
        if H % U:
            raise Refused(f"H={H} query heads don't divide into stages of U={U}; expected {self._valid()}.")
        if not _nested(self.per_rank, self.group):
            raise Refused(f"U={U} gives u={self.per_rank} query heads a rank and stage, which neither divides nor is a "
                          f"multiple of the g={self.group} that share a key head; expected {self._valid()}.")

    def _valid(self) -> str:
        """The stage nearest to the one asked for, in words."""
        every = [U for U in range(self.ranks, self.heads + 1, self.ranks)
                 if self.heads % U == 0 and _nested(U // self.ranks, self.group)]
        return f"U={min(every, key=lambda U: (abs(U - self.stage), U))}"

    @property
    def per_rank(self) -> int:
        """u, query heads per rank and stage."""
        return self.stage // self.ranks

    @property
    def effective(self) -> int:
        """He, key heads with their repetitions."""
        return max(self.kv_heads, self.ranks)

    @property
    def group(self) -> int:
        """g, query heads that share an effective key head."""
        return self.heads // self.effective

    @property
    def stages(self) -> int:
        """nu."""
        return self.heads // self.stage

    @property
    def stages_per_round(self) -> int:
        """Stages that read the same keys."""
        return max(1, self.group // self.per_rank)

    @property
    def rounds(self) -> int:
        """How often keys and values are exchanged."""
        return self.stages // self.stages_per_round

    @property
    def keys_per_rank(self) -> int:
        """Key heads per rank and round."""
        return max(1, self.per_rank // self.group)

    def keys(self, round: int) -> list[list[int]]:
        """Effective key heads of a round, one list per rank."""
        n = self.keys_per_rank
        return [[(round * self.ranks + rank) * n + j for j in range(n)] for rank in range(self.ranks)]

    def sources(self, round: int) -> list[list[int]]:
        """Key heads of the model that stand behind `keys`."""
        copies = self.effective // self.kv_heads
        return [[head // copies for head in own] for own in self.keys(round)]

    def queries(self, stage: int) -> list[list[int]]:
        """Query heads of a stage, one list per rank, in the order of the rank's key heads."""
        u, g = self.per_rank, self.group
        keys = self.keys(stage // self.stages_per_round)
        if u >= g:
            return [[head * g + i for head in own for i in range(g)] for own in keys]
        first = stage % self.stages_per_round * u
        return [[own[0] * g + first + i for i in range(u)] for own in keys]

    def order(self) -> list[int]:
        """All query heads as they are emitted: by stage, rank, place. A bijection on 0..H-1."""
        return [head for stage in range(self.stages) for own in self.queries(stage) for head in own]


def _nested(u: int, g: int) -> bool:
    return g % u == 0 if u <= g else u % g == 0


def _up(n: int, step: int) -> int:
    return -(-n // step) * step

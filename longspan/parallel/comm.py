"""Communication between the ranks that share a sequence: every operation is counted and none waits for ever.

A thin wrapper over a `torch.distributed` group (gloo on CPUs, NCCL on GPUs). Operations are named by what they carry, and
the rank that waits in vain says so in one sentence (`PeerLost`), whether another rank died or is stuck. A group of one
rank needs no `torch.distributed`: what it sends is what it receives.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from longspan.parallel.live import LiveElements, Traffic


class PeerLost(RuntimeError):
    """Another rank died or didn't answer in time; the message says what was waited for."""


class Communicator:
    """One rank's end of a group. `timeout` is in seconds and bounds every single operation."""

    def __init__(self, rank: int = 0, size: int = 1, *, group: Any = None, timeout: float = 60.0,
                 traffic: Traffic | None = None, live: LiveElements | None = None) -> None:
        self.rank, self.size, self.group, self.timeout = rank, size, group, timeout
        self.traffic, self.live = traffic or Traffic(), live or LiveElements()
        self._grids: dict[int, tuple[Communicator, Communicator]] = {}

    @classmethod
    def current(cls, timeout: float = 60.0) -> Communicator:
        """Over the default process group, if there is one; a group of one otherwise."""
        if not dist.is_available() or not dist.is_initialized():
            return cls(timeout=timeout)
        return cls(dist.get_rank(), dist.get_world_size(), timeout=timeout)

    def reset(self) -> None:
        """Set the counters to nothing."""
        self.traffic.reset()
        self.live.reset()

    # ------------------------------------------------------------------------------------------------------ all-to-all

    def all_to_all(self, send: Float[Tensor, "P ..."], what: str) -> Float[Tensor, "P ..."]:
        """Part i goes to rank i; returns the parts that all ranks sent here, in a buffer of `live`.

        `what` is the name in messages. With one rank, the very tensor sent.
        """
        if send.shape[0] != self.size or not send.is_contiguous():
            raise ValueError(f"all_to_all expects a contiguous tensor with one part for each of {self.size} ranks, got "
                             f"{tuple(send.shape)}")
        if self.size == 1:
            return send
        received = self.live.empty(tuple(send.shape), send)
        self._finish(lambda: [dist.all_to_all_single(received, send, group=self.group, async_op=True)], "all-to-all", what)
        self.traffic.add("all-to-all", send.nbytes // self.size * (self.size - 1))
        return received

    def seq2head(self, x: Float[Tensor, "B s n d"], what: str = "heads") -> Float[Tensor, "B S n_rank d"]:
        """A piece of the sequence with all heads becomes the sequence with a share of the heads, n/P in a row each."""
        b, s, n, d = x.shape
        if n % self.size:
            raise ValueError(f"seq2head expects heads that divide over {self.size} ranks, got {n}")
        send = x.reshape(b, s, self.size, n // self.size, d).permute(2, 0, 1, 3, 4).contiguous()
        return self.all_to_all(send, what).transpose(0, 1).reshape(b, self.size * s, n // self.size, d)

    def head2seq(self, x: Float[Tensor, "B S n_rank d"], what: str = "heads") -> Float[Tensor, "B s n d"]:
        """The inverse of `seq2head`, and its adjoint."""
        b, S, n, d = x.shape
        if S % self.size:
            raise ValueError(f"head2seq expects lengths that divide over {self.size} ranks, got {S}")
        send = x.reshape(b, self.size, S // self.size, n, d).transpose(0, 1).contiguous()
        return self.all_to_all(send, what).permute(1, 2, 0, 3, 4).reshape(b, S // self.size, self.size * n, d)

    # ------------------------------------------------------------------------------------------------------------ ring

    def shift(self, send: Tensor, what: str) -> Callable[[], Tensor]:
        """Start sending `send` to the next rank; the function returned waits, and gives what the previous one sent.

        `send` must not change before that.
        """
        if self.size == 1:
            return lambda: send
        received = self.live.empty(tuple(send.shape), send)
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size

        def both() -> list[Any]:
            pair = [dist.P2POp(dist.isend, send, group=self.group, group_peer=after),
                    dist.P2POp(dist.irecv, received, group=self.group, group_peer=before)]
            return dist.batch_isend_irecv(pair)

        works = self._start(both, "ring", what)
        self.traffic.add("ring", send.nbytes)

        def wait() -> Tensor:
            self._wait(works, "ring", what)
            return received

        return wait

    # ----------------------------------------------------------------------------------------------- sums and agreement

    def sum_(self, x: Tensor, what: str = "gradients") -> Tensor:
        """Add `x` up over all ranks, in place."""
        if self.size > 1:
            self._finish(lambda: [dist.all_reduce(x, group=self.group, async_op=True)], "all-reduce", what)
            self.traffic.add("all-reduce", 2 * x.nbytes // self.size * (self.size - 1))
        return x

    def gather(self, values: list[int], what: str, device: torch.device | str = "cpu") -> list[list[int]]:
        """The same list of whole numbers from every rank."""
        if self.size == 1:
            return [values]
        own = torch.tensor(values, dtype=torch.int64, device=device)
        every = [torch.empty_like(own) for _ in range(self.size)]
        self._finish(lambda: [dist.all_gather(every, own, group=self.group, async_op=True)], "all-gather", what)
        self.traffic.add("all-gather", own.nbytes * (self.size - 1))
        return [found.tolist() for found in every]

    def grid(self, outer: int) -> tuple[Communicator, Communicator]:
        """(inner, outer) groups of a grid: `outer` rows of size/outer neighbours each; made once, by all ranks together.

        They share this communicator's counters.
        """
        if outer not in self._grids:
            inner = self.size // outer
            if inner * outer != self.size:
                raise ValueError(f"{self.size} ranks can't be cut into {outer} rows")
            rows = [list(range(o * inner, (o + 1) * inner)) for o in range(outer)]
            columns = [list(range(i, self.size, inner)) for i in range(inner)]
            self._grids[outer] = self._part(rows), self._part(columns)
        return self._grids[outer]

    def _part(self, parts: list[list[int]]) -> Communicator:
        """The part of a partition of the ranks that this rank is in."""
        own: Communicator | None = None
        limit = timedelta(seconds=self.timeout)
        for ranks in parts:
            group = None
            if len(ranks) > 1:  # every rank takes part in making every group
                wide = [dist.get_global_rank(self.group, r) for r in ranks] if self.group else ranks
                group = self._start(partial(dist.new_group, wide, timeout=limit), "set-up", f"ranks {wide}")
            if self.rank in ranks:
                own = Communicator(ranks.index(self.rank), len(ranks), group=group, timeout=self.timeout,
                                   traffic=self.traffic, live=self.live)
        assert own is not None
        return own

    # -------------------------------------------------------------------------------------------------------- the waits

    def _finish(self, start: Callable[[], list[Any]], kind: str, what: str) -> None:
        self._wait(self._start(start, kind, what), kind, what)

    def _start(self, start: Callable[[], Any], kind: str, what: str) -> Any:
        try:
            return start()
        except RuntimeError as error:
            raise self._lost(kind, what, error) from error

    def _wait(self, works: list[Any], kind: str, what: str) -> None:
        # A wait of NCCL with a time holds up the host; its watchdog keeps the group's timeout by itself.
        bounded = dist.get_backend(self.group) != "nccl"
        try:
            for work in works:
                _ = work.wait(timedelta(seconds=self.timeout)) if bounded else work.wait()
        except RuntimeError as error:
            raise self._lost(kind, what, error) from error

    def _lost(self, kind: str, what: str, error: RuntimeError) -> PeerLost:
        late = "timed out" in str(error).lower()
        why = f"no answer within {self.timeout:g} s" if late else "a connection was lost, since another rank ended"
        return PeerLost(f"rank {self.rank} of {self.size}: {kind} of {what}: {why}.")

"""Decoding from a ragged cache against decoding from a dense one of the same total size, in the same run.

    python benchmarks/ragged_decode.py [--quick] [--layers N] [--threads N] [--out FILE]

Shapes are the bundled model's: 9 query heads, 3 key heads, head dim 64, 30 layers, so the time of one "token" is that
of 30 calls, each on its own tensors. `length` is the mean number of keys a head.

    ragged        `decode_attend` on a ragged prefix whose heads hold 1/4 to 7/4 of the mean, and a dense tail
    dense         `decode_attend` on a dense cache buffer
    sdpa          PyTorch's attention as transformers calls it (the query heads of a group one by one)
    sdpa folded   the same with the query heads of a group as rows of one head, as `attend` calls it

Times are the best of rounds in which the contestants take turns; GB/s are bytes of keys and values over that time,
beside what this machine reads and copies from memory with the same threads. Small cases live in the processor's cache
and may be faster than memory. Run it alone on the machine: a thread that waits for its core stops all contestants.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.kernels import attend_reference, decode_attend, ragged

HEADS, KEY_HEADS, WIDTH, TAIL = 9, 3, 64, 32
BAR = 1.15


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--quick", action="store_true", help="only the two shorter lengths, fewer rounds")
    arguments.add_argument("--layers", type=int, default=30)
    arguments.add_argument("--threads", type=int, help="default: PyTorch's")
    arguments.add_argument("--out", type=Path, help="write the result as JSON")
    chosen = arguments.parse_args()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    machine = {
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "native": ragged._kernel() is not None,
        **bandwidth(),
    }
    print(json.dumps(machine, indent=2))
    names = "".join(f"{name:>22}" for name in CONTESTANTS)
    print(f"{'dtype':9}{'B':>3}{'length':>8}{'MB':>8}{names}  ragged/dense")
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for batch in (1, 8):
            for length in (820, 1640) if chosen.quick else (820, 1640, 8192):
                rows.append(measure(dtype, batch, length, chosen.layers, seconds=0.5 if chosen.quick else 2.0))
                print(line(rows[-1]), flush=True)
    worst = max(row["ragged_over_dense"] for row in rows)
    print(f"ragged takes at most {worst:.2f} times as long as dense (bar: {BAR}).")
    if chosen.out:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(json.dumps({"machine": machine, "bar": BAR, "rows": rows}, indent=2) + "\n")


def bandwidth(megabytes: int = 256) -> dict[str, float]:
    """GB/s this machine reads (a sum or a maximum, whichever is faster) and copies (read plus written)."""
    x = torch.ones(megabytes * 2**20 // 4)
    y = torch.empty_like(x)
    total, top, copy = best_of(2.0, [x.sum, x.max, lambda: y.copy_(x)])
    return {"read_gb_s": x.nbytes / min(total, top) / 1e9, "copy_gb_s": 2 * x.nbytes / copy / 1e9}


def best_of(seconds: float, runs: list[Callable[[], Any]], rounds: int = 3) -> list[float]:
    """Best wall time of each run in seconds; they take turns for `seconds`, at least `rounds` times."""
    best = [float("inf")] * len(runs)
    for run in runs:
        run()
    begin, done = time.perf_counter(), 0
    while done < rounds or time.perf_counter() - begin < seconds:
        for index, run in enumerate(runs):
            start = time.perf_counter()
            run()
            best[index] = min(best[index], time.perf_counter() - start)
        done += 1
    return best


# ---------------------------------------------------------------------------------------------------------- contestants


class Case:
    """The caches of all layers, dense and ragged views of the same numbers, and one query."""

    def __init__(self, dtype: torch.dtype, batch: int, length: int, layers: int) -> None:
        share = torch.tensor([0.25, 1.0, 1.75]).repeat(batch) + 0.1 * torch.rand(batch * KEY_HEADS)
        lengths = (share / share.sum() * batch * KEY_HEADS * (length - TAIL)).long()
        lengths[-1] += batch * KEY_HEADS * (length - TAIL) - lengths.sum()
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
        self.length, self.prefix = length, int(self.offsets[-1])
        self.q = torch.randn(batch, 1, HEADS, WIDTH, dtype=dtype).transpose(1, 2)
        shape = (batch, KEY_HEADS, length, WIDTH)
        self.layers = [(torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)) for _ in range(layers)]
        self.nbytes = sum(k.nbytes + v.nbytes for k, v in self.layers)
        self.cut = [tuple(self._cut(x) for x in layer) for layer in self.layers]

    def _cut(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The same memory as a flat prefix and a dense tail."""
        flat = x.view(-1, WIDTH)
        return flat[: self.prefix], flat[self.prefix :].view(*x.shape[:2], TAIL, WIDTH)

    def ragged(self) -> None:
        for (k, tail_k), (v, tail_v) in self.cut:
            decode_attend(self.q, (k, v, self.offsets, None), tail_k, tail_v, TAIL)

    def dense(self) -> None:
        for k, v in self.layers:
            decode_attend(self.q, None, k, v, self.length)

    def sdpa(self) -> None:
        for k, v in self.layers:
            F.scaled_dot_product_attention(self.q, k, v, enable_gqa=True)

    def sdpa_folded(self) -> None:
        folded = self.q.reshape(len(self.q), KEY_HEADS, -1, WIDTH)
        for k, v in self.layers:
            F.scaled_dot_product_attention(folded, k, v)

    def check(self) -> float:
        """Largest difference of the dense decode step from the definition, on the first layer."""
        k, v = self.layers[0]
        want = attend_reference(self.q.float(), k.float(), v.float())[0]
        return float((decode_attend(self.q, None, k, v, self.length)[0].float() - want).abs().max())


CONTESTANTS = ("ragged", "dense", "sdpa", "sdpa_folded")


def measure(dtype: torch.dtype, batch: int, length: int, layers: int, seconds: float) -> dict[str, Any]:
    torch.manual_seed(0)
    case = Case(dtype, batch, length, layers)
    # The slow contestants get rounds of their own, so that the two of the bar meet often.
    times = best_of(seconds, [case.ragged, case.dense]) + best_of(seconds, [case.sdpa, case.sdpa_folded], rounds=2)
    ms = {name: 1e3 * t for name, t in zip(CONTESTANTS, times, strict=True)}
    return {
        "dtype": str(dtype).removeprefix("torch."), "batch": batch, "length": length, "layers": layers,
        "megabytes": case.nbytes / 1e6, "ms_per_token": ms,
        "gb_s": {name: case.nbytes / t / 1e6 for name, t in ms.items()},
        "ragged_over_dense": ms["ragged"] / ms["dense"], "difference_from_definition": case.check(),
    }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    ms, speed = row["ms_per_token"], row["gb_s"]
    cells = "".join(f"{f'{ms[name]:.2f} ms {speed[name]:5.1f} GB/s':>22}" for name in CONTESTANTS)
    head = f"{row['dtype']:9}{row['batch']:3}{row['length']:8}{row['megabytes']:8.0f}"
    return head + cells + f"{row['ragged_over_dense']:14.2f}"


if __name__ == "__main__":
    main()

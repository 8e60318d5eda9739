"""Does exchanging heads in stages take U/H of Ulysses' buffers, and nothing else?

The published figures are lengths on nodes of eight and sixteen GPUs (5 million tokens of Llama-3-8B on eight H100, a
quarter more than the best method before) and the memory of attention's intermediates (an eighth for a 32B model with 64
heads and U=8). Here two and four processes share a layer with random weights (16 heads of 32, 16, 4 or 2 key heads) and
run Ulysses, untied Ulysses and ring attention, forward and backward. Each result is compared with one process; elements of
exchange buffers are counted by the allocator that hands them out, bytes by the wrapper that sends them. Wall times are
medians of rounds in which the methods take turns. The table of eight devices is `longspan.parallel.planner`'s.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from longspan.experiments.base import Experiment, Outcome
from longspan.layers.positions.base import inverse_frequencies, rotate
from longspan.parallel import Communicator, ContextParallel, Shape, Weights, launch, sum_gradients
from longspan.parallel.planner import LLAMA_3_8B, QWEN3_32B, Node, Speed, fit, table
from longspan.parallel.ring import RingAttention
from longspan.parallel.ulysses import Ulysses
from longspan.parallel.upipe import UPipe
from longspan.registry import Refused

METHODS: tuple[ContextParallel, ...] = (
    Ulysses(), Ulysses(recompute=True), UPipe(U=4), UPipe(U=8), UPipe(U=16), RingAttention())
PLAIN, AGAIN, SMALL, WHOLE, RING = map(str, (METHODS[0], METHODS[1], METHODS[2], METHODS[4], METHODS[5]))
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"ranks": [2], "length": 64, "head_dim": 4, "width": 32, "rounds": {16: 1, 4: 1}, "lengths": [32]},
    "small": {"ranks": [2, 4], "length": 4096, "head_dim": 32, "width": 512, "rounds": {16: 5, 4: 5, 2: 5},
              "lengths": [1024, 16384]},
}
BY_NAME = {str(m): m for m in METHODS}
HEADS, SEED = 16, 5
MOST_ERROR, MOST_TIME, MOST_TOTAL = 1e-4, 1.6, 0.45
EXCHANGE, TOTAL = "exchange buffers, U=4 / Ulysses", "with the output, U=4 / Ulysses"
SLOWER, TIME = "time, U=4 / Ulysses", f"U=4 takes at most {MOST_TIME} times Ulysses' time"
NODE_METHODS: tuple[ContextParallel, ...] = (Ulysses(recompute=True), UPipe(U=8), UPipe(U=16), RingAttention())
NODES = ((LLAMA_3_8B, Node()), (QWEN3_32B, Node(devices=16)))
EXPECTED = {EXCHANGE: "0.25 (the paper: 0.125 for U=8 of 64 heads)", TOTAL: f"at most {MOST_TOTAL}",
            SLOWER: f"at most {MOST_TIME}",
            "Llama-3-8B on 8 devices": "the paper: 5 million tokens, 1.25 times the best other method"}


# --------------------------------------------------------------------------------------------------- inside every rank


def problem(length: int, kv_heads: int, head_dim: int, width: int) -> tuple[Tensor, Weights, Tensor]:
    """Hidden states, weights and the output's gradient: the same on every rank."""
    draw = torch.Generator().manual_seed(SEED)
    x, dy = (torch.randn(1, length, width, generator=draw) for _ in range(2))
    q, k, v, o = (torch.randn(n * head_dim, width, generator=draw) * width**-0.5 for n in (HEADS, kv_heads, kv_heads, HEADS))
    return x, Weights(q, k, v, o.mT.contiguous(), head_dim), dy


def one_process(x: Tensor, weights: Weights, dy: Tensor) -> list[Tensor]:
    """y, dx and the weights' gradients by PyTorch's own attention and autograd."""
    tensors = [t.detach().clone().requires_grad_() for t in (x, *weights.tensors())]
    x, wq, wk, wv, wo = tensors
    q, k, v = ((x @ w.mT).unflatten(-1, (-1, weights.head_dim)).transpose(1, 2) for w in (wq, wk, wv))
    f, place = inverse_frequencies(weights.head_dim), torch.arange(x.shape[1])
    out = F.scaled_dot_product_attention(rotate(q, place, f), rotate(k, place, f), v, is_causal=True, enable_gqa=True)
    y = out.transpose(1, 2).flatten(2) @ wo.mT
    return [y.detach(), *torch.autograd.grad(y, tensors, dy)]


def rows_of_rank(comm: Communicator, size: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure every method for every number of key heads."""
    rows = []
    for kv_heads, rounds in size["rounds"].items():
        data = problem(size["length"], kv_heads, size["head_dim"], size["width"])
        wanted = _from_first(data, comm)
        _timed(METHODS[0], comm, data)  # what is set up once isn't charged to the first method
        found = [_measure(m, comm, data, wanted) for m in METHODS]
        times: list[list[float]] = [[] for _ in METHODS]
        for _ in range(rounds):
            for method, seen in zip(METHODS, times, strict=True):
                seen.append(_timed(method, comm, data))
        for method, row, seen in zip(METHODS, found, times, strict=True):
            rows.append({"ranks": comm.size, "length": size["length"], "kv_heads": kv_heads, "method": str(method), **row,
                         "seconds": statistics.median(seen)})
    for length in size["lengths"]:
        x, weights, _ = problem(length, HEADS, size["head_dim"], size["width"])
        for method in (METHODS[1], METHODS[2]):
            comm.reset()
            with torch.no_grad():
                method.attention(method.shard(x, comm), weights, comm)
            rows.append({"ranks": comm.size, "length": length, "kv_heads": HEADS, "method": str(method),
                         "forward_elements": comm.live.peak, "forward_with_output": comm.live.peak_with_output})
    return rows


def _from_first(data: tuple[Tensor, Weights, Tensor], comm: Communicator) -> list[Tensor]:
    """The reference, computed by rank 0 for all."""
    x, weights, _ = data
    wanted = one_process(*data) if comm.rank == 0 else [torch.empty_like(t) for t in (x, x, *weights.tensors())]
    if comm.size > 1:
        for t in wanted:
            dist.broadcast(t, 0)
    return wanted


def _measure(method: ContextParallel, comm: Communicator, data: tuple[Tensor, Weights, Tensor], wanted: list[Tensor]
             ) -> dict[str, Any]:
    """Errors, elements, bytes, operations, and the process's peak, of one forward and backward."""
    x, weights, dy = data
    own = weights.map(lambda w: w.clone().requires_grad_())
    local = method.shard(x, comm).requires_grad_()
    before = _resident_peak(forget=True)
    comm.reset()
    y = method.attention(local, own, comm)
    row: dict[str, Any] = {"forward_elements": comm.live.peak, "forward_with_output": comm.live.peak_with_output}
    row |= _sent(comm, "forward")
    comm.reset()
    y.backward(method.shard(dy, comm))
    row |= {"backward_elements": comm.live.peak, **_sent(comm, "backward"), "peak_bytes": _resident_peak() - before}
    sum_gradients(own, comm)
    found = [y.detach(), *(t.grad for t in (local, *own.tensors()) if t.grad is not None)]
    there = [method.shard(wanted[0], comm), method.shard(wanted[1], comm), *wanted[2:]]
    errors = [float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in zip(found, there, strict=True)]
    row |= {"error": errors[0], "gradient_error": max(errors[1:])}
    return row | {"checksum": [float(t.double().sum()) for t in found]}


def _sent(comm: Communicator, when: str) -> dict[str, int]:
    kinds = ("all-to-all", "ring")
    return {f"{when}_bytes": sum(comm.traffic.bytes[k] for k in kinds),
            f"{when}_operations": sum(comm.traffic.operations[k] for k in kinds)}


def _timed(method: ContextParallel, comm: Communicator, data: tuple[Tensor, Weights, Tensor]) -> float:
    x, weights, dy = data
    own = weights.map(lambda w: w.detach().requires_grad_())
    local, dlocal = method.shard(x, comm).requires_grad_(), method.shard(dy, comm)
    comm.gather([0], "start")
    start = time.perf_counter()
    method.attention(local, own, comm).backward(dlocal)
    comm.gather([0], "end")
    seconds = time.perf_counter() - start
    for w in (local, *own.tensors()):
        w.grad = None
    return seconds


def _resident_peak(*, forget: bool = False) -> int:
    """Most bytes of memory the process has had, where the system says so, else 0. `forget`: what it has now, from now on."""
    try:
        if forget:
            Path("/proc/self/clear_refs").write_text("5")
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return 0


# -------------------------------------------------------------------------------------------------------- the judgement


def gathered(size: dict[str, Any], progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """One row per number of ranks, key heads and method: the largest figure of any rank."""
    rows = []
    for ranks in size["ranks"]:
        progress(f"{ranks} processes")
        every = launch(rows_of_rank, ranks, timeout=1200, args=(size,), operation_timeout=300)
        for same in zip(*every, strict=True):
            row = {name: max(r[name] for r in same) if isinstance(value, (int, float)) else value
                   for name, value in same[0].items()}
            rows.append(row | ({"checksum": [r["checksum"] for r in same]} if "checksum" in row else {}))
    return rows


def measure(scale: str, progress: Callable[[str], None]) -> Outcome:
    """Run all methods on groups of processes and compare."""
    if scale == "paper":
        raise Refused("upipe: the paper's lengths need eight or sixteen GPUs of 80 GiB and a training framework; expected "
                      "--scale small, whose table of eight devices says what the model of the method gives there.")
    return judged(scale, SIZES[scale], gathered(SIZES[scale], progress))


def judged(scale: str, size: dict[str, Any], rows: list[dict[str, Any]]) -> Outcome:
    """The spec's assertions, and the table of eight devices."""
    full = {(r["ranks"], r["kv_heads"], r["method"]): r for r in rows if "error" in r}
    ratios = compared(size, full)
    checks = statements(size, rows, full, ratios)
    speed, measured = None, ratios | {
        "peak of process memory, MiB": {m: round(r["peak_bytes"] / 2**20, 1) for m, r in _largest_group(size, full)},
        "seconds": {m: r["seconds"] for m, r in _largest_group(size, full)}}
    if scale == "smoke":
        checks.pop(TIME)
    else:
        speed, off = speed_of(rows, size, cores())
        measured["speeds of a core"] = as_figures(speed, off)
    nodes = [row for model, node in NODES for row in table(NODE_METHODS, model, node, speed=speed)]
    for model, node in NODES:
        measured[f"{model.name} on {node.devices} devices of 80 GiB, by the model: millions of tokens"] = {
            row["method"]: round(row["longest"] / 1e6, 2) for row in nodes if row["model"] == model.name and "longest" in row}
    failed = [name for name, holds in checks.items() if not holds]
    verdict, reason = "reproduced", ""
    if failed:
        verdict, reason = "failed", "not so here: " + "; ".join(failed) + "."
    elif scale == "smoke":
        verdict, reason = "mechanism-only", "a sequence of 64 tokens says nothing about time."
    shown = [{k: v for k, v in r.items() if k != "checksum"} for r in rows]
    return Outcome(measured, EXPECTED, checks, verdict, reason, [SEED], [*shown, *nodes])


def _largest_group(size: dict[str, Any], full: dict[Any, dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """The rows of most ranks and most key heads, by method."""
    return [(str(m), full[size["ranks"][-1], HEADS, str(m)]) for m in METHODS]


def compared(size: dict[str, Any], full: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    """U=4 over Ulysses: memory with as many key heads as query heads on most ranks, time everywhere."""
    most = size["ranks"][-1]
    plain, staged = full[most, HEADS, AGAIN], full[most, HEADS, SMALL]
    total = staged["forward_with_output"] / plain["forward_with_output"]
    times = {other: {f"P={p}, Hkv={kv}": full[p, kv, SMALL]["seconds"] / full[p, kv, other]["seconds"]
                     for p, kv in groups(full)} for other in (PLAIN, AGAIN)}
    return {
        "largest error against one process": max(max(r["error"], r["gradient_error"]) for r in full.values()),
        EXCHANGE: staged["forward_elements"] / plain["forward_elements"], TOTAL: total,
        "longest sequence in the same elements, U=4 / Ulysses": 1 / total,
        SLOWER: times[PLAIN], f"{SLOWER} with recomputation": times[AGAIN]}


def groups(full: dict[Any, dict[str, Any]]) -> list[tuple[int, int]]:
    return list(dict.fromkeys((p, kv) for p, kv, _ in full))


def statements(size: dict[str, Any], rows: list[dict[str, Any]], full: dict[Any, dict[str, Any]], ratios: dict[str, Any]
               ) -> dict[str, bool]:
    """What the spec asserts."""
    each = groups(full)
    stages = [str(m) for m in METHODS if isinstance(m, UPipe)]
    elements, as_one = "forward_elements", "checksum"
    return {
        f"every output and gradient equals one process's to {MOST_ERROR:g}":
            ratios["largest error against one process"] <= MOST_ERROR,
        "U=4 of 16 heads: exchange buffers within 5% of a quarter of Ulysses'": abs(ratios[EXCHANGE] / 0.25 - 1) <= 0.05,
        f"U=4 of 16 heads: at most {MOST_TOTAL} of Ulysses' elements with the output": ratios[TOTAL] <= MOST_TOTAL,
        "bytes sent in forward are Ulysses' for every U and grouping": all(
            full[p, kv, m]["forward_bytes"] == full[p, kv, PLAIN]["forward_bytes"] for p, kv in each for m in stages),
        "bytes sent in all are those of Ulysses with recomputation": all(
            full[p, kv, m]["backward_bytes"] == full[p, kv, AGAIN]["backward_bytes"] for p, kv in each for m in stages),
        "U=16 of 16 heads: Ulysses' elements and results": all(
            full[p, kv, WHOLE][elements] == full[p, kv, PLAIN][elements]
            and full[p, kv, WHOLE][as_one] == full[p, kv, AGAIN][as_one] for p, kv in each),
        "a ring sends 2 s d Hkv (P-1) elements in forward": all(
            full[p, kv, RING]["forward_bytes"] == 4 * 2 * (size["length"] // p) * size["head_dim"] * kv * (p - 1)
            for p, kv in each),
        "elements, bytes and operations are those of the model in every run": all(_as_modelled(r, size) for r in full.values()),
        "the longest sequence grows by the same ratio at every length": len(_ratios_by_length(rows)) == 1,
        TIME: max(ratios[SLOWER].values()) <= MOST_TIME,
    }


def _as_modelled(row: dict[str, Any], size: dict[str, Any]) -> bool:
    model = BY_NAME[row["method"]].account(shape_of(row, size), row["ranks"])
    names = [f"{when}_{what}" for when in ("forward", "backward") for what in ("bytes", "operations", "elements")]
    return all(row[name] == getattr(model, name) for name in (*names, "forward_with_output"))


def _ratios_by_length(rows: list[dict[str, Any]]) -> set[float]:
    """Elements with the output, U=4 over Ulysses, at every length and number of ranks."""
    found = {(r["ranks"], r["length"], r["method"]): r["forward_with_output"] for r in rows if r["kv_heads"] == HEADS}
    return {round(found[p, n, SMALL] / held, 9) for (p, n, m), held in found.items() if m == AGAIN}


def shape_of(row: dict[str, Any], size: dict[str, Any]) -> Shape:
    return Shape(row["length"], HEADS, row["kv_heads"], size["head_dim"], size["width"])


def speed_of(rows: list[dict[str, Any]], size: dict[str, Any], n_cores: int) -> tuple[Speed, float]:
    """Speeds of one of this machine's cores, and the median relative error of the times they give back.

    Ranks on fewer cores than there are take turns, so each has a share of one.
    """
    timed = [r for r in rows if "seconds" in r]
    runs = [(BY_NAME[r["method"]].account(shape_of(r, size), r["ranks"]), r["seconds"]) for r in timed]
    share = [min(1.0, n_cores / r["ranks"]) for r in timed]
    speed = fit(runs, share=share)
    errors = [abs(Speed(speed.flops * part, speed.bytes * part, speed.operation_seconds).seconds(account) - seconds) / seconds
              for (account, seconds), part in zip(runs, share, strict=True)]
    return speed, statistics.median(errors)


def as_figures(speed: Speed, off: float) -> dict[str, float | None]:
    """Speeds in common units; None for bytes whose cost is too small to be seen beside the rest."""
    per_second = speed.bytes / 1e9 if math.isfinite(speed.bytes) else None
    return {"GFLOP/s": speed.flops / 1e9, "GB/s": per_second, "ms per exchange": speed.operation_seconds * 1e3,
            "median error of times": off}


def cores() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


EXPERIMENT = Experiment(
    id="upipe", system="upipe", run=measure,
    claim="Exchanging heads in stages of U instead of all H at once gives the same results and sends the same bytes with "
          "U/H of Ulysses' exchange buffers, at a throughput close to Ulysses'.",
)

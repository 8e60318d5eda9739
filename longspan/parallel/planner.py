"""How long a sequence fits on a node, from the accounts of the methods and from measured speeds.

Memory of a device: its share of the training state (weights, gradient, moments, sharded over the devices), what every layer
saves for backward (nothing if that is offloaded), and the largest need of one layer at work: its input, output and their
gradients beside the buffers of `Account`, and queries, keys and values where a method keeps them. Left out: the MLP (tiled
in such runs), logits, log-sum-exps, a ring's running sums, and the allocator's waste, so lengths are upper bounds; ratios
between methods that exchange heads are what the model is for.

Seconds are arithmetic, bytes and operations times three constants, which `fit` takes from measured runs by least squares.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from longspan.parallel.account import Account, Shape
from longspan.parallel.base import ContextParallel
from longspan.registry import Refused

GiB = 1 << 30


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    parameters: float

    def shape(self, length: int, element_bytes: int) -> Shape:
        return Shape(length, self.heads, self.kv_heads, self.head_dim, self.width, element_bytes=element_bytes)


@dataclass(frozen=True)
class Node:
    """Devices that share one sequence, and what training keeps on them."""

    devices: int = 8
    memory: int = 80 * GiB
    """Bytes of each."""
    element_bytes: int = 2
    state_bytes: float = 16.0
    """Per parameter over all devices: float32 weights and two moments, and a gradient."""
    offload: bool = True
    """Whether what layers save for backward lies in the host's memory."""


LLAMA_3_8B = Model("Llama-3-8B", 32, 32, 8, 128, 4096, 8.03e9)
QWEN3_32B = Model("Qwen3-32B", 64, 64, 8, 128, 5120, 32.8e9)


@dataclass(frozen=True)
class Speed:
    """What a rank does in a second."""

    flops: float
    bytes: float
    operation_seconds: float
    """Cost of starting one exchange."""

    def seconds(self, account: Account) -> float:
        """Forward and backward of one layer's attention."""
        return (account.flops / self.flops + account.bytes / self.bytes
                + account.operations * self.operation_seconds)


def fit(runs: Sequence[tuple[Account, float]], *, share: Sequence[float] = ()) -> Speed:
    """Speeds behind measured (account, seconds), by least squares on relative errors with constants of at least zero.

    `share` is, for each run, the part of a core that a rank had (ranks on fewer cores take turns); 1 if left out.

    Raises:
        ValueError: fewer than three runs, or none that determines the arithmetic.
    """
    import numpy as np
    from scipy.optimize import nnls

    if len(runs) < 3:
        raise ValueError(f"fit expects at least three runs, got {len(runs)}")
    rows = np.array([[a.flops, a.bytes, a.operations] for a, _ in runs], dtype=float)
    rows[:, :2] /= np.array(share or [1.0] * len(runs))[:, None]
    seconds = np.array([s for _, s in runs])
    size = np.where(rows.max(0) > 0, rows.max(0), 1.0)
    found, _ = nnls(rows / size / seconds[:, None], np.ones(len(runs)))
    per_flop, per_byte, per_operation = found / size
    if per_flop <= 0:
        raise ValueError("the runs don't determine the time of arithmetic; expected runs of different lengths")
    return Speed(1 / per_flop, 1 / per_byte if per_byte > 0 else float("inf"), per_operation)


def memory(method: ContextParallel, model: Model, node: Node, length: int) -> float:
    """Bytes a device needs for a sequence of `length`. Raises `Refused` where the method can't divide it."""
    account = method.account(model.shape(length, node.element_bytes), node.devices)
    piece = length // node.devices
    heads, stream = piece * model.heads * model.head_dim, piece * model.width
    forward = account.forward_with_output + 2 * stream
    kept = account.saved_elements - (stream + piece * model.heads + heads)  # q, k, v, if backward doesn't make them anew
    backward = account.backward_elements + kept + 2 * heads + 3 * stream  # out and its gradient; x, dx, dy
    saved = 0 if node.offload else account.saved_elements * model.layers
    state = model.parameters * node.state_bytes / node.devices
    return state + node.element_bytes * (max(forward, backward) + saved)


def largest(method: ContextParallel, model: Model, node: Node, *, step: int = 1024) -> int:
    """The longest sequence that fits, in multiples of `step` positions a device; 0 if none does."""
    unit = step * node.devices
    low, high = 0, 1
    while memory(method, model, node, high * unit) <= node.memory:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if memory(method, model, node, middle * unit) <= node.memory else (low, middle)
    return low * unit


def table(methods: Iterable[ContextParallel], model: Model, node: Node, *, length: int = 1 << 20, speed: Speed | None = None
          ) -> list[dict[str, Any]]:
    """One row per method: the longest sequence, and the costs of one layer for a device at `length`.

    A method that can't divide the heads gets a row that says so.
    """
    rows = []
    for method in methods:
        row: dict[str, Any] = {"model": model.name, "devices": node.devices, "method": str(method)}
        try:
            account = method.account(model.shape(length, node.element_bytes), node.devices)
            row |= {"longest": largest(method, model, node), "length": length,
                    "memory_gib": memory(method, model, node, length) / GiB}
            row |= {name: value for name, value in asdict(account).items() if name != "pairs"}
            if speed is not None:
                row["seconds"] = speed.seconds(account)
        except Refused as refusal:
            row["refused"] = str(refusal)
        rows.append(row)
    return rows

"""All operators under one budget: the same data, steps, sizes and seeds, judged at up to sixteen times the trained length.

Three tasks. ``text``: the byte-level model of Python's source, in nats per byte over the same held-out bytes at every length.
``recall``: multi-query associative recall, questions far from their pairs in longer rows. ``slots``: one pair among fillers
found in one step, wherever it stands. Every arm is a mixer, a position scheme, a side path, a stack or an objective of the
small decoder, named as on the command line; all else is the same, learning rate included: nothing is tuned for anybody.

Rotary scalings are not trained: they read with the weights of the rotary arm, stretched by the factor the length asks for.
Speed and memory are measured last, arm after arm, on training steps: tokens per second at the trained length and at sixteen
times as much, the most bytes that tensors held at once there, and both relative to softmax attention.

Trained cells are kept in the cache folder under a key of all that determines them, so that a run that was stopped goes on.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from longspan.evaluation.digests import code_digest
from longspan.experiments import byte_lm, slots, spread_recall
from longspan.experiments.base import Experiment, Outcome, by_checks
from longspan.experiments.byte_lm import ByteLM
from longspan.experiments.slots import SlotModel, Slots
from longspan.experiments.spread_recall import SpreadRecall
from longspan.experiments.timing import best_of
from longspan.kernels import native
from longspan.layers import choose
from longspan.models.decoder import PARTS, Decoder, DecoderConfig, count_parameters
from longspan.registry import Refused
from longspan.training import IGNORE, Batch, TrainConfig, Trainer
from longspan.training import Outcome as StepOutcome
from longspan.training.peak import peak_bytes

TIMES = (1, 2, 4, 8, 16)
TASKS = ("text", "recall", "slots")


@dataclass(frozen=True)
class Arm:
    """One row of the table. Parts are texts as ``longspan train`` takes them; `reads_like` names the arm whose weights it
    reads with, stretched by ``{factor}``."""

    name: str
    mixer: str = "softmax"
    position: str | None = None
    side_path: str | None = None
    stack: str = "plain"
    objective: str = "next-token"
    reads_like: str | None = None
    tasks: tuple[str, ...] = TASKS

    def parts(self, factor: int = 1) -> dict[str, Any]:
        """The methods of the decoder's parts."""
        texts = {name: getattr(self, name) for name in PARTS}
        return {name: choose(text.format(factor=factor), PARTS[name]) for name, text in texts.items() if text is not None}


ARMS: tuple[Arm, ...] = (
    Arm("softmax, rope"),
    Arm("softmax, nope", position="nope"),
    Arm("softmax, alibi", position="alibi"),
    Arm("softmax, window 16", mixer="softmax(window=16)"),
    Arm("softmax, sink", mixer="softmax(sink=True)"),
    Arm("rope, interpolated", position="position-interpolation(factor={factor}, original=64)", reads_like="softmax, rope"),
    Arm("rope, ntk", position="ntk(factor={factor}, original=64)", reads_like="softmax, rope"),
    Arm("rope, yarn", position="yarn(factor={factor}, original=64)", reads_like="softmax, rope"),
    Arm("repo", position="repo"),
    Arm("goat", mixer="goat(R=2, M=4, length=64)"),
    Arm("goat, rope", mixer="goat(R=2, M=4, length=64)", position="rope"),
    Arm("rfa", mixer="rfa(length=64)"),
    Arm("sc-rfa, b=0.05", mixer="rfa(b=0.05, length=64)"),
    Arm("sc-rfa, b=5", mixer="rfa(b=5.0, length=64)"),
    Arm("softplus", mixer="softplus(p=15.0)"),
    Arm("softplus, p=3", mixer="softplus(p=3.0)"),
    Arm("softplus, l1 only", mixer="softplus(reweight=False)"),
    Arm("entmax 1.5", mixer="entmax(alpha=1.5)"),
    Arm("sparsemax", mixer="entmax(alpha=2.0)"),
    Arm("plash", mixer="plash(M=16, C=16)"),
    Arm("differential", mixer="differential"),
    Arm("gated", mixer="gated"),
    Arm("selective", mixer="selective"),
    Arm("l2a, window 16", mixer="l2a(window=16)", objective="l2a-next-token"),
    Arm("linear", mixer="linear-attention"),
    Arm("linear, gated", mixer="linear-attention(gated=True)"),
    Arm("performer", mixer="performer"),
    Arm("rope + short conv", side_path="short-conv"),
    Arm("rope + trsp", side_path="trsp"),
    Arm("contextlm", stack="contextlm(w=4)"),
    Arm("rope, pose", objective="pose", tasks=("text",)),
    Arm("rope, self-distillation", objective="self-distillation", tasks=("text",)),
)


@dataclass(frozen=True)
class Size:
    """Budget of a scale."""

    text: ByteLM
    recall: SpreadRecall
    slots: Slots
    steps: dict[str, int]
    seeds: dict[str, tuple[int, ...]]
    """Of each task."""
    judge: int
    """Held-out batches a length."""
    rounds: int
    """Timed training steps, of which the fastest counts."""
    arms: tuple[str, ...] | None = None
    lr: dict[str, float] = field(default_factory=lambda: {"recall": 3e-3, "slots": 2e-3})


SIZES: dict[str, Size] = {
    "smoke": Size(ByteLM(dim=16, heads=1, steps=2, batch=2, length=16, held_out=1), SpreadRecall(64, 2), Slots(48, 2),
                  {"recall": 2, "slots": 2}, dict.fromkeys(TASKS, (0,)), 1, 1, ("softmax, rope", "rope, yarn", "goat")),
    "small": Size(ByteLM(), SpreadRecall(32, 64, pairs=4, keys=8, values=8, fillers=4), Slots(48, 64),
                  {"recall": 400, "slots": 300}, {"text": (0, 1), "recall": (0,), "slots": (0,)}, 4, 10),
}


# ------------------------------------------------------------------------------------------------------------ training


def answer(model: SlotModel, batch: Batch, state: Any = None) -> StepOutcome:
    """The objective of slots: the value at the last one."""
    return StepOutcome(slots.answer_loss(model, batch), float(len(batch.ids)))


def trained(arm: Arm, task: str, size: Size, seed: int) -> Any:
    """The arm's model for a task, trained."""
    objective = choose(arm.objective, "objective")
    if task == "text":
        return byte_lm.fit(size.text, seed, objective, **arm.parts())
    config = TrainConfig(steps=size.steps[task], lr=size.lr[task], warmup=3 * size.steps[task] // 10, final_lr=0.0,
                         weight_decay=0.01, seed=seed, log_every=size.steps[task])
    model = made(arm, task, size, seed)
    asked: Any = answer if task == "slots" else objective
    Trainer(model, data(task, size, seed, 1, "train"), config, asked).run()
    return model.eval()


def made(arm: Arm, task: str, size: Size, seed: int, factor: int = 1) -> Any:
    """The arm's model for a task with first weights."""
    shape: dict[str, Any] = {"dim": size.text.dim, "n_layers": size.text.layers, "n_heads": size.text.heads}
    if task == "slots":
        return SlotModel(size.slots, seed, **shape, **arm.parts(factor))
    if task == "text":
        return byte_lm.build(size.text, seed, **arm.parts(factor))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Decoder(DecoderConfig(size.recall.vocab_size, **shape, **arm.parts(factor)))


def data(task: str, size: Size, seed: int, times: int, split: str) -> Any:
    """Batches of a task at `times` its trained length; held-out batches hold fewer rows where they are long."""
    of: Any = size.recall if task == "recall" else size.slots
    batch = of.batch if split == "train" else max(2, of.batch // times)
    return type(of)(**(vars(of) | {"time": of.time * times, "batch": batch, "seed": seed, "split": split}))


@torch.no_grad()
def judged(model: Any, task: str, size: Size, times: int) -> list[float]:
    """Nats per byte of each held-out stretch, or the share of right answers of each held-out batch."""
    if task == "text":
        longest = size.text.length * TIMES[-1]
        return byte_lm.window_losses(model, size.text, size.text.length * times, longest).tolist()
    test = data(task, size, 0, times, "held-out")
    if task == "slots":
        return [slots.accuracy(model, test, size.judge * times)]
    right = asked = 0
    for index in range(size.judge * times):
        batch = test(index)
        here = batch.labels != IGNORE
        right += int((model(batch.ids).logits[here].argmax(-1) == batch.labels[here]).sum())
        asked += int(here.sum())
    return [right / asked]


# -------------------------------------------------------------------------------------------------------------- cells


def cell(arm: Arm, task: str, seed: int, size: Size, readers: Sequence[Arm] = ()) -> dict[str, dict[str, list[float]]]:
    """What `arm` and the arms that read with its weights score at each length, from the cache folder if it is there."""
    file = native.cache_folder().parent / "arena" / f"{key(arm, task, seed, size, readers)}.json"
    if file.is_file():
        return json.loads(file.read_text(encoding="utf-8"))
    model = trained(arm, task, size, seed)
    found = {arm.name: {str(n): judged(model, task, size, n) for n in TIMES}}
    for reader in readers:
        found[reader.name] = {}
        for n in TIMES:
            stretched = made(reader, task, size, seed, n)
            stretched.load_state_dict(model.state_dict())
            found[reader.name][str(n)] = judged(stretched.eval(), task, size, n)
    file.parent.mkdir(parents=True, exist_ok=True)
    whole = file.with_suffix(f".{seed}.part")
    whole.write_text(json.dumps(found), encoding="utf-8")
    whole.replace(file)
    return found


def key(arm: Arm, task: str, seed: int, size: Size, readers: Sequence[Arm]) -> str:
    """Hash of all that decides a cell: the arm, the budget, the code that makes, trains and feeds a decoder, and PyTorch."""
    budget = (size.text, size.recall, size.slots, size.steps, size.lr, size.judge)
    texts = [repr((arm, task, seed, budget, tuple(readers), torch.__version__))]
    texts.append(code_digest(("kernels", "layers", "models", "training")))
    texts += [inspect.getsource(module) for module in (byte_lm, slots, spread_recall)]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:20]


# ----------------------------------------------------------------------------------------------------- speed and memory


def step_of(arm: Arm, size: Size, times: int) -> Callable[[], None]:
    """One training step of the byte model at `times` the trained length, with the same number of tokens."""
    model = made(arm, "text", size, 0).train()
    rows, length = max(1, size.text.batch // times), size.text.length * times
    ids = byte_lm.source()[: rows * length + 1]
    batch = Batch(ids[:-1].view(rows, length), ids[1:].view(rows, length))
    objective = choose(arm.objective, "objective")

    def step() -> None:
        objective(model, batch, None).loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def costs(arms: Sequence[Arm], size: Size, progress: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Tokens per second and peak bytes of a training step at both ends; rounds go over all arms in turn."""
    found: dict[str, dict[str, float]] = {arm.name: {"parameters": count_parameters(made(arm, "text", size, 0))} for arm in arms}
    for times in (TIMES[0], TIMES[-1]):
        tokens = max(1, size.text.batch // times) * size.text.length * times
        steps = {arm.name: step_of(arm, size, times) for arm in arms}
        for name, step in steps.items():  # the first one warms up
            progress(f"timing {name} at {size.text.length * times} tokens")
            step()
        seconds = best_of(size.rounds, steps)
        for name, step in steps.items():
            found[name] |= {f"tokens/s at {times}x": tokens / seconds[name], f"peak bytes at {times}x": peak_bytes(step)}
    return found


# ------------------------------------------------------------------------------------------------------------ the table


def measure(scale: str, progress: Callable[[str], None]) -> Outcome:
    """Train and judge every cell, then time."""
    if scale == "paper":
        raise Refused("the arena has no published counterpart; run it with --scale small, or train at any size with "
                      "`longspan train --mixer … --steps …`.")
    size = SIZES[scale]
    arms = [arm for arm in ARMS if size.arms is None or arm.name in size.arms]
    scores: dict[str, dict[str, dict[str, list[list[float]]]]] = {task: {} for task in TASKS}
    for arm in (a for a in arms if a.reads_like is None):
        readers = [a for a in arms if a.reads_like == arm.name]
        for task in arm.tasks:
            for seed in size.seeds[task]:
                progress(f"{arm.name}: {task}, seed {seed}")
                for name, row in cell(arm, task, seed, size, readers).items():
                    into = scores[task].setdefault(name, {str(n): [] for n in TIMES})
                    for n, values in row.items():
                        into[n].append(values)
    cost = costs([a for a in arms if a.reads_like is None], size, progress)
    table = [row_of(arm, scores, cost, size) for arm in arms]
    return outcome(scale, table, size)


def row_of(arm: Arm, scores: dict[str, Any], cost: dict[str, Any], size: Size) -> dict[str, Any]:
    """An arm's figures: means over seeds, the spread of seeds, and what a step costs."""
    row: dict[str, Any] = {"arm": arm.name} | {name: getattr(arm, name) for name in (*PARTS, "objective", "reads_like")}
    for task in TASKS:
        if arm.name in scores[task]:
            by_seed = {n: [float(np.mean(values)) for values in seeds] for n, seeds in scores[task][arm.name].items()}
            row[task] = {n: float(np.mean(values)) for n, values in by_seed.items()}
            row[f"{task} by seed"] = by_seed
    base = cost["softmax, rope"]
    own = cost.get(arm.reads_like or arm.name, {})
    row |= own | {f"{name} relative": own[name] / base[name] for name in own}
    return row


def outcome(scale: str, table: list[dict[str, Any]], size: Size) -> Outcome:
    """The table, and what must be so if lengths were read as told."""
    rows = {row["arm"]: row for row in table}

    def rise(name: str) -> float:
        return rows[name]["text"]["16"] - rows[name]["text"]["1"]

    checks = {
        "rotary positions lose at 16 times the trained length (0.25 nats or more)": rise("softmax, rope") >= 0.25,
        "the learned prior holds there (within 0.1 nats)": rise("goat") <= 0.1,
        "stretching rotary positions helps at 16 times": rows["rope, yarn"]["text"]["16"] < rows["softmax, rope"]["text"]["16"],
    }
    if "softmax, alibi" in rows:
        checks["distance penalties hold there (within 0.1 nats)"] = rise("softmax, alibi") <= 0.1
    learned = [row["arm"] for row in table if row.get("recall", {}).get("1", 0.0) >= 0.9]
    measured = {"arms": len(table), "answer most recall questions at the trained length": learned,
                "rise of nats per byte from 1x to 16x": {name: rise(name) for name in rows},
                "budget": {"text": vars(size.text), "recall": vars(size.recall), "slots": vars(size.slots), "steps": size.steps,
                           "seeds": size.seeds}}
    if scale == "smoke":
        return Outcome(measured, {}, checks, "mechanism-only", "a few steps teach nothing; only the machinery is tried.",
                       list(size.seeds["text"]), table)
    verdict, reason = by_checks(checks)
    return Outcome(measured, {"rope": "rises", "alibi, goat": "hold"}, checks, verdict, reason, list(size.seeds["text"]),
                   table)


def lines(table: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The arena as one table: every task at 1, 2, 4, 8 and 16 times the trained length, and what a step costs."""

    def at(row: dict[str, Any], task: str, digits: int) -> str:
        return " ".join(f"{row[task][str(n)]:.{digits}f}" for n in TIMES) if task in row else ""

    def cost(row: dict[str, Any], name: str, unit: float = 1.0, digits: int = 0) -> str:
        if name not in row or row["reads_like"] is not None:
            return ""
        return f"{row[name] / unit:,.{digits}f} ({row[f'{name} relative']:.2f})"

    times = ", ".join(f"{n}x" for n in TIMES)
    head = ["arm", "weights", f"nats per byte at {times}", "recall", "slots", "tokens/s, 1x", "tokens/s, 16x", "peak MB, 16x"]
    cells = [[row["arm"], f"{row['parameters']:,}", at(row, "text", 3), at(row, "recall", 2), at(row, "slots", 2),
              cost(row, "tokens/s at 1x"), cost(row, "tokens/s at 16x"), cost(row, "peak bytes at 16x", 1e6, 1)] for row in table]
    return head, cells


EXPERIMENT = Experiment(
    id="arena", system="arena", run=measure, lines=lines,
    claim="Under one budget, operators differ less at the length they were trained at than beyond it.",
)

"""Can tokens that say by their content where they stand be found at any distance, and do such places train?

The mechanism, without training: one head looks for a needle among random keys while index positions put it further and
further away; then the needle's place is the query's. Both go through the module of `longspan.layers.positions.repo`, whose
weights are set to read the wanted place from the input.

From nothing: three-layer decoders learn recall in 48 slots with rotary positions, without positions, and with learned places
from layer 1 on; judged in rows up to four times as long. No gain is expected at this size, only that places train.

From a pretrained model: the bundled model gets learned places from layer 10 on and is trained on text, the three matrices
and the projections of queries and keys alone, beside a control whose places stay 0 (no positions in these layers) and that
is trained alike. Both see the same windows in the same order; held-out windows are judged before and after.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from longspan.evaluation.statistics import paired
from longspan.experiments.base import Experiment, Outcome, by_checks
from longspan.experiments.slots import SlotModel, Slots, accuracy, answer_loss
from longspan.kernels import attend
from longspan.layers import Context
from longspan.layers.positions.repo import LearnedPlaces, Repo
from longspan.models import load
from longspan.registry import Refused
from longspan.training import Batch, TextBatches, TrainConfig, Trainer, read_text
from longspan.training import Outcome as StepOutcome
from longspan.training.next_token import NextToken
from longspan.training.retrofits import Tuned
from longspan.training.retrofits.repo import RepoRetrofit, repo_layers, without_positions

SEED = 0
SHARPNESS, NOISE, HEAD_DIM = 12.0, 0.1, 64
MASS, FLAT, LEARNED, LINEAR = 0.9, 0.01, 0.95, 0.9
"""What passes: needle mass, its spread over distances, accuracy in window, and |corr(z, i)| in some head below this."""
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"keys": 256, "distances": (1, 64), "draws": 3, "steps": 4, "batch": 8, "judge": 1, "text_steps": 0},
    "small": {"keys": 4096, "distances": (1, 64, 1024, 4096), "draws": 20, "steps": 700, "batch": 64, "judge": 16,
              "text_steps": 200, "context": 256, "windows": 24},
}
TIMES = (48, 96, 192)
START, RATE, FASTER = 10, 1e-3, 10.0
"""The bundled model's first layer with learned places, the learning rate of both runs, and how many times faster the three
matrices learn, which start from almost nothing: 200 steps are a hundredth of the published training."""
ARMS = {"RoPE": "rope", "NoPE": "nope", "RePo": Repo(start=1)}  # type: ignore[call-arg]
EXPECTED = {
    "needle mass by index": [0.886, 0.022, 0.002, 0.0], "needle mass at the query's place": [0.925, 0.924, 0.925, 0.925],
    "accuracy": {"RoPE": [1.0, 0.992, 0.844], "NoPE": [1.0, 1.0, 1.0], "RePo": [1.0, 0.977, 0.738]},
    "steps to 0.9": {"RoPE": 100, "RePo": 200}, "text": "a jump at the start, then below the NoPE control",
}


# ------------------------------------------------------------------------------------------------------- the mechanism


def reads_places(dim: int = 8) -> Any:
    """A position module that stands where channel 1 of its input says, given 1 in channel 0."""
    module: Any = Repo(start=0).build(dim, 1, 1, HEAD_DIM, 0, 1).double()  # type: ignore[call-arg]
    with torch.no_grad():
        for weight in module.learned.parameters():
            weight.zero_()
        module.learned.gate.weight[0, 0] = module.learned.content.weight[0, 1] = 1.0
        module.learned.assign.weight[0, 0] = 1.0 / F.silu(torch.tensor(1.0, dtype=torch.float64))
    return module


@torch.no_grad()
def needle_mass(distance: int, keys: int, draws: int, at_query: bool) -> float:
    """Mean attention that a query after `keys` keys pays to a noisy copy of itself, `distance` keys before it."""
    g, module, found = torch.Generator().manual_seed(SEED), reads_places(), []
    for _ in range(draws):
        query = F.normalize(torch.randn(HEAD_DIM, generator=g, dtype=torch.float64), dim=0)
        noise = NOISE * HEAD_DIM**-0.5 * torch.randn(HEAD_DIM, generator=g, dtype=torch.float64)
        k = F.normalize(torch.randn(keys + 1, HEAD_DIM, generator=g, dtype=torch.float64), dim=-1)
        needle = keys - distance
        k[needle] = F.normalize(query + noise, dim=0)
        x = torch.zeros(1, keys + 1, 8, dtype=torch.float64)
        x[..., 0], x[..., 1] = 1.0, torch.arange(keys + 1.0)
        if at_query:
            x[0, needle, 1] = keys
        places = module.places(x, Context.of(1, keys + 1))
        q, k = module.rotate(query.expand(1, 1, keys + 1, -1), k[None, None], places)
        is_needle = (torch.arange(keys) == needle).double()[None, None, :, None]
        mass, _ = attend(q[:, :, -1:], k[:, :, :keys], is_needle, scale=SHARPNESS, causal=False)
        found.append(float(mass))
    return float(np.mean(found))


# ------------------------------------------------------------------------------------------------------- from nothing


def slot_objective(model: Any, batch: Batch, state: Any = None) -> StepOutcome:
    """The value at the last slot, and how often it is right."""
    logits = model(batch, keep=1).logits[:, 0]
    right = float((logits.argmax(-1) == batch.labels[:, -1]).float().mean())
    return StepOutcome(F.cross_entropy(logits, batch.labels[:, -1]), float(len(batch.ids)), {"accuracy": right})


def learn_slots(position: Any, size: dict[str, Any]) -> tuple[SlotModel, int | None]:
    """A trained model, and the step from which fifty training batches in a row are nine tenths right on average."""
    task = Slots(TIMES[0], size["batch"], seed=SEED)
    model, steps = SlotModel(task, SEED, n_layers=3, position=position), size["steps"]
    config = TrainConfig(steps=steps, lr=2e-3, warmup=3 * steps // 10, final_lr=0.0, weight_decay=0.01, seed=SEED, log_every=1)
    history = Trainer(model, task, config, slot_objective).run().history
    rights = np.array([row["accuracy"] for row in history])
    good = [t for t in range(0, steps - 49) if rights[t : t + 50].mean() >= 0.9]
    return model.eval(), good[0] if good else None


@dataclass(frozen=True)
class Places:
    """What learned places look like: their spread, and their correlation with the index, one figure a layer and head."""

    spread: list[float]
    correlation: list[float]

    def summary(self) -> dict[str, float]:
        size = [abs(c) for c in self.correlation]
        return {"smallest spread": min(self.spread), "largest spread": max(self.spread), "smallest |corr(z, i)|": min(size),
                "largest |corr(z, i)|": max(size)}


@torch.no_grad()
def places_of(model: nn.Module, run: Callable[[], Any]) -> Places:
    """Places of all learned layers while `run` reads something."""
    seen: list[Float[Tensor, "B N T"]] = []
    modules = [m for m in model.modules() if isinstance(m, LearnedPlaces)]
    hooks = [m.register_forward_hook(lambda module, args, z: seen.append(z)) for m in modules]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    spread, correlation = [], []
    for z in seen:
        for head in z.unbind(1):
            index = torch.arange(head.shape[1]).expand_as(head).double()
            both = torch.stack((head.double().flatten(), index.flatten()))
            spread.append(float(head.std()))
            correlation.append(float(torch.corrcoef(both)[0, 1]) if spread[-1] > 0 else 0.0)
    return Places(spread, correlation)


def from_nothing(size: dict[str, Any], progress: Callable[[str], None]) -> tuple[list[dict[str, Any]], Places]:
    """One row per position scheme, and the places that RePo learned."""
    rows = []
    for name, position in ARMS.items():
        progress(f"slots with {name}")
        model, reached = learn_slots(position, size)
        tasks = [Slots(time, seed=SEED, split="held-out") for time in TIMES]
        rows.append({"run": f"slots, {name}", "accuracy": [accuracy(model, task, size["judge"]) for task in tasks],
                     "steps to 0.9": reached})
    return rows, places_of(model, lambda: answer_loss(model, tasks[0](0)))


# ------------------------------------------------------------------------------------------- from a pretrained model


@torch.no_grad()
def window_losses(tuned: Tuned, windows: list[Batch]) -> list[float]:
    """Nats per token of each held-out window."""
    tuned.eval()
    return [float(NextToken()(tuned, window).loss) for window in windows]  # type: ignore[call-arg]


def windows_of(tokens: Tensor, context: int, count: int) -> list[Batch]:
    """Windows spread evenly over the last tenth of a text, which training never reads."""
    held = tokens[round(len(tokens) * 0.9) :]
    starts = np.linspace(0, len(held) - context - 1, count).astype(int)
    return [Batch(held[None, s : s + context], held[None, s + 1 : s + context + 1]) for s in starts]


def continued(size: dict[str, Any], progress: Callable[[str], None], folder: Path | None) -> tuple[list[dict[str, Any]], dict]:
    """Both runs on text: a row each with held-out losses, and figures of the comparison."""
    loaded = load(dtype="float32")
    ids = loaded.tokenizer(read_text("topics"), add_special_tokens=False, verbose=False)["input_ids"]
    tokens, steps = torch.tensor(ids), size["text_steps"]
    windows = windows_of(tokens, size["context"], size["windows"])
    progress("judging the bundled model")
    base = window_losses(Tuned(loaded.model), windows)
    rows: list[dict[str, Any]] = [{"run": "text, the bundled model", "loss": float(np.mean(base))}]
    found: dict[str, Any] = {"loss of the model as it was": float(np.mean(base))}
    ends: dict[str, list[float]] = {}
    config = TrainConfig(steps=steps, lr=RATE, warmup=steps // 20, schedule="linear", final_lr=0.0, seed=SEED, log_every=1,
                         precision="bfloat16", checkpoint_every=25 if folder else 0)
    for name in ("RePo", "NoPE"):
        model = RepoRetrofit(start=START).convert(loaded.model)  # type: ignore[call-arg]
        tuned = Tuned.ready(model)
        matrices: list[Any] = [m for attention in repo_layers(model).values() for m in attention.learned.children()]
        for matrix in matrices:
            matrix.optimiser_settings = {"weight": {"lr_scale": FASTER}}
        if name == "NoPE":
            without_positions(model)
        before = window_losses(tuned, windows)
        out = None if folder is None else folder / name

        def told(step: int, metrics: dict[str, float], name: str = name) -> None:
            if step % 10 == 0:
                progress(f"text with {name}: step {step}, {metrics['nll']:.3f} nats")

        data = TextBatches(tokens, size["context"], 1, SEED)
        trainer = Trainer(tuned, data, config, out=out, progress=told, trainable_only=True)
        history = trainer.run(resume=out is not None).history
        ends[name] = window_losses(tuned, windows)
        rows.append({"run": f"text, {name}", "loss": float(np.mean(ends[name])), "loss at step 0": float(np.mean(before)),
                     "training loss": [round(float(np.mean([r["nll"] for r in history[a : a + 20]])), 4)
                                       for a in range(0, steps, 20)],
                     "trained": sum(p.numel() for p in model.parameters() if p.requires_grad)})
        found[f"{name} at step 0 and after"] = [rows[-1]["loss at step 0"], rows[-1]["loss"]]
        if name == "RePo":
            stands = places_of(model, lambda t=tuned: window_losses(t, windows[:1]))
            found["learned places"] = stands.summary() | {"layers": len(repo_layers(model))}
        del model, tuned, trainer
    gain = paired(ends["RePo"], ends["NoPE"], seed=SEED)
    found["RePo minus NoPE, nats"] = {"mean": gain.difference, "interval": [gain.lo, gain.hi], "p": gain.p_value,
                                      "windows": gain.n}
    return rows, found


# ------------------------------------------------------------------------------------------------------------ together


def measure(scale: str, progress: Callable[[str], None], folder: Path | None = None) -> Outcome:
    """The three parts in order. With `folder`, the runs on text leave checkpoints there and go on from them."""
    if scale == "paper":
        raise Refused("the published figures need OLMo-2 1B and 7B trained for 50 billion tokens at 4,096 tokens a line, judged "
                      "on RULER, LongBench and HybridQA; train with `longspan train --retrofit repo --model …` on a machine for "
                      "that.")
    size = SIZES[scale]
    progress("the mechanism")
    mass = {name: [needle_mass(n, size["keys"], size["draws"], at_query) for n in size["distances"]]
            for name, at_query in (("by index", False), ("at the query's place", True))}
    slot_rows, places = from_nothing(size, progress)
    text_rows, text = continued(size, progress, folder) if size["text_steps"] else ([], {})
    return outcome(scale, size, mass, slot_rows, places, text_rows, text)


def outcome(scale: str, size: dict[str, Any], mass: dict[str, list[float]], slot_rows: list[dict[str, Any]], places: Places,
            text_rows: list[dict[str, Any]], text: dict[str, Any]) -> Outcome:
    """What was found beside what was expected."""
    near = mass["at the query's place"]
    slots = {row["run"].removeprefix("slots, "): row for row in slot_rows}
    checks = {
        f"a needle at the query's place gets at least {MASS} at every distance": min(near) >= MASS,
        f"and the same within {FLAT}": max(near) - min(near) <= FLAT,
        f"slots: RePo answers at least {LEARNED:.0%} in window": slots["RePo"]["accuracy"][0] >= LEARNED,
        "slots: places differ between tokens in every head": min(places.spread) > 0,
        f"slots: |corr(z, i)| is below {LINEAR} in some head": min(map(abs, places.correlation)) < LINEAR,
    }
    if text:
        checks["text: RePo ends below the NoPE control"] = text["RePo minus NoPE, nats"]["mean"] < 0
    measured = {f"needle mass {name}": values for name, values in mass.items()} | {
        "accuracy": {name: row["accuracy"] for name, row in slots.items()},
        "steps to 0.9": {name: row["steps to 0.9"] for name, row in slots.items()},
        "places learned in slots": places.summary(), "text": text, "size": size, "learning rate on text": RATE}
    table = [{"run": f"needle {name}", "mass": dict(zip(map(str, size["distances"]), values))} for name, values in mass.items()]
    table += slot_rows + text_rows
    verdict, reason = verdict_of(scale, checks, measured)
    return Outcome(measured, EXPECTED, checks, verdict, reason, [SEED], table)


def verdict_of(scale: str, checks: dict[str, bool], measured: dict[str, Any]) -> tuple[str, str]:
    """What the checks say, and the figures behind the one on text where it doesn't hold."""
    if scale == "smoke":
        return "mechanism-only", "a few steps teach nothing; only the machinery is tried."
    verdict, reason = by_checks(checks)
    if verdict == "reproduced":
        return "mechanism-only", ("the published gains on RULER, LongBench and tables need 50 billion tokens of training; from "
                                  "scratch at this size none is expected.")
    gap, size = measured["text"]["RePo minus NoPE, nats"], measured["size"]
    if gap["mean"] >= 0:
        reason += (f" After {size['text_steps']} steps of {size['context']} tokens RePo is {gap['mean']:.3f} nats above the "
                   f"control (95% interval {gap['interval'][0]:.3f} to {gap['interval'][1]:.3f}).")
    return verdict, reason


EXPERIMENT = Experiment(
    id="repo-position", system="repo-position", run=measure,
    claim="Positions that tokens read from their own content train, and let a head find a token at any distance.",
)

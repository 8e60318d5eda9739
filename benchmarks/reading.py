"""Every selector on the bundled model at 8K, 16K and 32K: what it computes, what it loses, what it saves. One run.

    python benchmarks/reading.py --out docs/data/reading.json [--length N …] [--recipe R …] [--examples K]

Beyond 8,192 positions the model's are stretched (yarn), and only speed and agreement with dense reading are judged.

- *floor*: the same forward with attention made free, values copied through. Nothing can be faster than that.
- *ttft*: seconds to read the text and have the next token's logits, selecting and attending included.
- *select*, *attend*: seconds of the two over all layers, within that reading.
- *error*: of the attention output in every fifth layer, on the inputs that dense reading gives it, relative to its norm.
- *agreement*: share of the last 128 positions whose likeliest token is that of dense reading, and the KL divergence.
- *answer nats*, *needles* (8K): likelihood of the right answer and exact matches, on needles in running text.

Rows are written one by one, and a run goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longspan import Recipe, load
from longspan.context import Context
from longspan.decoding import read
from longspan.evaluation import parse_task
from longspan.evaluation.base import answer_ids, prompt_parts
from longspan.evaluation.texts import load_text
from longspan.experiments.base import machine
from longspan.models import LayerCall, Prompt
from longspan.models.load import context_window
from longspan.prefill import ReadContext, reading
from longspan.prefill.base import Selector, TokenSubset
from longspan.registry import cards

LENGTHS = (8192, 16384, 32768)
EVERY = 5
LAST = 128
TASK = "niah"


def recipes() -> list[str]:
    """Every selector and token subset as it comes, and the settings that keep quality at little density."""
    plain = [c.name for kind in ("selector", "token-subset") for c in cards(kind=kind) if c.name != "oracle-top-p"]
    return [*plain, "oracle-top-p"]


# ------------------------------------------------------------------------------------------------------------- readings


class Clock:
    """Seconds spent selecting and attending while a text is read."""

    def __init__(self) -> None:
        self.select = self.attend = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        attend = reading.block_sparse_attention

        def timed(function: Any, name: str) -> Any:
            def running(*args: Any, **options: Any) -> Any:
                start = time.perf_counter()
                made = function(*args, **options)
                setattr(self, name, getattr(self, name) + time.perf_counter() - start)
                return made
            return running

        own = [(cls, name, cls.__dict__[name]) for base, name in ((Selector, "plan"), (TokenSubset, "choose"))
               for cls in (base, *base.__subclasses__()) if name in cls.__dict__]
        for cls, name, function in own:
            setattr(cls, name, timed(function, "select"))
        reading.block_sparse_attention = timed(attend, "attend")
        try:
            yield
        finally:
            reading.block_sparse_attention = attend
            for cls, name, function in own:
                setattr(cls, name, function)


def stretched(model: Any, text: str, length: int) -> Recipe:
    """The recipe, with stretched positions where the length asks for them."""
    factor = -(-length // context_window(model))
    return Recipe.parse(text if factor == 1 else f"yarn(factor={factor}) + {text}")


def one_reading(model: Any, recipe: Recipe, ids: Tensor, watch: Any = None) -> tuple[dict[str, Any], Tensor]:
    """Times and density of reading `ids`, and the log-probabilities at its last positions."""
    clock = Clock()
    with recipe.on(model) as run, clock.running():
        if watch is not None:
            attend = run.attend
            run.attend = lambda call: watch(call, attend)  # type: ignore[method-assign]
        cache = run.new_cache(Prompt(ids, ids.shape[1]))
        start = time.perf_counter()
        logits = read(model, ids, cache, last=LAST)
        seconds = time.perf_counter() - start
        density = run.pairs.density if recipe.selector is not None or recipe.subsets else 1.0
    return {"ttft_s": seconds, "select_s": clock.select, "attend_s": clock.attend, "density": density}, logits[0].log_softmax(-1)


def free(call: LayerCall, attend: Any) -> Tensor:
    """Attention that costs nothing: every head's own values."""
    call.store.staged = None
    return call.v.repeat_interleave(call.q.shape[1] // call.v.shape[1], 1)


class Captured:
    """Inputs and outputs of every `EVERY`-th layer's attention during dense reading."""

    def __init__(self) -> None:
        self.layers: list[tuple[ReadContext, Tensor]] = []
        self.seconds = 0.0

    def __call__(self, call: LayerCall, attend: Any) -> Tensor:
        start = time.perf_counter()
        out = attend(call)
        self.seconds += time.perf_counter() - start
        if call.layer % EVERY == 0:
            x = ReadContext(call.q, call.k, call.v, call.scale, call.layer, call.parts.n_layers, parts=call.parts)
            self.layers.append((x, out))
        return out

    def error(self, recipe: Recipe) -> float:
        """Of the attention output, mean over layers."""
        found = []
        for x, exact in self.layers:
            out, _ = reading.read_rows(x, recipe.selector, recipe.subsets)  # type: ignore[arg-type]
            found.append(float((out.float() - exact.float()).norm() / exact.float().norm()))
        return sum(found) / len(found)


# -------------------------------------------------------------------------------------------------------------- quality


def quality(loaded: Any, text: str, length: int, examples: int, seed: int) -> dict[str, float]:
    """Mean answer nats and exact matches over the examples, and how both differ from example to example."""
    task, nats, right = parse_task(TASK), [], []
    for example in task.examples(length - 64, examples, seed, loaded.tokenizer):
        parts, wanted = prompt_parts(example, loaded.tokenizer), answer_ids(example, loaded.tokenizer)
        context = Context.from_ids(loaded, parts.context_ids, text)
        found, likeliest = context.forced(parts.question_ids, wanted)
        nats.append(sum(found) / len(found))
        right.append(float(all(likeliest)))
    return {"answer_nats": sum(nats) / len(nats), "needles": sum(right) / len(right), "examples": examples,
            "nats_each": nats}  # type: ignore[dict-item]


# ----------------------------------------------------------------------------------------------------------------- docs


def render(found: dict[str, Any]) -> str:
    """The table of every length, the fastest recipe first."""
    judged = {row["recipe"]: row for row in found["rows"] if row["part"] == "quality"}
    shown = [f"{found['machine']}. The floor stands beside every reading: the same forward with attention made free."]
    for length in sorted({row["length"] for row in found["rows"] if row["part"] == "speed"}):
        rows = sorted((r for r in found["rows"] if r["part"] == "speed" and r["length"] == length), key=lambda r: r["ttft_s"])
        with_quality = any(r["recipe"] in judged and judged[r["recipe"]]["length"] == length for r in rows)
        head = ["recipe", "density", "error", "same token", "KL", "select", "attend", "TTFT", "floor", "× floor", "vs dense"]
        head += ["answer nats", "needles"] if with_quality else []
        lines = [" | ".join(head), " | ".join(["---"] + ["--:"] * (len(head) - 1))]
        for r in rows:
            cells = [f"`{r['recipe']}`", f"{r['density']:.3f}", f"{r['error']:.3f}", f"{r['same_token']:.2f}", f"{r['kl']:.3f}",
                     f"{r['select_s']:.1f} s", f"{r['attend_s']:.1f} s", f"{r['ttft_s']:.1f} s", f"{r['floor_s']:.1f} s",
                     f"{r['over_floor']:.2f}", f"{r['speedup']:.2f}×"]
            if with_quality:
                own = judged.get(r["recipe"])
                cells += ["", ""] if own is None else [
                    f"{own['answer_nats']:.3f}", f"{own['needles'] * own['examples']:.0f} of {own['examples']}"]
            lines.append(" | ".join(cells))
        shown.append(f"**{length:,} tokens**\n\n" + "\n".join(f"| {line} |" for line in lines))
    return "\n\n".join(shown)


# ------------------------------------------------------------------------------------------------------------------ run


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, required=True)
    ask.add_argument("--length", type=int, action="append")
    ask.add_argument("--recipe", action="append", help="instead of every selector")
    ask.add_argument("--examples", type=int, default=4, help="needles at the first length; 0 leaves quality out")
    ask.add_argument("--seed", type=int, default=0, help="of the needles; settings were chosen on other seeds")
    ask.add_argument("--only", choices=("speed", "quality"))
    given = ask.parse_args()
    found = json.loads(given.out.read_text(encoding="utf-8")) if given.out.exists() else {"machine": machine(), "rows": []}
    loaded = load()

    def known(part: str, recipe: str, length: int) -> bool:
        return any(r["part"] == part and r["recipe"] == recipe and r["length"] == length for r in found["rows"])

    def note(row: dict[str, Any]) -> None:
        found["rows"].append(row)
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(" ".join(f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items() if k != "nats_each"),
              flush=True)

    lengths, wanted = given.length or LENGTHS, given.recipe or recipes()
    if given.only != "quality":
        for length in lengths:
            speed(loaded, length, [r for r in wanted if not known("speed", r, length)], note)
    if given.only != "speed" and given.examples:
        for text in (["full"] if given.seed == 0 else []) + wanted:
            if not known("quality", text, lengths[0]):
                judged = quality(loaded, text, lengths[0], given.examples, given.seed)
                note({"part": "quality", "recipe": text, "length": lengths[0], **judged})


def speed(loaded: Any, length: int, texts: list[str], note: Any) -> None:
    """Floor, dense reading, and every recipe."""
    if not texts:
        return
    model = loaded.model
    ids = torch.tensor([loaded.tokenizer(load_text().text)["input_ids"][:length]])
    one_reading(model, stretched(model, "full", length), ids[:, :512])
    floor, _ = one_reading(model, stretched(model, "full", length), ids, free)
    captured = Captured()
    dense, exact = one_reading(model, stretched(model, "full", length), ids, captured)
    dense |= {"attend_s": captured.seconds}
    base = {"part": "speed", "length": length, "floor_s": floor["ttft_s"]}
    note(base | {"recipe": "full", **dense, "over_floor": dense["ttft_s"] / floor["ttft_s"], "speedup": 1.0, "error": 0.0,
                 "same_token": 1.0, "kl": 0.0})
    for text in texts:
        recipe = stretched(model, text, length)
        one_reading(model, recipe, ids[:, : length // 8])
        row, logs = one_reading(model, recipe, ids)
        note(base | {"recipe": text, **row, "over_floor": row["ttft_s"] / floor["ttft_s"],
                     "speedup": dense["ttft_s"] / row["ttft_s"], "error": captured.error(recipe),
                     "same_token": float((logs.argmax(-1) == exact.argmax(-1)).float().mean()),
                     "kl": float((exact.exp() * (exact - logs)).sum(-1).mean())})


if __name__ == "__main__":
    main()

"""What drafts gain where they are right, and cost where they are useless, side by side with plain decoding.

    python benchmarks/speculative.py [--new N] [--rounds R] [--out FILE]

Two prompts on the bundled model: a passage to be written out again, which the answer's first words are given of (text that
repeats its context), and a list of random words to go on with (nothing repeats). Every draft writes the same number of
tokens as plain decoding, one after the other in every round; the best of the rounds. "ratio" is plain seconds over the draft's:
above 1 is faster. ``wrong`` proposes tokens that are never right, seven at a time: the worst a draft can be; ``late`` does
that after computing as long as a decode step.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longspan import Recipe, load
from longspan.context import Context
from longspan.decoding import Draft, Drafter, Proposal, Target
from longspan.evaluation.texts import load_text
from longspan.experiments.base import machine
from longspan.registry import knob, method

RECIPES = ("full", "suffix", "layer-skip", "layer-skip(gamma=2)", "magicdec", "wrong", "wrong(delay=0.03)")


class WrongDrafter(Drafter):
    """Proposes one token all over."""

    def __init__(self, gamma: int, delay: float) -> None:
        self.gamma, self.delay = gamma, delay

    def propose(self, ids: Sequence[int], limit: int) -> Proposal:
        until = time.perf_counter() + self.delay
        while time.perf_counter() < until:
            pass
        return Proposal((3,) * min(limit, self.gamma))


@method("wrong", kind="draft", summary="Proposes tokens that are never right.")
class Wrong(Draft):
    """A useless draft."""

    gamma: int = knob(7, "tokens proposed at once", low=1)
    delay: float = knob(0.0, "seconds that a proposal takes", low=0.0)

    def begin(self, target: Target) -> WrongDrafter:
        return WrongDrafter(self.gamma, self.delay)


def prompts(loaded: Any, length: int) -> dict[str, tuple[str, str, str]]:
    """Document, question and the answer's first words, by name."""
    ids = loaded.tokenizer(load_text("pydoc").text)["input_ids"]
    passage = loaded.tokenizer.decode(ids[5000 : 5000 + length])
    draw = random.Random(0)
    words = sorted({w for w in load_text("pydoc").text.split() if w.isalpha()})
    mixed = " ".join(draw.choice(words) for _ in range(length))
    start = loaded.tokenizer.decode(ids[5000:5024])
    return {"repeats": (passage, "Write the passage above out again, word for word.", start),
            "random": (loaded.tokenizer.decode(loaded.tokenizer(mixed)["input_ids"][:length]),
                       "Go on with the list of words.", draw.choice(words))}


def timed(loaded: Any, recipe: str, prompt: tuple[str, str, str], new: int) -> dict[str, float]:
    document, question, start = prompt
    context = Context.read(loaded, document, recipe)
    ids = loaded.tokenizer("\n\n" + question + context.foot + start, add_special_tokens=False)["input_ids"]
    done = context.answer_ids(ids, new)[0]
    return {"tokens": len(done.ids), "seconds": done.seconds, "passes": done.passes, "proposed": done.proposed,
            "accepted": done.accepted}


def render(found: dict[str, Any]) -> str:
    """A table for each text."""
    shown = [f"{found['machine']}. {found['new']} tokens after {found['length']:,}, the best of {found['rounds']} rounds."]
    for text in dict.fromkeys(row["text"] for row in found["rows"]):
        lines = ["| draft | ms a token | against plain | passes | stood |", "| --- | --: | --: | --: | --: |"]
        lines += [f"| `{r['recipe']}` | {r['ms_per_token']:.1f} | {r['ratio']:.2f}× | {r['passes']} | "
                  f"{r['accepted']} of {r['proposed']} |" for r in found["rows"] if r["text"] == text]
        shown.append(f"Text: {text}\n\n" + "\n".join(lines))
    return "\n\n".join(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new", type=int, default=192)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--recipe", action="append", help="a recipe; repeat; a fixed list if left out")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args()
    loaded = load()
    rows: list[dict[str, Any]] = []
    recipes = args.recipe or RECIPES
    for name, prompt in prompts(loaded, args.length).items():
        found: dict[str, list[dict[str, float]]] = {recipe: [] for recipe in recipes}
        for recipe in recipes:
            Recipe.parse(recipe)
            timed(loaded, recipe, prompt, 8)
        for _ in range(args.rounds):
            for recipe in recipes:
                found[recipe].append(timed(loaded, recipe, prompt, args.new))
        per_token = {r: min(x["seconds"] / max(1, x["tokens"] - 1) for x in runs) for r, runs in found.items()}
        for recipe, runs in found.items():
            last = runs[-1]
            rows.append({"text": name, "recipe": recipe, "ms_per_token": 1e3 * per_token[recipe],
                         "ratio": per_token[recipes[0]] / per_token[recipe], **last})
            print(f"{name:8} {recipe:32} {rows[-1]['ms_per_token']:7.2f} ms a token, ratio {rows[-1]['ratio']:5.2f}, "
                  f"{last['passes']} passes for {last['tokens']} tokens, {last['accepted']} of {last['proposed']} stood",
                  flush=True)
        if args.out:
            found_all = {"machine": machine(), "new": args.new, "length": args.length, "rounds": args.rounds, "rows": rows}
            args.out.write_text(json.dumps(found_all, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

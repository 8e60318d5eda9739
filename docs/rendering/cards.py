"""Methods from their cards: tables for the README, one page a method, and the site's menu of them."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from longspan import registry
from longspan.registry import CAPABILITIES, KINDS, Card, Knob
from longspan.reporting.methods import markdown_cards, source
from rendering.text import cell, code, prose, table

KIND_TEXT: dict[str, tuple[str, str]] = {
    "score": ("Scores", "How much an entry of the key-value cache is worth keeping."),
    "budget": ("Budgets", "How many entries every head keeps. A budget stands behind a score and an `@`."),
    "policy": ("Policies", "Methods that choose by themselves what stays, where a score times a budget can't say it."),
    "store": ("Stores", "How the kept entries are held in memory. Written into a score: `store=`."),
    "schedule": ("Schedules", "After which tokens the cache is compressed. Written into a score: `schedule=`."),
    "reuse": ("Reuse", "Keys and values computed for one prompt and used in another."),
    "selector": ("Selectors", "Which query-key pairs are computed while a prompt is read."),
    "token-subset": ("Token subsets", "Which tokens take part in a layer at all while a prompt is read."),
    "draft": ("Drafts", "Where proposed tokens come from when several are checked at once."),
    "verifier": ("Verifiers", "How proposed tokens are checked."),
    "denoising": ("Denoising", "How a block-diffusion model attends to what stands before a block while it denoises it."),
    "position": ("Positions", "How a model is told where tokens stand."),
    "weight-transform": ("Weight transforms", "Changes of a model's weights before it runs."),
    "oracle": ("Oracles", "References that know the answer: bounds, not methods to run."),
    "task": ("Tasks", "What recipes are judged on."),
    "mixer": ("Mixers", "What lets tokens see each other in a decoder trained from scratch."),
    "side-path": ("Side paths", "A second path beside the mixer."),
    "stack": ("Stacks", "How layers are composed."),
    "objective": ("Objectives", "What training minimises."),
    "retrofit": ("Retrofits", "Changes of a pretrained model that need training."),
    "codec": ("Codecs", "Lossless compression of text with a model."),
    "parallel": ("Parallel", "One sequence over many devices."),
    "sequence-model": ("Sequence models", "Long context beyond text."),
    "theory": ("Theory", "Constructions, estimators and bounds as code."),
    "context-strategy": ("Context strategies", "What the model is shown."),
}
"""Heading and one sentence for every kind."""

RECIPES = {
    "score": "{call}(budget=0.2)",
    "budget": "snapkv @ {call}(budget=0.2)",
    "policy": "{call}",
    "reuse": "{call}",
    "store": "snapkv(budget=0.2, store={call})",
    "schedule": "snapkv(budget=0.2, schedule={call})",
    "selector": "{call}",
    "token-subset": "{call}",
    "draft": "{call}",
    "verifier": "layer-skip(verify={call})",
    "denoising": "{call}",
    "weight-transform": "{call}",
}
"""A recipe that shows a method of each kind that may stand in one."""


def own() -> list[Card]:
    """Cards of the package itself, by kind and name; methods of other packages don't belong in these docs."""
    found = [c for c in registry.cards() if c.module.startswith("longspan.")]
    return sorted(found, key=lambda c: (list(KINDS).index(c.kind), c.name))


def kinds() -> list[str]:
    """Kinds that have methods."""
    return list(dict.fromkeys(c.kind for c in own()))


def methods_table() -> str:
    """All methods but tasks."""
    return linked(c for c in own() if c.kind != "task")


def tasks_table() -> str:
    return linked(c for c in own() if c.kind == "task")


def linked(cards: Iterable[Card]) -> str:
    """The library's own table of methods, each name a link to its page."""
    cards = list(cards)
    text = markdown_cards(cards)
    for card in cards:
        text = text.replace(f"| `{card.name}` |", f"| [`{card.name}`](methods/{card.name}.md) |", 1)
    return text


def recipe_example(card: Card) -> str | None:
    """A recipe with this method, or None for kinds that don't stand in recipes."""
    if card.kind not in RECIPES:
        return None
    cls = registry.get(card.name)
    if getattr(cls, "default_budget", 0.2) == 1.0:
        # A score that keeps everything says something only together with a store.
        return f"{card.name}(store=quantised(bits=4))"
    # Text knobs that are empty by default name something of the user's.
    needed = ", ".join(f'{k.name}="path/to/{k.name}"' for k in card.knobs if k.type == "str" and k.default == "")
    return RECIPES[card.kind].format(call=f"{card.name}({needed})" if needed and card.kind == "draft" and card.can("draft-model")
                                     else card.name)


def command_example(card: Card) -> str:
    """A command line that runs this method, or explains it where no command runs it alone."""
    recipe = recipe_example(card)
    if recipe is not None:
        if card.kind == "denoising":
            return f'longspan compare --model block-diffusion -r full -r "{recipe}" -t perplexity -l 192 -n 10'
        length = 2048 if card.kind == "policy" else 1024
        recipe = recipe.replace('"', "'")
        return f'longspan compare -r full -r "{recipe}" -t niah -l {length} -n 10'
    if card.kind == "task":
        # Text knobs that are empty by default name the user's own files.
        needed = ", ".join(f"{k.name}='{k.name.upper()}'" for k in card.knobs if k.type == "str" and k.default == "")
        task = f'"{card.name}({needed})"' if needed else card.name
        return f'longspan compare -r full -r "snapkv(budget=0.5)" -t {task} -l 2048 -n 10'
    if KINDS[card.kind] == "train" or card.room == "layers":
        return f"longspan train --{card.kind} {card.name}"
    return f"longspan methods {card.name}"


def page(card: Card) -> str:
    """One method: what it does, where it comes from, how it is written, its knobs, what it needs."""
    facts = [f"[{card.kind}](index.md#{anchor(card.kind)})", source(card), code(card.module.replace(".", "/") + ".py")]
    parts = [f"# {card.name}\n", f"**{prose(card.summary)}**\n", " · ".join(filter(None, facts)) + "\n"]
    parts += [f"{prose(text)}\n" for text in (idea(card), card.doc) if text]
    parts.append("## Use\n")
    recipe = recipe_example(card)
    if recipe is not None:
        parts.append(f"```text\n{recipe}\n```\n")
    parts.append(f"```bash\n{command_example(card)}\n```\n")
    parts.append("## Knobs\n")
    parts.append(knobs(card) if card.knobs else "None.\n")
    if card.kind == "score":
        parts.append(
            "Besides its knobs a score takes `budget`, `store` and `schedule`: see [recipes](../recipes.md).\n"
        )
    if card.capabilities:
        parts.append("## What it declares\n")
        parts.append("".join(f"- `{c}`: {CAPABILITIES[c]}\n" for c in card.capabilities))
    return "\n".join(parts)


def idea(card: Card) -> str:
    """The docstring of the method's file, read without importing it."""
    file = registry.PACKAGE.parent.joinpath(*card.module.split(".")).with_suffix(".py")
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""


def knobs(card: Card) -> str:
    rows = [
        [code(k.name), cell(k.kind or k.type), code(default(k.default)), values(k), cell(prose(k.help))]
        for k in card.knobs
    ]
    return table(["knob", "type", "default", "values", "meaning"], rows)


def values(knob: Knob) -> str:
    """The values a knob takes, in words."""
    if knob.choices:
        return ", ".join(code(choice) for choice in knob.choices)
    bounds = {
        (True, True): f"{knob.low} to {knob.high}",
        (True, False): f"at least {knob.low}",
        (False, True): f"at most {knob.high}",
    }
    return bounds.get((knob.low is not None, knob.high is not None), "")


def default(value: object) -> str:
    """As a user would write it."""
    return '""' if value == "" else str(value)


def anchor(kind: str) -> str:
    return KIND_TEXT[kind][0].lower().replace(" ", "-")


def overview() -> str:
    """The methods of every kind, with what the kind is for."""
    parts = [
        "# Methods\n",
        "Generated from the methods' cards, which `longspan methods` shows in the terminal. Every name "
        "leads to a page with its knobs.\n",
    ]
    for kind in kinds():
        title, sentence = KIND_TEXT[kind]
        parts.append(f"## {title}\n\n{sentence}\n")
        rows = [[f"[`{c.name}`]({c.name}.md)", cell(prose(c.summary)), source(c)] for c in own() if c.kind == kind]
        parts.append(table(["name", "what it does", "source"], rows))
    return "\n".join(parts)


def pages() -> dict[str, str]:
    """File name and content of everything in docs/methods/."""
    return {"index.md": overview(), **{f"{card.name}.md": page(card) for card in own()}}


def menu() -> str:
    """The site's menu of methods, as YAML lines below ``nav:``."""
    lines = ["  - Methods:", "      - All methods: methods/index.md"]
    for kind in kinds():
        lines.append(f"      - {KIND_TEXT[kind][0]}:")
        lines += [f"          - {c.name}: methods/{c.name}.md" for c in own() if c.kind == kind]
    return "\n".join(lines) + "\n"

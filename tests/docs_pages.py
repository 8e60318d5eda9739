"""What the documentation's tests share: the pages, and a check of command lines that stand in them."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from longspan.evaluation import parse_task
from longspan.recipe import Recipe

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

from rendering import commands  # noqa: E402

COPIES = ("index.md", "contributing.md")
BY_HAND = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(file for file in sorted(DOCS.glob("*.md")) if file.name not in COPIES),
]
"""Pages that people write, with or without generated blocks."""


def shell_lines(text: str) -> list[list[str]]:
    """Words of every `longspan …` line in the shell blocks of a page."""
    found = []
    for body in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        for line in body.splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0].split("/")[-1] == "longspan":
                found.append(["longspan", *words[1:]])
    return found


def checked_command(words: list[str]) -> None:
    """Fail unless the command, its options, and the recipes and tasks in it are known."""
    known = commands.commands()
    assert words[1] in known, f"unknown command {words[1]}"
    options = {spelling: p for p in commands.parameters(known[words[1]]) for spelling in p.spelled}
    required = sum(p.required and not p.spelled for p in commands.parameters(known[words[1]]))
    rest, arguments, given = iter(words[2:]), 0, {}
    for word in rest:
        if not word.startswith("-"):
            arguments += 1
            continue
        assert word in options, f"{' '.join(words)}: unknown option {word}"
        if not options[word].is_flag:
            given.setdefault(options[word].name, []).append(p_value := next(rest))
            assert p_value
    assert arguments >= required, f"{' '.join(words)}: arguments are missing"
    if words[1] == "compare":
        for task in given.get("task", []):
            parse_task(task)
    if "vatp" not in " ".join(words):
        for recipe in given.get("recipe", []):
            Recipe.parse(recipe)

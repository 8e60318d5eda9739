"""The rules of the house: rooms import lower rooms only, methods can be removed, the index is current, nothing leaks."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from longspan import registry

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "longspan"
ORDER = [
    ["registry", "grammar"], ["kernels"], ["layers"], ["models"], ["prefill"], ["cache"], ["decoding"], ["recipe"],
    ["training", "weights", "coding", "parallel", "sequences", "theory"], ["context"], ["evaluation"],
    ["experiments", "reporting"], ["serving"], ["terminal"], ["commands"], ["cli"],
]
RANK = {room: i for i, rooms in enumerate(ORDER) for room in rooms}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imports(file: Path) -> set[str]:
    """Dotted names below longspan that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("longspan"):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("longspan.")}
    return found


def test_rooms_import_lower_rooms_only():
    wrong = []
    for file in modules():
        room = room_of(file)
        if room == "__init__":
            continue
        assert room in RANK, f"{room} has no place in the order of rooms"
        for name in imports(file):
            other = name.split(".")[1]
            if other in RANK and RANK[other] > RANK[room]:
                wrong.append(f"{file.relative_to(ROOT)} imports {name}")
            if other in RANK and other != room and RANK[other] == RANK[room] and room not in ORDER[0]:
                wrong.append(f"{file.relative_to(ROOT)} imports its neighbour {name}")
    assert sorted(set(wrong)) == []


def test_every_file_says_what_it_is():
    silent = [str(f.relative_to(ROOT)) for f in modules()
              if f.read_text(encoding="utf-8").strip() and not ast.get_docstring(ast.parse(f.read_text(encoding="utf-8")))]
    assert silent == []


def test_index_is_current(tmp_path):
    made = tmp_path / "methods.json"
    code = f"from pathlib import Path; from longspan.registry import write_index; write_index(Path({str(made)!r}))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    assert json.loads(made.read_text()) == json.loads(registry.INDEX_FILE.read_text()), "run `make index`"


def test_cards_are_complete():
    for card in registry.cards():
        assert card.summary.endswith(".") and len(card.summary) <= 120, card.name
        for knob in card.knobs:
            assert knob.help, f"{card.name}.{knob.name} has no one-line meaning"


def test_help_answers_without_pytorch():
    code = "import sys; sys.argv = ['longspan', '--help']\nfrom longspan import cli\n"
    code += "try:\n cli.main()\nexcept SystemExit:\n pass\n"
    code += "print('torch' in sys.modules, file=sys.stderr)"
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stderr.strip().endswith("False")
    assert "compare" in done.stdout
    assert time.perf_counter() - start < 20  # a generous bound for a busy machine; it takes a quarter of a second


def removable() -> list[str]:
    """Method modules that no other module imports directly: taking one away must not be noticed elsewhere."""
    named = {name for file in modules() for name in imports(file)}
    used = named | {name.rsplit(".", 1)[0] for name in named}
    return [m for m in registry.method_modules() if m not in used]


def test_methods_can_be_removed(tmp_path):
    """Take a few methods' files away (chosen by the commit): everything else still works."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    dice = found.stdout.strip() or "no repository"
    candidates = removable()
    chosen = sorted(candidates, key=lambda m: hashlib.sha256((dice + m).encode()).digest())[:4]
    shutil.copytree(PACKAGE, tmp_path / "longspan", ignore=shutil.ignore_patterns("__pycache__"))
    for module in chosen:
        (tmp_path / module.replace(".", "/")).with_suffix(".py").unlink()
    code = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from longspan import registry
cards = registry.cards()
found = registry.discover()
assert {c.name for c in found} == {c.name for c in cards}, "index and source differ"
from tiny_models import tiny, tiny_ids
from longspan import Recipe
model = tiny("llama")
ids = tiny_ids(1, 40) if callable(tiny_ids) else None
for card in cards:
    if card.kind == "score" and not card.can("profile"):
        recipe = Recipe.parse(f"{card.name}(budget=0.9)")
        with recipe.on(model):
            model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=2)
print(len(cards))
"""
    done = subprocess.run([sys.executable, "-c", code, str(ROOT / "tests")], capture_output=True, text=True, cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, f"without {chosen}:\n{done.stderr}"
    assert int(done.stdout.split()[-1]) < len(registry.cards())


FORBIDDEN = ("/work" + "/", "/fa" + "rm/", "sub" + "agent", "pypi" + ".org", "files.python" + "hosted")


@pytest.mark.parametrize("word", FORBIDDEN)
def test_nothing_of_a_workplace_leaks(word):
    found = subprocess.run(["git", "grep", "-nI", "--fixed-strings", word, "--", "."], capture_output=True, text=True, cwd=ROOT)
    if found.returncode > 1:
        pytest.skip("not a git checkout")
    lines = [line for line in found.stdout.splitlines() if "test_architecture" not in line]
    assert lines == []

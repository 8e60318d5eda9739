"""Examples in the documentation: commands, recipes, refusals and Python that work as they are written."""

from __future__ import annotations

import ast
import importlib
import re

import pytest
from docs_pages import BY_HAND, DOCS, ROOT, checked_command, shell_lines
from rendering import cards, combinations, commands
from tiny_folder import write_tiny_folder

import longspan
from longspan import registry
from longspan.registry import KINDS, Refused

pages = pytest.mark.parametrize("page", BY_HAND, ids=lambda page: page.name)


# ------------------------------------------------------------------------------------------------- commands and recipes


@pages
def test_commands_in_pages_are_ones_that_exist(page):
    for words in shell_lines(page.read_text(encoding="utf-8")):
        checked_command(words)


def test_the_command_check_notices_mistakes():
    for line in ("longspan compute -r full", "longspan compare --recipes full", "longspan ask only-a-file"):
        with pytest.raises(AssertionError):
            checked_command(line.split())
    with pytest.raises(Refused):
        checked_command(["longspan", "compare", "-r", "snapvk"])


@pytest.mark.parametrize("name", commands.commands())
def test_the_reference_lists_every_option(name):
    section = (DOCS / "command-line.md").read_text(encoding="utf-8").split(f"\n## {name}\n")[1].split("\n## ")[0]
    tree = ast.parse((ROOT / f"longspan/commands/{name}.py").read_text(encoding="utf-8"))
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    for argument in function.args.args:
        spelled = "json" if argument.arg == "as_json" else argument.arg.replace("_", "-")
        assert f"--{spelled}" in section or f"`{argument.arg.upper()}`" in section, argument.arg


def test_recipes_and_refusals_on_the_recipes_page():
    text = (DOCS / "recipes.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| (`.+?`) \| (.+?) \|$", text, re.MULTILINE)
    recipes = [(recipe.strip("`"), said) for recipe, said in shown if "(" in recipe or recipe == "`full`"]
    refused = [(recipe, said) for recipe, said in recipes if combinations.attempt(recipe)]
    assert len(recipes) - len(refused) >= 8 and len(refused) == 5
    for recipe, said in refused:
        assert combinations.attempt(recipe) == said
    assert combinations.attempt("auto") != ""


# -------------------------------------------------------------------------------------------------------------- Python


def python_blocks(file: Path) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", file.read_text(encoding="utf-8"), re.DOTALL))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    from longspan.models import load

    folder = write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny")
    return load(folder, dtype="float32", device="cpu")


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "python.md"], ids=lambda page: page.name)
def test_python_examples_run(page, tiny, monkeypatch):
    monkeypatch.setattr(longspan, "load", lambda *_, **__: tiny)
    source = python_blocks(page)
    assert "load" in source
    exec(compile(source, str(page), "exec"), {"__name__": "example"})


def test_the_training_page_agrees_with_itself(tmp_path, monkeypatch, capsys):
    """Its decoder reads alike whole and in pieces, and its operator, saved as a file, trains."""
    from longspan.training.command import TrainOptions, train

    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "training.md").read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(blocks[0], "training.md", "exec"), {"__name__": "example"})
    assert capsys.readouterr().out.strip() == "tensor(True)"
    registry.get("next-token")  # what training registers must outlast the patch
    monkeypatch.setattr(registry, "_methods", dict(registry._methods))
    (tmp_path / "half.py").write_text(blocks[1], encoding="utf-8")
    (card,) = registry.load_file(tmp_path / "half.py")
    report = train(TrainOptions(mixer=card.name, task="copy", context=16, steps=2, batch=2, dim=16, eval_batches=1))
    assert report["mixer"] == "half" and report["position"] == "rope"


@pytest.mark.slow
def test_the_readme_example_runs_on_the_bundled_model(capsys):
    exec(compile(python_blocks(ROOT / "README.md"), "README.md", "exec"), {"__name__": "example"})
    answer, held = capsys.readouterr().out.strip().splitlines()[-2:]
    assert answer and " of " in held


def test_the_package_docstring_shows_names_that_exist():
    for name in longspan.__all__:
        assert getattr(longspan, name) is not None


def test_base_classes_named_for_contributors_exist():
    rows = re.findall(
        r"^\| ([\w-]+) \| `(longspan[\w.]+)` \| (.+?) \| (.+?) \|$",
        (ROOT / "CONTRIBUTING.md").read_text(),
        re.MULTILINE,
    )
    assert len(rows) >= 11
    for kind, path, methods, rooms in rows:
        module, _, name = path.rpartition(".")
        cls = getattr(importlib.import_module(module), name)
        assert kind in KINDS and all(callable(getattr(cls, m)) for m in re.findall(r"`(\w+)`", methods))
        assert all((ROOT / room).is_dir() for room in re.findall(r"`([\w/]+)`", rooms))
        assert all(issubclass(registry.get(c.name), cls) for c in cards.own() if c.kind == kind)


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_in_the_root_lead_somewhere(page):
    targets = re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert targets
    for target in targets:
        assert (ROOT / target).exists(), target

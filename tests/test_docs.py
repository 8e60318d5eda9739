"""The documentation: what is generated is current, matches the cards and the data, and the site builds."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from docs_pages import BY_HAND, DOCS, ROOT, checked_command

import render  # isort: skip  (docs/ is on the path from here on)
from rendering import cards, combinations, results
from rendering.text import blocks, fill, prose

from longspan import registry
from longspan.recipe import Recipe
from longspan.registry import CAPABILITIES, KINDS

GENERATED = sorted((DOCS / "methods").glob("*.md"))
names = pytest.mark.parametrize("card", cards.own(), ids=lambda card: card.name)


# ------------------------------------------------------------------------------------------------------------- current


def test_rendering_again_changes_nothing():
    made, _ = render.outputs()
    assert [str(f.relative_to(ROOT)) for f in render.stale(made)] == [], "run `make docs`"


def test_every_generated_block_has_a_maker():
    wanted = {name for page in [*BY_HAND, ROOT / "mkdocs.yml"] for name in blocks(page.read_text(encoding="utf-8"))}
    assert wanted == set(render.sections(ROOT))


def copy_of_docs(tmp_path: Path) -> Path:
    shutil.copytree(
        DOCS, tmp_path / "docs", ignore=shutil.ignore_patterns("data", "reproduction", "images", "__pycache__")
    )
    for name in ("README.md", "CONTRIBUTING.md", "mkdocs.yml"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    return tmp_path


def test_missing_data_is_named_with_the_command_that_makes_it(tmp_path, monkeypatch, capsys):
    root = copy_of_docs(tmp_path)
    made, missing = render.outputs(root)
    for name in ("demo", *results.BENCHMARKS):
        assert any(f"docs/data/{name}.json is missing; run `" in sentence for sentence in missing)
    assert any("docs/reproduction holds no outcome; run `longspan reproduce" in sentence for sentence in missing)
    assert root / "docs/images/pareto.svg" not in made
    assert blocks(made[root / "README.md"])["results"] == blocks((root / "README.md").read_text())["results"]
    monkeypatch.setattr(render, "outputs", lambda: (made, missing))
    monkeypatch.setattr(sys, "argv", ["render.py"])
    assert render.main() == 1
    assert "docs/data/demo.json is missing" in capsys.readouterr().err


def test_pages_of_methods_that_are_gone_are_removed(tmp_path):
    root = copy_of_docs(tmp_path)
    left = root / "docs" / "methods" / "gone.md"
    left.write_text("# gone\n")
    made, _ = render.outputs(root)
    assert left in render.write(made, root) and not left.exists()
    assert render.stale(made, root) == []


# ------------------------------------------------------------------------------------------- results, from made-up data


LINE = {
    "task": "niah",
    "length": 1024,
    "n": 8,
    "compress": "before-question",
    "answer_nll": 0.25,
    "full_cache_bytes": 2**24,
    "ttft_s": 0.5,
    "tokens_per_s": 20.0,
    "achieved": {},
}
DEMO = {
    "model": "made-up",
    "machine": "a desk",
    "rows": [
        {**LINE, "recipe": "full", "accuracy": 0.875, "ci95": [0.5, 0.98], "cache_bytes": 2**24},
        {
            **LINE,
            "recipe": "keydiff(budget=0.5)",
            "accuracy": 0.75,
            "ci95": [0.4, 0.93],
            "cache_bytes": 2**23,
            "answer_nll": 0.5,
            "vs_full": {
                "accuracy_difference": -0.125,
                "ci95": [-0.4, 0.2],
                "p_value": 1.0,
                "p_holm": 1.0,
                "wins": 0,
                "losses": 1,
                "nll_difference": 0.25,
                "nll_ci95": [0.1, 0.4],
                "nll_p_value": 0.1,
                "n": 8,
            },
        },
    ],
}
BENCH = {
    "threads": 3,
    "torch": "9.9",
    "rows": [
        {
            "dtype": "bfloat16",
            "length": 8192,
            "density": 0.1,
            "sdpa_s": 1.25,
            "ours_s": 0.2,
            "speedup": 6.25,
            "limit": 10.0,
            "note|": None,
        }
    ],
}
STORE = {"store": "ragged", "cache_mb": 75.0, "ms_per_step": 20.0, "bound": 2.0, "reachable": 1.75, "speedup": 1.5,
         "share_of_bound": 0.75}
BATCHES = {"length": 900, "budget": 0.2, "dtype": "bfloat16", "weights_mb": 270.0, "machine": "a desk",
           "batches": [{"rows": 3, "stores": [STORE, {**STORE, "store": "floor", "ms_per_step": 12.5}]}]}
COSTS = {"machine": "a desk", "rows": [{"score": "knorm", "watches": "keys", "tokens": 900, "added_s": 0.5, "dense_s": 10.0,
                                        "share": 0.05}]}
READ = {"part": "speed", "recipe": "xattention", "length": 512, "density": 0.25, "error": 0.125, "same_token": 0.75, "kl": 0.5,
        "select_s": 0.5, "attend_s": 1.0, "ttft_s": 3.5, "floor_s": 2.0, "over_floor": 1.75, "speedup": 2.5}
READING = {"machine": "a desk", "rows": [READ, {"part": "quality", "recipe": "xattention", "length": 512, "answer_nats": 0.25,
                                               "needles": 0.5, "examples": 4}]}
BLIND = {"block": 128, "tokens": 900, "model": "made-up", "heads": [
    {"dim": 64, "base": 1e5, "cut_off": 18, "dh": 32, "dl": 48, "rows": [
        {"channel": 0, "theta": 1.0, "closed_form": 0.015, "measured": 0.015, "keys": 0.05},
        {"channel": 32, "theta": 0.003, "closed_form": 0.99, "measured": 0.99, "keys": 0.7}]}]}
LOW_BIT = {"threads": 2, "torch": "9.9", "rows": [
    {"length": 512, "groups": "per_thread", "sdpa_s": 2.0, "codes_s": 0.01, "sink_local_s": 0.02,
     "estimate_nothing_chosen_s": 0.1, "plan_nothing_chosen_s": 0.125, "plan_much_chosen_s": 0.1,
     "selection_nothing_chosen_of_sdpa": 0.0625, "selection_much_chosen_of_sdpa": 0.05}]}
DRAFTS = {"machine": "a desk", "new": 9, "length": 512, "rounds": 3,
          "rows": [{"text": "repeats", "recipe": "suffix", "ms_per_token": 12.5, "ratio": 2.25, "passes": 4, "accepted": 5,
                    "proposed": 7}]}
SWEPT = {"task": "ruler-niah-multikey-1", "length": 512, "n": 4,
         "accuracy": 0.5, "ci95": [0.2, 0.8], "answer_nll": 1.25, "cache_bytes": 2**22,
         "full_cache_bytes": 2**24}
SWEEP = {"model": "made-up", "machine": "a desk", "refused": [],
         "rows": [{**SWEPT, "recipe": "full", "cache_bytes": 2**24}, {**SWEPT, "recipe": "knorm @ uniform(budget=0.2)"}],
         "winners": [{"task": "ruler-niah-multikey-1", "budget": 0.2, "n": 4,
                      "winner": "knorm @ uniform(budget=0.2)", "answer_nll": 1.25,
                      "full_nll": 1.0, "recipes": 1, "not_told_apart": []}]}
OUTCOME = {
    "id": "made-up",
    "system": "made-up",
    "scale": "small",
    "claim": "It works.",
    "measured": {"gain": 1.5},
    "expected": {},
    "checks": {},
    "verdict": "failed",
    "reason": "it doesn't.",
}


AT = {str(n): 2.0 + n / 100 for n in (1, 2, 4, 8, 16)}
ARENA = OUTCOME | {"id": "arena", "seeds": [0, 1], "machine": "a desk", "table": [
    {"arm": "softmax, rope", "reads_like": None, "parameters": 1000, "text": AT, "recall": AT, "slots": AT,
     "text by seed": {n: [v, v + 0.5] for n, v in AT.items()}, "tokens/s at 1x": 5000.0, "tokens/s at 1x relative": 1.0}]}


@pytest.fixture(scope="module")
def rendered(tmp_path_factory):
    """A copy of the docs with made-up results, rendered."""
    root = copy_of_docs(tmp_path_factory.mktemp("copy"))
    for folder in ("data", "reproduction"):
        (root / "docs" / folder).mkdir()
    for name in ("block_sparse", "ragged_decode"):
        (root / "docs/data" / f"{name}.json").write_text(json.dumps(BENCH))
    for name, made_up in (("demo", DEMO), ("decode_batch", BATCHES), ("score_cost", COSTS), ("cache_sweep", SWEEP),
                          ("reading", READING), ("speculative", DRAFTS), ("low_bit", LOW_BIT), ("pooling_blind_spot", BLIND)):
        (root / f"docs/data/{name}.json").write_text(json.dumps(made_up))
    (root / "docs/reproduction/made-up.json").write_text(json.dumps(OUTCOME))
    (root / "docs/reproduction/arena.json").write_text(json.dumps(ARENA))
    made, missing = render.outputs(root)
    unmade = ("kvpress", "context_parallel", "entmax", "plash_scaling", "drawing")
    assert [m for m in missing if not any(name in m for name in unmade)] == []
    render.write(made, root)
    return root


def test_results_reach_readme_and_site_with_links_that_fit(rendered):
    readme, index = (rendered / "README.md").read_text(), (rendered / "docs/index.md").read_text()
    for page, prefix in ((readme, "docs/"), (index, "")):
        assert f"]({prefix}images/pareto.svg)" in page and f"]({prefix}combinations.md)" in page
        assert "75% [40, 93]" in page and "−12 ·" in page and "8.00 MiB" in page and "a desk" in page
    assert "](docs/reproduction/made-up.json)" in readme and "](docs/methods/snapkv.md)" in readme
    assert "](contributing.md)" in index and "## Methods" not in index
    assert "](reproduction/made-up.json)" in (rendered / "docs/reproduction.md").read_text()
    for name in ("pareto", "nll"):
        assert "keydiff" in (rendered / f"docs/images/{name}.svg").read_text()


def test_readings_stand_beside_their_floor(rendered):
    page = (rendered / "docs/benchmarks.md").read_text()
    assert ("| `xattention` | 0.250 | 0.125 | 0.75 | 0.500 | 0.5 s | 1.0 s | 3.5 s | 2.0 s | 1.75 | 2.50× | 0.250 | 2 of 4 |"
            in page)
    assert "| `suffix` | 12.5 | 2.25× | 4 | 5 of 7 |" in page
    assert "| 512 | per_thread | 2.00 s | 10 ms | 20 ms | 100 ms | 6.2% | 5.0% |" in page
    assert "closed form" in (rendered / "docs/images/blind-spot.svg").read_text()


def test_the_arena_is_one_table_and_three_pictures(rendered):
    page = (rendered / "docs/arena.md").read_text()
    assert "2.010 2.020 2.040 2.080 2.160" in page and "5,000 (1.00)" in page and "differ by 0.500 nats" in page
    for task in ("text", "recall", "slots"):
        assert "softmax, rope" in (rendered / f"docs/images/arena-{task}.svg").read_text()


def test_benchmarks_are_shown_in_their_units():
    text = results.plain(BENCH)
    assert text.startswith("threads: 3; torch: 9.9.\n")
    assert "| bfloat16 | 8,192 | 0.1 | 1.25 s | 200 ms | 6.25× | 10.00× | – |" in text
    assert "PyTorch" not in text and "| dtype | tokens | density | dense | sparse | speedup |" in text


def test_a_benchmark_that_renders_itself_is_asked_to(tmp_path, monkeypatch):
    (tmp_path / "docs/data").mkdir(parents=True)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "docs/data/own.json").write_text('{"x": 3}')
    (tmp_path / "benchmarks/own.py").write_text("def render(result):\n    return f'own {result}\\n\\n'\n")
    monkeypatch.setitem(results.BENCHMARKS, "own", "own.py")
    assert results.benchmark(tmp_path / "docs", "own") == "own {'x': 3}\n"


def test_the_demo_is_taken_from_a_finished_run(tmp_path):
    from longspan.evaluation.runner import write_parquet

    row = {
        "model": "m",
        "task": "niah",
        "length": 512,
        "index": 0,
        "seed": 0,
        "compress": "before-question",
        "dtype": "float32",
        "text_source": "here",
        "text_hash": "0" * 64,
        "max_new_tokens": 8,
        "score": 1.0,
        "answer_nll": 0.1,
        "cache_bytes": 10,
        "full_cache_bytes": 20,
        "ttft_s": 0.1,
        "tokens_per_s": 5.0,
        "new_tokens": 5,
        "decode_s": 1.0,
    }
    achieved = json.dumps({"kept_fraction": 0.5, "kept_per_layer_and_head": [[1, 2]]})
    write_parquet(tmp_path / "rows.parquet", [{**row, "recipe": "full", "achieved": achieved}])
    file = results.take(tmp_path, tmp_path / "data")
    found = json.loads(file.read_text())
    assert (found["model"], found["dtype"], found["text_source"]) == ("m", ["float32"], ["here"])
    assert found["rows"][0]["achieved"] == {"kept_fraction": 0.5}
    with pytest.raises(results.Missing, match=r"rows\.parquet is missing"):
        results.take(tmp_path / "nowhere", tmp_path)


# -------------------------------------------------------------------------------------------------------- method pages


@names
def test_a_method_page_says_what_the_card_says(card):
    text = (DOCS / "methods" / f"{card.name}.md").read_text(encoding="utf-8")
    assert f"# {card.name}\n" in text and prose(card.summary) in text
    assert card.module.replace(".", "/") + ".py" in text and (ROOT / (card.module.replace(".", "/") + ".py")).is_file()
    for knob in card.knobs:
        assert f"| `{knob.name}` |" in text
    for capability in card.capabilities:
        assert f"- `{capability}`: {CAPABILITIES[capability]}" in text
    if card.paper.startswith("arXiv:"):
        assert f"(https://arxiv.org/abs/{card.paper.removeprefix('arXiv:')})" in text
    rows = re.findall(r"^\| `\w+` \|", text, re.MULTILINE)
    assert len(rows) == len(card.knobs)


@names
def test_a_method_page_shows_how_it_is_used(card):
    recipe = cards.recipe_example(card)
    if recipe is not None:
        assert card.name in [m.card.name for m in Recipe.parse(recipe).methods] or card.name == "full"
    checked_command(shlex.split(cards.command_example(card)))


def test_every_kind_has_a_heading():
    assert set(cards.KIND_TEXT) == set(KINDS)


def test_methods_of_other_packages_stay_out(monkeypatch):
    foreign = registry.Card("foreign", "score", "x", "external", "", "Not ours.", "somewhere.else", "X")
    monkeypatch.setattr(registry, "cards", lambda **_: [foreign])
    assert cards.own() == []


def test_docstrings_become_markdown_that_means_the_same():
    assert prose("Sum ``a*b`` * c_i, H * B, *not* so::\n\n    x_1 * y < z\n\n<tag> _u") == (
        "Sum `a*b` \\* c_i, H \\* B, *not* so:\n\n    x_1 * y < z\n\n&lt;tag> \\_u"
    )


# -------------------------------------------------------------------------------------------------------- combinations


def test_combinations_tell_what_the_parser_does():
    assert combinations.attempt("snapkv @ adakv(budget=0.5)") == ""
    reason = combinations.attempt("snapkv(store=dense) @ adakv(budget=0.5)")
    assert reason.startswith("adakv keeps a different number")
    text = combinations.grid(
        ["budget", "store"],
        [("adakv", "dense"), ("uniform", "dense")],
        ["snapkv", "knorm"],
        lambda b, s, score: f"{score}(store={s}) @ {b}(budget=0.5)",
    )
    assert "| `adakv` | `dense` | no (1) | no (1) |" in text and "| `uniform` | `dense` | yes | yes |" in text
    assert text.endswith(f"\n1. {reason}\n")


# ---------------------------------------------------------------------------------------------------------------- site


def test_generated_blocks_keep_their_markers():
    page = "a\n<!-- begin generated: x -->\nold\n<!-- end generated -->\n  # begin generated: y\n  # end generated\nz\n"
    filled = fill(page, lambda name, body: f"{name} was {body!r}\n")
    assert blocks(filled) == {"x": "x was 'old\\n'\n", "y": "y was ''\n"}
    assert fill(filled, lambda name, body: {"x": "old\n", "y": ""}[name]) == page


def test_the_site_builds_and_loads_nothing_from_elsewhere(rendered, tmp_path):
    pytest.importorskip("material")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "--site-dir",
            str(tmp_path / "site"),
            "--config-file",
            str(rendered / "mkdocs.yml"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    built = list((tmp_path / "site").rglob("*.html"))
    assert len(built) > len(GENERATED)
    for file in built:
        for tag in re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", file.read_text(encoding="utf-8")):
            assert not re.search(r"(?:src|href)=\"?(?:https?:)?//", tag), f"{file.name}: {tag}"
    assert not list((tmp_path / "site").rglob("render*"))

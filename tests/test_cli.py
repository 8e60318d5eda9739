"""The command line: what it prints, its exit codes, and one clear sentence for every bad request."""

from __future__ import annotations

import json

import pytest
from tiny_folder import write_tiny_folder

from longspan import registry


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny"))


def test_compare_gives_one_json_document(call, folder):
    code, out, _ = call("compare", "-m", folder, "-r", "full", "-r", "knorm(budget=0.5)", "-t", "passkey", "-l", "512",
                        "-n", "2", "--max-new-tokens", "3", "--dtype", "float32", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["model"] == "tiny"
    full, half = found["rows"]
    wanted = {"recipe", "task", "length", "n", "accuracy", "ci95", "answer_nll", "cache_bytes", "full_cache_bytes",
              "ttft_s", "tokens_per_s", "achieved"}
    assert wanted <= set(full)
    assert (full["recipe"], half["recipe"], half["n"]) == ("full", "knorm(budget=0.5)", 2)
    assert half["cache_bytes"] < 0.62 * full["cache_bytes"]  # positions take 4 bytes beside 2 x 8 floats
    assert half["achieved"]["kept_fraction"] == pytest.approx(0.5, abs=0.01)


def test_compare_writes_a_report_and_resumes(call, folder, tmp_path):
    words = ("compare", "-m", folder, "-r", "full", "-r", "tova(budget=0.5)", "-t", "niah", "-l", "512", "-n", "2",
             "--max-new-tokens", "2", "--out", str(tmp_path / "out"))
    code, out, _ = call(*words)
    assert code == 0 and "Report:" in out
    page = (tmp_path / "out" / "report.html").read_text()
    assert "tova(budget=0.5)" in page
    before = (tmp_path / "out" / "rows.jsonl").read_bytes()
    assert call(*words)[0] == 0
    assert (tmp_path / "out" / "rows.jsonl").read_bytes() == before
    assert (tmp_path / "out" / "rows.parquet").exists() and (tmp_path / "out" / "summary.json").exists()


def test_ask(call, folder, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("The lamp is in the cellar. " * 20)
    code, out, err = call("ask", str(file), "Where is the lamp?", "-m", folder, "-r", "snapkv(window=8, budget=0.5)",
                          "--max-new-tokens", "4", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["achieved"]["kept_fraction"] == pytest.approx(0.5, abs=0.02)
    assert set(found) >= {"model", "recipe", "answer", "read_s", "ttft_s", "tokens_per_s"}


def test_methods_and_tasks(call):
    code, out, _ = call("methods", "--json")
    assert code == 0
    rows = json.loads(out)
    assert {"name", "system", "kind", "room", "paper", "summary", "knobs"} <= set(rows[0])
    assert {r["name"] for r in rows} == {c.name for c in registry.cards()}
    code, out, _ = call("methods", "snapkv", "--json")
    knobs = json.loads(out)[0]["knobs"]
    assert {"name", "type", "default", "help"} <= set(knobs[0])
    code, out, _ = call("tasks", "--json")
    names = {r["name"] for r in json.loads(out)}
    assert {"niah", "passkey", "kv-retrieval", "perplexity", "ruler-vt", "ruler-cwe", "ruler-fwe"} <= names
    assert sum(n.startswith("ruler-niah") for n in names) == 8
    code, out, _ = call("methods", "--kind", "budget")
    assert code == 0 and "adakv" in out and "snapkv" not in out


def test_train_reports(call):
    code, out, _ = call("train", "--task", "recall", "--steps", "2", "--dim", "16", "--heads", "2", "--context", "16",
                        "--batch", "2", "--json")
    assert code == 0
    assert json.loads(out)


BAD = {
    "unknown recipe": (["compare", "-r", "snpkv"], "snapkv"),
    "unknown knob": (["compare", "-r", "snapkv(widow=3)"], "window"),
    "unknown task": (["compare", "-t", "niha"], "niah"),
    "a method as a task": (["compare", "-t", "snapkv"], "expected a task"),
    "no examples": (["compare", "-n", "0"], "at least 1"),
    "negative length": (["compare", "-l", "-5"], "expected a number of tokens"),
    "length below the floor": (["compare", "-t", "niah", "-l", "20"], "at least"),
    "prompt over the window": (["compare", "-t", "passkey", "-l", "9000", "-n", "1"], "4096"),
    "compress when": (["compare", "--compress", "later"], "before-question"),
    "missing file": (["ask", "no-such-file.txt", "What?"], "no such file"),
    "missing model": (["compare", "-m", "no-such-model"], "no-such-model"),
    "missing own file": (["compare", "--load", "nothing.py"], "no such file"),
    "unknown method": (["methods", "snapvk"], "snapkv"),
    "unknown room": (["methods", "--room", "cash"], "cache"),
    "unknown experiment": (["reproduce", "cache-baseline"], "cache-baselines"),
    "unknown scale": (["reproduce", "cache-baselines", "--scale", "tiny"], "smoke"),
    "memory without a unit": (["plan", "--context", "1024", "--memory", "7"], "2GiB"),
    "context beyond the window": (["plan", "--context", "99999", "--memory", "1GiB"], "at most"),
    "unknown mixer": (["train", "--mixer", "softmx"], "softmax"),
    "empty recipe": (["compare", "-r", ""], "empty"),
    "budget too small for the window": (
        ["compare", "-r", "snapkv(budget=\"8 tokens\")", "-t", "passkey", "-l", "512", "-n", "1"], "32"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_requests_get_one_sentence(what, call, folder):
    words, hint = BAD[what]
    if words[0] in ("compare", "ask", "plan") and "-m" not in words:
        words = [*words, "-m", folder]
    code, out, err = call(*words)
    assert code == 2, err
    assert out == ""
    assert hint in err and "Traceback" not in err
    assert len(err.strip().splitlines()) == 1


def test_files_that_are_not_text(call, folder, tmp_path):
    binary = tmp_path / "picture.png"
    binary.write_bytes(bytes(range(256)))
    code, _, err = call("ask", str(binary), "What?", "-m", folder)
    assert code == 2 and "not text" in err
    empty = tmp_path / "empty.txt"
    empty.write_text("  \n")
    code, _, err = call("ask", str(empty), "What?", "-m", folder)
    assert code == 2 and "empty" in err
    full = tmp_path / "full.txt"
    full.write_text("word " * 50)
    code, _, err = call("ask", str(full), "why " * 6000, "-m", folder)
    assert code == 2 and "4096" in err
    code, _, err = call("ask", str(full), "  ", "-m", folder)
    assert code == 2 and "question is empty" in err


def test_a_failed_run_exits_with_one(call, folder, monkeypatch):
    import longspan.evaluation

    def breaks(*_):
        raise RuntimeError("the machine is on fire")

    monkeypatch.setattr(longspan.evaluation, "run", breaks)
    code, _, err = call("compare", "-m", folder, "-r", "full")
    assert code == 1 and "on fire" in err and "Traceback" not in err


def test_auto_asks_the_planner(call, folder):
    code, out, err = call("compare", "-m", folder, "-r", "auto", "-t", "passkey", "-l", "512", "-n", "1",
                          "--max-new-tokens", "1", "--json")
    assert code == 0, err
    assert json.loads(out)["rows"][0]["recipe"].startswith("auto: ")


@pytest.mark.parametrize("words", [
    ("--mixer", "gated", "--dim", "16", "--layers", "1", "--heads", "2", "--task", "copy", "--context", "16"),
    ("--retrofit", "repo", "--model", "FOLDER", "--context", "32"),
    ("--task", "l-cube", "--dim", "16", "--layers", "1", "--heads", "2", "--context", "8", "--batch", "2"),
], ids=["decoder", "retrofit", "l-cube"])  # fmt: skip
def test_train_reaches_decoders_retrofits_and_l_cube(call, folder, words):
    code, out, err = call("train", *(folder if word == "FOLDER" else word for word in words), "--steps", "1", "--json")
    assert code == 0, err
    assert json.loads(out)

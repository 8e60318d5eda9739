"""The runner: rows are pairs, a killed run loses and repeats nothing, both moments of compression are real."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tiny_folder import write_tiny_folder

from longspan.evaluation import AFTER, BEFORE, Request, parse_task, read_parquet, run
from longspan.evaluation import runner as runner_module
from longspan.evaluation.base import answer_ids, prompt_parts
from longspan.models import load
from longspan.recipe import Recipe
from longspan.registry import Refused


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load(write_tiny_folder(tmp_path_factory.mktemp("runner") / "tiny"), dtype="float32", device="cpu")


def request(out=None, recipes=("full", "knorm(budget=0.5)"), n=2, **changes):
    return Request([Recipe.parse(r) for r in recipes], [parse_task("passkey")], [512], n, out=out, max_new_tokens=3, **changes)


def test_rows_are_pairs_in_order(loaded):
    rows = run(loaded, request())
    assert [(r["index"], r["recipe"]) for r in rows] == [(i, r) for i in (0, 1) for r in ("full", "knorm(budget=0.5)")]
    assert all(r["text_hash"] or r["text_source"] == "" for r in rows)
    assert all(r["compress"] == BEFORE and r["answer_tokens"] > 0 and r["answer_nll"] > 0 for r in rows)


def test_a_killed_run_goes_on_where_it_stopped(loaded, tmp_path, monkeypatch):
    out = tmp_path / "out"
    whole = run(loaded, request())
    measured = []

    def counting(*args, **kwargs):
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(args[1])
        return original(*args, **kwargs)

    original = runner_module.measure
    monkeypatch.setattr(runner_module, "measure", counting)
    with pytest.raises(KeyboardInterrupt):
        run(loaded, request(out))
    with (out / "rows.jsonl").open("ab") as file:  # the kill came in the middle of a line
        file.write(b'{"model": "ti')
    measured.clear()
    rows = run(loaded, request(out))
    assert len(measured) == 1, "the three rows that were there must not be measured again"
    same = ("recipe", "index", "prediction", "answer_nll", "cache_bytes")
    assert [[r[k] for k in same] for r in rows] == [[r[k] for k in same] for r in whole]
    lines = (out / "rows.jsonl").read_text().splitlines()
    assert len(lines) == 4 and all(json.loads(line) for line in lines)
    assert len(read_parquet(out / "rows.parquet")) == 4


def test_more_examples_reuse_the_first_ones(loaded, tmp_path, monkeypatch):
    run(loaded, request(tmp_path, n=1))
    calls = []
    original = runner_module.measure
    monkeypatch.setattr(runner_module, "measure", lambda *a, **k: calls.append(1) or original(*a, **k))
    rows = run(loaded, request(tmp_path, n=2))
    assert len(rows) == 4 and len(calls) == 2


def test_before_and_after_the_question_differ(loaded):
    before = run(loaded, request(recipes=["snapkv(window=8, budget=0.2)"]))
    after = run(loaded, request(recipes=["snapkv(window=8, budget=0.2)"], compress=AFTER))
    assert before[0]["compress"] != after[0]["compress"]
    assert before[0]["answer_nll"] != after[0]["answer_nll"]
    seen = [json.loads(r[0]["achieved"])["seen"] for r in (before, after)]
    assert seen[0] == before[0]["context_tokens"] and seen[1] == after[0]["prompt_tokens"] > seen[0]


def test_answer_likelihood_is_that_of_a_plain_forward(loaded):
    import torch

    row = run(loaded, request(recipes=["full"], n=1))[0]
    example = next(iter(parse_task("passkey").examples(512, 1, 0, loaded.tokenizer)))
    prompt, answer = prompt_parts(example, loaded.tokenizer).ids, answer_ids(example, loaded.tokenizer)
    with torch.no_grad():
        logits = loaded.model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
    wanted = -np.mean([logits[len(prompt) - 1 + i, t].item() for i, t in enumerate(answer)])
    assert row["answer_nll"] == pytest.approx(wanted, abs=1e-4)


def test_kept_view_marks_what_is_held(loaded):
    asked = request(recipes=["full", "streaming-llm(budget=0.25)"], n=1, keep_view=True)
    run(loaded, asked)
    (view,) = asked.kept.values()
    (_, full), (_, part) = view["recipes"]
    assert full.all() and full.shape[-1] == len(view["tokens"])
    assert part[:, :, :4].all() and part[:, :, -5:].all()
    assert part.mean() == pytest.approx(0.25, abs=0.01)


def test_perplexity_has_likelihood_but_no_score(loaded):
    asked = Request([Recipe.parse("full")], [parse_task("perplexity")], [256], 1)
    (row,) = run(loaded, asked)
    assert row["score"] is None and row["answer_nll"] > 0 and row["new_tokens"] == 0


def test_cap_on_generated_tokens_is_part_of_the_row(loaded):
    assert run(loaded, request(recipes=["full"], n=1))[0]["max_new_tokens"] == 3
    with pytest.raises(Refused, match="max-new-tokens 0"):
        Request([], [], [512], max_new_tokens=0)


def test_a_damaged_journal_is_refused_and_left_alone(loaded, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"model": 1}\n')
    with pytest.raises(Refused, match=r"line 1 of rows\.jsonl"):
        run(loaded, request(tmp_path))
    assert (tmp_path / "rows.jsonl").read_text() == '{"model": 1}\n'
    with pytest.raises(Refused, match="can't be made a folder"):
        run(loaded, request(tmp_path / "rows.jsonl"))


def test_refusals():
    with pytest.raises(Refused, match="one task"):
        parse_task("niah + passkey")
    with pytest.raises(Refused, match="expected a task"):
        parse_task("snapkv")


def test_reading_once_gives_the_likelihoods_and_bytes_of_reading_each_time(tmp_path, loaded):
    """The same examples and recipes; only what is timed or generated differs."""
    recipes = [Recipe.parse(r) for r in ("full", "knorm(budget=0.5)", "h2o @ adakv(budget=0.4)")]
    tasks = [parse_task("niah"), parse_task("perplexity(stride=16)")]
    each = run(loaded, Request(recipes, tasks, [400], 2, max_new_tokens=2))
    once = run(loaded, Request(recipes, tasks, [400], 2, max_new_tokens=2, out=tmp_path, read_once=True))
    for a, b in zip(each, once, strict=True):
        assert (a["recipe"], a["task"], a["index"]) == (b["recipe"], b["task"], b["index"])
        assert b["answer_nll"] == pytest.approx(a["answer_nll"], abs=1e-4)
        assert b["cache_bytes"] == a["cache_bytes"] and b["ttft_s"] is None and b["score_name"] == "verbatim"
    again = run(loaded, Request(recipes, tasks, [400], 2, max_new_tokens=2, out=tmp_path, read_once=True))
    assert again == once


def test_recipes_that_read_in_their_own_way_are_not_read_once(loaded):
    with pytest.raises(Refused, match="--read-once: recipe 'xattention"):
        Request([Recipe.parse("xattention + knorm")], [parse_task("niah")], [300], read_once=True)
    with pytest.raises(Refused, match="expected before-question"):
        Request([Recipe.parse("knorm")], [parse_task("niah")], [300], compress="after-question", read_once=True)


def test_what_is_given_twice_counts_once(loaded):
    twice = Request([Recipe.parse("full"), Recipe.parse("knorm(budget=0.5)"), Recipe.parse("full")],
                    [parse_task("passkey"), parse_task("passkey")], [512, 512], 1, max_new_tokens=2)
    rows = run(loaded, twice)
    assert [r["recipe"] for r in rows] == ["full", "knorm(budget=0.5)"]


def test_rows_of_a_method_of_ones_own_belong_to_its_code(tmp_path, monkeypatch):
    from longspan import registry

    monkeypatch.setattr(registry, "_methods", dict(registry._methods))  # what the test registers ends with it
    code = """
from longspan.cache import Score
from longspan.registry import method

@method("own-{n}", kind="score", summary="A score of a test.")
class Own(Score):
    def score(self, x):
        return {sign}x.k.float().norm(dim=-1)
"""
    file = tmp_path / "own.py"
    file.write_text(code.format(n=1, sign=""))
    registry.load_file(file)
    first = runner_module.own_code(Recipe.parse("own-1(budget=0.5)"))
    wrapped = runner_module.own_code(Recipe.parse("criticalkv(base=own-1)"))
    assert first == wrapped and len(first["own_code"]) == 16
    file.write_text(code.format(n=1, sign="-"))
    assert runner_module.own_code(Recipe.parse("own-1(budget=0.5)")) != first
    assert runner_module.own_code(Recipe.parse("knorm(budget=0.5)")) == {}


def test_an_oracle_does_not_read_once(loaded):
    from longspan.evaluation import parse_oracle

    with pytest.raises(Refused, match="leave one out"):
        Request([Recipe.parse("knorm")], [parse_task("niah")], [400], oracle=parse_oracle("gt-ref"), read_once=True)

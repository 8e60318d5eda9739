"""The harness's model class under recipes: what is shared, what is held, what is cut, and our tasks."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_models import tiny
from tiny_tokenizer import tiny_tokenizer

from longspan.evaluation import parse_task
from longspan.evaluation.harness import Held, Ledger, by_task, recipe_arguments, split_arguments
from longspan.evaluation.harness.metadata import check_metadata, ours
from longspan.evaluation.harness.run import lines
from longspan.evaluation.harness.samples import pair_with_full, sample_rows, write_samples
from longspan.models import Loaded
from longspan.registry import Refused

TEXT = "Some text about statements and what they do. " * 12
CUT = "streaming-llm(n_sink=2, budget=0.25)"


def request(*args, task="a"):
    return SimpleNamespace(args=args, task_name=task)


# ----------------------------------------------------------------------------------------------- without the harness


def test_commas_of_a_recipe_stay_in_it():
    text = "model=folder,recipe=snapkv(budget=0.2,store=quantised(bits=4)),dtype=float32"
    assert split_arguments(text) == {"model": "folder", "recipe": "snapkv(budget=0.2,store=quantised(bits=4))",
                                     "dtype": "float32"}
    split = {"model": "folder", "recipe": "snapkv(budget=0.2", "store": "quantised(bits=4))", "dtype": "float32"}
    assert recipe_arguments(split) == {"model": "folder", "dtype": "float32",
                                       "recipe": "snapkv(budget=0.2,store=quantised(bits=4))"}
    assert recipe_arguments({"recipe": "snapkv(budget=0.2;store=dense)"}) == {"recipe": "snapkv(budget=0.2,store=dense)"}
    with pytest.raises(Refused, match="parentheses don't close"):
        recipe_arguments({"recipe": "snapkv(budget=0.2"})


def test_answers_keep_the_order_of_requests_and_their_tasks():
    ledger = Ledger()

    def answer(some):
        ledger.rows[ledger.task] += [Held(len(some), 10, 4, 2)] * len(some)
        return [r.args[0] for r in some]

    found = by_task(ledger, answer, [request(1, task="a"), request(2, task="b"), request(3, task="a")])
    assert found == [1, 2, 3]
    assert ledger.means(["a"]) == {"cache_bytes": 2, "full_bytes": 10, "tokens": 4, "kept": 2, "requests": 2, "truncated": 0}
    assert ledger.means(["a", "b"])["cache_bytes"] == pytest.approx(5 / 3)
    assert ledger.means(["c"]) == {}


def test_metadata_must_be_an_object():
    from longspan.commands.harness import parse_metadata

    assert parse_metadata('{"length": 9}') == {"length": 9}
    for text in ("[1]", "{"):
        with pytest.raises(Refused, match="--metadata"):
            parse_metadata(text)


@pytest.mark.parametrize("name", ["niah", "ruler_niah_multikey_1", "ruler_vt", "babilong", "kv_retrieval"])
def test_our_tasks_are_scored_as_here(name):
    import yaml

    from longspan.evaluation.harness.tasks import generated

    task = name.replace("_", "-")
    tokenizer = tiny_tokenizer()
    rows = generated.rows(task, tokenizer, 1600, 2)
    assert rows == generated.rows(task, tokenizer, 1600, 2)
    file = Path(generated.__file__).with_name(f"{name}.yaml")
    said = yaml.load(file.read_text().replace("!function", ""), yaml.SafeLoader)["generation_kwargs"]
    for row, example in zip(rows, parse_task(task).examples(1600, 2, 0, tokenizer), strict=True):
        assert row["prompt"] == example.context + example.question
        assert generated.score(row, [f" {row['answer']}"]) == {"score": 1.0}
        assert generated.score(row, [""]) == {"score": 0.0}
        assert said == {"max_gen_toks": example.max_new_tokens, "until": list(example.meta.get("stop", [])), "do_sample": False}
    with pytest.raises(Refused, match="examples=0"):
        generated.rows(task, tokenizer, 1600, 0)


ASKED = ["longspan_niah", "longspan_ruler_vt", "arc_easy"]


@pytest.mark.parametrize(("metadata", "said"), [
    ({"lenght": 512}, "'lenght'; did you mean 'length'"), ({"seed": "x"}, "seed='x'; expected a whole number"),
    ({"length": True}, "length=True; expected a whole number"), ({"examples": 0}, "examples=0; .* at least 1"),
    ({"seed": -1}, "seed=-1; .* at least 0"), ({"length": 512.0}, "length=512.0"), ({"tokenizer": 3}, "tokenizer=3; .* folder"),
])
def test_metadata_that_our_tasks_cannot_read_are_refused(metadata, said):
    with pytest.raises(Refused, match=said):
        check_metadata(metadata, ["longspan_*"], ASKED)
    check_metadata(metadata, ["arc_easy"], ASKED)  # nothing is known of others' metadata
    if "lenght" in metadata:
        check_metadata(metadata, ["longspan_niah", "arc_easy"], ASKED)
    else:
        with pytest.raises(Refused, match=said):
            check_metadata(metadata, ["longspan_niah", "arc_easy"], ASKED)


def test_metadata_of_our_tasks_are_taken():
    check_metadata({"length": 512, "examples": 3, "seed": 0, "tokenizer": "folder"}, ["longspan_niah"], ASKED)
    assert {"longspan_niah", "longspan_babilong", "longspan_kv_retrieval"} < set(ours())


def results(values):
    """What the harness returns for one task: documents with a score, and one metric that isn't their mean."""
    about = {"target": "a", "filtered_resps": ["b"], "filter": "none", "metrics": ["acc", "ppl"]}
    samples = [{"doc_id": i, "doc_hash": f"d{i}", "prompt_hash": f"h{i}", **about, "acc": np.float64(v), "ppl": -float(v)}
               for i, v in enumerate(values)]
    return {"results": {"t": {"acc,none": sum(values) / len(values), "ppl,none": 9.0}}, "samples": {"t": samples}}


def test_recipes_are_paired_with_full_by_document():
    dense, worse, same = [1] * 9 + [0], [0] * 8 + [1, 0], [1] * 9 + [0]
    found, rows = [], []
    for recipe, values in (("worse", worse), ("full", dense), ("same", same)):
        found += lines(recipe, results(values), Ledger())
        rows += sample_rows(recipe, results(values))
    pair_with_full(found, rows)
    by = {(line["recipe"], line["metric"]): line.get("vs_full") for line in found}
    p = 2 / 2 ** 8  # eight documents lost, none won: McNemar's exact test
    assert by["worse", "acc"]["difference"] == pytest.approx(-0.8) and by["worse", "acc"]["p_value"] == pytest.approx(p)
    assert by["worse", "acc"]["p_holm"] == pytest.approx(2 * p)  # two recipes
    assert (by["worse", "acc"]["n"], by["worse", "acc"]["wins"], by["worse", "acc"]["losses"]) == (10, 0, 8)
    assert by["worse", "acc"]["ci95"][1] < 0 and by["same", "acc"]["p_holm"] == 1
    assert by["full", "acc"] is None and by["worse", "ppl"] is None  # a metric that isn't a mean of documents
    json.dumps(found, allow_nan=False)
    pair_with_full(found, [row for row in rows if row["recipe"] != "full"])
    assert not any("vs_full" in line for line in found)


def test_samples_are_json_lines(tmp_path):
    write_samples(tmp_path, 1, sample_rows("full", results([1, 0])) + [{"task": "a/b", "scores": {}}])
    first, _ = (json.loads(row) for row in (tmp_path / "samples-1-t.jsonl").read_text().splitlines())
    assert first == {"recipe": "full", "task": "t", "filter": "none", "doc_id": 0, "doc_hash": "d0", "prompt_hash": "h0",
                     "target": "a", "prediction": ["b"], "scores": {"acc": 1.0, "ppl": -1.0}}
    assert (tmp_path / "samples-1-a_b.jsonl").is_file()


def shown(found, width=80):
    from rich.console import Console

    from longspan.commands.harness import table

    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table(found, "SmolLM2-135M-Instruct"))
    return console.export_text()


def test_the_table_is_whole_at_80_columns():
    held = {"cache_bytes": 7.5 * 2 ** 20, "full_bytes": 36.25 * 2 ** 20, "kept": 12345.4, "tokens": 61234.0, "requests": 120,
            "truncated": 0}
    of = {"metric": "exact_match", "filter": "strict-match", "stderr": 0.0123}
    versus = {"difference": -0.1234, "ci95": [-0.2, -0.05], "p_value": 0.01, "p_holm": 0.0123}
    of["task"] = "longspan_ruler_niah_multikey_1"
    found = [{"recipe": "full", "value": 0.5, **of, **held},
             {"recipe": "snapkv(budget=0.2, window=32, kernel=7)", "value": 0.3766, **of, **held, "truncated": 3,
              "vs_full": versus}]
    text = shown(found)
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text, text
    for whole in ("0.5000", "±0.0123", "−0.123 p=0.012 ▼", "[−0.200, −0.050]", "7.50 MiB", "21%", "12345 of 61234", "3 of"):
        assert whole in text, text
    assert "snapkv(budget=0.2, window=32, kernel=7)" in shown(found, 140)
    assert "vs full" not in shown(found[:1])


def test_the_harness_logs_errors_only_and_speaks_again_afterwards():
    import logging

    from longspan.evaluation.harness.run import quiet

    logger, below = logging.getLogger("lm_eval"), logging.getLogger("lm_eval.api.task")
    before = logger.level
    with pytest.raises(KeyError), quiet():
        assert not below.isEnabledFor(logging.WARNING) and below.isEnabledFor(logging.ERROR)
        raise KeyError
    assert logger.level == before


# -------------------------------------------------------------------------------------------------- with the harness


@pytest.fixture(scope="module")
def loaded():
    pytest.importorskip("lm_eval")
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    model = tiny("llama", vocab=len(tokenizer), positions=2048, eos_token_id=tokenizer.eos_token_id,
                 pad_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id)
    return Loaded(model, tokenizer, "tiny", "", Path())


def made(loaded, recipe="full", **options):
    from longspan.evaluation.harness import LongspanLM

    return LongspanLM(loaded, recipe, **options)


def test_bytes_shrink_on_every_call(loaded):
    for call in range(2):
        for name, args in (("loglikelihood", (TEXT, " they")), ("generate_until", (TEXT, {"until": [], "max_gen_toks": 3}))):
            full, cut = made(loaded), made(loaded, CUT)
            for model in (full, cut):
                for i in range(call + 1):
                    getattr(model, name)([request(*args, task=str(i))], disable_tqdm=True)
            held, dense = (model.ledger.means([str(call)]) for model in (cut, full))
            assert dense["cache_bytes"] == dense["full_bytes"] == held["full_bytes"]
            assert held["cache_bytes"] < 0.35 * dense["cache_bytes"]
            assert held["kept"] == pytest.approx(0.25 * held["tokens"], abs=1)


def test_options_of_a_question_share_one_reading(loaded, monkeypatch):
    import longspan.evaluation.harness.model as module

    opened = []
    real = module.open_context
    monkeypatch.setattr(module, "open_context", lambda *a, **k: opened.append(1) or real(*a, **k))
    options = [request(TEXT, f" {word}") for word in ("they", "do", "not", "they")]
    together = made(loaded, CUT).loglikelihood(options, disable_tqdm=True)
    assert len(opened) == 1
    alone = [made(loaded, CUT).loglikelihood([option], disable_tqdm=True)[0] for option in options]
    assert [v for v, _ in together] == pytest.approx([v for v, _ in alone], abs=1e-5)
    dense = made(loaded).loglikelihood(options, disable_tqdm=True)
    assert max(abs(a - b) for (a, _), (b, _) in zip(together, dense)) > 1e-3


def test_cut_prompts_are_counted(loaded):
    model = made(loaded, max_length=64)
    model.loglikelihood([request(TEXT, " they"), request("Some text", " they")], disable_tqdm=True)
    model.generate_until([request(TEXT, {"until": [], "max_gen_toks": 4})], disable_tqdm=True)
    found = model.ledger.means()
    assert found["truncated"] == 2 and found["requests"] == 3


@pytest.mark.parametrize("recipe", ["full", CUT, "snapkv(budget=0.5, window=8)"])
def test_prompts_together_are_answered_as_alone(loaded, recipe):
    places = ((0, 500), (9, 300), (40, 540), (3, 90))
    asked = [request(TEXT[start:end], {"until": [], "max_gen_toks": 8}) for start, end in places]
    alone, together = (made(loaded, recipe, batch_size=size) for size in (1, 2))
    texts = alone.generate_until(list(asked), disable_tqdm=True)
    assert together.generate_until(list(asked), disable_tqdm=True) == texts and len(set(texts)) > 1
    one, two = alone.ledger.means(), together.ledger.means()
    assert two["requests"] == 4 and two["tokens"] == one["tokens"]  # padding isn't read
    assert two["kept"] == pytest.approx(one["kept"], abs=0.5)


def test_recipes_that_join_documents_are_refused(loaded):
    with pytest.raises(Refused, match="from its start to its end"):
        made(loaded, "prophetkv")


def test_the_harness_makes_it_from_text(loaded, tmp_path):
    from lm_eval.api.registry import get_model

    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    model = get_model("longspan").create_from_arg_string(
        f"model={tmp_path},recipe=snapkv(budget=0.5,window=8),dtype=float32,max_length=99", {"batch_size": 2})
    assert str(model.recipe) == str(made(loaded, "snapkv(budget=0.5, window=8)").recipe)
    assert model.max_length == 99 and model.batch_size == 2


@pytest.mark.slow  # the harness looks through all its task files
def test_a_table_of_our_tasks(loaded, tmp_path, caplog):
    import logging

    from longspan.evaluation.harness.run import run_harness

    folder = tmp_path / "model"
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    here = Loaded(loaded.model, loaded.tokenizer, "tiny", "", folder)
    tasks = ["longspan_ruler_vt", "longspan_kv_retrieval", "longspan_babilong"]
    logging.getLogger("lm_eval").addHandler(caplog.handler)
    try:
        found = run_harness(here, ["full", CUT], tasks, out=tmp_path / "out", bootstrap_iters=0, batch_size=2,
                            metadata={"length": 1200, "examples": 2})
    finally:
        logging.getLogger("lm_eval").removeHandler(caplog.handler)
    assert not [record for record in caplog.records if record.name.startswith("lm_eval")]
    assert [(line["recipe"], line["requests"]) for line in found] == [("full", 2)] * 3 + [(CUT, 2)] * 3
    assert sorted(line["task"] for line in found[:3]) == sorted(tasks)
    for dense, cut in zip(found, found[3:]):
        assert dense["task"] == cut["task"] and cut["cache_bytes"] < 0.35 * dense["cache_bytes"]
        assert cut["vs_full"]["n"] == 2 and "vs_full" not in dense
        assert cut["vs_full"]["difference"] == pytest.approx(cut["value"] - dense["value"])
    stored = json.loads((tmp_path / "out" / "results.json").read_text())
    assert stored["lines"] == found and stored["recipes"] == ["full", CUT]
    kept = [[json.loads(row) for row in (tmp_path / "out" / f"samples-{n}-longspan_kv_retrieval.jsonl").read_text().splitlines()]
            for n in (0, 1)]
    assert [row["prompt_hash"] for row in kept[0]] == [row["prompt_hash"] for row in kept[1]]
    assert all(set(row["scores"]) == {"score"} and isinstance(row["prediction"][0], str) for rows in kept for row in rows)
    text = shown(found)
    for line in found:
        assert f"{line['cache_bytes'] / line['full_bytes']:.0%}" in text, text
    with pytest.raises(Refused, match="longspan_niah"):
        run_harness(here, ["full"], ["longspan_niahh"])
    with pytest.raises(Refused, match="did you mean 'length'"):
        run_harness(here, ["full"], ["longspan_niah"], metadata={"lenght": 512})

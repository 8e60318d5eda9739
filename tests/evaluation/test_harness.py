"""The harness's model class under recipes: what is shared, what is held, what is cut, and our tasks."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_models import tiny
from tiny_tokenizer import tiny_tokenizer

from longspan.evaluation import parse_task
from longspan.evaluation.harness import Held, Ledger, by_task, recipe_arguments, split_arguments
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
def test_a_table_of_our_tasks(loaded, tmp_path):
    from rich.console import Console

    from longspan.commands.harness import table
    from longspan.evaluation.harness.run import run_harness

    folder = tmp_path / "model"
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    here = Loaded(loaded.model, loaded.tokenizer, "tiny", "", folder)
    found = run_harness(here, ["full", CUT], ["longspan_ruler_vt"], out=tmp_path / "out", bootstrap_iters=0,
                        metadata={"length": 1200, "examples": 2})
    assert [(line["recipe"], line["requests"]) for line in found] == [("full", 2), (CUT, 2)]
    assert found[1]["cache_bytes"] < 0.35 * found[0]["cache_bytes"]
    stored = json.loads((tmp_path / "out" / "results.json").read_text())
    assert stored["lines"] == found
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(table(found, "tiny"))
    shown = console.export_text()
    assert f"{found[1]['cache_bytes'] / found[1]['full_bytes']:.0%}" in shown and "100%" in shown, shown
    with pytest.raises(Refused, match="longspan_niah"):
        run_harness(here, ["full"], ["longspan_niahh"])

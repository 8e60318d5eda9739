"""Answer-informed references: what they are made of, and that reading the answer at once is reading it step by step."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from tiny_folder import write_tiny_folder
from tiny_models import tiny, tiny_ids

from longspan import cli
from longspan.cache import CachePolicy
from longspan.evaluation import Request, parse_oracle, parse_task, run, summarise
from longspan.evaluation.agreement import Judge
from longspan.evaluation.base import Example, answer_ids
from longspan.evaluation.oracles import GTRef, ModelRef, answer_attention, dense_reading, pooled, reference
from longspan.models import Loaded, load
from longspan.recipe import Recipe
from longspan.registry import Refused

N, ANSWER = 30, [5, 9, 17, 40, 6]


@pytest.fixture
def model():
    return tiny("llama", layers=3)


def prompt():
    return tiny_ids(1, N)[0].tolist()


def peaks_of(model, answer=ANSWER, chunk=None):
    with dense_reading(model, prompt()) as reading:
        return reading.peaks(answer, chunk)


# -------------------------------------------------------------------------------------------------------- the reference


def plain_peaks(model, answer):
    """Every layer's own queries of the answer and keys of the prompt, from stock transformers."""
    kept = {}
    ids = torch.tensor([prompt() + list(answer)])
    model.set_attn_implementation("eager")
    out = model(ids, output_attentions=True)
    for i, attention in enumerate(out.attentions):  # (1,Hq,N+m,N+m), over all keys: renormalised over the prompt's
        rows = attention[0, :, N:, :N]
        kept[i] = rows / rows.sum(-1, keepdim=True)
    return torch.stack(list(kept.values())).amax((0, 1))


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma"])
def test_it_is_the_softmax_over_the_prompt_alone(family):
    found = peaks_of(tiny(family, layers=3))
    torch.testing.assert_close(found, plain_peaks(tiny(family, layers=3), ANSWER), atol=1e-5, rtol=1e-4)


def test_all_answer_keys_in_the_softmax_would_give_something_else(model):
    """The step that the definition warns about shows."""
    ids = torch.tensor([prompt() + ANSWER])
    model.set_attn_implementation("eager")
    attention = torch.stack(model(ids, output_attentions=True).attentions)[:, 0, :, N:, :N].amax((0, 1))
    assert (attention - peaks_of(tiny("llama", layers=3))).abs().max() > 1e-2


def test_one_layer_one_head_one_token_is_exactly_that_softmax():
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 1, 8, generator=draw), torch.randn(1, N, 8, generator=draw)
    wanted = (q[0] @ k[0].T / math.sqrt(8)).softmax(-1)
    torch.testing.assert_close(answer_attention(q, k, 8**-0.5)[0], wanted, atol=1e-7, rtol=1e-5)
    assert torch.equal(reference([wanted], kernel=1), wanted[0])
    capped = answer_attention(q, k, 8**-0.5, softcap=0.5)[0]
    torch.testing.assert_close(capped, (0.5 * torch.tanh(q[0] @ k[0].T / math.sqrt(8) / 0.5)).softmax(-1))


def test_grouped_heads_read_their_own_keys():
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(4, 3, 8, generator=draw), torch.randn(2, N, 8, generator=draw)
    wanted = (q @ k.repeat_interleave(2, 0).mT * 0.3).softmax(-1)
    torch.testing.assert_close(answer_attention(q, k, 0.3), wanted)
    visible = torch.arange(N) >= torch.tensor([[10], [11], [N]])
    windowed = answer_attention(q, k, 0.3, visible=visible)
    assert not windowed[:, 0, :10].any() and not windowed[:, 2].any()
    torch.testing.assert_close(windowed[:, :2].sum(-1), torch.ones(4, 2))


def test_bounds(model):
    """0 <= r <= 1, and before pooling it sums to at least one."""
    peaks = peaks_of(model)
    unpooled, r = reference([peaks], kernel=1), reference([peaks])
    assert float(unpooled.sum()) >= 1 and float(r.min()) >= 0 and float(r.max()) <= 1
    assert float(unpooled.max()) <= 1


def test_the_order_of_layers_and_heads_changes_nothing():
    draw = torch.Generator().manual_seed(0)
    p = torch.rand(3, 4, 5, N, generator=draw)
    r = lambda p: reference([p.amax((0, 1))])  # noqa: E731
    assert torch.equal(r(p), r(p.flip(0))) and torch.equal(r(p), r(p[:, [2, 0, 3, 1]]))
    assert not torch.equal(r(p), r(p.flip(-1)))


def test_pooling_damps_the_edges():
    found = pooled(torch.ones(20), 7)
    assert found[10] == 1 and [round(7 * float(v)) for v in found[:4]] == [4, 5, 6, 7]


def test_several_answers_give_the_mean_of_their_references(model):
    first, second = peaks_of(model), peaks_of(model, [50, 51])
    wanted = (reference([first]) + reference([second])) / 2
    torch.testing.assert_close(reference([first, second]), wanted, atol=1e-7, rtol=0)
    assert not torch.allclose(wanted, reference([torch.cat([first, second])]), atol=1e-4)  # not the mean over all tokens


@pytest.mark.parametrize("chunk", [1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_one_pass_equals_step_by_step(family, chunk):
    """Check 6."""
    model = tiny(family, layers=3)
    torch.testing.assert_close(peaks_of(model), peaks_of(model, chunk=chunk), atol=1e-5, rtol=0)


def test_an_answer_leaves_the_reading_where_it_was(model):
    with dense_reading(model, prompt()) as reading:
        first = reading.peaks(ANSWER)
        own = reading.write(4, [])
        assert reading.cache.get_seq_length() == N
        assert torch.equal(reading.peaks(ANSWER), first) and reading.write(4, []) == own
        reading.go_on([3, 4])
        assert reading.tokens == N + 2 and reading.peaks(ANSWER).shape == (5, N + 2)


def test_long_answers_are_looked_at_in_blocks(model, monkeypatch):
    whole = peaks_of(model)
    monkeypatch.setattr("longspan.evaluation.oracles.ROWS", 2)
    torch.testing.assert_close(peaks_of(model), whole, atol=1e-6, rtol=0)


# ------------------------------------------------------------------------------------------------------------ the cards


def test_model_and_right_answer_agree_where_they_are_the_same():
    """Check 5: Model-Ref is GT-Ref when the right answer is the one the model writes."""
    example = Example("text", "?", "", ("yes", "no"), 4, {"index": 0})
    tokenizer = load_tokenizer()
    right = GTRef().answers(example, Loaded(None, tokenizer, "", "", Path()), lambda: pytest.fail("nothing is written"))
    own = ModelRef().answers(example, Loaded(None, tokenizer, "", "", Path()), lambda: list(right[0]))
    assert own == right == [answer_ids(example, tokenizer)]
    assert ModelRef().answers(example, Loaded(None, tokenizer, "", "", Path()), list) == []


def load_tokenizer():
    from tiny_tokenizer import tiny_tokenizer

    return tiny_tokenizer()


def test_alternatives_are_answers_of_their_own():
    tokenizer = load_tokenizer()
    loaded = Loaded(None, tokenizer, "", "", Path())
    example = Example("text", "?", "", ("yes", "no"), 4, {"index": 0, "answers_are": "any"})
    assert len(GTRef().answers(example, loaded, list)) == 2
    assert len(GTRef().answers(Example("text", "?", "", ("yes", "no"), 4, {"index": 0}), loaded, list)) == 1


@pytest.mark.parametrize(("text", "words"), [
    ("model-reff", "unknown oracle 'model-reff'; did you mean 'model-ref'?"),
    ("snapkv", "unknown oracle 'snapkv'"),
    ("gt-ref + gt-ref", "unknown oracle"),
    ("gt-ref(kernel=4)", r"gt-ref\(kernel=4\): expected an odd width, such as 5"),
    ("gt-ref(kernal=5)", "kernel"),
])
def test_oracles_that_arent_are_refused(text, words):
    with pytest.raises(Refused, match=words.replace("?", r"\?")):
        parse_oracle(text)
    assert parse_oracle("gt-ref(W=4)") == GTRef(W=4) and str(parse_oracle("model-ref")) == "model-ref"


def test_an_oracle_is_no_part_of_a_recipe():
    with pytest.raises(Refused, match="gt-ref is a oracle and can't stand alone in a recipe; use it as --oracle gt-ref"):
        Recipe.parse("gt-ref")


def test_empty_answers_are_refused(model):
    for peaks in ([], [peaks_of(model, [])], [peaks_of(model), peaks_of(model, [])]):
        with pytest.raises(Refused, match="the answer is empty; expected at least one token"):
            reference(peaks)


def test_nan_is_refused(model):
    model.model.layers[1].self_attn.q_proj.weight.data[0] = float("nan")
    with pytest.raises(Refused, match="the answer's attention is NaN"):
        reference([peaks_of(model)])


def test_models_whose_layers_all_evict_are_refused():
    model = tiny("mistral", sliding_window=8)
    with dense_reading(model, prompt()) as reading, pytest.raises(Refused, match="a sliding window shorter than the prompt"):
        reading.peaks(ANSWER)


# --------------------------------------------------------------------------------------------------- scores on a reading


@pytest.mark.parametrize("text", ["snapkv(budget=0.4, window=4)", "h2o(budget=0.4)",
                                  "criticalkv(base=snapkv(window=4), budget=0.4)"])
def test_scores_are_those_that_compression_sees(model, text):
    """What the score says of a dense reading, noted by a look into a real run."""
    policy, seen = Recipe.parse(text).scored, {}
    original = type(policy.budget).keep

    def keep(self, scores, x):
        seen[x.layer] = scores[0].clone()
        return original(self, scores, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(policy.budget), "keep", keep)
        with Recipe.parse(text).on(model):
            model.generate(tiny_ids(1, N), max_new_tokens=1, do_sample=False, pad_token_id=0)
    with dense_reading(model, prompt(), [CachePolicy(policy.score, policy.budget)]) as reading:
        found = reading.scores(policy)
    assert found.keys() == seen.keys() == {0, 1, 2}
    for layer, scores in found.items():
        torch.testing.assert_close(scores, seen[layer], atol=1e-5, rtol=1e-5)


def test_a_score_that_keeps_so_short_a_prompt_whole_has_nothing_to_say(model):
    policy = Recipe.parse("snapkv(budget=0.5, window=32)").scored
    with dense_reading(model, prompt(), [policy]) as reading:
        assert reading.scores(policy) == {}


# ------------------------------------------------------------------------------------------------------- in the compare


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load(write_tiny_folder(tmp_path_factory.mktemp("oracles") / "tiny"), dtype="float32", device="cpu")


RECIPES = ("full", "snapkv(budget=0.3, window=8)", "knorm(budget=0.3)", "fastkv(rho=0.3)")


def request(oracle, out=None, **more):
    oracle = None if oracle is None else parse_oracle(oracle)
    return Request([Recipe.parse(r) for r in RECIPES], [parse_task("passkey")], [512], 2, out=out, max_new_tokens=3,
                   oracle=oracle, **more)


@pytest.mark.parametrize("oracle", ["gt-ref", "model-ref"])
@pytest.mark.parametrize("compress", ["before-question", "after-question"])
def test_rows_tell_how_scores_agree(loaded, oracle, compress):
    rows = run(loaded, request(oracle, compress=compress))
    for row in rows:
        assert row["oracle_name"] == oracle
        if row["recipe"] in ("full", "fastkv(rho=0.3)"):
            assert row["oracle_recall"] is row["oracle_spearman"] is row["oracle"] is None
        else:
            found = json.loads(row["oracle"])
            assert found["name"] == oracle and len(found["recall_per_layer"]) == 2
            assert row["oracle_recall"] == found["recall"]["mean"] and 0 <= row["oracle_recall"] <= 1
            assert row["oracle_spearman"] == found["spearman"]["mean"] and -1 <= row["oracle_spearman"] <= 1
    summary = summarise(rows)
    assert [line["oracle"] is None for line in summary] == [True, False, False, True]
    mean = sum(r["oracle_recall"] for r in rows if r["recipe"] == RECIPES[1]) / 2
    assert summary[1]["oracle"]["recall"]["mean"] == pytest.approx(mean) and summary[1]["oracle"]["name"] == oracle
    assert all("oracle" not in line for line in summarise(run(loaded, request(None))))


def test_rows_with_and_without_a_reference_are_kept_apart(loaded, tmp_path):
    plain = run(loaded, request(None, tmp_path))
    judged = run(loaded, request("gt-ref", tmp_path))
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == len(plain) + len(judged) == 16
    assert run(loaded, request("gt-ref", tmp_path)) == judged
    assert run(loaded, request("gt-ref(W=4)", tmp_path)) != judged


def test_an_example_is_read_once_for_all_recipes(loaded, monkeypatch):
    import longspan.evaluation.agreement as room

    reads = []
    original = room.dense_reading
    monkeypatch.setattr(room, "dense_reading", lambda *a, **k: (reads.append(1), original(*a, **k))[1])
    run(loaded, request("gt-ref"))
    assert len(reads) == 2  # one an example


def test_the_reference_of_a_compressed_context_is_that_of_the_whole_prompt(loaded):
    """Compressing before the question ranks the context; the answer still looks from behind the question."""
    task = parse_task("passkey")
    example = next(iter(task.examples(512, 1, 0, loaded.tokenizer)))
    recipe = Recipe.parse(RECIPES[1])
    found = {c: json.loads(Judge(loaded, GTRef(), [recipe], c).row(example, recipe)["oracle"]) for c in
             ("before-question", "after-question")}
    assert found["before-question"]["recall_per_layer"] != found["after-question"]["recall_per_layer"]


def test_an_answer_beyond_the_window_is_refused(loaded, monkeypatch):
    example = Example("word " * 1500, "?", "", ("yes " * 1200,), 4, {"index": 0})
    recipe = Recipe.parse(RECIPES[2])
    with pytest.raises(Refused, match=r"prompt and answer: .* reads at most 4096"):
        Judge(loaded, GTRef(), [recipe]).row(example, recipe)


def test_a_model_that_answers_nothing_has_no_reference(loaded, monkeypatch):
    monkeypatch.setattr("longspan.evaluation.oracles.DenseReading.write", lambda *a, **k: [])
    rows = run(loaded, request("model-ref"))
    assert all(row["oracle"] is None and row["answer_nll"] is not None for row in rows)


def test_the_command(loaded, monkeypatch, capsys):
    words = ["compare", "-m", str(loaded.folder), "-r", RECIPES[1], "-r", "full", "-t", "passkey", "-l", "512", "-n", "1",
             "--max-new-tokens", "2", "--oracle"]

    def called(*more):
        monkeypatch.setattr(sys, "argv", ["longspan", *words, *more])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code, *capsys.readouterr()

    code, out, _ = called("gt-ref", "--json")
    found = json.loads(out)["rows"]
    assert code == 0
    assert set(found[0]["oracle"]["recall"]) == {"mean", "min", "spread", "jump"} and found[1]["oracle"] is None
    _, shown, _ = called("gt-ref")
    assert "spearman" in shown and "gt-ref" in shown
    code, _, error = called("gtref")
    assert (code, error.strip()) == (2, "longspan: --oracle: unknown oracle 'gtref'; did you mean 'gt-ref'?")

"""Making profiles: what answers need against plain attention, and the whole way on a tiny model."""

from __future__ import annotations

import itertools

import pytest
import torch
from profiled import random_reading
from tiny_folder import write_tiny_folder
from tiny_models import tiny

from longspan import load
from longspan.cache import top_mask
from longspan.context import Context
from longspan.evaluation import profiling
from longspan.evaluation.calibration import Question, Reading
from longspan.evaluation.profiling import make_profile, observe
from longspan.models import profiles
from longspan.recipe import Recipe
from longspan.registry import Refused

RECIPE = "knorm @ lu-kv(budget=0.5)"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load(write_tiny_folder(tmp_path_factory.mktemp("model"), positions=1024), dtype="float32")


def needed_plainly(model, reading, question, answer):
    """U of every layer by one dense forward with transformers' own attention."""
    values, hooks = [], []
    for layer in model.model.layers:
        hooks.append(layer.self_attn.v_proj.register_forward_hook(lambda m, i, o: values.append(o[0])))
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    ids = [*reading.ids, *question.ids, *answer]
    with torch.no_grad():
        found = model(torch.tensor([ids]), output_attentions=True).attentions
    model.set_attn_implementation(before)
    for hook in hooks:
        hook.remove()
    N, needed = len(reading.ids), []
    for layer, weights, v in zip(model.model.layers, found, values):
        Hq, D = weights.shape[1], layer.self_attn.head_dim
        output = layer.self_attn.o_proj.weight  # (hidden, Hq * D)
        kv = v.view(len(ids), -1, D)[:N]
        G = Hq // kv.shape[1]
        sizes = torch.stack([(kv[:, h // G] @ output[:, h * D : (h + 1) * D].T).norm(dim=-1) for h in range(Hq)])
        rows = weights[0, :, len(reading.ids) + len(question.ids) :, :N]
        needed.append((rows * (sizes / sizes.sum())[:, None]).amax(1).view(-1, G, N).amax(1))
    return torch.stack(needed)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_utility_is_the_most_any_answer_row_needed(family):
    model, reading = tiny(family), random_reading(40)
    shown = observe(model, Recipe.parse(RECIPE), reading)
    assert len(shown) == 2 and shown[0].layers == (0, 1) and shown[0].scores.shape == (2, 2, 40)
    for evidence, question in zip(shown, reading.questions):
        wanted = needed_plainly(model, reading, question, question.answer)
        torch.testing.assert_close(evidence.utility, wanted, atol=1e-7, rtol=1e-4)
    assert torch.equal(shown[0].scores, shown[1].scores)  # the score has seen no question
    assert not torch.equal(shown[0].utility, shown[1].utility)


def test_written_answers_count_like_given_ones():
    """Without a random state the likeliest tokens are written; given as an answer they need the same."""
    model, given = tiny("llama"), random_reading(40, questions=1)
    asked = Question(given.questions[0].ids)
    written = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiling, "MAX_WRITTEN", 5)
        evidence, = observe(model, Recipe.parse(RECIPE), Reading(given.ids, (asked,)))
        ids = [*given.ids, *asked.ids]
        with torch.no_grad():
            for _ in range(5):
                written.append(int(model(torch.tensor([ids + written])).logits[0, -1].argmax()))
        torch.testing.assert_close(evidence.utility, needed_plainly(model, given, asked, written), atol=1e-7, rtol=1e-4)
        draws = [torch.Generator().manual_seed(seed) for seed in (0, 0, 1)]
        sampled = [observe(model, Recipe.parse(RECIPE), Reading(given.ids, (asked,)), (), draw)[0].utility for draw in draws]
    assert torch.equal(sampled[0], sampled[1]) and not torch.equal(sampled[0], sampled[2])


def test_questions_without_an_answer_are_left_out():
    model, reading = tiny("llama"), random_reading(40)
    silent = Reading(reading.ids, (Question(reading.questions[0].ids), reading.questions[1]))
    assert len(observe(model, Recipe.parse(RECIPE), silent, ends=range(128))) == 1


@pytest.mark.parametrize("text", ["h2o(recent=0.25)", "snapkv(window=8)", "expected-attention(n_future=8)"])
def test_scores_are_those_of_the_compression(text):
    """Scores with a window, or that watch all queries, or look at the budget: what they rank first is what is kept."""
    model, reading = tiny("llama"), random_reading(40, questions=1)
    recipe = Recipe.parse(f"{text} @ uniform(budget=0.5)")
    evidence, = observe(model, recipe, reading)
    with recipe.on(model) as run, torch.no_grad():
        model.generate(torch.tensor([reading.ids]), max_new_tokens=1, pad_token_id=0)
        kept = run.cache.kept_positions()
    best = top_mask(evidence.scores, torch.full((2, 2), 20))
    for layer, heads in enumerate(kept):
        for head, positions in enumerate(heads):
            assert positions.tolist() == best[layer, head].nonzero()[:, 0].tolist()


def test_protected_entries_are_told():
    evidence, = observe(tiny("llama"), Recipe.parse("snapkv(window=8) @ lu-kv"), random_reading(40, questions=1))
    assert evidence.protected[..., -8:].all() and not evidence.protected[..., :-8].any()


def test_the_model_is_left_as_it_was():
    model, reading = tiny("llama"), random_reading(40)
    before = model(torch.tensor([reading.ids])).logits
    observe(model, Recipe.parse(RECIPE), reading)
    assert model.config._attn_implementation != "longspan"
    assert torch.equal(model(torch.tensor([reading.ids])).logits, before)


def test_sliding_layers_take_no_part():
    model, reading = tiny("gemma3", layers=4), random_reading(40, questions=1)
    evidence, = observe(model, Recipe.parse("knorm @ lu-kv"), reading)
    assert evidence.layers == (1, 3) and evidence.n_layers == 4
    only = tiny("mistral", sliding_window=16)
    with pytest.raises(Refused, match="every layer of this model has a sliding window"):
        observe(only, Recipe.parse("knorm @ lu-kv"), reading)
    short = observe(only, Recipe.parse("knorm @ lu-kv"), random_reading(12))
    assert short[0].layers == (0, 1)


def test_a_window_hides_what_lies_before_it():
    model, reading = tiny("mistral", sliding_window=16), random_reading(14, questions=1)
    evidence, = observe(model, Recipe.parse("knorm @ lu-kv"), reading)
    assert (evidence.utility[..., 3:] > 0).all() and (evidence.utility[..., :2] == 0).all()


# --------------------------------------------------------------------------------------------------- the whole way


def test_a_profile_is_made_found_and_reused(loaded):
    with pytest.raises(Refused, match="longspan profile 'knorm @ lu-kv"):
        Context.from_ids(loaded, range(10, 60), RECIPE)
    told = []
    made = make_profile(loaded, RECIPE, lambda *what: told.append(what), contexts=2, length=300)
    assert not made.reused and made.path.is_file() and [t[:2] for t in told] == [(0, 2), (1, 2), (2, 2)]
    ratios = made.profile.tensors["ratios"]
    assert ratios.shape == (99, 2, 2)
    torch.testing.assert_close(ratios.mean((1, 2))[:90], torch.arange(1, 91) / 100, atol=0.01, rtol=0)
    assert ratios[49].max() - ratios[49].min() > 0.01
    context = Context.from_ids(loaded, range(10, 110), RECIPE)
    assert sum(map(sum, context.achieved.kept)) == pytest.approx(200, abs=2)
    again = make_profile(loaded, "knorm @ lu-kv(budget=0.1)", contexts=1)
    assert again.reused and again.path == made.path
    assert again.as_json()["score"] == "knorm" and again.as_json()["made from"]["contexts"] == 2


def test_the_same_seed_makes_the_same_profile(loaded, tmp_path):
    tables = [make_profile(loaded, RECIPE, contexts=1, questions=2, length=200, seed=seed, out=tmp_path / f"{i}.safetensors")
              .profile.tensors["ratios"] for i, seed in enumerate((0, 0, 1))]
    assert torch.equal(tables[0], tables[1]) and not torch.equal(tables[0], tables[2])


def test_a_damaged_profile_is_made_again(loaded):
    made = make_profile(loaded, RECIPE, contexts=1, questions=1, length=200, answers="known")
    made.path.write_bytes(made.path.read_bytes()[:50])
    repaired = make_profile(loaded, RECIPE, contexts=1, questions=1, length=200, answers="known")
    assert not repaired.reused and torch.equal(repaired.profile.tensors["ratios"], made.profile.tensors["ratios"])
    assert not make_profile(loaded, RECIPE, contexts=1, questions=1, length=200, answers="known", again=True).reused


@pytest.mark.parametrize(("recipe", "options", "what"), [
    ("knorm(budget=0.5)", {}, "needs no profile; expected one with a method that does, such as knorm @ lu-kv"),
    ("full", {}, "recipe 'full' needs no profile"),
    (RECIPE, {"answers": "guessed"}, "answers='guessed': expected sampled or known"),
    (RECIPE, {"contexts": 0}, "nothing to calibrate on"),
    (RECIPE, {"length": 2000}, "calibration text, question and answer together"),
    ("snapkv(window=400) @ lu-kv", {"length": 200}, r"too short for snapkv\(window=400\)"),
])
def test_what_cannot_be_profiled_is_refused(loaded, recipe, options, what):
    with pytest.raises(Refused, match=what):
        make_profile(loaded, recipe, **{"contexts": 1, "questions": 1, "length": 200} | options)
    assert not list(profiles.cache_folder().glob("profiles/**/*.safetensors"))


def test_a_small_budget_does_not_stand_in_the_way(loaded):
    """Ten tokens are less than the window: such a recipe is refused when it runs, but can be profiled."""
    made = make_profile(loaded, "snapkv(window=32) @ lu-kv(budget=0.05)", contexts=1, questions=1, length=200)
    assert made.profile.key.score == "snapkv"


def test_evidence_is_taken_one_text_at_a_time(loaded):
    shown = profiling.gather(loaded, Recipe.parse(RECIPE), [random_reading(40, questions=1, seed=s) for s in range(3)])
    assert len(list(itertools.islice(shown, 1))) == 1
    assert loaded.model.config._attn_implementation != "longspan"


def test_several_recipes_share_their_texts(loaded, monkeypatch, tmp_path):
    """Profiles made together are those made one by one, and what is there already isn't made again."""
    recipes = ["knorm @ lu-kv", "h2o @ lu-kv", "snapkv(window=8) @ lu-kv"]
    options = {"contexts": 2, "questions": 1, "length": 300}
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "alone"))
    alone = [profiling.make_profile(loaded, r, **options) for r in recipes]
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "together"))
    profiling.make_profile(loaded, recipes[1], **options)
    together = profiling.make_profiles(loaded, recipes, **options)
    assert [made.reused for made in together] == [False, True, False]
    for one, all_ in zip(alone, together):
        assert one.profile.key == all_.profile.key and one.profile.notes == all_.profile.notes
        assert torch.equal(one.profile.tensors["ratios"], all_.profile.tensors["ratios"])
    with pytest.raises(Refused, match="can't hold the profiles of 3 recipes"):
        profiling.make_profiles(loaded, recipes, out=tmp_path / "x.safetensors")


def test_a_file_that_holds_something_else_is_not_written_over(loaded, tmp_path):
    file, options = tmp_path / "x.safetensors", {"contexts": 1, "questions": 1, "length": 200, "answers": "known"}
    made = make_profile(loaded, "knorm @ lu-kv", out=file, **options)
    assert make_profile(loaded, "knorm @ lu-kv", out=file, **options).reused
    with pytest.raises(Refused, match="isn't the profile of keydiff @ lu-kv"):
        make_profile(loaded, "keydiff @ lu-kv", out=file, **options)
    assert profiles.load(file).key == made.profile.key
    assert make_profile(loaded, "keydiff @ lu-kv", out=file, again=True, **options).profile.key.score == "keydiff"

"""Recipes on unchanged `generate`: every way of generating, batches, rows, questions, memory, refusals."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from generating import left_padded, new_tokens
from masked_oracle import check_against_oracle, forced_logits
from tiny_models import FAMILIES, TOKENS, tiny, tiny_ids, tiny_tokenizer
from transformers import DynamicCache, GenerationConfig, TextIteratorStreamer

from longspan.models.hook import Prompt
from longspan.recipe import Recipe, per_row
from longspan.registry import Refused, cards

RECIPES = ["full", "h2o(budget=0.4)", "snapkv(window=4) @ adakv(budget=0.4)",
           "knorm(budget=0.4, store=quantised(bits=8, group=8), schedule=every(steps=3))",
           "streaming-llm(n_sink=2, rerotate=True, budget=0.5, schedule=every(steps=2))"]
EVICTING = RECIPES[1:4]


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


@pytest.fixture(params=RECIPES)
def recipe(request):
    return Recipe.parse(request.param)


# ------------------------------------------------------------------------------------------------------ as written


@pytest.mark.parametrize("text", [
    "full", "snapkv(budget=0.2)", "h2o @ adakv(budget=0.4)", 'knorm(budget="64 KiB")',
    "criticalkv(base=h2o(recent=0.25)) @ adakv(budget=0.5, alpha=0.1)"])
def test_recipes_are_written_as_they_are_read(text):
    assert str(Recipe.parse(text)) == text
    assert Recipe.parse(f" {text} + full ").cache == Recipe.parse(text).cache


def test_parts_fill_their_slots():
    recipe = Recipe.parse("full + snapkv(window=4, budget=0.5) + full")
    assert recipe.cache.score.window == 4 and recipe.selector is None and recipe.decoding is None
    assert [m.card.kind for m in recipe.methods] == ["score", "budget"]
    assert Recipe.parse("full") == Recipe(name="full")
    assert str(Recipe.parse("full") + Recipe.parse("h2o(budget=0.3)")) == "h2o(budget=0.3)"


@pytest.mark.parametrize(("text", "words"), [
    ("snapvk", "did you mean 'snapkv'"), ("snapkv(budgte=0.2)", "did you mean 'budget'"),
    ("adakv", "is a budget and can't stand alone in a recipe; write it behind a score, as in snapkv @ adakv"),
    ("ragged", "write it into a score, as in snapkv(store=ragged)"), ("every", "as in snapkv(schedule=every)"),
    ("snapkv @ h2o", "h2o is a score; expected a budget"), ("snapkv(budget=0.1) @ adakv", "the budget stands twice"),
    ("snapkv(store=every)", "every is a schedule; expected a store"), ("snapkv(store=3)", "expected a store by name"),
    ("snapkv(schedule=dense)", "dense is a store; expected a schedule"), ("snapkv + h2o", "already has snapkv"),
    ("auto", "longspan plan"), ("snapkv(budget=0)", "a fraction lies in (0, 1]"), ("snapkv(budget=2)", 'did you mean "2 tokens"'),
    ("snapkv(store=dense) @ adakv", "adakv keeps a different number of tokens per head"), ("niah", "use it as --task niah"),
    ("criticalkv(base=expected-attention)", "already weighs by the values"),
])
def test_recipes_that_make_no_sense_are_refused(text, words):
    with pytest.raises(Refused) as error:
        Recipe.parse(text)
    assert words in str(error.value)


def test_only_scores_take_a_budget():
    selector = next(iter(cards(kind="selector")), None)
    if selector is None:
        pytest.skip("no selectors are installed")
    with pytest.raises(Refused, match="only a score takes a budget behind @"):
        Recipe.parse(f"{selector.name} @ adakv")


# ----------------------------------------------------------------------------------------------- ways of generating


def test_greedy_equals_the_oracle(model, recipe):
    ids = tiny_ids(1, 30)
    with recipe.on(model):
        tokens = new_tokens(model, ids[:, :20], 10)
    forced = torch.cat([ids[:, :20], torch.tensor(tokens)], 1)
    if "rerotate" not in str(recipe):
        check_against_oracle(model, recipe, forced, 20)
    with recipe.on(model) as run:
        logits, _ = forced_logits(run, model, forced, 20)
    assert logits[:, :-1].argmax(-1).tolist() == tokens


def test_sampling_with_a_seed_repeats_itself_and_follows_the_recipe(model, recipe):
    ids = tiny_ids(2, 20)
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        with recipe.on(model):
            runs.append(new_tokens(model, ids, do_sample=True, temperature=1.5))
    assert runs[0] == runs[1]
    torch.manual_seed(3)
    stock = new_tokens(model, ids, do_sample=True, temperature=1.5)
    assert (stock == runs[0]) == (str(recipe) == "full")


@pytest.mark.parametrize("returned", [1, 3])
def test_beam_search_equals_a_batch_of_beams(model, recipe, returned):
    """Reordering beams, by a reference that reads every hypothesis anew: its likelihood under the recipe."""
    ids = tiny_ids(1, 20)
    with recipe.on(model):
        out = model.generate(ids, num_beams=3, num_return_sequences=returned, max_new_tokens=6, do_sample=False,
                             eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, output_scores=True)
    for sequence, score in zip(out.sequences, out.sequences_scores):
        with recipe.on(model) as run:
            logits, _ = forced_logits(run, model, sequence[None], 20)
        own = logits[0, :-1].log_softmax(-1).gather(-1, sequence[20:, None]).sum() / 6
        torch.testing.assert_close(own, score, atol=2e-5, rtol=1e-4)
    if str(recipe) == "full":
        stock = model.generate(ids, num_beams=3, num_return_sequences=returned, max_new_tokens=6, do_sample=False,
                               eos_token_id=None, pad_token_id=0)
        assert torch.equal(out.sequences, stock)


def test_beams_of_a_padded_batch(model, recipe):
    ids, mask = left_padded(tiny_ids(1, 24), tiny_ids(1, 17, seed=1))
    options = {"num_beams": 3, "num_return_sequences": 2}
    with recipe.on(model):
        both = new_tokens(model, ids, attention_mask=mask, **options)
    for i, row in enumerate((tiny_ids(1, 24), tiny_ids(1, 17, seed=1))):
        with recipe.on(model):
            assert new_tokens(model, row, **options) == both[2 * i : 2 * i + 2]


def test_several_sequences_of_one_prompt(model, recipe):
    torch.manual_seed(0)
    with recipe.on(model) as run:
        found = new_tokens(model, tiny_ids(1, 20), do_sample=True, num_return_sequences=3)
        assert len(found) == 3 and run.achieved.full_bytes == 3 * run.achieved.seen * (256 + 2 * 4)
    torch.manual_seed(0)
    with recipe.on(model):
        assert new_tokens(model, tiny_ids(1, 20).repeat(3, 1), do_sample=True) == found


@pytest.mark.parametrize("how", ["prompt lookup", "assistant", "the model itself"])
def test_assisted_decoding_equals_plain_greedy(model, recipe, how):
    """Drafts that are rejected change nothing: not what is evicted, not what scores have noted."""
    ids = tiny_ids(1, 8).repeat(1, 3)
    options = {"prompt lookup": {"prompt_lookup_num_tokens": 4}, "assistant": {"assistant_model": tiny("llama")},
               "the model itself": {"assistant_model": model}}[how]
    if how == "assistant":  # nearly the same model, so that some drafts are accepted and some are not
        with torch.no_grad():
            options["assistant_model"].model.layers[1].mlp.down_proj.weight.mul_(0.3)
    with recipe.on(model):
        plain = new_tokens(model, ids, 16)
        assert new_tokens(model, ids, 16, **options) == plain


def test_streaming_in_a_thread():
    model, tokenizer = tiny("llama", vocab=len(TOKENS)), tiny_tokenizer()
    inputs = tokenizer("the thing that the other thing thought", return_tensors="pt", add_special_tokens=False)
    recipe = Recipe.parse("h2o(budget=0.5)")
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with recipe.on(model):
        wanted = tokenizer.decode(model.generate(**inputs, **options)[0, inputs["input_ids"].shape[1] :])
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
        thread = threading.Thread(target=model.generate, kwargs={**inputs, **options, "streamer": streamer})
        thread.start()
        pieces = list(streamer)
        thread.join(20)
    assert "".join(pieces) == wanted
    assert recipe.achieved.kept_fraction < 0.6


@pytest.mark.parametrize("size", [1, 5, 7, 64])
def test_chunked_prefill_equals_unchunked(model, recipe, size):
    ids, mask = left_padded(tiny_ids(1, 24), tiny_ids(1, 17, seed=1))
    with recipe.on(model) as run:
        whole, kept = new_tokens(model, ids, attention_mask=mask), run.cache.kept_positions()
        assert new_tokens(model, ids, attention_mask=mask, prefill_chunk_size=size) == whole
        assert all(torch.equal(a, b) for x, y in zip(kept, run.cache.kept_positions()) for a, b in zip(x, y))


def test_prompts_as_embeddings(model, recipe):
    ids = tiny_ids(1, 20)
    with recipe.on(model):
        wanted = new_tokens(model, ids)
        assert model.generate(inputs_embeds=model.get_input_embeddings()(ids), max_new_tokens=8, do_sample=False,
                              eos_token_id=None, pad_token_id=0).tolist() == wanted


# ------------------------------------------------------------------------------------------------------------ batches


def test_padded_batches_equal_single_rows(model, recipe):
    rows = [tiny_ids(1, n, seed=n) for n in (24, 17, 20)]
    ids, mask = left_padded(*rows)
    with recipe.on(model) as run:
        both = new_tokens(model, ids, attention_mask=mask)
        batch = run.achieved
    single = []
    for row in rows:
        with recipe.on(model) as run:
            single += new_tokens(model, row)
    assert both == single
    assert batch.kept_fraction == pytest.approx(0.4 if str(recipe) != "full" else 1.0, abs=0.12)


@pytest.mark.parametrize("name", [c.name for c in cards(kind="score") if c.module.startswith("longspan")])
def test_every_score_gives_padded_rows_what_they_get_alone(model, name):
    card = next(c for c in cards() if c.name == name)
    if card.can("profile"):
        pytest.skip("needs offline statistics")
    rows = [tiny_ids(1, n, seed=n) for n in (24, 17)]
    ids, mask = left_padded(*rows)
    knobs = ", ".join(f"{k.name}=4" for k in card.knobs if k.name == "window")
    recipe = Recipe.parse(f"{name}({knobs}) @ adakv(budget=0.4)")
    with recipe.on(model):
        both = new_tokens(model, ids, attention_mask=mask)
    for i, row in enumerate(rows):
        with recipe.on(model):
            assert new_tokens(model, row) == [both[i]]


def test_rows_may_have_recipes_of_their_own(model):
    """`per_row` gives each row what it would get alone: kept entries, tokens, bytes budgets, windows, statistics."""
    texts = ["h2o(budget=0.4)", "full", "snapkv(window=4) @ adakv(budget=0.4)", "snapkv(window=7, budget=0.5)",
             'knorm(budget="1 KiB")', "expected-attention(n_sink=2, budget=0.4)", "expected-attention(n_sink=4, budget=0.4)",
             "h2o(recent=0.2, budget=0.4)", "criticalkv(base=h2o, budget=0.4)", "h2o(budget=0.4)",
             "streaming-llm(n_sink=2, rerotate=True, budget=0.4)"]
    recipes = [Recipe.parse(t) for t in texts]
    rows = [tiny_ids(1, 24 - i, seed=i) for i in range(len(texts))]
    ids, mask = left_padded(*rows)
    with per_row(recipes, model) as run:
        both = new_tokens(model, ids, attention_mask=mask)
        views = [layer.store.view() for layer in run.cache.policy_layers]
    for i, (recipe, row) in enumerate(zip(recipes, rows)):
        with recipe.on(model) as run:
            assert new_tokens(model, row) == [both[i]], texts[i]
            for view, alone in zip(views, run.cache.kept_positions()):
                for h, positions in enumerate(alone):
                    assert view.positions[i, h][view.valid[i, h]].tolist() == positions.tolist(), texts[i]


def test_rows_of_their_own_with_beams_and_several_answers(model):
    recipes = [Recipe.parse("h2o(budget=0.4)"), Recipe.parse("full")]
    ids = tiny_ids(2, 20)
    with per_row(recipes, model) as run:
        both = new_tokens(model, ids, num_beams=3, num_return_sequences=2)
        assert run.cache.first.record.kept.tolist() == [[8, 8]] * 3 + [[20, 20]] * 3
    for i, recipe in enumerate(recipes):
        with recipe.on(model):
            assert new_tokens(model, ids[i : i + 1], num_beams=3, num_return_sequences=2) == both[2 * i : 2 * i + 2]


def test_rows_of_their_own_in_bare_forwards(model):
    recipes = [Recipe.parse("knorm(budget=0.5)"), Recipe.parse("full")]
    with per_row(recipes, model) as run:
        model(tiny_ids(2, 20))
        run.commit()
        assert run.cache.policy_layers[0].store.lengths().tolist() == [[10, 10], [20, 20]]
        model(tiny_ids(3, 20))
        with pytest.raises(Refused, match="2 recipes were given for 3 rows"):
            run.commit()


@pytest.mark.parametrize(("recipes", "rows", "words"), [
    (["h2o", "full"], 3, "2 recipes were given for 3 rows"),
    (["h2o(store=ragged)", "h2o(store=quantised)"], 2, "must share a store"),
    (["h2o(schedule=every)", "h2o(budget=0.5)"], 2, "must share a schedule"),
])
def test_rows_that_cant_go_together_are_refused(model, recipes, rows, words):
    with per_row([Recipe.parse(r) for r in recipes], model), pytest.raises(Refused, match=words):
        new_tokens(model, tiny_ids(rows, 20))


# ------------------------------------------------------------------------------------- one context, several questions


@pytest.mark.parametrize("text", RECIPES[:3])
def test_several_questions_on_one_compressed_context(model, text):
    """Whole ids with the cache, then the cache cropped; or new ids with a full-width mask. Each as if asked first."""
    recipe, context = Recipe.parse(text), tiny_ids(1, 20)
    questions = [tiny_ids(1, n, seed=n) for n in (5, 3, 5)]
    with recipe.on(model) as run:
        first = []
        for question in questions:
            cache = run.new_cache(Prompt(context, 20))
            model(context, past_key_values=cache)
            first += new_tokens(model, torch.cat([context, question], 1), past_key_values=cache)
        cache = run.new_cache(Prompt(context, 20))
        model(context, past_key_values=cache)
        held = cache.nbytes()
        for question, wanted in zip(questions, first):
            whole = torch.cat([context, question], 1)
            assert new_tokens(model, whole, past_key_values=cache) == [wanted]
            cache.crop(-(cache.get_seq_length() - 20))
            mask = torch.ones_like(whole)
            assert new_tokens(model, question, past_key_values=cache, attention_mask=mask) == [wanted]
            cache.crop(-(cache.get_seq_length() - 20))
        assert cache.get_seq_length() == 20
        assert [layer.store.lengths().tolist() for layer in cache.policy_layers] == [
            layer.record.kept.tolist() for layer in cache.policy_layers]
        assert cache.nbytes() <= held + 2 * 2 * 2 * 17 * 8 * 4 * 2  # the tail's buffers


@pytest.mark.parametrize("text", RECIPES[:3])
def test_a_batch_of_questions_with_padding_in_the_middle(model, text):
    recipe, context = Recipe.parse(text), tiny_ids(1, 20)
    questions, mask = left_padded(tiny_ids(1, 6, seed=6), tiny_ids(1, 3, seed=3))
    full_mask = torch.cat([torch.ones(2, 20, dtype=torch.long), mask], 1)
    with recipe.on(model) as run:
        cache = run.new_cache(Prompt(context, 20))
        model(context, past_key_values=cache)
        cache.batch_repeat_interleave(2)
        for _ in range(2):
            both = new_tokens(model, torch.cat([context.repeat(2, 1), questions], 1), past_key_values=cache,
                              attention_mask=full_mask)
            cache.crop(-(cache.get_seq_length() - 20))
            for i, question in enumerate((tiny_ids(1, 6, seed=6), tiny_ids(1, 3, seed=3))):
                single = run.new_cache(Prompt(context, 20))
                model(context, past_key_values=single)
                assert new_tokens(model, torch.cat([context, question], 1), past_key_values=single) == [both[i]]


def test_new_ids_without_a_mask_are_explained(model):
    with Recipe.parse("h2o(budget=0.5)").on(model) as run:
        new_tokens(model, tiny_ids(1, 20), 2)
        with pytest.raises(Refused, match="the cache holds 21 tokens, but ids and attention mask tell of 4 only"):
            new_tokens(model, tiny_ids(1, 4), past_key_values=run.cache)
        with pytest.raises(Refused, match="columns, expected"):
            model(tiny_ids(1, 4), past_key_values=run.cache, attention_mask=torch.ones(1, 9))


def test_cropping_into_what_was_compressed_is_refused(model):
    with Recipe.parse("h2o(budget=0.5)").on(model) as run:
        new_tokens(model, tiny_ids(1, 20), 4)
        run.cache.crop(-3)
        with pytest.raises(Refused, match="can't take back 1 tokens: only the 0 read since the last compression"):
            run.cache.crop(-1)


def test_a_second_generate_compresses_as_much_as_the_first(model, recipe):
    ids = tiny_ids(1, 20)
    with recipe.on(model) as run:
        found = []
        for _ in range(3):
            tokens = new_tokens(model, ids)
            found.append((tokens, run.achieved))
        assert found[0] == found[1] == found[2]


# ---------------------------------------------------------------------------------------------------- bare forwards


def test_bare_forwards_and_commit(model, recipe):
    """Read in pieces, commit, go on: as if the prompt's length had been known."""
    ids = tiny_ids(1, 26)
    with recipe.on(model) as run:
        wanted, cache = forced_logits(run, model, ids[:, :22], 20)
        kept = cache.kept_positions()
        out = model(ids[:, :13])
        model(ids[:, 13:20], past_key_values=out.past_key_values)
        run.commit()
        run.commit()  # nothing new since: changes nothing
        cache = run.cache
        logits = torch.cat([model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(20, 22)], 1)
        torch.testing.assert_close(logits, wanted[:, 1:], atol=1e-5, rtol=1e-5)
        assert all(torch.equal(a, b) for x, y in zip(kept, cache.kept_positions()) for a, b in zip(x, y))


def test_commit_explains_what_it_cant_do(model):
    with Recipe.parse("snapkv(window=4, budget=0.5)").on(model) as run:
        with pytest.raises(Refused, match="nothing was read yet"):
            run.commit()
        run.new_cache(None)
        with pytest.raises(Refused, match="nothing was read yet"):
            run.commit()
        new_tokens(model, tiny_ids(1, 20), 4)
        with pytest.raises(Refused, match=r"compressed when it ended, and schedule=at-prompt .* every\(steps=128\)"):
            run.commit()
    with Recipe.parse("snapkv(window=4, budget=0.5, schedule=every(steps=100))").on(model) as run:
        new_tokens(model, tiny_ids(1, 20), 4)
        run.commit()
        assert run.achieved.compressions == 2 and run.achieved.kept[0] == [11.0, 11.0]


def test_a_cache_read_bare_learns_its_prompt_from_generate(model):
    ids = tiny_ids(1, 20)
    with Recipe.parse("h2o(budget=0.5)").on(model) as run:
        wanted = new_tokens(model, ids)
        model(ids[:, :12])
        assert new_tokens(model, ids, past_key_values=run.cache) == wanted
        assert run.achieved.kept_fraction == 0.5
        run.cache.reset()
        assert run.cache.get_seq_length() == 0 and new_tokens(model, ids, past_key_values=run.cache) == wanted


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_modes_of_gradients(model, recipe, mode):
    ids = tiny_ids(1, 24)
    with recipe.on(model) as run:
        wanted, _ = forced_logits(run, model, ids, 20)
        with mode():
            cache = run.new_cache(Prompt(ids[:, :20], 20))
            found = [model(ids[:, :20], past_key_values=cache).logits[:, -1:]]
        for t in range(20, 24):  # a cache that inference mode began goes on outside of it
            found.append(model(ids[:, t : t + 1], past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(found, 1), wanted, atol=1e-5, rtol=1e-5)


def test_training_through_a_recipe(model):
    """Gradients of a loss on later tokens flow through what was kept, and through the prompt."""
    trained = tiny("llama").requires_grad_(True)
    ids = tiny_ids(1, 24)
    with Recipe.parse("knorm(budget=1.0)").on(trained) as run:
        cache = run.new_cache(Prompt(ids[:, :20], 20))
        trained(ids[:, :20], past_key_values=cache)
        trained(ids[:, 20:], past_key_values=cache).logits.square().mean().backward()
    ours = {n: p.grad.clone() for n, p in trained.named_parameters()}
    trained.zero_grad()
    trained(ids).logits[:, 20:].square().mean().backward()
    for name, p in trained.named_parameters():
        torch.testing.assert_close(ours[name], p.grad, atol=1e-4, rtol=1e-3, msg=name)


# -------------------------------------------------------------------------------------------------- families, dtypes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", EVICTING)
def test_every_family_equals_the_oracle(family, text):
    model, recipe = tiny(family), Recipe.parse(text)
    ids, mask = left_padded(tiny_ids(1, 30), tiny_ids(1, 24, seed=1))
    cache = check_against_oracle(model, recipe, ids, 22, mask, tolerance=5e-4)
    sliding = sum(1 for layer in cache.layers if layer.is_sliding)
    assert sliding == {"gemma2": 1, "gemma3": 1}.get(family, 0)


@pytest.mark.parametrize("text", EVICTING[:2])
def test_a_window_longer_than_the_prompt_hides_by_position(text):
    """All layers slide, the prompt is shorter than the window: our cache, and old entries leave the window later."""
    model, ids = tiny("mistral", sliding_window=22), tiny_ids(2, 36)
    check_against_oracle(model, Recipe.parse(text), ids, 18)


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_assisted_decoding_with_sliding_layers(family):
    model, ids = tiny(family), tiny_ids(1, 8).repeat(1, 3)
    with Recipe.parse("h2o(budget=0.4)").on(model):
        assert new_tokens(model, ids, 12, prompt_lookup_num_tokens=4) == new_tokens(model, ids, 12)


def test_sliding_layers_free_what_left_the_window():
    model = tiny("gemma3")
    with Recipe.parse("h2o(budget=0.5)").on(model) as run:
        new_tokens(model, tiny_ids(1, 200, vocab=128), 2)
        sliding, own = run.cache.layers
        assert sliding.keys.untyped_storage().nbytes() <= 2 * 15 * 2 * 8 * 4
        assert run.achieved.cache_bytes == own.record.bytes + 2 * sliding.keys.untyped_storage().nbytes()
        assert run.achieved.full_bytes == (2 * 2 * 2 * 8 * 4 + 4) * 200  # the layer of ours keeps a position a token


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("text", RECIPES)
def test_dtypes(dtype, text):
    model, recipe, ids = tiny("llama").to(dtype), Recipe.parse(text), tiny_ids(2, 26)
    with recipe.on(model) as run:
        found, cache = forced_logits(run, model, ids, 20)
        assert found.dtype == dtype and torch.isfinite(found.float()).all()
        layer = cache.policy_layers[0]
        assert layer.store.view().k.dtype == dtype
        assert run.achieved.full_bytes == 2 * 2 * 20 * (2 * 2 * 8 * dtype.itemsize + 4) if "every" not in text else True
    reference = tiny("llama")
    with recipe.on(reference) as run:
        exact, _ = forced_logits(run, reference, ids, 20)
    if text == "full":  # elsewhere rounding may change what is kept
        torch.testing.assert_close(found.float(), exact, atol={torch.float32: 1e-6}.get(dtype, 0.15), rtol=0.05)


@pytest.mark.parametrize("text", [*RECIPES, "expected-attention(n_sink=2, budget=0.5)", "random @ pyramid(budget=0.5)",
                                  "criticalkv(base=tova) @ adakv(budget=0.5)", "keydiff(budget=0.5, schedule=per-chunk(size=6))"])
def test_no_device_is_written_down(model, text):
    """With ``meta`` as the default device, whatever forgets to say where it lives meets real tensors and fails."""
    recipe = Recipe.parse(text)
    ids, mask = left_padded(tiny_ids(1, 26), tiny_ids(1, 21))
    with recipe.on(model) as run:
        wanted, _ = forced_logits(run, model, ids, 20, mask)
        with torch.device("meta"):
            found, cache = forced_logits(run, model, ids, 20, mask)
            cache.batch_select_indices(torch.tensor([1, 0], device="cpu"))
            cache.batch_repeat_interleave(2)
            cache.achieved()
    assert torch.equal(found, wanted)


# ------------------------------------------------------------------------------------------------------------ memory


@pytest.fixture
def live_tensors():
    """Tensors made since the test began that are still alive, by the garbage collector."""
    gc.collect()
    gc.freeze()  # what is there already is looked at no more
    yield lambda: (gc.collect(), [t for t in gc.get_objects() if type(t) is torch.Tensor])[1]
    gc.unfreeze()


def bytes_of(tensors):
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("text", ["full", "h2o(budget=0.2)", "snapkv(window=4) @ adakv(budget=0.2)",
                                  "expected-attention @ pyramid(budget=0.2)",
                                  "knorm(budget=0.2, store=quantised(bits=4, group=8))",
                                  "tova(budget=0.2, schedule=every(steps=50))"])
@pytest.mark.parametrize("bare", [False, True])
def test_freed_means_freed(text, bare, live_tensors):
    """Bytes reported are those of the live tensors: nothing of the prompt's queries, keys and values is left."""
    model, recipe, ids = tiny("llama", kv_heads=4, positions=1024), Recipe.parse(text), tiny_ids(1, 400)
    before = {id(t) for t in live_tensors()}
    with recipe.on(model) as run:
        if bare:
            model(ids, logits_to_keep=1)
            run.commit()
        else:
            model.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0)
        new = [t for t in live_tensors() if id(t) not in before]
        reported = run.achieved.cache_bytes
    large = bytes_of(t for t in new if t.numel() > 400)
    assert large <= reported <= large + bytes_of(t for t in new if t.numel() <= 400)
    if text != "full":
        assert reported < 0.35 * recipe.achieved.full_bytes


def test_ragged_at_twenty_percent_holds_twenty_percent():
    model = tiny("llama", kv_heads=4, head_dim=64, positions=1024)
    with Recipe.parse("h2o @ adakv(budget=0.2)").on(model) as run:
        new_tokens(model, tiny_ids(1, 600), 2)
        achieved = run.achieved
    assert achieved.cache_bytes / achieved.full_bytes == pytest.approx(0.2, abs=0.02)
    assert achieved.kept_fraction == 0.2
    assert len({n for layer in achieved.kept for n in layer}) > 2  # heads do keep different numbers


@pytest.mark.parametrize("store", ["", ", store=ragged", ", store=dense", ", store=quantised(bits=4, group=8)"])
def test_budgets_in_bytes_are_kept(store):
    model = tiny("llama", kv_heads=4, positions=1024)
    with Recipe.parse(f'knorm(budget="40 KiB"{store})').on(model) as run:
        new_tokens(model, tiny_ids(2, 400), 2)
        assert 0.93 * 40 * 1024 < run.achieved.cache_bytes < 1.01 * 40 * 1024


def test_memory_of_earlier_prompts_is_given_back(model, live_tensors):
    recipe = Recipe.parse("h2o(budget=0.5)")
    with recipe.on(model):
        sizes = []
        for _ in range(3):
            new_tokens(model, tiny_ids(1, 200), 2)
            sizes.append(bytes_of(t for t in live_tensors() if t.dim() == 4))
        assert sizes[0] == sizes[1] == sizes[2] > 0
    assert recipe.achieved.kept_fraction == 0.5  # remembered without the cache
    assert bytes_of(t for t in live_tensors() if t.dim() == 4) == 0


def test_achieved_reports_what_happened(model):
    recipe = Recipe.parse("h2o(budget=0.4)")
    with pytest.raises(Refused, match="hasn't run yet"):
        recipe.achieved  # noqa: B018
    ids, mask = left_padded(tiny_ids(1, 20), tiny_ids(1, 10))
    with recipe.on(model) as run:
        with pytest.raises(Refused, match="no cache was made"):
            run.achieved  # noqa: B018
        new_tokens(model, ids, attention_mask=mask)
        inside = run.achieved
    assert recipe.achieved == inside
    assert inside.seen == 20 and inside.kept == [[6.0, 6.0]] * 2  # 8 of 20 and 4 of 10, in the mean over rows
    assert inside.kept_fraction == pytest.approx(0.4)
    assert inside.full_bytes == 2 * 2 * (2 * 2 * 8 * 4 + 4) * 20
    assert inside.asked == "h2o(budget=0.4)" and inside.compressions == 1 and inside.density == 1.0
    with Recipe.parse("full").on(model) as run:
        new_tokens(model, ids, attention_mask=mask)
        assert (run.achieved.kept_fraction, run.achieved.compressions, run.achieved.kept) == (1.0, 0, [[15.0, 15.0]] * 2)


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(("more", "words"), [
    ({"cache_implementation": "static"}, "cache_implementation='static'"),
    ({"cache_implementation": "quantized"}, "cache_implementation='quantized'"),
    ({"cache_implementation": "offloaded"}, "cache_implementation='offloaded'"),
    ({"generation_config": GenerationConfig(cache_implementation="static")}, "cache_implementation='static'"),
    ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions=True"),
    ({"use_cache": False}, "use_cache=False leaves nothing to compress"),
    ({"attention_mask": torch.tensor([[1] * 20, [0] * 20])}, "row 1 of the batch is padding only"),
])
def test_arguments_that_cant_be_carried(model, more, words):
    with Recipe.parse("h2o(budget=0.5)").on(model), pytest.raises(Refused, match=words):
        model.generate(tiny_ids(2, 20), max_new_tokens=2, **more)


def test_a_models_own_generation_config_counts():
    model = tiny("llama")
    model.generation_config.cache_implementation = "static"
    with Recipe.parse("h2o(budget=0.5)").on(model), pytest.raises(Refused, match="cache_implementation='static'"):
        model.generate(tiny_ids(1, 20), max_new_tokens=2)
    model.generation_config.cache_implementation = "hybrid"  # an old default that transformers itself reads as unset
    with Recipe.parse("h2o(budget=0.5)").on(model) as run:
        model.generate(tiny_ids(1, 20), max_new_tokens=2, pad_token_id=0)
        assert run.achieved.kept_fraction == 0.5


def test_without_a_policy_no_cache_is_needed(model):
    with Recipe.parse("full").on(model):
        assert new_tokens(model, tiny_ids(1, 20), use_cache=False) == new_tokens(model, tiny_ids(1, 20))


def test_an_empty_prompt_is_refused(model):
    with Recipe.parse("h2o(budget=0.5)").on(model):
        with pytest.raises(Refused, match="the prompt is empty"):
            model.generate(torch.zeros(1, 0, dtype=torch.long), max_new_tokens=2)
        with pytest.raises(Refused, match="the prompt is empty"):
            model.generate(inputs_embeds=torch.zeros(1, 0, 32), max_new_tokens=2)


def test_chunked_prefill_on_a_filled_cache_is_refused(model):
    with Recipe.parse("h2o(budget=0.5)").on(model) as run:
        model(tiny_ids(1, 20))
        with pytest.raises(Refused, match="prefill_chunk_size can't be combined"):
            new_tokens(model, tiny_ids(1, 24), past_key_values=run.cache, prefill_chunk_size=4)


def test_a_cache_outside_its_recipe_is_an_error(model):
    recipe = Recipe.parse("h2o(budget=0.5)")
    with recipe.on(model):
        out = model.generate(tiny_ids(1, 20), max_new_tokens=2, return_dict_in_generate=True, pad_token_id=0)
    cache = out.past_key_values
    with pytest.raises(RuntimeError, match="recipe that was left"):
        model(tiny_ids(1, 1), past_key_values=cache)
    with recipe.on(model), pytest.raises(Refused, match="was not made by this recipe"):
        model(tiny_ids(1, 1), past_key_values=cache)
    with recipe.on(model) as run:
        run.adopt(cache)
        assert model(tiny_ids(1, 1), past_key_values=cache).logits.shape == (1, 1, 128)
    with pytest.raises(RuntimeError, match="was left"):
        run.new_cache(None)


def test_nan_in_the_keys_is_refused():
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = torch.nan
    for text in ("h2o(budget=0.5)", "knorm @ adakv(budget=0.5)", "snapkv(window=4, budget=0.5)"):
        with Recipe.parse(text).on(model), pytest.raises(Refused, match="gave NaN in layer 1"):
            new_tokens(model, tiny_ids(1, 20))


def test_a_broken_forward_spoils_its_cache_only(model):
    with Recipe.parse("snapkv(window=8, budget=0.2)").on(model) as run:
        with pytest.raises(Refused, match=r"the budget of 6 tokens .* smaller than the 8 tokens"):
            new_tokens(model, tiny_ids(1, 30))
        with pytest.raises(RuntimeError, match="an earlier forward on this cache was broken off"):
            model(tiny_ids(1, 1), past_key_values=run.cache)
        assert len(new_tokens(model, tiny_ids(1, 60))[0]) == 8


@pytest.mark.parametrize(("text", "length"), [
    ("h2o(budget=0.2)", 1), ("snapkv(budget=0.2)", 1), ("streaming-llm(budget=0.2)", 1), ("snapkv(window=32, budget=0.2)", 32),
    ("snapkv(window=32, budget=0.2)", 7), ('h2o(budget="50 tokens")', 30), ("knorm(budget=1.0)", 20),
    ("streaming-llm(budget=0.2)", 4), ("expected-attention @ adakv(budget=0.2)", 3),
    ('criticalkv @ pyramid(budget="64 tokens")', 20)])
def test_no_ops_are_exact(model, text, length):
    """One token, a window or a budget that covers everything: bit for bit the full recipe, for every evictor."""
    ids = tiny_ids(1, length + 4)
    with Recipe.parse("full").on(model) as run:
        wanted, _ = forced_logits(run, model, ids, length)
    with Recipe.parse(text).on(model) as run:
        found, _ = forced_logits(run, model, ids, length)
        assert run.achieved.kept_fraction == 1.0
    assert torch.equal(found, wanted)


def test_stock_caches_work_again_after_leaving(model):
    ids = tiny_ids(1, 20)
    with Recipe.parse("h2o(budget=0.5)").on(model):
        new_tokens(model, ids)
    cache = DynamicCache()
    model(ids, past_key_values=cache)
    assert cache.get_seq_length() == 20


@pytest.mark.parametrize("name", ["rope", "alibi", "nope"])
def test_positions_of_the_small_decoder_are_no_part_of_a_recipe(name):
    with pytest.raises(Refused, match=f"longspan train --position {name}"):
        Recipe.parse(f"{name} + full")


def test_rows_with_other_weights_or_reuse_are_refused():
    model = tiny("llama")
    for first, reason in (("head-ablation(heads=1)", "rows of one batch must share weight transforms"),
                          ("naive-reuse", "joins documents for a question")):
        with pytest.raises(Refused, match=reason), per_row([Recipe.parse(first), Recipe.parse("full")], model):
            pass

"""A document read once: asked, appended to, saved and loaded, with the same answers each time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file
from tiny_models import TOKENS, tiny, tiny_tokenizer

from longspan.cache.digest import content_digest
from longspan.context import Context
from longspan.context.document import check_window, frame
from longspan.models import Loaded
from longspan.recipe import Recipe
from longspan.registry import Refused

TEXT = "the other path leads to the thin house where they thought of nothing else than the weather and the thunder."
RECIPES = ["full", "h2o(budget=0.3)", "snapkv(window=8) @ adakv(budget=0.3)",
           "knorm(budget=0.3, store=quantised(bits=4, group=8))", "h2o(budget=0.3, schedule=every(steps=4))"]


def loaded_of(family="llama", seed=0, dtype=torch.float32, **more):
    model = tiny(family, vocab=len(TOKENS), seed=seed, **more).to(dtype)
    model.generation_config.eos_token_id = None
    return Loaded(model, tiny_tokenizer(), f"tiny {family}", f"print-of-{family}-{seed}", Path("nowhere"))


@pytest.fixture(scope="module")
def loaded():
    return loaded_of()


def ask(context, question="what then?", n=12):
    return context.ask(question, max_new_tokens=n).ids


@pytest.mark.parametrize("recipe", RECIPES)
def test_asking_changes_nothing(loaded, recipe):
    context = Context.read(loaded, TEXT, recipe)
    before = [layer.store.lengths().tolist() for layer in context.cache.policy_layers]
    first = ask(context)
    other = ask(context, "who?")
    assert ask(context) == first and ask(context, "who?") == other and first != other
    assert [layer.store.lengths().tolist() for layer in context.cache.policy_layers] == before
    assert context.cache.get_seq_length() == len(context.ids)


def test_full_answers_are_those_of_generate(loaded):
    context = Context.read(loaded, TEXT)
    head, foot = frame(loaded.tokenizer)
    ids = loaded.tokenizer(head + TEXT, add_special_tokens=False)["input_ids"]
    question = loaded.tokenizer("\n\nwhat then?" + foot, add_special_tokens=False)["input_ids"]
    whole = torch.tensor([ids + question])
    out = loaded.model.generate(whole, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, whole.shape[1] :].tolist()
    end = loaded.tokenizer.eos_token_id
    assert list(ask(context)) == (out[: out.index(end)] if end in out else out)


@pytest.mark.parametrize("recipe", RECIPES)
def test_compression_comes_before_the_question(loaded, recipe):
    context = Context.read(loaded, TEXT, recipe)
    share = 1.0 if recipe == "full" else 0.3
    assert context.achieved.kept_fraction == pytest.approx(share, abs=0.02)
    assert context.achieved.seen == len(context.ids)
    assert context.achieved.cache_bytes < (1.05 if recipe == "full" else 0.4) * context.achieved.full_bytes
    kept = context.achieved
    ask(context)
    assert context.achieved == kept and context.read_s > 0


def test_appending_under_full_is_reading_all_at_once(loaded):
    turns = ["then it rained.", "and they went home."]
    context = Context.read(loaded, TEXT)
    counted = []
    handle = loaded.model.model.embed_tokens.register_forward_hook(lambda m, args, out: counted.append(args[0].shape[1]))
    for turn in turns:
        context.append(turn)
    handle.remove()
    added = [len(loaded.tokenizer("\n\n" + t, add_special_tokens=False)["input_ids"]) for t in turns]
    assert counted == added, "what was read before is not read again"
    whole = Context.from_ids(loaded, context.ids, foot=context.foot)
    torch.testing.assert_close(context.logits, whole.logits, atol=1e-4, rtol=1e-4)
    assert ask(context) == ask(whole)


@pytest.mark.parametrize("recipe", RECIPES[1:4])
def test_what_is_appended_is_kept_whole(loaded, recipe):
    context = Context.read(loaded, TEXT, recipe)
    before = [layer.store.lengths() for layer in context.cache.policy_layers]
    n = len(context.ids)
    context.append("then it rained.")
    for layer, lengths in zip(context.cache.policy_layers, before):
        assert torch.equal(layer.store.lengths(), lengths + len(context.ids) - n)
    assert ask(context) == ask(context)


@pytest.mark.parametrize("appended", [False, True])
@pytest.mark.parametrize("recipe", [*RECIPES, "streaming-llm(n_sink=2, rerotate=True, budget=0.5, schedule=every(steps=3))"])
def test_saved_and_loaded_answers_are_equal(loaded, recipe, appended, tmp_path):
    context = Context.read(loaded, TEXT, recipe)
    if appended:
        context.append("then it rained.")
    file = context.save(tmp_path / "one.longspan")
    assert [f.name for f in tmp_path.iterdir()] == ["one.longspan"]
    other = Context.load(file, loaded)
    assert (other.ids, other.foot, str(other.recipe)) == (context.ids, context.foot, str(context.recipe))
    assert other.achieved.as_json() == context.achieved.as_json()
    for _ in range(2):
        assert ask(other) == ask(context)
    question, answer = [5, 6, 7], [8, 9, 10]
    assert other.nlls(question, answer) == context.nlls(question, answer)
    other.append("and more.")
    context.append("and more.")
    assert ask(other) == ask(context)
    assert Context.load(other.save(tmp_path / "two.longspan"), loaded).ask("what then?", 12).ids == ask(context)


def test_a_saved_context_is_as_small_as_the_cache(loaded, tmp_path):
    sizes = {}
    for recipe in ("full", "h2o @ adakv(budget=0.25)", "full(store=quantised(bits=4, group=8))"):
        file = Context.read(loaded, TEXT * 2, recipe).save(tmp_path / "x.longspan")
        sizes[recipe] = sum(t.numel() * t.element_size() for n, t in load_file(file).items() if n[0].isdigit())
    assert sizes["h2o @ adakv(budget=0.25)"] < 0.3 * sizes["full"]
    assert sizes["full(store=quantised(bits=4, group=8))"] < 0.4 * sizes["full"]


def test_likelihoods_are_those_of_the_model(loaded):
    context = Context.read(loaded, TEXT)
    question, answer = [20, 21, 22], [30, 31, 32, 33]
    logits = loaded.model(torch.tensor([context.ids + question + answer])).logits[0].float().log_softmax(-1)
    start = len(context.ids) + 3
    wanted = [-float(logits[start + i - 1, t]) for i, t in enumerate(answer)]
    assert context.nlls(question, answer) == pytest.approx(wanted, abs=1e-4)
    assert context.nlls(question, answer, chunk=2) == pytest.approx(wanted, abs=1e-4)
    assert context.nlls([], [30]) == pytest.approx([-float(logits[len(context.ids) - 1, 30]) if not question else
                                                    -float(context.logits.log_softmax(-1)[0, 30])], abs=1e-5)


def test_answers_stop_at_stop_texts_and_prefixes_count_as_said(loaded):
    context = Context.read(loaded, TEXT)
    done, _ = context.answer_ids([20, 21], 12)
    text = loaded.tokenizer.decode(done.ids)
    stopped, ttft = context.answer_ids([20, 21], 12, stop=[text[2:4]])
    assert stopped.stopped and len(stopped.ids) < len(done.ids) and ttft > 0
    assert stopped.ids == done.ids[: len(stopped.ids)]
    assert context.ask("what?", 6, answer_prefix="because the").ids != context.ask("what?", 6).ids


def test_sliding_layers_are_asked_but_not_saved(tmp_path):
    loaded = loaded_of("gemma3")
    context = Context.read(loaded, TEXT, "h2o(budget=0.3)")
    assert ask(context) == ask(context)
    context.append("then it rained.")
    assert ask(context) == ask(context)
    with pytest.raises(Refused, match="sliding-window layers can't be saved"):
        context.save(tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_an_error_while_asking_leaves_the_context_as_it_was(loaded):
    context = Context.read(loaded, TEXT, "h2o(budget=0.3, schedule=every(steps=4))")
    first, length = ask(context), context.cache.get_seq_length()
    calls = []

    def failing(module, args):
        calls.append(1)
        if len(calls) > 3:
            raise KeyboardInterrupt

    handle = loaded.model.model.layers[1].mlp.register_forward_pre_hook(failing)
    for action in (lambda: ask(context), lambda: context.append("more."), lambda: context.nlls([5], [6, 7], chunk=1)):
        with pytest.raises(KeyboardInterrupt):
            action()
    handle.remove()
    assert context.cache.get_seq_length() == length == len(context.ids) and ask(context) == first


# ---------------------------------------------------------------------------------------------------------- refusals


def test_nothing_to_read_or_ask_is_refused(loaded):
    with pytest.raises(Refused, match="the document is empty"):
        Context.read(loaded, " \n")
    context = Context.read(loaded, TEXT)
    for action, words in ((lambda: context.ask("  "), "question is empty"), (lambda: context.append(""), "turn to append")):
        with pytest.raises(Refused, match=words):
            action()


def test_more_than_the_window_is_refused(loaded):
    with pytest.raises(Refused, match=r"the document: \d+ tokens, but tiny llama reads at most 256; shorten by"):
        Context.read(loaded, TEXT * 20)
    context = Context.read(loaded, TEXT)
    with pytest.raises(Refused, match="document, question and answer together"):
        context.ask("what?", max_new_tokens=500)
    with pytest.raises(Refused, match="document and turn together"):
        context.append(TEXT * 5)
    check_window(loaded, 256, "just enough")


@pytest.fixture(scope="module")
def saved(loaded, tmp_path_factory):
    return Context.read(loaded, TEXT, "knorm @ adakv(budget=0.3)").save(tmp_path_factory.mktemp("saved") / "c.longspan")


def test_other_models_and_dtypes_are_refused(saved):
    with pytest.raises(Refused, match="made with another model than tiny llama"):
        Context.load(saved, loaded_of(seed=1))
    with pytest.raises(Refused, match="holds float32 numbers, but tiny llama is loaded in bfloat16"):
        Context.load(saved, loaded_of(dtype=torch.bfloat16))


def test_damaged_files_are_refused(loaded, saved, tmp_path):
    """One flipped bit anywhere: in the header, in the metadata, in keys, values, positions or tokens."""
    good = saved.read_bytes()
    file = tmp_path / "bad"
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(8, len(good), (60,), generator=generator).tolist()
    places += [3, 9, len(good) - 1, good.index(b"adakv"), good.index(b"0.3")]
    for place in places:
        file.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(Refused, match=r"damaged|can't be read|not a saved context"):
            Context.load(file, loaded)
    for size in (0, 5, 100, len(good) // 2, len(good) - 1):
        file.write_bytes(good[:size])
        with pytest.raises(Refused, match="can't be read"):
            Context.load(file, loaded)


def test_other_files_are_refused(loaded, tmp_path):
    with pytest.raises(Refused, match="no such file"):
        Context.load(tmp_path / "missing", loaded)
    save_file({"x": torch.ones(2)}, tmp_path / "x", metadata={"format": "pt"})
    with pytest.raises(Refused, match="is not a saved context; expected format longspan-context-1"):
        Context.load(tmp_path / "x", loaded)
    (tmp_path / "text").write_text("hello, this is no safetensors file at all")
    with pytest.raises(Refused, match="can't be read as a saved context"):
        Context.load(tmp_path / "text", loaded)


def test_the_digest_covers_names_shapes_dtypes_and_metadata(saved):
    tensors = load_file(saved)
    with safe_open(saved, "pt") as stored:
        meta = {k: v for k, v in stored.metadata().items() if k != "digest"}
    found = content_digest(tensors, meta)
    assert found != content_digest(tensors, meta | {"foot": "x"})
    assert found != content_digest({("y" if n == "ids" else n): t for n, t in tensors.items()}, meta)
    assert found != content_digest(tensors | {"ids": tensors["ids"][None]}, meta)
    assert found != content_digest(tensors | {"logits": tensors["logits"].view(torch.int32)}, meta)
    assert found == content_digest(dict(reversed(tensors.items())), meta)


def test_templates_that_hide_the_text_are_refused():
    tokenizer = tiny_tokenizer()
    assert frame(tokenizer) == ("<s>", "</s>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{{ m['content'] }}{% endfor %}"
    with pytest.raises(Refused, match="exactly once"):
        frame(tokenizer)
    tokenizer.chat_template = None
    assert frame(tokenizer) == ("", "\n")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_saved_as_it_is(dtype, tmp_path):
    loaded = loaded_of(dtype=dtype)
    for recipe in ("full", "knorm(budget=0.5, store=quantised(bits=8, group=8))"):
        context = Context.read(loaded, TEXT, recipe)
        assert ask(Context.load(context.save(tmp_path / "x"), loaded)) == ask(context)


def test_a_recipe_may_be_given_as_an_object(loaded):
    recipe = Recipe.parse("h2o(budget=0.3)")
    context = Context.read(loaded, TEXT, recipe)
    assert context.recipe is recipe and ask(context) == ask(Context.read(loaded, TEXT, "h2o(budget=0.3)"))


def test_what_cannot_be_written_or_read_is_refused(loaded, tmp_path):
    context = Context.read(loaded, "Some text. " * 20, "knorm(budget=0.5)")
    for place in (tmp_path / "missing" / "a.longspan", tmp_path):
        with pytest.raises(Refused, match="can't save the context"):
            context.save(place)
    assert list(tmp_path.parent.glob("*.part")) == [] and list(tmp_path.iterdir()) == []
    with pytest.raises(Refused, match="no tokens"):
        Context.from_ids(loaded, [], "knorm")
    with pytest.raises(Refused, match="max_new_tokens=0"):
        context.ask("Who?", max_new_tokens=0)


def test_a_later_cut_knows_its_sentences_after_loading(loaded, tmp_path):
    recipe = "shotkv(r_p=0.5, W=4, schedule=every(steps=4, at_prompt=False))"
    context = Context.read(loaded, "One sentence here. Another one there. A third stands last. " * 3, recipe)
    again = Context.load(context.save(tmp_path / "a.longspan"), loaded)
    assert again.ask("Who?", max_new_tokens=6).ids == context.ask("Who?", max_new_tokens=6).ids

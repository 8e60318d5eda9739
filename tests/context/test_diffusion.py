"""Documents of a block-diffusion model: asked, scored, measured, through the same doors as every other model's."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from tiny_blocks import close, random_ids, tiny_blocks
from tiny_models import TOKENS, tiny, tiny_tokenizer

from longspan import cli
from longspan.context import Context, DiffusionContext, open_context
from longspan.decoding.block_sampler import ONE_A_STEP, Sampling, denoise, forced_nlls
from longspan.decoding.blocks import Denoising, Prefix, read_blocks
from longspan.decoding.denoising.flashblock import FlashBlock
from longspan.evaluation import Request, parse_task, run
from longspan.evaluation.measure import kept_tokens, measure
from longspan.models import Loaded
from longspan.models.block_diffusion import ByteTokenizer
from longspan.recipe import Recipe
from longspan.registry import Refused

TEXT = "the other path leads to the house"


@pytest.fixture(scope="module")
def loaded():
    return Loaded(tiny_blocks(window=200), ByteTokenizer(), "tiny blocks", "print-of-blocks", Path("nowhere"))


def test_whole_blocks_are_read_and_the_rest_waits(loaded):
    context = DiffusionContext.read(loaded, TEXT)
    ids = list(TEXT.encode())
    assert context.ids == ids and context.prefix.length == 32 and context.tail == ids[32:]
    want = read_blocks(loaded.model, Prefix.empty(loaded.model), torch.tensor([ids[:32]]))
    close(context.prefix.k[1], want.k[1])
    assert context.achieved.seen == 33 and context.achieved.cache_bytes == context.prefix.nbytes == context.achieved.full_bytes
    assert context.read_s > 0 and bool(kept_tokens(context).all()) and kept_tokens(context).shape == (2, 2, 33)


@pytest.mark.parametrize("recipe", ["full", "flashblock(tau=3)", "losa(k=2, budget=8, page=4)", "quest-rows(budget=8, page=4)"])
def test_asking_changes_nothing(loaded, recipe):
    context = open_context(loaded, TEXT, recipe)
    assert isinstance(context, DiffusionContext)
    first, other = context.ask("what then?", 11), context.ask("who?", 11)
    assert context.ask("what then?", 11).ids == first.ids != other.ids and len(first.ids) == 11
    assert context.prefix.length == 32 and len(context.tail) == 1 and first.ttft_s > 0
    told = context.achieved.as_json()
    assert told["passes"] > 0 and told["asked"] == recipe and (told["prefix_reads"] < 1) == (recipe != "full")


def test_answers_are_denoised_after_the_question(loaded):
    """Block by block by hand: the question's last block first, the last one cut to what is still to be written."""
    context = DiffusionContext.from_ids(loaded, list(TEXT.encode()), "flashblock(tau=3)", sampling=ONE_A_STEP)
    question = random_ids(1, 10, 3)[0].tolist()
    done, _ = context.answer_ids(question, 12)
    whole = torch.tensor([[*TEXT.encode(), *question]])  # 43 tokens: 5 blocks and 3
    prefix = read_blocks(loaded.model, Prefix.empty(loaded.model), whole[:, :40])
    first = torch.cat([whole[:, 40:], torch.full((1, 5), 256)], 1)
    one, prefix = denoise(loaded.model, prefix, first, FlashBlock(tau=3))
    two, _ = denoise(loaded.model, prefix, torch.full((1, 7), 256), FlashBlock(tau=3))
    assert done.ids == one[0, 3:].tolist() + two[0].tolist() and not done.stopped and done.seconds > 0


def test_likelihoods_are_those_of_forced_denoising(loaded):
    context = DiffusionContext.read(loaded, TEXT, "losa(k=1, budget=4, page=4)")
    question, answer = random_ids(1, 10, 3)[0].tolist(), random_ids(1, 12, 4)[0].tolist()
    prefix = read_blocks(loaded.model, Prefix.empty(loaded.model), torch.tensor([[*TEXT.encode(), *question]])[:, :40])
    want = forced_nlls(loaded.model, prefix, question[-3:], answer, context.method)
    assert context.nlls(question, answer) == pytest.approx(want, abs=1e-5)
    plain = DiffusionContext.read(loaded, TEXT).nlls(question, answer)
    assert plain == pytest.approx(forced_nlls(loaded.model, prefix, question[-3:], answer, Denoising()), abs=1e-5)
    assert plain != pytest.approx(want, abs=1e-4), "a sparse method shows"
    assert context.nlls(question, []) == []


def test_stop_texts_end_an_answer(loaded):
    context = DiffusionContext.read(loaded, TEXT)
    whole, _ = context.answer_ids([65, 66], 12)
    stop = loaded.tokenizer.decode(whole.ids[2:3])
    if stop == "\ufffd":
        stop = loaded.tokenizer.decode(whole.ids[:3])
    done, _ = context.answer_ids([65, 66], 12, stop=[stop])
    assert done.stopped and done.ids == whole.ids[: len(done.ids)] and len(done.ids) <= 3
    nothing, _ = context.answer_ids([65, 66], 0)
    assert nothing.ids == [] and nothing.seconds == 0.0


def test_appending_is_reading_all_at_once(loaded):
    context = DiffusionContext.read(loaded, TEXT, "flashblock")
    context.append("then it rained.")
    whole = DiffusionContext.read(loaded, TEXT + "\n\nthen it rained.", "flashblock")
    assert context.ids == whole.ids and context.tail == whole.tail
    close(context.prefix.v[1], whole.prefix.v[1])
    assert context.ask("what then?", 9).ids == whole.ask("what then?", 9).ids and context.achieved.seen == len(whole.ids)


def test_sampling_is_the_readers_choice(loaded):
    ids = list(TEXT.encode())
    one, all_at_once = (DiffusionContext.from_ids(loaded, ids, sampling=s) for s in (ONE_A_STEP, Sampling(steps=1)))
    assert len(one.answer_ids([], 7)[0].ids) == len(all_at_once.answer_ids([], 7)[0].ids) == 7
    assert one.achieved.reads.steps == 7 and all_at_once.achieved.reads.steps == 1


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("recipe, words", [
    ("snapkv(budget=0.2)", "snapkv is a score"), ("xattention", "xattention is a selector"),
    ("prophetkv", "prophetkv is a reuse"), ("flashblock + knorm(budget=0.5)", "knorm.* is a score"),
    ("losa(k=9)", "blocks of 8 tokens")])
def test_parts_that_do_not_suit_the_model_are_refused(loaded, recipe, words):
    with pytest.raises(Refused, match=words):
        open_context(loaded, TEXT, recipe).ask("who?", 4)


def test_denoising_parts_are_refused_on_ordinary_models():
    model = tiny("llama", vocab=len(TOKENS))
    plain = Loaded(model, tiny_tokenizer(), "tiny llama", "print", Path("nowhere"))
    with pytest.raises(Refused, match="tiny llama writes token by token"):
        open_context(plain, TEXT, "flashblock(tau=2)")
    assert isinstance(open_context(plain, TEXT, "full"), Context)


def test_requests_that_cannot_be_served_are_refused(loaded):
    context = DiffusionContext.read(loaded, TEXT)
    for call, words in [
        (lambda: DiffusionContext.read(loaded, "  "), "document is empty"),
        (lambda: DiffusionContext.from_ids(loaded, []), "no tokens"),
        (lambda: DiffusionContext.read(loaded, "x" * 201), "reads at most 200"), (lambda: context.ask(" "), "question is empty"),
        (lambda: context.ask("who?", 0), "at least 1"), (lambda: context.ask("who?", 190), "at most 200"),
        (lambda: context.append(""), "turn to append is empty"), (lambda: context.append("y" * 190), "at most 200"),
        (lambda: context.nlls([], [65] * 190), "at most 200")]:
        with pytest.raises(Refused, match=words):
            call()
    assert context.ids == list(TEXT.encode())


# ------------------------------------------------------------------------------------- the doors of everybody else


def test_examples_are_measured_like_any_others(loaded):
    task = parse_task("perplexity")
    example = next(iter(task.examples(96, 1, 0, loaded.tokenizer)))
    recipes = ("full", "flashblock(tau=0)", "flashblock(tau=4)")
    rows = {text: measure(loaded, Recipe.parse(text), task, example).row for text in recipes}
    assert rows["full"]["answer_nll"] == pytest.approx(rows["flashblock(tau=0)"]["answer_nll"], abs=1e-6)
    assert rows["full"]["answer_nll"] != pytest.approx(rows["flashblock(tau=4)"]["answer_nll"], abs=1e-6)
    assert json.loads(rows["flashblock(tau=4)"]["achieved"])["prefix_reads"] < 0.5 and rows["full"]["score"] is None
    asked = Request([Recipe.parse("full"), Recipe.parse("losa(k=1, budget=8)")], [task], [96], 1, keep_view=True)
    found = run(loaded, asked)
    assert [r["recipe"] for r in found] == ["full", "losa(k=1, budget=8)"] and found[0]["cache_bytes"] > 0
    assert all(bool(kept.all()) for view in asked.kept.values() for _, kept in view["recipes"])


def test_the_command_line_reaches_it(tmp_path, monkeypatch, capsys):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["longspan", *words])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, *capsys.readouterr()

    ask = ("ask", str(file), "where to?", "--model", "block-diffusion", "--max-new-tokens", "20", "--json")
    code, out, _ = call(*ask, "-r", "flashblock(tau=2)")
    told = json.loads(out)
    assert code == 0 and told["model"] == "block-diffusion" and 0 < told["achieved"]["prefix_reads"] < 1
    code, _, err = call(*ask, "-r", "snapkv(budget=0.5)")
    assert code == 2 and "takes denoising methods only" in err
    code, out, _ = call("compare", "--model", "block-diffusion", "-r", "full", "-r", "losa(k=5)", "-t", "perplexity", "-l", "192",
                        "-n", "1", "--json")
    rows = {row["recipe"]: row for row in json.loads(out)["rows"]}
    assert code == 0 and rows["full"]["answer_nll"] < 4 and set(rows) == {"full", "losa(k=5)"}

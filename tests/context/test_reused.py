"""Documents joined for every question: what users call, by documents, by text, by tokens, and from the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from reuse_oracle import oracle
from tiny_folder import write_tiny_folder
from tiny_models import TOKENS, tiny, tiny_ids, tiny_tokenizer

from longspan.context import Context, Library, ReusedContext, ask, open_context
from longspan.context.document import frame
from longspan.context.reused import cut
from longspan.models import Loaded
from longspan.recipe import Recipe
from longspan.registry import Refused, cards

DOCUMENTS = ["the other path leads to the thin house.", "they thought of nothing else.", "the weather and the thunder came then."]
METHODS = [c.name for c in cards(kind="reuse") if c.module.startswith("longspan")]


def loaded_of(family="llama", seed=0, **more):
    model = tiny(family, vocab=len(TOKENS), seed=seed, **more)
    model.generation_config.eos_token_id = None
    return Loaded(model, tiny_tokenizer(), f"tiny {family}", f"print-of-{family}-{seed}", Path("nowhere"))


@pytest.fixture(scope="module")
def loaded():
    return loaded_of()


def ids_of(loaded, text):
    return loaded.tokenizer(text, add_special_tokens=False)["input_ids"]


def question_of(loaded, text="who came?"):
    return ids_of(loaded, "\n\n" + text + frame(loaded.tokenizer)[1])


# ------------------------------------------------------------------------------------------------------- by documents


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("name", METHODS)
def test_documents_in_any_order_share_their_caches(family, name):
    loaded = loaded_of(family)
    library = Library(loaded)
    recipe = f"{name}(reselect=0)" if name == "kvshare" else name
    ReusedContext.of(library, DOCUMENTS, recipe)
    for order in ([2, 0, 1], [1, 2], [0]):
        context = ReusedContext.of(library, [DOCUMENTS[i] for i in order], recipe)
        answer = context.ask("who came?", 6)
        assert (context.achieved.hits, context.achieved.misses, context.achieved.documents) == (len(order), 0, len(order))
        assert answer.ttft_s > 0 and context.ask("who came?", 6).ids == answer.ids
        assert len(answer.ids) == 6 or family == "gemma3"  # which soon writes its end token
    assert library.counts.misses == 4  # three documents and what the chat template writes first


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_full_recompute_answers_as_a_context_that_read_it_all(family):
    loaded = loaded_of(family)
    text = "".join(d + "\n\n" for d in DOCUMENTS)
    head, foot = frame(loaded.tokenizer)
    ids = [*ids_of(loaded, head), *(i for d in DOCUMENTS for i in ids_of(loaded, d + "\n\n"))]
    assert ids == ids_of(loaded, head + text)
    whole, library = Context.from_ids(loaded, ids, foot=foot), Library(loaded)
    for attempt in range(2):  # documents missing: a plain prefill; documents there: all of them recomputed
        context = ReusedContext.of(library, DOCUMENTS, "full-recompute")
        assert context.ids == ids and context.ask("who came?", 8).ids == whole.ask("who came?", 8).ids
        assert context.achieved.misses == 3 * (1 - attempt)
        assert context.achieved.recomputed == len(ids) - len(ids_of(loaded, head))
        assert context.nlls([20, 21], [30, 31, 32]) == pytest.approx(whole.nlls([20, 21], [30, 31, 32]), abs=1e-4)
        assert context.nlls([20, 21], [30, 31, 32], chunk=2) == pytest.approx(whole.nlls([20, 21], [30, 31, 32]), abs=1e-4)


def test_documents_read_just_now_are_recomputed_whole(loaded):
    library = Library(loaded)
    ReusedContext.of(library, DOCUMENTS[:2])
    context = ReusedContext.of(library, DOCUMENTS, "prophetkv(r=0.5)")
    context.ask("who came?", 2)
    own = [len(ids_of(loaded, d + "\n\n")) for d in DOCUMENTS]
    assert context.achieved.recomputed == own[2] + (own[0] + own[1]) // 2 and context.achieved.misses == 1
    again = ReusedContext.of(library, DOCUMENTS, "prophetkv(r=0.5)")
    again.ask("who came?", 2)
    assert again.achieved.recomputed == sum(own) // 2
    shown = again.achieved.as_json()
    assert shown["hits"] == 3 and shown["recomputed_fraction"] == pytest.approx(sum(own) // 2 / len(again.ids), abs=1e-5)
    assert 0 < shown["tokens_computed"] < 1 and shown["asked"] == "prophetkv(r=0.5)" and shown["cache_bytes"] > 0


def test_a_documents_change_is_seen(loaded):
    library = Library(loaded)
    ReusedContext.of(library, DOCUMENTS)
    changed = [DOCUMENTS[0].replace("thin", "thick"), *DOCUMENTS[1:]]
    context = ReusedContext.of(library, changed, "naive-reuse")
    fresh = ReusedContext.of(Library(loaded), changed, "naive-reuse")
    assert context.achieved.misses == 1 and context.ids == fresh.ids
    assert torch.equal(context.joined.k, fresh.joined.k)


def test_ask_in_one_call(loaded, tmp_path):
    library = Library(loaded, tmp_path)
    first = ask(library, "who came?", DOCUMENTS, "cacheblend(r=1.0)", max_new_tokens=5)
    again = ask(Library(loaded, tmp_path), "who came?", DOCUMENTS, "cacheblend(r=1.0)", max_new_tokens=5)
    assert first.ids == again.ids and library.counts.misses == 4


# ------------------------------------------------------------------------------------------------ by text and by tokens


def test_cutting_a_prompt_into_documents():
    ids = list(range(100))
    assert cut(ids, [], 40, 3) == (3, [(3, 43, True), (43, 83, True), (83, 100, True)])
    assert cut(ids, [], 97, 3) == (3, [(3, 100, True)])
    # words between documents are recomputed; long stretches of them are documents too
    found = [(5, 20, True), (20, 22, False), (22, 60, True), (60, 90, True), (90, 100, True)]
    assert cut(ids, [(5, 20), (22, 60)], 30, 3) == (5, found)
    assert cut(ids, [(0, 50), (50, 98)], 30, 3) == (0, [(0, 50, True), (50, 98, True), (98, 100, False)])
    for bad in ([(5, 5)], [(20, 30), (10, 15)], [(5, 20), (19, 30)], [(90, 101)], [(-1, 4)]):
        with pytest.raises(Refused, match="ascending order"):
            cut(ids, bad, 30, 3)


@pytest.mark.parametrize("name", METHODS)
def test_spans_are_documents_and_words_between_them_are_recomputed(loaded, name):
    ids, question, answer = tiny_ids(1, 60, seed=3)[0].tolist(), [20, 21, 22], [30, 31]
    spans = {"documents": [(4, 20), (22, 50)]}
    context = ReusedContext.from_ids(loaded, ids, name, spans=spans)
    found = context.nlls(question, answer)
    assert (context.achieved.documents, context.achieved.hits, context.achieved.misses) == (2, 0, 2)
    chosen = context._latest.recomputed.tolist()
    assert {20, 21, *range(50, 60)} <= set(chosen) and min(chosen) >= 4
    edges = [(0, 4), (4, 20), (20, 22), (22, 50), (50, 60)]
    logits = oracle(loaded.model, ids, edges, chosen, question + answer[:1]).logits[0, -2:].log_softmax(-1)
    assert found == pytest.approx([-float(logits[i, t]) for i, t in enumerate(answer)], abs=1e-4)


def test_texts_are_cut_into_chunks_behind_the_template(loaded):
    text = " ".join(DOCUMENTS)
    context = ReusedContext.read(loaded, text, "prophetkv(r=0.5, chunk=16)")
    head = len(ids_of(loaded, frame(loaded.tokenizer)[0]))
    assert context.joined.prefix == head and context.ids == Context.read(loaded, text).ids
    n = len(context.ids) - head
    assert context.achieved.documents == -(-n // 16) and all(b - a <= 16 for a, b in context.joined.documents)
    context.ask("who?", 3)
    assert context.achieved.recomputed == n // 2 and context.achieved.kept_fraction == 1


def test_the_question_ends_where_the_template_goes_on(loaded):
    context = ReusedContext.read(loaded, DOCUMENTS[0], "prophetkv")
    foot = len(ids_of(loaded, frame(loaded.tokenizer)[1]))
    suffix = question_of(loaded)
    assert foot and context._asked(suffix) == (0, len(suffix) - foot)
    assert context._asked([*suffix, 70, 71]) == (0, len(suffix) - foot)
    assert context._asked([70, 71]) == (0, 2)
    assert context._asked(suffix[-foot:]) == (0, foot)  # nothing before the template's part: all of it asks


def test_ask_and_tokens_agree(loaded):
    context = ReusedContext.read(loaded, " ".join(DOCUMENTS), "prophetkv(r=0.3, chunk=16)")
    context.foot = frame(loaded.tokenizer)[1]
    done, ttft = context.answer_ids(question_of(loaded), 7)
    assert tuple(done.ids) == context.ask("who came?", 7).ids and ttft > 0
    assert context.ask("who came?", 7, answer_prefix="the").ids != tuple(done.ids)


def test_stop_texts(loaded):
    context = ReusedContext.read(loaded, " ".join(DOCUMENTS), "kvshare(r=0.2, chunk=16, reselect=2)")
    done, _ = context.answer_ids([20, 21], 12)
    text = loaded.tokenizer.decode(done.ids)
    stopped, _ = context.answer_ids([20, 21], 12, stop=[text[1:5]])
    assert stopped.stopped and stopped.ids == done.ids[: len(stopped.ids)] and len(stopped.ids) < 12
    assert text[1:5] in loaded.tokenizer.decode(stopped.ids) and text[1:5] not in loaded.tokenizer.decode(stopped.ids[:-1])


def test_open_context_follows_the_recipe(loaded, tmp_path):
    ids = tiny_ids(1, 40)[0].tolist()
    assert all(isinstance(open_context(loaded, document, "full"), Context) for document in (ids, DOCUMENTS[0]))
    for document in (ids, DOCUMENTS[0]):
        context = open_context(loaded, document, f'epic(library="{tmp_path}")')
        assert isinstance(context, ReusedContext) and context.achieved.misses == 1
        assert open_context(loaded, document, f'epic(library="{tmp_path}")').achieved.hits == 1
    assert context.cache.kept_positions()[0][0].tolist() == list(range(len(context.ids)))


def test_the_cache_before_and_after_a_question(loaded):
    context = ReusedContext.read(loaded, " ".join(DOCUMENTS), "prophetkv(chunk=16)")
    assert context.cache.get_seq_length() == len(context.ids)
    before = context.joined.k.clone()
    context.answer_ids([20, 21, 22], 4)
    assert context.cache.get_seq_length() == len(context.ids) + 3 + 3  # the last token written is not read
    assert torch.equal(before, context.joined.k)


# ------------------------------------------------------------------------------------------- choosing again while writing


def test_kvshare_recomputes_more_while_it_writes(loaded):
    recipe = "kvshare(r=0.25, chunk=16, reselect={})"
    once = ReusedContext.read(loaded, " ".join(DOCUMENTS), recipe.format(0))
    often = ReusedContext.read(loaded, " ".join(DOCUMENTS), recipe.format(3))
    a, b = once.answer_ids([20, 21], 10)[0], often.answer_ids([20, 21], 10)[0]
    assert once.achieved.reselected == 0 and often.achieved.reselected == 3 and len(a.ids) == len(b.ids) == 10
    assert a.ids[:3] == b.ids[:3] and often.achieved.recomputed > once.achieved.recomputed
    assert often.answer_ids([20, 21], 10)[0].ids == b.ids


def test_choosing_again_with_everything_recomputed_changes_nothing(loaded):
    whole = ReusedContext.read(loaded, " ".join(DOCUMENTS), "full-recompute(chunk=16)")
    again = ReusedContext.read(loaded, " ".join(DOCUMENTS), "kvshare(r=1.0, chunk=16, reselect=2)")
    assert again.answer_ids([20, 21], 9)[0].ids == whole.answer_ids([20, 21], 9)[0].ids and again.achieved.reselected == 4


def test_layers_that_let_go_can_not_choose_again():
    loaded = loaded_of("gemma3")
    context = ReusedContext.read(loaded, " ".join(DOCUMENTS), "kvshare(r=0.2, chunk=16, reselect=2)")
    with pytest.raises(Refused, match=r"expected kvshare\(reselect=0\) on this model"):
        context.answer_ids([20, 21], 6)
    assert len(ReusedContext.read(loaded, " ".join(DOCUMENTS), "kvshare(reselect=0)").answer_ids([20, 21], 6)[0].ids) == 6


# -------------------------------------------------------------------------------------------------------------- refusals


def test_refusals(loaded):
    library = Library(loaded)
    for documents in ([], ["some text", "  "]):
        with pytest.raises(Refused, match="an empty document or none"):
            ReusedContext.of(library, documents)
    with pytest.raises(Refused, match="the document is empty"):
        ReusedContext.read(loaded, "  ", "epic")
    with pytest.raises(Refused, match="doesn't say how documents are joined; expected one such as prophetkv"):
        ReusedContext.of(library, DOCUMENTS, "snapkv(budget=0.2)")
    context = ReusedContext.of(library, DOCUMENTS)
    with pytest.raises(Refused, match="the question is empty"):
        context.ask(" ")
    with pytest.raises(Refused, match="documents, question and answer together"):
        context.ask("who?", 500)
    with pytest.raises(Refused, match="the document: 400 tokens"):
        ReusedContext.from_ids(loaded, [5] * 400, "epic")
    with pytest.raises(Refused, match="--compress before-question"):
        ReusedContext.from_ids(loaded, [5] * 40, "prophetkv").nlls([], [7])


def test_the_model_is_left_as_it_was(loaded):
    model = loaded.model
    before = model.config._attn_implementation, dict(model.__dict__)
    context = ReusedContext.read(loaded, DOCUMENTS[0], "prophetkv")
    context.ask("who?", 3)
    with pytest.raises(Refused):
        context.nlls([], [7])
    assert (model.config._attn_implementation, dict(model.__dict__)) == before
    assert not model.model._forward_pre_hooks and Recipe.parse("epic").reuse is not None


# ------------------------------------------------------------------------------------------------------------ the commands


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_folder(tmp_path_factory.mktemp("model"))



def test_compare_reports_what_was_recomputed(folder, tmp_path, monkeypatch, capsys):
    from longspan import cli

    words = ["longspan", "compare", "-m", str(folder), "-r", "full", "-r", "full-recompute(chunk=64)",
             "-r", "prophetkv(r=0.2, chunk=64)", "-t", "passkey", "-l", "400", "-n", "2", "--max-new-tokens", "2",
             "--dtype", "float32", "--json", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert not left.value.code
    rows = json.loads(capsys.readouterr().out)["rows"]
    full, whole, some = rows
    assert whole["answer_nll"] == pytest.approx(full["answer_nll"], abs=1e-4) and some["answer_nll"] != full["answer_nll"]
    achieved = some["achieved"]
    assert achieved["misses"] == achieved["documents"] > 3 and achieved["recomputed_fraction"] == pytest.approx(0.2, abs=0.02)
    assert (tmp_path / "report.html").is_file()


def test_ask_and_refusals_on_the_command_line(folder, tmp_path, monkeypatch, capsys):
    from longspan import cli

    text = tmp_path / "text.txt"
    text.write_text(" ".join(DOCUMENTS) * 5)
    for attempt in range(2):
        recipe = f'prophetkv(chunk=32, library="{tmp_path / "caches"}")'
        monkeypatch.setattr(sys, "argv", ["longspan", "ask", str(text), "who came?", "-m", str(folder), "-r", recipe, "--json",
                                          "--max-new-tokens", "3"])
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert not left.value.code
        achieved = json.loads(capsys.readouterr().out)["achieved"]
        n = achieved["documents"]
        assert n > 2 and (achieved["hits"], achieved["misses"]) == ((n, 0) if attempt else (0, n))
    words = ["longspan", "compare", "-m", str(folder), "-t", "passkey", "-l", "400", "-n", "1", "--compress", "after-question"]
    for recipe, reason in (("prophetkv", "before-question"), ("prophetkv + snapkv", "stands alone")):
        monkeypatch.setattr(sys, "argv", [*words, "-r", recipe])
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert left.value.code == 2 and reason in capsys.readouterr().err

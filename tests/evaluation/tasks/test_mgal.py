import json

import pytest
from tiny_tokenizer import tiny_tokenizer

from longspan.evaluation import parse_task
from longspan.evaluation.base import total_length
from longspan.evaluation.mgal import LANGUAGES, TASKS, own
from longspan.evaluation.mgal.items import MARKER
from longspan.evaluation.mgal.language import sentences
from longspan.registry import Refused


def examples(task, language="fr", n=3, length=3500, seed=0, **knobs):
    knobs = "".join(f", {name}={value}" for name, value in ({"corpus": "own"} | knobs).items())
    made = parse_task(f"mgal(task={task}, language={language}{knobs})")
    return made, list(made.examples(length, n, seed, tiny_tokenizer()))


@pytest.mark.parametrize("task", TASKS)
def test_right_answers_score_one_and_no_answer_zero(task):
    if task.startswith("paragraph") or task == "document-translate":
        pytest.importorskip("sacrebleu")
    made, found = examples(task)
    for index, example in enumerate(found):
        assert made.metric(f" {example.answers[0]}", example) == pytest.approx(1.0) and made.metric("", example) == 0.0
        assert total_length(example, tiny_tokenizer()) <= 3500
        assert json.loads(json.dumps(example.meta)) == example.meta and example.meta["index"] == index


@pytest.mark.parametrize("task", ("word-choice", "sentence-cloze", "paragraph-fill"))
def test_languages_read_the_same_paragraphs(task):
    rows = [examples(task, language, 2)[1] for language in ("en", "ar", "zh")]
    for row in zip(*rows):
        assert len({(e.meta["id"], tuple(e.meta["paragraphs"])) for e in row}) == 1
        assert len({e.context for e in row}) == 3
    assert len({tuple(e.meta["id"] for e in row) for row in rows}) == 1


def test_the_dearest_language_decides_and_alone_a_language_fills_its_length():
    first, last = rows = [examples("paragraph-fill", "en", 1, shared=shared)[1][0] for shared in (True, False)]
    shared, alone = (b - a for a, b in (e.meta["paragraphs"] for e in (first, last)))
    assert alone > shared
    assert total_length(rows[1], tiny_tokenizer()) > 0.8 * 3500


def test_examples_take_turns_in_the_nine_places():
    _, found = examples("word-extract", "en", 9, 2500, shared=False)
    assert [e.meta["paragraph_position"] for e in found] == ["begin", "middle", "end"] * 3
    turns = [e.meta["document_position"] for e in found]
    assert sum(a == b for a, b in zip(turns, ["begin"] * 3 + ["middle"] * 3 + ["end"] * 3)) >= 6
    _, late = examples("paragraph-fill", "en", 3, 2500, position="end", shared=False)
    assert sum(e.meta["document_position"] == "end" for e in late) >= 2


@pytest.mark.parametrize("crowding", (0, 6))
def test_crowding_is_that_of_the_options(crowding):
    _, found = examples("sentence-cloze", "en", 2, 3000, crowding=crowding, options=8)
    for example in found:
        k = int(example.meta["id"].split("/")[2])
        near = {s for i in (k - 1, k, k + 1) if 0 <= i < 40 for s in sentences(own().of("en")[i], "en")}
        gold = example.meta["options"]["ABCDEFGH".index(example.answers[0][1])]
        assert sum(o in near for o in example.meta["options"] if o != gold) == crowding
        assert MARKER in example.context and gold not in example.context


def test_examples_depend_on_their_key_only():
    _, few = examples("word-choice", n=2)
    _, many = examples("word-choice", n=4)
    _, other = examples("word-choice", n=2, seed=1)
    assert many[:2] == few and other[0].context != few[0].context


def test_your_own_folder_stands_in_for_the_corpus(tmp_path):
    for language in LANGUAGES:
        (tmp_path / f"{language}.txt").write_text("\n".join(own().of(language)[:20]) + "\n", encoding="utf-8")
    made, (example,) = examples("word-choice", "ru", 1, 3000, path=f'"{tmp_path}"')
    assert made.text.source == str(tmp_path) and example.meta["paragraphs"][1] <= 20
    assert made.score_name == "mgal-open"


@pytest.mark.parametrize("knobs,said", [
    ("task=word-choise", "did you mean 'word-choice'"), ("language=de", "unknown"), ("options=1", "at least 2"),
    ("task=sentence-cloze, crowding=9, options=8", "expected at most 7"), ("task=paragraph-translate", "language=en; expected"),
    ("instruction=middle", "unknown"), ("prompt_language=german", "unknown")])
def test_knobs_out_of_range_are_refused(knobs, said):
    with pytest.raises(Refused, match=said):
        parse_task(f"mgal({knobs})")


def test_a_corpus_without_legal_items_is_refused(tmp_path):
    for language, text in (("en", "Nothing here."), ("fr", "Rien ici.")):
        (tmp_path / f"{language}.txt").write_text(text + "\n", encoding="utf-8")
    with pytest.raises(Refused, match="0 legal items exist"):
        examples("word-extract", "fr", 1, 500, path=f'"{tmp_path}"')


def test_below_the_floor_is_refused_with_the_floor():
    with pytest.raises(Refused, match=r"mgal at length 100: .* at least"):
        examples("word-choice", "en", 1, 100)

import json

import pytest
from tiny_tokenizer import tiny_tokenizer

from longspan.evaluation import parse_task
from longspan.evaluation.base import total_length
from longspan.evaluation.mgal import LANGUAGES, TASKS, own
from longspan.evaluation.mgal.items import MARKER
from longspan.evaluation.mgal.language import sentences
from longspan.registry import Refused

LENGTH = {task: 4800 if task == "sentence-cloze" else 3500 for task in TASKS}


def examples(task, language="fr", n=3, length=None, seed=0, **knobs):
    length = length or LENGTH[task]
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
        assert total_length(example, tiny_tokenizer()) <= LENGTH[task]
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


@pytest.mark.parametrize("task,shared", [("word-choice", True), ("word-extract", False), ("sentence-cloze", False)])
def test_examples_take_turns_in_the_nine_places(task, shared):
    _, found = examples(task, "ar", 9, shared=shared, options=6)
    assert [e.meta["paragraph_position"] for e in found] == ["begin", "middle", "end"] * 3
    assert [e.meta["document_position"] for e in found] == ["begin"] * 3 + ["middle"] * 3 + ["end"] * 3


@pytest.mark.parametrize("position", ("begin", "middle", "end"))
@pytest.mark.parametrize("task", ("word-choice", "sentence-cloze", "paragraph-fill", "paragraph-translate"))
def test_the_place_asked_for_is_kept(task, position):
    _, found = examples(task, "fr", 3, position=position, options=6, shared=task == "word-choice")
    assert [e.meta["document_position"] for e in found] == [position] * 3


def test_paragraphs_take_turns_in_three_places():
    _, found = examples("paragraph-fill", "en", 6, 2500)
    assert [e.meta["document_position"] for e in found] == ["begin", "middle", "end"] * 2


@pytest.mark.parametrize("task,most", [("paragraph-fill", 40), ("document-summary", 40)])
def test_no_question_is_asked_twice_and_examples_end(task, most):
    _, found = examples(task, "en", 60, 2500)
    assert 1 < len(found) <= most and len({e.meta["id"] for e in found}) == len(found)


def test_many_words_are_all_different():
    made, found = examples("word-choice", "en", 90, 1600, shared=False)
    assert len(found) == len({e.meta["id"].split("/", 2)[2] for e in found}) == 90
    assert list(parse_task(str(made)).examples(1600, 12, 0, tiny_tokenizer(), 10)) == found[10:12]


@pytest.mark.parametrize("crowding", (0, 6))
def test_crowding_is_that_of_the_options(crowding):
    _, found = examples("sentence-cloze", "en", 2, crowding=crowding, options=8)
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
    ("options=5, crowding=12", "crowding=12 with options=5; expected at most 4"),
    ("task=document-summary, position=end", "expected balanced, or another task"),
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


def test_the_default_crowding_goes_with_few_options_where_it_is_not_used():
    assert parse_task("mgal(options=3)").options == 3


def test_the_language_that_limits_is_named_and_alone_the_floor_is_smaller():
    shared, alone = (parse_task(f"mgal(corpus=own{more})") for more in ("", ", shared=false"))
    floor = shared.floor(tiny_tokenizer())
    assert floor > 1.5 * alone.floor(tiny_tokenizer())
    assert floor == parse_task("mgal(corpus=own, language=zh)").floor(tiny_tokenizer())
    said = f"takes {floor} tokens .* (Arabic|Russian|Chinese) text of the same paragraphs.*at least {floor}, or for shared=false"
    with pytest.raises(Refused, match=said):
        next(shared.examples(floor - 16, 1, 0, tiny_tokenizer()))
    assert next(alone.examples(floor - 16, 1, 0, tiny_tokenizer())).meta["language"] == "en"
    with pytest.raises(Refused, match="ask for at least"):
        next(alone.examples(100, 1, 0, tiny_tokenizer()))

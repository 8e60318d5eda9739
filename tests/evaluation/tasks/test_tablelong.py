import functools
import json
import random
from dataclasses import replace

import pytest
from tables_read_back import read_back
from tiny_folder import write_tiny_folder
from tiny_tokenizer import tiny_tokenizer

from longspan.evaluation import parse_task
from longspan.evaluation.base import answer_text, total_length
from longspan.evaluation.tables.command import row_of, summary
from longspan.evaluation.tables.executors import same, select
from longspan.evaluation.tables.filtering import Judged, judge, stop_ids
from longspan.evaluation.tables.wording import LANGUAGES
from longspan.models import load
from longspan.registry import Refused

LENGTH = 1500


def examples(text, n=3, length=LENGTH, seed=0):
    return list(parse_task(text).examples(length, n, seed, tiny_tokenizer()))


@pytest.fixture
def own(tmp_path):
    """Two linked CSV files."""
    rng = random.Random(0)
    rooms = [f"r{i}" for i in range(8)]
    (tmp_path / "rooms.csv").write_text("room,size\n" + "".join(f"{room},{rng.randint(10, 99)}\n" for room in rooms))
    (tmp_path / "lamps.csv").write_text("lamp,room,watts\n" + "".join(
        f"L{i},{rng.choice(rooms)},{rng.randint(3, 60)}\n" for i in range(30)))
    return f"{tmp_path / 'rooms.csv'},{tmp_path / 'lamps.csv'}"


@pytest.mark.parametrize("form", ["markdown", "csv", "json", "pairs"])
@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_answer_is_what_sql_gives_over_the_tables_in_the_prompt(form, language):
    for example in examples(f"tablelong(serialisation={form}, language={language})", 6, 3000 if language == "zh" else LENGTH):
        shown = read_back(example.context.removeprefix(LANGUAGES[language].intro), form)
        found = select(shown, example.meta["sql"])
        if (decimals := example.meta["decimals"]) is not None:
            found = [round(value, decimals) for value in found]
        assert same(found, example.meta["gold"], example.meta["ordered"])
        assert example.meta["tables"] == len(shown.tables) == len(example.meta["documents"])


def test_lengths_are_within_two_percent():
    for length in (1000, 2048, 4096):
        for example in examples("tablelong", 6, length):
            assert 0.98 * length <= total_length(example, tiny_tokenizer()) <= length


def test_families_take_turns_or_stay():
    assert [e.meta["family"] for e in examples("tablelong", 6)] == ["retrieval", "computation", "association"] * 2
    found = examples("tablelong(family=association)", 3)
    assert all(e.meta["family"] == "association" and " JOIN " in e.meta["sql"] and e.meta["tables"] >= 2 for e in found)


def test_rows_needed_are_marked_and_no_other_table_is_read():
    for example in examples("tablelong(family=retrieval)", 6):
        spans = [example.context[a:b] for a, b in example.meta["spans"]]
        assert spans and all("\n" not in span and span.startswith("| ") for span in spans)
        assert len(spans) == len(example.meta["gold"]) and all(
            str(value) in span for value, span in zip(example.meta["gold"], spans))


def test_numbers_of_tables_and_cells_are_as_asked():
    assert all(e.meta["tables"] == 5 for e in examples("tablelong(tables=5)", 6))
    few, many = (examples(f"tablelong(family=computation, tables=3, cells={cells})", 5, 3000) for cells in (20, 90))
    assert sum(e.meta["cells_needed"] for e in few) < 0.5 * sum(e.meta["cells_needed"] for e in many)


def test_reward_is_exact():
    task = parse_task("tablelong(family=computation)")
    for example in examples("tablelong(family=computation)", 6):
        gold = example.meta["gold"]
        assert task.metric(answer_text(example), example) == 1.0 and task.metric("\n" + answer_text(example), example) == 1.0
        assert task.metric(json.dumps([*gold, 1]), example) == task.metric("", example) == task.metric("[", example) == 0.0
        if len(set(map(str, gold))) > 1:
            turned = task.metric(json.dumps(gold[1:] + gold[:1]), example)
            assert turned == float(not example.meta["ordered"])


def test_with_reasoning_the_last_answer_line_counts():
    task = parse_task("tablelong(family=retrieval, reasoning=200)")
    example, = task.examples(LENGTH, 1, 0, tiny_tokenizer())
    assert example.answer_prefix == "" and example.max_new_tokens == 200 and "stop" not in example.meta
    right = answer_text(example)
    assert right.startswith("Answer: [") and task.metric(f"First, Answer: [0]\nso\n{right}", example) == 1.0
    assert task.metric(f"{right}\nAnswer: [0]", example) == 0.0


def test_own_files_are_asked_about_and_others_fill(own):
    found = examples(f'tablelong(csv="{own}")', 6)
    for example in found:
        names = {"rooms", "lamps"}
        assert any(f'FROM "{name}"' in example.meta["sql"] for name in names) and example.meta["tables"] > 1
    assert any('JOIN "rooms" ON "lamps"."room" = "rooms"."room"' in e.meta["sql"] for e in found)
    text = parse_task(f'tablelong(csv="{own}")').text
    assert text is not None and len(text.sha256) == 64 and parse_task("tablelong").text is None


@pytest.mark.parametrize("text,said", [
    ("tablelong(tables=0)", "at least 1"), ("tablelong(tables=31)", "at most 30"), ("tablelong(family=lookup)", "unknown choice"),
    ("tablelong(serialisation=markdwn)", "did you mean 'markdown'"),
    ("tablelong(family=association, tables=1)", "joins two tables"),
    ("tablelong(family=retrieval, tables=1, cells=9)", "needed as a whole"), ("tablelong(cells=0)", "at least 1"),
    ("tablelong(reasoning=20)", "expected 0, or at least 96"),
])
def test_knobs_that_make_no_question_are_refused(text, said):
    with pytest.raises(Refused, match=said):
        parse_task(text)


def test_a_length_below_what_the_answer_needs_is_refused_with_both_numbers():
    with pytest.raises(Refused, match=r"tablelong at length 100: its smallest prompt takes \d+ tokens"):
        examples("tablelong", 1, 100)


def test_files_without_a_link_give_no_association(tmp_path):
    (tmp_path / "one.csv").write_text("a,b\n1,2\n3,4\n5,4\n")
    with pytest.raises(Refused, match="association over one: no column of one is a key of another"):
        examples(f'tablelong(family=association, csv="{tmp_path / "one.csv"}")', 1)
    with pytest.raises(Refused, match="no such file"):
        examples(f'tablelong(csv="{tmp_path / "two.csv"}")', 1)


# ----------------------------------------------------------------------------------------------- filter and command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny"))


def test_pass_rates_come_from_sampled_answers(folder):
    loaded, task = load(folder, dtype="float32"), parse_task("tablelong(family=retrieval)")
    example, = task.examples(LENGTH, 1, 0, loaded.tokenizer)
    example = replace(example, max_new_tokens=6)
    found, again, other = (judge(loaded, task, example, 3, seed=seed) for seed in (0, 0, 1))
    assert found == again != other and len(found.answers) == len(found.rewards) == 3
    assert found.rewards == tuple(task.metric(answer, example) for answer in found.answers)
    assert len(set(found.answers)) > 1  # each sample has dice of its own
    with pytest.raises(Refused, match="1 rollouts: expected at least 2"):
        judge(loaded, task, example, 1)


def test_only_questions_that_are_sometimes_right_are_kept():
    assert [Judged(("",) * 4, rewards).kept for rewards in ((0, 0, 0, 0), (0, 1, 0, 0), (1, 1, 1, 1))] == [False, True, False]
    assert Judged(("",) * 4, (0.0, 1.0, 0.0, 1.0)).p == 0.5


def test_answers_end_at_tokens_that_hold_a_bracket():
    tokenizer = tiny_tokenizer()
    found = stop_ids(tokenizer, ["]"])
    assert found == tuple(i for i in range(len(tokenizer)) if "]" in tokenizer.decode([i])) and len(found) >= 1
    assert stop_ids(tokenizer, []) == ()


def test_summary_has_pass_rates_by_family():
    judged = [Judged(("", ""), (1.0, float(i > 0))) for i in range(3)]
    rows = [row_of(e, 10, own) | {"kept": own.kept} for e, own in zip(examples("tablelong", 3), judged)]
    found = summary(rows, True)
    assert found["P"] == {"retrieval": 0.5, "computation": 1.0, "association": 1.0}
    assert (found["drawn"], found["kept"], found["P = 0"], found["P = 1"]) == (3, 1, 0, 2)


@pytest.fixture
def call(call):
    return functools.partial(call, "tables")


def test_the_command_writes_json_lines(call, folder, tmp_path, own):
    out = tmp_path / "new" / "questions.jsonl"
    files = [word for file in own.split(",") for word in ("--csv", file)]
    code, said, err = call("-n", "6", "-l", "3000", "--out", str(out), "-m", folder, *files, "--json")
    assert code == 0, err
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 6 and {row["family"] for row in rows} == {"retrieval", "computation", "association"}
    assert set(rows[0]) == {"prompt", "answer_prefix", "sql", "answer", "ordered", "decimals", "family", "cells_needed", "tables",
                            "tokens", "index"}
    found = json.loads(said)
    assert found["drawn"] == found["kept"] == 6 and 2940 <= found["tokens"][0] <= found["tokens"][2] <= 3000
    code, said, _ = call("-n", "2", "-l", "3000", "--out", str(out), "-m", folder)
    assert code == 0 and "2 of 2 questions" in said and len(out.read_text().splitlines()) == 2


def test_the_command_filters(call, folder, tmp_path, monkeypatch):
    from longspan.evaluation.tables import command

    rates = iter((0.0, 0.5, 1.0))
    monkeypatch.setattr(command, "judge", lambda *a, **k: Judged(("", ""), {0.0: (0, 0), 0.5: (1, 0), 1.0: (1, 1)}[next(rates)]))
    out = tmp_path / "q.jsonl"
    code, said, err = call("-n", "3", "-l", "3000", "--out", str(out), "-m", folder, "--pass-rate", "2", "--dtype", "float32")
    assert code == 0, err
    row, = map(json.loads, out.read_text().splitlines())
    assert row["P"] == 0.5 and row["index"] == 1 and "1 of 3 questions" in said and "P 0.500" in said


@pytest.mark.parametrize("words,said", [
    (("--pass-rate", "1"), "expected at least 2"), (("--csv", "none.csv"), "no such file"), (("--tables", "0"), "at least 1"),
    (("--family", "lookups"), "unknown choice"), (("-l", "90"), "at length 90"), (("--csv", "a,b.csv"), "a comma in the name"),
])
def test_bad_requests_of_the_command_exit_with_two(call, folder, tmp_path, words, said):
    code, _, err = call("--out", str(tmp_path / "q.jsonl"), "-m", folder, *words)
    assert code == 2 and said in err


def test_a_file_that_cannot_be_written_is_refused(call, folder, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = call("--out", str(tmp_path / "file" / "q.jsonl"), "-m", folder)
    assert code == 2 and "can't be written" in err

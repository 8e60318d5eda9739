import functools
import json
import random
from statistics import fmean

import pytest
from tiny_tokenizer import tiny_tokenizer

from longspan.evaluation.base import Key, total_length
from longspan.evaluation.ink import bm25
from longspan.evaluation.longmemeval import ABSTENTION, KINDS, TYPES, ask
from longspan.evaluation.longmemeval.chatter import WEEKDAYS, chat
from longspan.evaluation.longmemeval.judge import first_date
from longspan.evaluation.longmemeval.questions import ADVICE, BOUGHT, EVENTS, FACTS, TASTES
from longspan.evaluation.retrieval_metrics import mean_retrieval_scores
from longspan.evaluation.tasks.longmemeval import EXCHANGES, FILLER, LongMemEval
from longspan.registry import Refused, card


def made(n=14, length=1500, **knobs):
    return list(LongMemEval(**knobs).examples(length, n, 0, tiny_tokenizer()))


def said(example, role="user"):
    return [example.context[start:end] for start, end in example.meta["spans"] if example.context[start:end].startswith(role)]


@functools.cache
def single():
    """Forty histories with one session of evidence each: for every session its text, and whether it is the evidence."""
    return [[(example.context[start:end], [name] == example.meta["evidence_ids"])
             for name, (start, end) in zip(example.meta["session_ids"], example.meta["documents"])]
            for example in made(40, 4000, type="single-session-user")]


def places(measure):
    """Where evidence stands, 0 to 1, among the sessions of its history put into order by `measure`."""
    found = []
    for sessions in single():
        values = [measure(text) for text, _ in sessions]
        own, = (measure(text) for text, evidence in sessions if evidence)
        found.append((sum(v < own for v in values) + sum(v == own for v in values) / 2) / len(values))
    return found


@pytest.mark.parametrize("measure", [
    len, lambda text: text.count("\nuser: "), lambda text: text.split(" ")[-1], lambda text: text.split("\n")[0][-5:],
    lambda text: text.split("\n")[1][:20], lambda text: min(map(len, text.split("\n"))), lambda text: text.split("\n")[0]],
    ids=["length", "turns", "last word", "time of day", "opener", "shortest line", "date"])
def test_evidence_can_not_be_told_without_reading(measure):
    """Over 40 histories the mean place is that of chance, 0.5, within four standard errors of a uniform one."""
    assert abs(fmean(places(measure)) - 0.5) < 4 * 12**-0.5 / 40**0.5


def test_every_session_has_one_everyday_exchange_among_those_about_the_text():
    for sessions in single():
        for text, _ in sessions:
            users = [turn for turn in text.split("\n") if turn.startswith("user: ")]
            about = [turn for turn in users if turn.removeprefix("user: ").startswith(FILLER)]
            assert len(users) - len(about) == 1
            assert len(about) in (*EXCHANGES, 0)
        assert sum(" 09:00" in text.split("\n")[0] for text, _ in sessions) <= 2


def test_everyday_talk_is_about_other_things():
    rng = random.Random(0)
    said = {" ".join(chat(rng)) for _ in range(3000)}
    subjects = [thing.split()[-1] for thing, *_ in FACTS] + [noun for _, noun, _ in ADVICE] + list(EVENTS)
    subjects += [value for values in BOUGHT.values() for value in values]
    subjects += ["postcard", "ten kilometres", "team meeting", "German"]
    values = {value for *_, names in (*FACTS, *ADVICE, *TASTES) for value in names} - set(WEEKDAYS)
    for sentence in said:
        assert not [word for word in (*subjects, *values) if word in sentence]


def test_sessions_are_the_same_in_a_longer_history():
    def texts(units):
        example = LongMemEval().draft(Key("longmemeval", 4000, 0, 3), tiny_tokenizer()).build(units)
        return {example.context[start:end] for start, end in example.meta["documents"]}

    short, long = texts(20), texts(40)
    assert len(short - long) <= 1  # the one that was cut


def test_the_card_states_how_answers_are_judged():
    assert "off by one" in card("longmemeval").doc


def test_six_types_and_abstention_come_in_turn():
    assert len(TYPES) == 6
    found = made()
    kinds = [ABSTENTION if example.meta["abstain"] else example.meta["type"] for example in found]
    assert kinds == [*KINDS, *KINDS]
    assert {example.meta["type"] for example in made(3, type="multi-session")} == {"multi-session"}
    assert LongMemEval().score_name == "longmemeval-open"


def test_sessions_are_dated_and_in_order():
    for example in made(7):
        heads = [example.context[start:end].split("\n")[0] for start, end in example.meta["documents"]]
        dates = [head.removeprefix("Session of ") for head in heads]
        assert dates == sorted(dates)
        assert len(dates) == len(example.meta["session_ids"])
        assert example.question.split("Today is ")[1][:16] > dates[-1][:16]  # asked after the last session
        for start, end in example.meta["turns"]:
            assert example.context[start:end].startswith(("user: ", "assistant: "))


def test_evidence_occurs_once_and_holds_the_answer():
    for example in made(21):
        kind, turns = example.meta["type"], said(example) + said(example, "assistant")
        evidence = [example.meta["session_ids"].index(name) for name in example.meta["evidence_ids"]]
        assert evidence == sorted(evidence)
        if example.meta["abstain"]:
            assert not turns
            continue
        assert all(example.context.count(turn) == 1 for turn in turns)
        if kind == "single-session-assistant":
            assert example.answers[0] in said(example, "assistant")[0]
        elif kind == "multi-session":
            assert example.answers[0] == str(len(turns))
        elif kind == "knowledge-update":
            assert example.answers[0] in turns[1] and example.answers[0] not in turns[0]
        elif kind != "temporal-reasoning":
            assert example.answers[0] in turns[0]


def test_temporal_answers_follow_from_the_dates():
    both = set()
    for seed in range(20):
        asked = ask("temporal-reasoning", random.Random(seed))
        first, second = (first_date(session.date) for session in asked.sessions)
        if asked.question.startswith("How many days"):
            assert asked.answers == (f"{(second - first).days} days",)
        else:
            assert first_date(asked.answers[0]) == first
        both.add(asked.question[:3])
    assert len(both) == 2


def test_what_is_asked_in_an_abstention_was_never_told():
    for seed in range(20):
        asked = ask(ABSTENTION, random.Random(seed))
        assert asked.abstain
        subject = asked.question.rstrip("?").split("my ")[1].split(" ")[0]
        assert all(f"my {subject}" not in turn.content.lower() for session in asked.sessions for turn in session.turns)


def row(number, kind="single-session-user", **changes):
    sessions = [[{"role": "user", "content": f"Filler {number} {i}. " + "words " * 30}, {"role": "assistant", "content": "Yes."}]
                for i in range(6)]
    sessions[3].insert(0, {"role": "user", "content": f"My code is code{number}.", "has_answer": True})
    return {"question_id": f"q{number}", "question_type": kind, "question": f"What is code {number}?", "answer": f"code{number}",
            "question_date": "2023/06/01 (Thu) 10:00", "haystack_session_ids": [f"s{i}" for i in range(6)],
            "haystack_dates": [f"2023/05/{20 - i} (Sat) 02:21" for i in range(6)], "haystack_sessions": sessions,
            "answer_session_ids": ["s3"], **changes}


@pytest.fixture()
def write(tmp_path):
    def make(rows):
        (tmp_path / "longmemeval_s.json").write_text(json.dumps(rows))
        return str(tmp_path / "longmemeval_s.json")

    return make


def test_a_file_is_read_and_cut_to_the_length(write):
    rows = [row(1), row(2, "knowledge-update", answer=42), row(3, "single-session-preference"), row(4, question_id="q4_abs")]
    task, tokenizer = LongMemEval(file=write(rows)), tiny_tokenizer()
    short, long = (list(task.examples(length, 10, 0, tokenizer)) for length in (450, 2000))
    assert [example.meta["question_id"] for example in short] == ["q1", "q2", "q4_abs"]  # a rubric can't be judged by rules
    assert long[0].meta["session_ids"] == ["s5", "s4", "s3", "s2", "s1", "s0"]  # oldest first
    assert "s3" in short[0].meta["session_ids"] and len(short[0].meta["session_ids"]) < 6
    assert all(total_length(example, tokenizer) <= 450 for example in short)
    assert said(short[0]) == ["user: My code is code1."]
    assert task.metric("It is code1.", short[0]) == 1.0
    assert task.metric("It is 42.", short[1]) == 1.0
    assert task.metric("I do not know.", short[2]) == 1.0
    assert "2023/06/01 (Thu) 10:00" in short[0].question
    only = LongMemEval(file=write(rows), type=ABSTENTION).examples(450, 10, 0, tokenizer)
    assert [example.meta["question_id"] for example in only] == ["q4_abs"]


def test_other_files_are_refused(write, tmp_path):
    with pytest.raises(Refused, match="no such file"):
        list(LongMemEval(file=str(tmp_path / "none.json")).examples(1000, 1, 0, tiny_tokenizer()))
    with pytest.raises(Refused, match="no field 'answer'"):
        broken = row(1)
        del broken["answer"]
        list(LongMemEval(file=write([broken])).examples(1000, 1, 0, tiny_tokenizer()))
    with pytest.raises(Refused, match="judged without a model"):
        list(LongMemEval(file=write([row(1, "single-session-preference")])).examples(1000, 1, 0, tiny_tokenizer()))
    with pytest.raises(Refused, match="did you mean 'multi-session'"):
        LongMemEval(type="multi-sesion")


def test_retrieved_sessions_are_scored():
    """BM25 over the sessions finds most evidence; its ranking is scored by recall and the published NDCG."""
    found = made(21, length=2500)
    rankings, relevant = {}, {}
    for number, example in enumerate(found):
        sessions = [example.context[start:end] for start, end in example.meta["documents"]]
        order = (-bm25(example.meta["query"][0], sessions)).argsort(kind="stable")
        name = f"{number}_{example.meta['question_id']}"
        rankings[name] = [example.meta["session_ids"][i] for i in order]
        relevant[name] = example.meta["evidence_ids"]
    means = mean_retrieval_scores(rankings, relevant, cutoffs=(1, 5))
    assert 0.5 < means["recall_any@1"] <= means["recall_any@5"] <= 1.0
    assert means["recall_all@5"] <= means["recall_any@5"]
    backwards = mean_retrieval_scores({name: order[::-1] for name, order in rankings.items()}, relevant, cutoffs=(1, 5))
    assert backwards["ndcg_any@5"] < means["ndcg_any@5"]

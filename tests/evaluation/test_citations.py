import pytest

from longspan.evaluation.citations import (
    Judge,
    Statement,
    against_evidence,
    chat_judge,
    citation_scores,
    correctness,
    parse,
    snippet,
    without_citations,
)

ANSWER = ("<statement>It opened in 1874.<cite>[1-1][3-4]</cite></statement>\n<statement>So it is old.<cite></cite></statement>"
          "<statement>It is high.<cite>[9-2]</cite></statement>")
SENTENCES = ["zero.", "one.", "two.", "three.", "four four."]


def test_statements_and_their_ranges():
    assert parse(ANSWER) == [Statement("It opened in 1874.", ((1, 1), (3, 4))), Statement("So it is old.", ()),
                             Statement("It is high.", ())]
    assert parse("no statement [1-2]") == []
    assert parse("<statement>a<cite>[7]</cite></statement>") == [Statement("a", ((7, 7),))]
    assert without_citations(ANSWER) == "It opened in 1874.\nSo it is old.It is high."
    assert snippet(SENTENCES, (3, 9)) == "three. four four."
    assert snippet(SENTENCES, (9, 9)) == ""


def fixed(support=1.0, relevant=1.0, needs=1.0):
    return Judge(lambda q, s, c: support, lambda q, s, c: relevant, lambda q, a, s: needs)


def test_recall_precision_and_length_by_a_judge():
    relevant = Judge(lambda q, s, c: 0.5, lambda q, s, c: float("four" in c), lambda q, a, s: float(s == "It is high."))
    found = citation_scores(ANSWER, SENTENCES, "When?", relevant)
    assert found.recall == pytest.approx((0.5 + 1 + 0) / 3)  # cited; needs no citation; needs one and has none
    assert found.precision == 0.5
    assert found.f1 == pytest.approx(0.5)
    assert found.citation_length == pytest.approx((1 + 3) / 2)
    assert (found.statements, found.citations) == (3, 2)


def test_without_a_citation_f1_is_zero():
    found = citation_scores("<statement>So it is.</statement>", SENTENCES, "q", fixed(needs=0.0))
    assert (found.recall, found.precision, found.f1, found.citation_length) == (1.0, 0.0, 0.0, 0.0)
    assert citation_scores("", SENTENCES, "q", fixed()).f1 == 0.0


def test_sentences_that_do_not_exist_support_nothing():
    found = citation_scores("<statement>a<cite>[70-80]</cite></statement>", SENTENCES, "q", fixed())
    assert (found.recall, found.precision) == (0.0, 0.0)


def test_at_most_forty_statements_are_judged():
    asked = []
    judge = Judge(lambda q, s, c: asked.append(s) or 1.0, lambda q, s, c: 1.0, lambda q, a, s: 1.0)
    found = citation_scores("<statement>a<cite>[1-1]</cite></statement>" * 50, SENTENCES, "q", judge)
    assert len(asked) == found.statements == 40


def test_a_chat_model_as_judge():
    prompts = []

    def ask(prompt):
        prompts.append(prompt)
        return "Rating: [[partial]]" if "<snippet>" in prompt and "[[full]]" in prompt else "[[Yes]]"

    found = citation_scores(ANSWER, SENTENCES, "When?", chat_judge(ask))
    assert found.recall == pytest.approx(0.5 / 3)
    assert found.precision == 1.0
    assert "<snippet>\none.\n\nthree. four four.\n</snippet>" in prompts[0]
    assert "<response>\nIt opened in 1874." in next(p for p in prompts if "<response>" in p)
    with pytest.raises(ValueError, match="replied 'maybe'"):
        chat_judge(lambda prompt: "maybe", tries=2).relevant("q", "s", "c")


def test_a_judge_is_asked_again_until_it_rates():
    replies = iter(["hm", "[[perhaps]]", "[[no]]"])
    assert chat_judge(lambda prompt: next(replies)).needs_citation("q", "a", "s") == 0.0


@pytest.mark.parametrize("scale,worst,middle,best", [("qa", (1, 0), (2, 0.5), (3, 1)), ("summary", (1, 0), (3, 0.5), (5, 1)),
                                                     ("few-shot", (1, 0.1), (5, 0.5), (10, 1))])
def test_ratings_as_zero_to_one(scale, worst, middle, best):
    for rating, wanted in (worst, middle, best):
        assert correctness(rating, scale) == pytest.approx(wanted)
    with pytest.raises(ValueError, match="few-shot"):
        correctness(1, "other")


def test_known_evidence_needs_no_judge():
    found = against_evidence(ANSWER, [1, 2, 4, 4])
    assert (found.recall, found.precision) == (pytest.approx(2 / 3), pytest.approx(2 / 3))  # cites 1, 3, 4
    assert against_evidence("", [1]).f1 == 0.0
    with pytest.raises(ValueError, match="no evidence"):
        against_evidence(ANSWER, [])


def test_citing_everything_is_not_precise():
    found = against_evidence("<statement>a<cite>[0-99999999999]</cite></statement>", [5], [2] * 100)
    assert (found.recall, found.precision) == (1.0, pytest.approx(1 / 100))
    assert found.citation_length == 200
    twice = against_evidence("<statement>a<cite>[5-6][5-6][6-7]</cite></statement>", [5])
    assert twice.precision == pytest.approx(1 / 3)  # sentences count once

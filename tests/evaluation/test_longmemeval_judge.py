from datetime import date

import pytest

from longspan.evaluation.longmemeval import JUDGES, abstains, accuracies, judge, judge_prompt, judged_by
from longspan.evaluation.longmemeval.judge import first_date, first_quantity


def test_most_types_want_the_answer_contained():
    assert judge("single-session-user", "It is pale blue, I think.", ["pale blue"]) == 1.0
    assert judge("single-session-user", "It is blue.", ["pale blue"]) == 0.0
    assert judge("multi-session", "You bought three.", ["3", "three"]) == 1.0
    assert judge("multi-session", "You bought 13.", ["3", "three"]) == 0.0
    assert judge("single-session-user", "", ["pale blue"]) == 0.0


def test_an_updated_answer_suffices():
    assert judge("knowledge-update", "It was 35 at first, now it is 42.", ["42"]) == 1.0
    assert judge("knowledge-update", "It is 35.", ["42"]) == 0.0


@pytest.mark.parametrize("said,right", [("18 days", 1), ("About 17 days.", 1), ("nineteen; no, 19 days", 1), ("20 days", 0),
                                        ("18 weeks, or 20 days", 0), ("18", 1), ("", 0)])
def test_days_may_be_off_by_one_in_temporal_reasoning(said, right):
    assert judge("temporal-reasoning", said, ["18 days"]) == right
    assert judge("multi-session", "17 days", ["18 days"]) == 0.0  # but nowhere else


@pytest.mark.parametrize("said,right", [("5 March 2024", 1), ("March 6th, 2024", 1), ("On 2024/03/04.", 1),
                                        ("the 5th of March", 1), ("March 7", 0), ("5 March 2023", 0), ("", 0)])
def test_dates_are_compared_as_dates(said, right):
    assert judge("temporal-reasoning", said, ["5 March 2024"]) == right


def test_other_temporal_answers_are_contained():
    assert judge("temporal-reasoning", "You sold the car first.", ["sold the car"]) == 1.0


@pytest.mark.parametrize("said,right", [
    ("3", 1), ("Three.", 1), ("You bought three, the last one a fern.", 1), ("1 or 2 or 3 or 4", 0),
    ("one, two, three or four", 0), ("3-4", 0), ("not 3", 0), ("You did not buy 3.", 0),
    ("It isn’t three", 0), ("13", 0), ("twenty-three", 0), ("3.5", 0),
    ("3,000", 0), ("a few", 0), ("", 0)])
def test_a_count_is_the_only_number_named(said, right):
    assert judge("multi-session", said, ["3", "three"]) == right
    assert judge("knowledge-update", "It was 3, now it is 4.", ["4"]) == 1.0  # elsewhere other numbers may be named


def test_several_sessions_may_ask_for_other_things_than_counts():
    assert judge("multi-session", "In 2 shops, for $185 in all.", ["$185"]) == 1.0
    assert judge("multi-session", "From 2019 to 2021, in Lisbon.", ["Lisbon"]) == 1.0
    assert judge("multi-session", "1,200 kilometres", ["1200"]) == 1.0


@pytest.mark.parametrize("said", ["It is unknown.", "Unknown", "I am not sure.", "I'm unsure about that.", "I have no idea."])
def test_not_being_sure_is_abstaining(said):
    assert judge("single-session-user", said, ["anything"], abstain=True) == 1.0


def test_abstention_wants_a_sentence_that_says_so():
    assert judge("single-session-user", "You never mentioned a cat.", ["anything"], abstain=True) == 1.0
    assert judge("single-session-user", "I don’t know.", ["anything"], abstain=True) == 1.0
    assert judge("single-session-user", "Biscuit", ["Biscuit"], abstain=True) == 0.0
    assert not abstains("")


def test_first_quantity_and_first_date():
    assert first_quantity("between 2 and three days", "day") == 3
    assert first_quantity("none", "day") is None
    assert first_date("on Sept. 3, 2024") == date(2024, 9, 3)
    assert first_date("30 February 2024") is None
    assert first_date("March 3") is None


def test_a_model_can_judge():
    asked = []

    def says_yes(prompt):
        asked.append(prompt)
        return " Yes."

    assert judged_by(says_yes, "temporal-reasoning", "How long?", "18 days", "17 days") == 1.0
    assert JUDGES["temporal-reasoning"] in asked[0]
    assert "Response: 17 days" in asked[0]
    assert judged_by(lambda prompt: "No", "multi-session", "How many?", "3", "3") == 0.0
    assert JUDGES["abstention"] in judge_prompt("multi-session", "q", "a", "r", abstain=True)
    assert JUDGES[""] in judge_prompt("multi-session", "q", "a", "r")


def test_accuracies_by_task_and_overall():
    found = accuracies([("1", "multi-session", 1.0), ("2", "multi-session", 1.0), ("3_abs", "multi-session", 0.0),
                        ("4", "knowledge-update", 0.0)])
    assert found["multi-session"] == pytest.approx(2 / 3)
    assert found["task-averaged"] == pytest.approx(1 / 3)
    assert found["overall"] == 0.5
    assert found["abstention"] == 0.0
    assert accuracies([]) == {}

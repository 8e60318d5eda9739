import random
import re

import pytest
from tiny_tokenizer import tiny_tokenizer

from longspan.evaluation.tasks.babilong import COUNTS, GIVE, GO, LABELS, PLACES, THINGS, BABILong, tell

WALK = re.compile(rf"(.+?) (?:{'|'.join(GO)}) the (\w+)\.")


def read(story):
    """A second reading of a story, sentence by sentence: where persons are, who holds what, where things have been."""
    place, holder, trail, last, gifts, sides = {}, {}, {}, [], [], []
    for sentence in story:
        if walk := WALK.fullmatch(sentence):
            who, where = walk.groups()
            last = last if re.search(r"\b(he|she|they)$", who) else who.split(" and ")
            for person in last:
                place[person] = where
                for thing in [t for t, h in holder.items() if h == person]:
                    trail[thing].append(where)
        elif away := re.fullmatch(r"(\w+) is no longer in the (\w+)\.", sentence):
            place[away[1]] = f"not {away[2]}"
        elif drop := re.fullmatch(r"(\w+) (?:dropped|put down|discarded|left) the (\w+)\.", sentence):
            assert holder.pop(drop[2]) == drop[1]
        elif side := re.fullmatch(r"The (\w+) is (\w+) of the (\w+)\.", sentence):
            sides.append(side.groups())
        elif gift := re.fullmatch(rf"(\w+) (?:{'|'.join(GIVE)}) the (\w+) to (\w+)\.", sentence):
            assert holder[gift[2]] == gift[1] != gift[3]
            assert place[gift[1]] == place[gift[3]]  # they are in one place
            holder[gift[2]] = gift[3]
            gifts.append(gift.groups())
        else:
            person, thing = re.fullmatch(r"(\w+) (?:got|grabbed|picked up|took) the (\w+)\.", sentence).groups()
            assert thing not in holder
            assert trail.setdefault(thing, [place[person]])[-1] == place[person]  # it is where it was left
            holder[thing] = person
    return place, holder, trail, gifts, sides


def where(question, sides):
    """The only place that fits."""
    if found := re.fullmatch(r"What is (\w+) of the (\w+)\?", question):
        place, = (place for place, side, base in sides if (side, base) == found.groups())
    else:
        found = re.fullmatch(r"What is the (\w+) (\w+) of\?", question)
        place, = (base for place, side, base in sides if (place, side) == found.groups())
    return place


def given(question, gifts):
    """What, who or to whom, of the last gift that the question fits."""
    forms = {r"What did (?P<giver>\w+) give to (?P<taker>\w+)\?": 1, r"Who did (?P<giver>\w+) give the (?P<thing>\w+) to\?": 2,
             r"Who gave the (?P<thing>\w+) to (?P<taker>\w+)\?": 0, r"Who gave the (?P<thing>\w+)\?": 0,
             r"Who received the (?P<thing>\w+)\?": 2}
    (asked, wanted), = ((found.groupdict(), part) for form, part in forms.items() if (found := re.fullmatch(form, question)))
    fits = [gift for gift in gifts if asked.items() <= dict(zip(("giver", "thing", "taker"), gift)).items()]
    return fits[-1][wanted]


@pytest.mark.parametrize("name", LABELS)
def test_answers_follow_from_the_story(name):
    answers = set()
    for seed in range(60):
        story, question, answer = tell(name, random.Random(seed))
        place, holder, trail, gifts, sides = read(story)
        if name == "qa4":
            assert answer == where(question, sides)
        elif name == "qa5":
            assert answer == given(question, gifts)
        elif found := re.fullmatch(r"Where is the (\w+)\?", question):
            assert answer == trail[found[1]][-1]
        elif found := re.fullmatch(r"Where is (\w+)\?", question):
            assert answer == place[found[1]]
        elif found := re.fullmatch(r"Where was the (\w+) before the (\w+)\?", question):
            assert trail[found[1]][-2:] == [answer, found[2]]
        elif found := re.fullmatch(r"Is (\w+) in the (\w+)\?", question):
            assert answer == ("yes" if place[found[1]] == found[2] else "no")
        elif found := re.fullmatch(r"How many objects is (\w+) carrying\?", question):
            assert answer == COUNTS[list(holder.values()).count(found[1])]
        else:
            person = re.fullmatch(r"What is (\w+) carrying\?", question)[1]
            assert answer == (",".join(t for t in THINGS if holder.get(t) == person) or "nothing")
        answers |= set(answer.split(","))
    assert answers <= set(LABELS[name])
    assert len(answers) > 1
    assert set(PLACES) >= {walk[2] for sentence in story if (walk := WALK.fullmatch(sentence))}


def test_twelve_tasks():
    assert set(LABELS) == {f"qa{i}" for i in (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13)}


@pytest.mark.parametrize("name", ["qa1", "qa3", "qa4", "qa5", "qa8", "qa13"])
def test_sentences_are_scattered_in_their_order(name):
    task, tokenizer = BABILong(name=name), tiny_tokenizer()
    for example in task.examples(task.floor(tokenizer) + 200, 3, 0, tokenizer):
        spans = example.meta["spans"]
        assert spans == sorted(spans)
        story = [example.context[start:end] for start, end in spans]
        question, = example.meta["query"]
        assert question in example.question
        read(story)
        assert task.metric(f" {example.answers[0]}.", example) == 1.0
        assert task.metric("", example) == 0.0
        assert example.context.count("\nAnswer: ") == 2  # two worked examples
        assert task.score_name == "babilong-open"


def test_naming_two_labels_is_wrong():
    example, = BABILong().examples(1000, 1, 0, tiny_tokenizer())
    other = next(place for place in PLACES if place != example.answers[0])
    assert BABILong().metric(f"{example.answers[0]} or {other}", example) == 0.0
    assert BABILong().metric(f"{example.answers[0]}. Not the {other}", example) == 1.0


def test_none_scores_where_nothing_is_carried():
    task, tokenizer = BABILong(name="qa7"), tiny_tokenizer()
    found = [example for example in task.examples(task.floor(tokenizer) + 100, 12, 0, tokenizer) if example.answers == ("none",)]
    assert found
    for example in found:
        assert task.metric(" none", example) == 1.0
        assert task.metric(" one", example) == 0.0


def test_only_long_sentences_stand_around_a_story():
    short = [sentence for sentence in BABILong().text.sentences if len(sentence.split()) < 10]
    assert short == []
    assert len(BABILong().text.sentences) > 1000

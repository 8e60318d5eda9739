import random
import re

import pytest
from tiny_tokenizer import tiny_tokenizer

from longspan.evaluation.tasks.babilong import COUNTS, GO, LABELS, PLACES, THINGS, BABILong, tell

WALK = re.compile(rf"(.+?) (?:{'|'.join(GO)}) the (\w+)\.")


def read(story):
    """A second reading of a story, sentence by sentence: where persons are, who holds what, where things have been."""
    place, holder, trail, last = {}, {}, {}, []
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
        else:
            person, thing = re.fullmatch(r"(\w+) (?:got|grabbed|picked up|took) the (\w+)\.", sentence).groups()
            assert thing not in holder
            assert trail.setdefault(thing, [place[person]])[-1] == place[person]  # it is where it was left
            holder[thing] = person
    return place, holder, trail


@pytest.mark.parametrize("name", LABELS)
def test_answers_follow_from_the_story(name):
    answers = set()
    for seed in range(60):
        story, question, answer = tell(name, random.Random(seed))
        place, holder, trail = read(story)
        if found := re.fullmatch(r"Where is the (\w+)\?", question):
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


@pytest.mark.parametrize("name", ["qa1", "qa3", "qa8", "qa13"])
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
    example, = BABILong().examples(900, 1, 0, tiny_tokenizer())
    other = next(place for place in PLACES if place != example.answers[0])
    assert BABILong().metric(f"{example.answers[0]} or {other}", example) == 0.0
    assert BABILong().metric(f"{example.answers[0]}. Not the {other}", example) == 1.0

from tiny_tokenizer import tiny_tokenizer

from longspan.evaluation.tasks.needle import HEADER, Needle


def made(task, n=11, length=700):
    return list(task.examples(length, n, 0, tiny_tokenizer()))


def test_needle_occurs_once_at_its_depth():
    for example in made(Needle()):
        (start, end), = example.meta["spans"]
        assert example.context[start:end] == example.meta["needle"]
        assert example.context.count(example.meta["needle"]) == 1
        assert example.answers[0] in example.meta["needle"]
        body = len(example.context) - len(HEADER) - (end - start)
        reached = (start - len(HEADER)) / body
        assert reached <= example.meta["depth"] + 0.01  # moved back to the end of a sentence
        assert reached >= example.meta["depth"] - 260 / body


def test_first_and_last_depth_are_the_very_ends():
    by_depth = {example.meta["depth"]: example for example in made(Needle())}
    assert sorted(by_depth) == [i / 10 for i in range(11)]
    assert by_depth[0.0].context.startswith(HEADER + by_depth[0.0].meta["needle"])
    assert by_depth[1.0].context.endswith(by_depth[1.0].meta["needle"])


def test_rotation_changes_the_text_and_its_absence_does_not():
    fixed = {example.context[:len(HEADER) + 200] for example in made(Needle(rotate=False, depths=1), 3)}
    rotated = {example.context[:len(HEADER) + 200] for example in made(Needle(depths=1), 3)}
    assert (len(fixed), len(rotated)) == (1, 3)


def test_scores():
    example = made(Needle(), 1)[0]
    phrase = example.answers[0]
    assert Needle().metric(f"{phrase}. Then go home.", example) == 1.0
    assert Needle().metric(phrase.rsplit(" ", 1)[0], example) == 0.0
    assert 0.5 < Needle(score="rouge-1").metric(phrase.rsplit(" ", 1)[0], example) < 1.0

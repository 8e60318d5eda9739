"""Four more generated tasks of InfiniteBench (arXiv:2402.13718): digit strings, calls in code, and two with numbers.

- number string: like the passkey, but the key has runs of equal digits, so that copying it needs care;
- code run: functions that call one another through a number of layers; what does one of them return?
- math find: the largest, smallest or median number of a long list;
- math calc: all intermediate values of a long sum.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from longspan.evaluation import metrics
from longspan.evaluation.base import Draft, Example, Key, Task
from longspan.evaluation.tasks.haystack import insert, noise, spread_depth
from longspan.registry import knob, method

PAPER = "arXiv:2402.13718"


@method("number-string", kind="task", system="standard-suites", paper=PAPER,
        summary="A ten-digit string with repeated digits, stated twice in repeated noise.")
class NumberString(Task):
    """InfiniteBench's number_string: five random digits, then five times one of them doubled."""

    def draft(self, key: Key, tokenizer: Any) -> Draft:
        rng = key.rng("digits")
        digits = rng.choices("0123456789", k=5)
        for _ in range(5):
            at = rng.randrange(len(digits))
            digits.insert(at, digits[at])
        hidden = "".join(digits)
        line = f"The sequence of digits is {hidden}. Remember it. {hidden} is the sequence of digits."
        header = "Some important information is hidden in a lot of irrelevant text. Find it and remember it.\n\n"
        depth = spread_depth(key.seed, key.index)

        def build(units: int) -> Example:
            body, spans = insert(noise(units), [line], [int(depth * (units + 1))], "\n", len(header))
            return Example(
                context=header + body, question="\n\nWhat is the sequence of digits?",
                answer_prefix="The sequence of digits is", answers=(hidden,), max_new_tokens=12,
                meta={"index": key.index, "depth": depth, "spans": spans})

        return Draft(build)

    def metric(self, prediction: str, example: Example) -> float:
        return metrics.passkey(prediction, example.answers[0])


@method("code-run", kind="task", system="standard-suites", paper=PAPER,
        summary="What a function returns that calls others through several layers.")
class CodeRun(Task):
    """InfiniteBench's code_run: each function adds an offset and calls one of the next layer."""

    layers: int = knob(2, "calls from the function asked for to the value, both counted", low=1, high=10)

    def draft(self, key: Key, tokenizer: Any) -> Draft:
        def build(units: int) -> Example:
            rng = key.rng(f"functions/{units}")
            names = [f"func_{number}" for number in rng.sample(range(10 * units), units)]
            layers = [names[layer::self.layers] for layer in range(self.layers)]
            offsets = {name: rng.randint(-12, 17) for name in names}
            callee = {name: rng.choice(below) for here, below in pairwise(layers) for name in here}
            order = rng.sample(names, units)
            asked, argument = rng.choice(layers[0]), rng.randint(-10, 10)
            path, value = [asked], argument + offsets[asked]
            while path[-1] in callee:
                path.append(callee[path[-1]])
                value += offsets[path[-1]]
            header = "Here is a set of Python functions.\n\n"
            pieces = [_function(name, offsets[name], callee.get(name)) for name in order]
            starts = {name: len(header) + sum(len(piece) + 2 for piece in pieces[:i])
                      for i, name in enumerate(order) if name in path}
            call = f"{asked}({argument})"
            return Example(
                context=header + "\n\n".join(pieces), question=f"\n\nWhat does {call} return? Give the number only.",
                answer_prefix=f"The return value of {call} is", answers=(str(value),), max_new_tokens=5,
                meta={"index": key.index, "depth": sum(order.index(name) for name in path) / len(path) / units,
                      "spans": [[starts[name], starts[name] + len(pieces[order.index(name)])] for name in path]})

        return Draft(build, least=2 * self.layers)

    def metric(self, prediction: str, example: Example) -> float:
        return metrics.last_integer(prediction, int(example.answers[0]))


def _function(name: str, offset: int, callee: str | None) -> str:
    changed = f"x {'-' if offset < 0 else '+'} {abs(offset)}"
    return f"def {name}(x):\n    return {changed if callee is None else f'{callee}({changed})'}"


QUERIES = ("largest number", "second largest number", "third largest number", "smallest number",
           "second smallest number", "third smallest number", "median")


@method("math-find", kind="task", system="standard-suites", paper=PAPER,
        summary="The largest, smallest or median number of a long list.")
class MathFind(Task):
    """InfiniteBench's math_find: numbers from 0 to 99, seven queries in turn; ranks count distinct numbers."""

    def draft(self, key: Key, tokenizer: Any) -> Draft:
        query = QUERIES[key.index % len(QUERIES)]
        rng = key.rng("range")
        # The range is narrowed at random, so that the answer isn't 99 or 0 whatever the list says.
        lowest, highest = rng.randint(0, 20), rng.randint(79, 99)

        def build(units: int) -> Example:
            count = units | 1 if query == "median" else units  # an odd list, whose median is one of its numbers
            numbers = key.rng("numbers").choices(range(lowest, highest + 1), k=count)
            return Example(
                context=f"Here is a list of numbers.\n\n{numbers}",
                question=f"\n\nWhat is the {query} of the list? Give the number only.",
                answer_prefix=f"The {query} of the list is", answers=(str(_find(numbers, query)),), max_new_tokens=3,
                meta={"index": key.index, "query": [query], "count": count})

        return Draft(build, least=16)

    def metric(self, prediction: str, example: Example) -> float:
        return metrics.first_number(prediction, int(example.answers[0]))


def _find(numbers: list[int], query: str) -> int:
    if query == "median":
        return sorted(numbers)[len(numbers) // 2]
    rank = 1 if query.startswith("second") else 2 if query.startswith("third") else 0
    return sorted(set(numbers), reverse="largest" in query)[rank]


@method("math-calc", kind="task", system="standard-suites", paper=PAPER,
        summary="All intermediate values of a long sum.")
class MathCalc(Task):
    """InfiniteBench's math_calc: values stay from 0 to 99; the score is the share that is right before an error.

    The answer is as long as the question, so half of the length is generated.
    """

    def draft(self, key: Key, tokenizer: Any) -> Draft:
        def build(units: int) -> Example:
            rng = key.rng("terms")
            values = [rng.randint(0, 99)]
            text = str(values[0])
            for _ in range(units - 1):
                values.append(rng.randint(0, 99))
                step = values[-1] - values[-2]
                text += f" {'-' if step < 0 else '+'} {abs(step)}"
            answers = tuple(map(str, values))
            return Example(
                context=f"Here is a sum. Work out the value after each of its numbers.\n\nSum: {text}",
                question="\n\nList all values in order, the first number included.", answer_prefix="Values:",
                answers=answers, max_new_tokens=len(tokenizer.encode(" " + ", ".join(answers))) + 4,
                meta={"index": key.index, "count": units})

        return Draft(build, least=4)

    def metric(self, prediction: str, example: Example) -> float:
        return metrics.correct_prefix(prediction, [int(answer) for answer in example.answers])

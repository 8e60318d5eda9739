"""NoLiMa's idea (arXiv:2502.05167): a needle that shares no content word with the question.

"Mara lives beside the Eiffel Tower" answers "Which person has been to France?", but no word of the question leads
there: attention can't match letters, one fact has to link the two. The published needles may not be used freely; the
pairs here are our own. Two dozen depths, one needle each, and on request a sentence that does share the question's
words and says nothing, at least a fifth of the text away. With a file (``file=``) needles are those of the user's copy of the
published set.

The base score and the effective length that NoLiMa reports are in `longspan.evaluation.effective_length`.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from longspan.evaluation import metrics
from longspan.evaluation.base import Draft, Example, Key, Task
from longspan.evaluation.tasks.haystack import Essay, at_characters, grid_depth, insert
from longspan.evaluation.texts import Text, load_file, load_text
from longspan.registry import Refused, knob, method

NAMES = ("Mara", "Tobias", "Ingrid", "Pablo", "Yasmin", "Cedric", "Noemi", "Ravi", "Leonora", "Dmitri", "Astrid",
         "Kofi", "Wanda", "Emre", "Celeste", "Hiroshi")

PAIRS = (
    ("For years {name} lived beside the Eiffel Tower.", "Which person has been to France?"),
    ("Every morning {name} jogs around the Colosseum.", "Which person has been to Rome?"),
    ("From the window of the flat, {name} can see Big Ben.", "Which person has been to England?"),
    ("The workshop that {name} runs looks out on the Brandenburg Gate.", "Which person has been to Berlin?"),
    ("Once a week {name} sweeps the steps of the Parthenon.", "Which person has been to Greece?"),
    ("At the foot of Mount Fuji, {name} keeps a small inn.", "Which person has been to Japan?"),
    ("For a living, {name} guides visitors through Machu Picchu.", "Which person has been to Peru?"),
    ("{name} sells postcards in front of the Taj Mahal.", "Which person has been to India?"),
    ("{name} gets hives from peanuts, almonds and walnuts.", "Which person can't eat nuts?"),
    ("Since childhood {name} has touched neither beef nor pork nor chicken.", "Which person is a vegetarian?"),
    ("A glass of milk makes {name} ill for hours.", "Which person doesn't tolerate lactose?"),
    ("{name} plays first violin under a famous conductor.", "Which person is in an orchestra?"),
    ("In the operating theatre {name} never lets the scalpel shake.", "Which person is a surgeon?"),
    ("Before dawn {name} kneads the dough and lights the oven.", "Which person is a baker?"),
    ("{name} lands the evening jet from Zurich on time.", "Which person is a pilot?"),
    ("On moonless nights {name} counts the rings of Saturn.", "Which person owns a telescope?"),
)
"""Needle and question; a name fills the needle and is the answer."""

DISTRACTOR = "Nobody remembers {tail}"
HEADER = "Read the following text. A question about one of the persons in it comes at the end.\n\n"


@method("nolima", kind="task", system="standard-suites", paper="arXiv:2502.05167",
        summary="Find a sentence that shares no word with the question about it.")
class NoLiMa(Task):
    """NoLiMa with our own pairs of needle and question."""

    haystack: str = knob("pydoc", "text the needle is hidden in: pydoc, docstrings, jargon, bible, debian-handbook")
    depths: int = knob(26, "depths from 0 to 1, one an example, each once before any comes again", low=1)
    file: str = knob("", "your copy of NoLiMa's needle_set.json; pairs of our own if left out")
    distractor: bool = knob(False, "also hide a sentence with the question's words, a fifth of the text away")

    own_text = True

    @property
    def text(self) -> Text:
        return load_text(self.haystack)

    def draft(self, key: Key, tokenizer: Any) -> Draft:
        rng = key.rng("needle")
        if self.file:
            pair, needle, question, names = rng.choice(read_needles(load_file(self.file)))
            name = rng.choice(names)
            hidden = [needle.replace("{CHAR}", name)]
        else:
            (needle, question), name = rng.choice(PAIRS), rng.choice(NAMES)
            pair, hidden = question, [needle.format(name=name)]
        if self.distractor:
            hidden.append(DISTRACTOR.format(tail=question[0].lower() + question[1:-1] + "."))
        essay = Essay(self.text, rng.randrange(len(self.text.sentences)), tokenizer)
        depth = grid_depth(key.index, self.depths)
        away = [d / 100 for d in range(101) if abs(d / 100 - depth) >= 0.2]
        depths = [depth, rng.choice(away)][:len(hidden)]

        def build(units: int) -> Example:
            sentences = essay.take(units)
            body, spans = insert(sentences, hidden, [at_characters(sentences, d) for d in depths], " ", len(HEADER))
            return Example(
                context=HEADER + body, question=f"\n\n{question} Give the name only.",
                answer_prefix="The name of that person is", answers=(name,), max_new_tokens=16,
                meta={"index": key.index, "depth": depth, "spans": spans[:1], "needle": hidden[0],
                      "distractors": spans[1:], "pair": pair})

        return Draft(build, least=2, estimate=essay.tokens)

    def metric(self, prediction: str, example: Example) -> float:
        return metrics.contains(prediction, example.answers[0])


Needle = tuple[str, str, str, tuple[str, ...]]
"""Id of the pair, needle with ``{CHAR}`` for the name, question, names."""


@functools.lru_cache(maxsize=2)
def read_needles(text: Text) -> list[Needle]:
    """Every needle of a published set with every question about it, one pair for each of its tests.

    Raises:
        Refused: the file isn't of NoLiMa's form.
    """
    try:
        found = [(f"{one['id']}/{test}/{hop}", _filled(one["needle"], args["input_args"]), _filled(question, args["input_args"]),
                  tuple(one["character_set"]))
                 for one in json.loads(text.text) for test, args in one["tests"].items()
                 for hop, question in one["questions"].items()]
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        problem = f"no field {error.args[0]!r}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise Refused(f"{text.source!r}: not a needle set of NoLiMa ({problem}); expected its needle_set.json as "
                      "published.") from None
    if not found:
        raise Refused(f"{text.source!r}: no needles; expected NoLiMa's needle_set.json.")
    return found


def _filled(template: str, args: list[str]) -> str:
    """A template with ``{1}``, ``{2}`` and so on replaced by the test's arguments."""
    return re.sub(r"\{(\d+)\}", lambda found: args[int(found.group(1)) - 1], template)

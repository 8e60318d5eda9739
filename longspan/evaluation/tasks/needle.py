"""Needle in a haystack: one out-of-place sentence in running text, asked for at every length and depth.

Essays are joined until long enough; the needle stands at a given depth, moved back to the end of a sentence; the
question asks for what it says. The published judge is a chat model; here the answer counts when it contains the key
phrase, or by ROUGE-1 F against the needle.
"""

from __future__ import annotations

import random
from typing import Any

from longspan.evaluation import metrics
from longspan.evaluation.base import Draft, Example, Key, Task
from longspan.evaluation.tasks.haystack import Essay, at_characters, grid_depth, insert
from longspan.evaluation.texts import Text, load_text
from longspan.registry import knob, method

PLACES = ("Lisbon", "Oslo", "Kyoto", "Quito", "Dakar", "Riga", "Hobart", "Tunis", "Galway", "Turin", "Bergen", "Porto")
TIMES = ("rainy evening", "cold morning", "quiet Sunday", "windy afternoon", "warm night", "foggy day")
DOINGS = (
    "eat a lemon tart by the old lighthouse", "listen to fado records in the harbour library",
    "count the barges from the iron bridge", "play chess with the night baker",
    "drink plum tea under the station clock", "feed the geese behind the copper mill",
    "paint the fishing boats from the sea wall", "read old maps in the tram museum",
    "fly a paper kite over the salt meadows", "share roasted chestnuts with the ferry crew",
)

HEADER = "Read the following text. A question about it comes at the end.\n\n"


def draw_needle(rng: random.Random) -> tuple[str, str, str]:
    """A needle: its subject, its key phrase, and the sentence."""
    subject = f"The best thing to do in {rng.choice(PLACES)} on a {rng.choice(TIMES)}"
    phrase = rng.choice(DOINGS)
    return subject, phrase, f"{subject} is to {phrase}."


@method("niah", kind="task", system="standard-suites", paper="Kamradt 2023, LLMTest_NeedleInAHaystack",
        summary="Find one sentence hidden at a given depth of running text.")
class Needle(Task):
    """Needle in a haystack over a grid of depths; the grid of lengths is the caller's."""

    haystack: str = knob("pydoc", "text the needle is hidden in: pydoc, docstrings, jargon, bible, debian-handbook")
    depths: int = knob(11, "depths from 0 to 1, one an example, each once before any comes again", low=1)
    score: str = knob("contains", "answer contains the key phrase, or ROUGE-1 F against the needle",
                      choices=("contains", "rouge-1"))
    rotate: bool = knob(True, "begin each example's text at another sentence (False: all at the first)")

    own_text = True

    @property
    def text(self) -> Text:
        return load_text(self.haystack)

    def draft(self, key: Key, tokenizer: Any) -> Draft:
        text, rng = self.text, key.rng("needle")
        subject, phrase, needle = draw_needle(rng)
        essay = Essay(text, rng.randrange(len(text.sentences)) if self.rotate else 0, tokenizer)
        depth = grid_depth(key.index, self.depths)

        def build(units: int) -> Example:
            sentences = essay.take(units)
            body, spans = insert(sentences, [needle], [at_characters(sentences, depth)], " ", len(HEADER))
            return Example(
                context=HEADER + body, question=f"\n\nAccording to the text, what is {_lower(subject)}?",
                answer_prefix=f"{subject} is to", answers=(phrase,), max_new_tokens=32,
                meta={"index": key.index, "depth": depth, "spans": spans, "needle": needle})

        return Draft(build, least=2, estimate=essay.tokens)

    def metric(self, prediction: str, example: Example) -> float:
        if self.score == "rouge-1":
            return metrics.rouge_1(prediction, example.answers[0])
        return metrics.contains(prediction, example.answers[0])


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]

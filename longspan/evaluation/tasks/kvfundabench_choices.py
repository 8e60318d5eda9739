"""KVFundaBench's questions with choices: world knowledge (MMLU) and common sense (CommonsenseQA).

Without a file the questions are ours: facts of geography, chemistry and biology, and where everyday things are found or what
they are for. The answer is not in the shots, which show the format only, as in the published tasks.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import ClassVar

from longspan.evaluation.base import Example
from longspan.evaluation.tasks.kvfundabench import PAPER, FewShot, Item
from longspan.evaluation.tasks.kvfundabench_files import LETTERS, choices, read_commonsense_qa, read_mmlu
from longspan.evaluation.texts import Text
from longspan.evaluation.words import listed
from longspan.registry import method


def pairs(text: str) -> dict[str, str]:
    """Entries ``name:value`` as a dictionary; an underscore stands for a blank."""
    return dict(entry.replace("_", " ").split(":") for entry in text.split())


FACTS: dict[str, dict[str, str]] = {
    "What is the capital of {}?": pairs("""
        France:Paris Germany:Berlin Italy:Rome Spain:Madrid Portugal:Lisbon Greece:Athens Norway:Oslo Sweden:Stockholm
        Finland:Helsinki Poland:Warsaw Austria:Vienna Hungary:Budapest Ireland:Dublin Japan:Tokyo China:Beijing India:New_Delhi
        Egypt:Cairo Kenya:Nairobi Canada:Ottawa Cuba:Havana Peru:Lima Chile:Santiago Argentina:Buenos_Aires Russia:Moscow"""),
    "What is the chemical symbol of {}?": pairs("""
        hydrogen:H helium:He carbon:C nitrogen:N oxygen:O sodium:Na magnesium:Mg aluminium:Al silicon:Si sulfur:S chlorine:Cl
        potassium:K calcium:Ca iron:Fe copper:Cu zinc:Zn silver:Ag tin:Sn iodine:I gold:Au mercury:Hg lead:Pb uranium:U"""),
    "On which continent is {}?": pairs("""
        France:Europe Brazil:South_America Kenya:Africa Japan:Asia Canada:North_America Nigeria:Africa Vietnam:Asia
        Peru:South_America Poland:Europe Mexico:North_America Egypt:Africa Thailand:Asia Chile:South_America Norway:Europe"""),
    "What is a young {} called?": pairs("""
        dog:puppy cat:kitten cow:calf horse:foal sheep:lamb goat:kid pig:piglet hen:chick duck:duckling frog:tadpole
        kangaroo:joey lion:cub deer:fawn swan:cygnet goose:gosling"""),
}
"""Questions with one right value for every name; wrong choices are other values of the same question."""

PLACES: dict[str, tuple[str, ...]] = {
    "in a kitchen": listed("oven kettle saucepan toaster fridge"), "on a farm": listed("tractor barn plough cow scarecrow"),
    "in an office": listed("printer stapler desk photocopier"), "in a hospital": listed("stretcher nurse scalpel ambulance"),
    "on a beach": listed("sandcastle lifeguard seashell surfboard"), "in a school": listed("blackboard pupil teacher timetable"),
    "at an airport": listed("runway pilot check-in suitcase"), "in a library": listed("bookshelf librarian novel atlas"),
    "in a bathroom": listed("toothbrush shower bathtub towel"), "in a garage": listed("car spanner jack tyre"),
}
USES: dict[str, tuple[str, ...]] = {
    "to cut something": listed("knife scissors saw axe"), "to write something down": listed("pencil pen chalk typewriter"),
    "to keep dry in the rain": listed("umbrella raincoat poncho"), "to tell the time": listed("watch sundial hourglass clock"),
    "to see in the dark": listed("torch lantern candle lamp"), "to travel over water": listed("ferry canoe raft yacht"),
    "to make music": listed("violin piano trumpet flute"), "to open a lock": ("key",),
    "to keep warm in winter": listed("scarf mittens blanket sweater"), "to look at the stars": ("telescope",),
}
ASKED: dict[str, dict[str, tuple[str, ...]]] = {
    "Which of these would you expect to find {}?": PLACES, "Which of these would you use {}?": USES}


def draw_fact(rng: random.Random) -> Item:
    """A question of knowledge with four choices."""
    asked = rng.choice(sorted(FACTS))
    known: Mapping[str, str] = FACTS[asked]
    name = rng.choice(sorted(known))
    return _with_choices(rng, asked.format(name), known[name], sorted(set(known.values()) - {known[name]}), 4)


def draw_sense(rng: random.Random) -> Item:
    """A question of common sense with five choices; the wrong ones belong elsewhere."""
    asked = rng.choice(sorted(ASKED))
    groups = ASKED[asked]
    place = rng.choice(sorted(groups))
    others = sorted({thing for other, things in groups.items() if other != place for thing in things})
    return _with_choices(rng, asked.format(place), rng.choice(groups[place]), others, 5)


def _with_choices(rng: random.Random, question: str, right: str, wrong: list[str], count: int) -> Item:
    options = rng.sample(wrong, count - 1)
    at = rng.randrange(count)
    options.insert(at, right)
    return Item(*choices(question, options, LETTERS[at]))


def chosen_letter(prediction: str) -> str | None:
    """The first letter in parentheses, or one that stands alone where the answer begins."""
    found = re.search(r"\(([A-J])\)", prediction) or re.match(r"\s*([A-J])\b", prediction)
    return found.group(1) if found else None


class _Choices:
    """What tasks with choices share: the letter counts."""

    def metric(self, prediction: str, example: Example) -> float:
        return float(chosen_letter(prediction) == example.answers[0])


@method("kvfunda-knowledge", kind="task", system="shotkv", paper=PAPER,
        summary="Facts of the world with four choices; MMLU from your copy.")
class Knowledge(_Choices, FewShot):
    """World knowledge. The answer counts when the letter chosen is right."""

    header: ClassVar[str] = "Answer the last question with one of its choices, as in the examples.\n\n"

    def draw(self, rng: random.Random) -> Item:
        return draw_fact(rng)

    def read(self, text: Text) -> list[Item]:
        return [Item(*row) for row in read_mmlu(text)]


@method("kvfunda-commonsense", kind="task", system="shotkv", paper=PAPER,
        summary="Everyday things, where they are found and what they are for; CommonsenseQA from your copy.")
class Commonsense(_Choices, FewShot):
    """Common sense, five choices. The answer counts when the letter chosen is right."""

    header: ClassVar[str] = "Answer the last question with one of its choices, as in the examples.\n\n"

    def draw(self, rng: random.Random) -> Item:
        return draw_sense(rng)

    def read(self, text: Text) -> list[Item]:
        return [Item(*row) for row in read_commonsense_qa(text)]

"""BABILong (arXiv:2406.10149): small stories, their sentences scattered through a long text.

Persons walk between places, take things, carry and drop them; a question asks about the end state, so several scattered
sentences have to be put together in their order. The stories of twelve of the twenty bAbI tasks are simulated here from
their rules; the text around them is ours. Two worked examples come before the text.

- qa1, qa2, qa3: where a person is; where a thing is; where it was before that;
- qa4: which of two places lies north, south, east or west of another; qa5: who gave what to whom;
- qa6, qa9: is a person at a place, without and with negations; qa7, qa8: how many things, and which, someone carries;
- qa11, qa12, qa13: with pronouns, with two persons at once, with both.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field
from typing import Any

from longspan.evaluation import metrics
from longspan.evaluation.base import Draft, Example, Key, Task
from longspan.evaluation.tasks.haystack import Essay, insert
from longspan.evaluation.texts import Text, load_text, make_text
from longspan.registry import knob, method

PERSONS = ("Mary", "John", "Daniel", "Sandra")
PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
THINGS = ("apple", "football", "milk")
GIVERS = ("Bill", "Fred", "Jeff", "Mary")
"""Persons of qa5, whose published labels are these."""
SIDES = {"north": "south", "south": "north", "east": "west", "west": "east"}
COUNTS = ("none", "one", "two", "three")
GO = ("moved to", "went to", "journeyed to", "travelled to", "went back to")
TAKE = ("got", "grabbed", "picked up", "took")
GIVE = ("gave", "handed", "passed")
DROP = ("dropped", "put down", "discarded", "left")

LABELS: dict[str, tuple[str, ...]] = {
    **{name: PLACES for name in ("qa1", "qa2", "qa3", "qa4", "qa11", "qa12", "qa13")},
    **{name: ("yes", "no") for name in ("qa6", "qa9")},
    "qa5": (*GIVERS, *THINGS), "qa7": COUNTS, "qa8": (*THINGS, "nothing"),
}
"""The answers of each task; scoring looks for these words only."""

LENGTHS = {"qa1": (2, 10), "qa2": (6, 24), "qa3": (12, 40), "qa4": (2, 2), "qa5": (6, 22)}
"""How many sentences a story has, least and most; `OTHERS` for all other tasks."""
OTHERS = (4, 14)
LEAST_WORDS = 10
"""Shorter sentences of the text around a story are left out."""


@dataclass
class World:
    """Who and what is where, and the sentences that tell it."""

    rng: random.Random
    story: list[str] = field(default_factory=list)
    place: dict[str, str] = field(default_factory=dict)
    """Place of each person, as far as told."""
    carrier: dict[str, str] = field(default_factory=dict)
    trail: dict[str, list[str]] = field(default_factory=dict)
    """Places a thing has been at, the last one now."""
    negated: dict[str, str] = field(default_factory=dict)
    """Places persons are said not to be at, their whereabouts unknown."""

    gifts: list[tuple[str, str, str]] = field(default_factory=list)
    """Who gave what to whom, the last one at the end."""
    sides: list[tuple[str, str, str]] = field(default_factory=list)
    """Facts such as (office, north, bedroom): the office is north of the bedroom."""

    def go(self, *persons: str, told_as: str = "", place: str = "") -> None:
        """Persons walk to a new place together; `told_as` replaces their names."""
        place = place or self.rng.choice([p for p in PLACES if p not in {self.place.get(person) for person in persons}])
        self.story.append(f"{told_as or ' and '.join(persons)} {self.rng.choice(GO)} the {place}.")
        for person in persons:
            self.place[person] = place
            self.negated.pop(person, None)
            for thing in self.held(person):
                self.trail[thing].append(place)

    def not_there(self, person: str) -> None:
        """It is only told where a person is not any more."""
        place = self.place.pop(person, None) or self.rng.choice(PLACES)
        self.story.append(f"{person} is no longer in the {place}.")
        self.negated[person] = place

    def held(self, person: str) -> list[str]:
        return [thing for thing in THINGS if self.carrier.get(thing) == person]

    def handle(self) -> bool:
        """Somebody takes or drops a thing, if anybody can."""
        can = [(person, thing) for person in self.place for thing in THINGS
               if self.carrier.get(thing) == person
               or (thing not in self.carrier and self.trail.get(thing, [self.place[person]])[-1] == self.place[person])]
        if not can:
            return False
        person, thing = self.rng.choice(can)
        if self.carrier.get(thing) == person:
            self.story.append(f"{person} {self.rng.choice(DROP)} the {thing}.")
            del self.carrier[thing]
        else:
            self.story.append(f"{person} {self.rng.choice(TAKE)} the {thing}.")
            self.carrier[thing] = person
            self.trail.setdefault(thing, [self.place[person]])
        return True

    def give(self) -> bool:
        """Somebody gives what they carry to another person, who comes along first if need be; if anybody carries anything."""
        if not self.carrier:
            return False
        thing = self.rng.choice(sorted(self.carrier))
        giver = self.carrier[thing]
        taker = self.rng.choice([person for person in GIVERS if person != giver])
        if self.place.get(taker) != self.place[giver]:
            self.go(taker, place=self.place[giver])
        self.story.append(f"{giver} {self.rng.choice(GIVE)} the {thing} to {taker}.")
        self.carrier[thing] = taker
        self.gifts.append((giver, thing, taker))
        return True

    def lay_out(self) -> None:
        """Three places in a row or around a corner, told by two sentences in any order."""
        first, middle, last = self.rng.sample(PLACES, 3)
        side = self.rng.choice(sorted(SIDES))
        other = self.rng.choice([s for s in sorted(SIDES) if s != SIDES[side]])
        self.sides = [(first, side, middle), (middle, other, last)]
        self.rng.shuffle(self.sides)
        self.story += [f"The {place} is {side} of the {base}." for place, side, base in self.sides]


def tell(task: str, rng: random.Random) -> tuple[list[str], str, str]:
    """A story of `task`, its question, and the answer; told again until the question has one."""
    while True:
        world = World(rng)
        low, high = LENGTHS.get(task, OTHERS)
        length = rng.randint(low, high)
        while len(world.story) < length:
            _next_sentence(task, world)
        asked = _ask(task, world)
        if asked is not None:
            return world.story, *asked


def _next_sentence(task: str, world: World) -> None:
    rng = world.rng
    if task == "qa4":
        world.lay_out()
    elif task == "qa5":
        done = (rng.random() < 0.3 and world.give()) or (rng.random() < 0.5 and world.handle())
        if not done:
            world.go(rng.choice(GIVERS))
    elif task in ("qa11", "qa13"):
        several = task == "qa13"
        persons = rng.sample(PERSONS, 2 if several else 1)
        world.go(*persons)
        joint = rng.choice(("Then", "After that", "Afterwards", "Following that"))
        world.go(*persons, told_as=f"{joint} {'they' if several else _pronoun(persons[0])}")
    elif task == "qa12":
        world.go(*rng.sample(PERSONS, 2))
    elif task == "qa9" and rng.random() < 0.3:
        world.not_there(rng.choice(PERSONS))
    elif task not in ("qa2", "qa3", "qa7", "qa8") or rng.random() < 0.5 or not world.handle():
        world.go(rng.choice(PERSONS))


def _pronoun(person: str) -> str:
    return "she" if person in ("Mary", "Sandra") else "he"


def _ask(task: str, world: World) -> tuple[str, str] | None:
    """Question and answer about the end of a story, or None if the story doesn't allow one."""
    rng, known = world.rng, sorted(world.place)
    if task == "qa4":
        place, side, base = rng.choice(world.sides)
        return (f"What is {side} of the {base}?", place) if rng.random() < 0.5 else (f"What is the {place} {side} of?", base)
    if task == "qa5":
        return _ask_of_gift(world) if world.gifts else None
    if task in ("qa1", "qa11", "qa12", "qa13"):
        person = rng.choice(known)
        return f"Where is {person}?", world.place[person]
    if task in ("qa6", "qa9"):
        person = rng.choice(sorted({*known, *world.negated}))
        place = world.place.get(person) or world.negated[person]
        yes = person in world.place and rng.random() < 0.5
        if not yes and person in world.place:
            place = rng.choice([p for p in PLACES if p != place])
        return f"Is {person} in the {place}?", "yes" if yes else "no"
    if task in ("qa7", "qa8"):
        person = rng.choice(known)
        held = world.held(person)
        if task == "qa7":
            return f"How many objects is {person} carrying?", COUNTS[len(held)]
        return f"What is {person} carrying?", ",".join(held) or "nothing"
    depth = 2 if task == "qa3" else 1
    things = sorted(thing for thing, trail in world.trail.items() if len(trail) >= depth)
    if not things:
        return None
    thing = rng.choice(things)
    if task == "qa2":
        return f"Where is the {thing}?", world.trail[thing][-1]
    return f"Where was the {thing} before the {world.trail[thing][-1]}?", world.trail[thing][-2]


def _ask_of_gift(world: World) -> tuple[str, str]:
    """A question about the last time that something was given."""
    giver, thing, taker = world.gifts[-1]
    return world.rng.choice([
        (f"What did {giver} give to {taker}?", thing), (f"Who did {giver} give the {thing} to?", taker),
        (f"Who gave the {thing} to {taker}?", giver), (f"Who gave the {thing}?", giver), (f"Who received the {thing}?", taker)])


@functools.lru_cache(maxsize=4)
def long_sentences(text: Text) -> Text:
    """The sentences of a text that have ten words or more, as BABILong takes them from its books."""
    return make_text(f"{text.name}-10", text.source, "\n\n".join(s for s in text.sentences if len(s.split()) >= LEAST_WORDS))


@method("babilong", kind="task", system="standard-suites", paper="arXiv:2406.10149",
        summary="Put together a small story whose sentences are scattered through a long text.")
class BABILong(Task):
    """BABILong over twelve simulated bAbI tasks: the one right label in the first sentence.

    Scoring is as published, but that labels are whole words: "none" doesn't name "one", nor "know" "no".
    """

    name: str = knob("qa1", "which bAbI task", choices=tuple(LABELS))
    haystack: str = knob("pydoc", "text around the story: pydoc, docstrings, jargon, bible, debian-handbook")

    own_text = True

    @property
    def text(self) -> Text:
        return long_sentences(load_text(self.haystack))

    def draft(self, key: Key, tokenizer: Any) -> Draft:
        rng = key.rng(f"story/{self.name}")
        story, question, answer = tell(self.name, rng)
        shot_rng = random.Random(f"babilong/{self.name}")  # the two worked examples are the same for all
        shots = "".join(f"{' '.join(s)}\nQuestion: {q}\nAnswer: {a}\n\n"
                        for s, q, a in (tell(self.name, shot_rng) for _ in range(2)))
        header = ("Facts about persons, places and things are hidden in a long text. Answer the question from those "
                  f"facts alone; the answer is one of: {', '.join(LABELS[self.name])}.\n\n{shots}The text:\n\n")
        essay = Essay(self.text, rng.randrange(len(self.text.sentences)), tokenizer)

        def build(units: int) -> Example:
            places = key.rng(f"places/{units}").choices(range(units + 1), k=len(story))
            body, spans = insert(essay.take(units), story, sorted(places), " ", len(header))
            depths = sorted(place / units for place in places)
            return Example(
                context=header + body, question=f"\n\nQuestion: {question}", answer_prefix="Answer:", answers=(answer,),
                max_new_tokens=20, meta={
                    "index": key.index, "depth": sum(depths) / len(depths), "depths": depths, "spans": spans,
                    "query": [question], "labels": list(LABELS[self.name])})

        return Draft(build, least=2, estimate=essay.tokens)

    def metric(self, prediction: str, example: Example) -> float:
        question, = example.meta["query"]
        return metrics.babilong(prediction, example.answers[0], question, example.meta["labels"])

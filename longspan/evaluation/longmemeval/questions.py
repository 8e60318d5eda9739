"""Questions of our own with the sessions that answer them: LongMemEval's six types, and abstention.

A user and an assistant talk over half a year. A fact comes up in passing; the assistant recommends something; a taste is told;
a value changes later on; things of one sort are bought in several sessions; events have dates. An abstention asks for a fact of
the same sort as one that was told, about something that never came up.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import datetime, timedelta

from longspan.evaluation.longmemeval.chatter import GREETINGS, PLACES
from longspan.evaluation.longmemeval.history import Asked, Session, Turn, written
from longspan.evaluation.longmemeval.judge import MONTHS, NUMBER_WORDS

START, DAYS = datetime(2024, 1, 8, 9, 0), 180
"""When the first session may be, and how many days later the last one; the question is asked a week after that."""

FACTS = (
    ("my bicycle", "I had {thing} repainted last week, it is {value} now.", "What colour is {thing}?",
     ("emerald green", "dark red", "pale blue", "bright orange", "silver grey")),
    ("my cat", "By the way, I named {thing} {value} after all.", "What is the name of {thing}?",
     ("Biscuit", "Pepper", "Mochi", "Clover", "Juno")),
    ("my sister", "I am visiting {thing} soon, she has moved to {value}.", "Where does {thing} live?",
     ("Lyon", "Bergen", "Porto", "Galway", "Turin")),
    ("my violin lesson", "I can't come then, {thing} is always on {value}.", "On which day of the week is {thing}?",
     ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")),
    ("my thesis", "I finally chose a subject: {thing} will be about {value}.", "What is {thing} about?",
     ("river deltas", "medieval maps", "sea urchins", "solar sails", "folk songs")),
    ("my neighbour", "I got help from {thing}, who works as a {value}.", "What is the job of {thing}?",
     ("glassblower", "beekeeper", "locksmith", "dentist", "surveyor")),
)
"""Who or what, how the user tells it, how it is asked for, and values it can have."""

ADVICE = (
    ("a quiet restaurant in {place}", "restaurant", ("The Copper Ladle", "Salt and Juniper", "The Blue Door", "Little Harbour")),
    ("a novel set in {place}", "novel", ("The Lantern Ferry", "Nine Winters", "A House of Rain", "The Salt Road")),
    ("a museum to visit in {place}", "museum", ("the Clock Museum", "the Museum of Maps", "the Glass House", "the Tram Depot")),
)

TASTES = (
    ("Coffee keeps me awake, so in the evening I only drink {value}.", "What should I drink while I work tonight?",
     ("peppermint tea", "rooibos tea", "hot chocolate", "ginger tea")),
    ("On weekends I relax best when I am {value}.", "What could I do to relax on Saturday?",
     ("pottering in the garden", "solving crosswords", "walking by the sea", "baking bread")),
    ("I never watch thrillers any more, what I love are {value}.", "Which kind of film should I watch tonight?",
     ("nature documentaries", "old musicals", "silent films", "courtroom dramas")),
)

UPDATES = (
    ("I have {value} postcards in my collection now.", "How many postcards are in my collection?",
     tuple(str(n) for n in range(21, 90, 7))),
    ("My personal best over ten kilometres is now {value} minutes.", "What is my personal best over ten kilometres?",
     tuple(str(n) for n in range(41, 69, 3))),
    ("The team meeting is on {value} from now on.", "On which day is the team meeting?",
     ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")),
    ("My German class has moved to {value}.", "Where is my German class?",
     ("the town hall", "the old library", "the music school", "the station building")),
)

BOUGHT = {
    "musical instruments": ("a ukulele", "a clarinet", "an accordion", "a mandolin", "a trombone"),
    "pieces of furniture": ("a bookcase", "an armchair", "a bedside table", "a wardrobe", "a footstool"),
    "plants": ("a fern", "a lemon tree", "a cactus", "an orchid", "a pot of basil"),
}

EVENTS = ("repaired the roof", "ran the charity race", "adopted the dog", "sold the old car", "planted the hedge",
          "passed the sailing exam", "moved the piano", "met the new director")

UNKNOWN_ANSWER = "I don't know, this was not mentioned."


def ask(kind: str, rng: random.Random) -> Asked:
    """A question of `kind` (`TYPES`, or "abstention") with the sessions it is about."""
    return KINDS[kind](rng)


def _days(rng: random.Random, count: int, apart: int = 3) -> list[datetime]:
    """Times on different days, in order, at least `apart` days apart; one alone may be at any time that `moment` gives."""
    slack = (count - 1) * (apart - 1)
    days = sorted(rng.sample(range(DAYS - slack), count))
    return [moment(rng, day + i * (apart - 1)) for i, day in enumerate(days)]


def moment(rng: random.Random, day: int | None = None) -> datetime:
    """When a session begins: a time between nine and seven, on a day of the half-year unless it is given."""
    day = rng.randrange(DAYS) if day is None else day
    return START + timedelta(days=day, hours=rng.randrange(10), minutes=rng.randrange(60))


def _session(number: int, when: datetime, said: str, reply: str, told_by: str = "user") -> Session:
    """A session of one exchange, in which the turn of `told_by` is evidence; a task puts others around it."""
    return Session(f"evidence_{number}", written(when), (
        Turn("user", said, told_by == "user"), Turn("assistant", reply, told_by == "assistant")))


def _asked(kind: str, question: str, answers: tuple[str, ...], sessions: list[Session], abstain: bool = False) -> Asked:
    name = f"{kind}_abs" if abstain else kind
    return Asked(name, kind, question, answers, written(START + timedelta(days=DAYS + 7)), tuple(sessions))


def _fact(rng: random.Random) -> Asked:
    thing, told, question, values = rng.choice(FACTS)
    value = rng.choice(values)
    told = _sentence(told.format(thing=thing, value=value))
    return _asked("single-session-user", question.format(thing=thing), (value,),
                  [_session(1, _days(rng, 1)[0], told, rng.choice(GREETINGS))])


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _advice(rng: random.Random) -> Asked:
    wanted, noun, names = rng.choice(ADVICE)
    place, name = rng.choice(PLACES), rng.choice(names)
    said = f"Can you recommend {wanted.format(place=place)}?"
    reply = f"I would pick {name}. People who have been there like to come back, and it is easy to find."
    if noun == "novel":
        reply = f"I would pick {name}. It is a slow book, and the last chapter stays with you."
    question = f"Which {noun} did you recommend to me when I asked for {wanted.format(place=place)}?"
    return _asked("single-session-assistant", question, (name,), [_session(1, _days(rng, 1)[0], said, reply, "assistant")])


def _taste(rng: random.Random) -> Asked:
    told, question, values = rng.choice(TASTES)
    value = rng.choice(values)
    return _asked("single-session-preference", question, (value,),
                  [_session(1, _days(rng, 1)[0], told.format(value=value), rng.choice(GREETINGS))])


def _update(rng: random.Random) -> Asked:
    told, question, values = rng.choice(UPDATES)
    old, new = rng.sample(values, 2)
    sessions = [_session(i, day, told.format(value=value), rng.choice(GREETINGS))
                for i, (day, value) in enumerate(zip(_days(rng, 2), (old, new)), 1)]
    return _asked("knowledge-update", question, (new,), sessions)


def _several(rng: random.Random) -> Asked:
    sort = rng.choice(sorted(BOUGHT))
    things = rng.sample(BOUGHT[sort], rng.randint(2, 4))
    sessions = [_session(i, day, f"Guess what, I bought {thing} this morning.", rng.choice(GREETINGS))
                for i, (day, thing) in enumerate(zip(_days(rng, len(things)), things), 1)]
    count = len(things)
    return _asked("multi-session", f"How many {sort} have I bought?", (str(count), NUMBER_WORDS[count]), sessions)


def _in_time(rng: random.Random) -> Asked:
    first, second = rng.sample(EVENTS, 2)
    days = _days(rng, 2)
    sessions = [_session(i, day, f"Today I {event}, and it took all afternoon.", rng.choice(GREETINGS))
                for i, (day, event) in enumerate(zip(days, (first, second)), 1)]
    if rng.random() < 0.5:
        apart = (days[1].date() - days[0].date()).days
        question = f"How many days passed between the day I {first} and the day I {second}?"
        return _asked("temporal-reasoning", question, (f"{apart} days",), sessions)
    when = days[0]
    answer = f"{when.day} {MONTHS[when.month - 1].capitalize()} {when.year}"
    return _asked("temporal-reasoning", f"On which date was it that I {first}?", (answer,), sessions)


def _untold(rng: random.Random) -> Asked:
    """A fact was told of one thing; another is asked for, of which nothing was said. No turn is evidence."""
    told, asked = rng.sample(FACTS, 2)
    thing, sentence, _, values = told
    session = _session(1, _days(rng, 1)[0], _sentence(sentence.format(thing=thing, value=rng.choice(values))),
                       rng.choice(GREETINGS), told_by="nobody")
    return _asked("single-session-user", asked[2].format(thing=asked[0]), (UNKNOWN_ANSWER,), [session], abstain=True)


ABSTENTION = "abstention"
KINDS: dict[str, Callable[[random.Random], Asked]] = {
    "single-session-user": _fact, "single-session-assistant": _advice, "single-session-preference": _taste,
    "multi-session": _several, "temporal-reasoning": _in_time, "knowledge-update": _update, ABSTENTION: _untold,
}
TYPES = tuple(kind for kind in KINDS if kind != ABSTENTION)
"""LongMemEval's six types of question."""

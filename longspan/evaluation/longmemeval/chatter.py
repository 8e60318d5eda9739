"""What else a user and an assistant say to each other: exchanges of the same wording as those with evidence, about other things.

Every session holds one exchange of this kind or one that a question asks about, so that neither its form nor its length nor
the opener tells evidence from the rest. None of these things is ever asked for.
"""

from __future__ import annotations

import random

WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")

TOLD = (
    ("I had my front door repainted last week, it is {value} now.", ("brick red", "sea green", "dark blue", "cream", "black")),
    ("By the way, I named the sourdough {value} after all.", ("Bubbles", "Doris", "Captain", "Gustav", "Fizz")),
    ("I am visiting my uncle soon, he has moved to {value}.", ("Ghent", "Split", "Malmo", "Graz", "Leeds")),
    ("I can't come then, my pottery evening is always on {value}.", WEEKDAYS),
    ("I finally chose a subject: my talk will be about {value}.", ("lighthouses", "tide mills", "bird calls", "coins", "clouds")),
    ("I got help from my landlord, who works as a {value}.", ("baker", "plumber", "notary", "florist", "ferryman")),
    ("Strong tea keeps me awake, so after lunch I only eat {value}.", ("plums", "oat biscuits", "yoghurt", "toast", "almonds")),
    ("In winter I sleep best when the room is {value}.", ("cool", "dark", "well aired", "silent", "warm")),
    ("I never read newspapers any more, what I like are {value}.", ("short stories", "comics", "atlases", "letters", "diaries")),
    ("I have {value} stamps in my album now.", tuple(str(n) for n in range(22, 90, 9))),
    ("My way to work now takes {value} minutes.", tuple(str(n) for n in range(12, 60, 7))),
    ("The choir practice is on {value} from now on.", WEEKDAYS),
    ("My first aid course has moved to {value}.", ("the gym", "the fire station", "the parish hall", "the harbour office")),
    ("Guess what, I bought {value} this morning.", ("a raincoat", "a kettle", "a pair of boots", "a sun hat", "a bread knife")),
    ("Today I {value}, and it took all afternoon.", ("sorted the photographs", "washed the windows", "cleaned the cellar",
                                                     "filled in the tax form", "queued for a passport")),
)
"""What a user tells, and values it can have; the subjects of `questions` don't occur."""

ADVISED = (
    ("a small bakery in {place}", "The bread is dark there, and you can sit by the window.",
     ("Rye and Co", "The Oven Door", "Crumb", "The Early Loaf")),
    ("a swimming pool in {place}", "People who have been there like to come back, and it is easy to find.",
     ("the Lido", "the Old Baths", "the Dolphin", "the North Pool")),
    ("a bookshop in {place}", "It is a narrow shop, and the owner knows every shelf.",
     ("Page Nine", "The Paper Kite", "Inkwell", "The Second Shelf")),
)
"""What a user asks for, what the assistant adds, and names it can recommend."""

GREETINGS = ("That is good to hear.", "Thank you for telling me.", "Noted, that sounds nice.", "I am glad to hear that.")
PLACES = ("Lisbon", "Riga", "Hobart", "Quito", "Dakar", "Oslo")
ADVICE_SHARE = 0.15
"""How often the user asks for advice: about as often as where the types of question come in turn."""


def chat(rng: random.Random) -> tuple[str, str]:
    """What the user says and what the assistant answers."""
    if rng.random() < ADVICE_SHARE:
        wanted, remark, names = rng.choice(ADVISED)
        return f"Can you recommend {wanted.format(place=rng.choice(PLACES))}?", f"I would pick {rng.choice(names)}. {remark}"
    told, values = rng.choice(TOLD)
    return told.format(value=rng.choice(values)), rng.choice(GREETINGS)

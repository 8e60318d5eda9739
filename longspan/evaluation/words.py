"""Words, numbers and identifiers that generated tasks hide: keys, values and word lists.

RULER names a needle by an adjective-noun pair and gives it a seven-digit number or a UUID. The adjectives, nouns and
verbs below are our own short lists, so that nothing has to be installed; `word_list` can read larger ones.
"""

from __future__ import annotations

import functools
import random
import re
import uuid
from collections.abc import Callable

from longspan.evaluation.texts import Text, load_text, make_text
from longspan.registry import Refused, nearest


def listed(text: str) -> tuple[str, ...]:
    """The words of a text, in order."""
    return tuple(text.split())


ADJECTIVES: tuple[str, ...] = listed("""
able amber ancient angry arctic autumn azure bitter blank blind blue bold brave brief bright brisk broad broken bronze
calm careful cheap cheerful chilly civil classic clean clear clever close cloudy coarse cold common cool copper cosmic
crimson crisp curious curly daily damp dark daring deep dense distant double dry dull dusty eager early earnest easy
eastern elegant empty equal even exact faint fair famous fancy fast fertile fierce final firm flat fluent foggy foreign
formal fragile free fresh friendly frosty full gentle giant glad gloomy golden grand gray great green happy hard harsh
hasty heavy hidden hollow honest humble hungry icy idle jolly keen kind large late lazy lean light little lively local
lonely long loud loyal lucky magic marble mellow merry mighty mild misty modern modest muddy narrow neat noble noisy
northern odd open orange patient plain pleasant polite proud purple quick quiet rapid rare ready red rich rough round
royal rusty sandy scarlet secret sharp short shy silent silver simple slow small smooth soft solid southern spare steady
steep still stormy strange strong sudden sunny sweet swift tall tame tender thick thin tidy tiny true vast violet vivid
warm weary western white wide wild winter wise wooden yellow young
""")

NOUNS: tuple[str, ...] = listed("""
anchor apple arrow artist autumn badge bakery balloon banner barn basin basket beach beacon bell bench berry bird
blanket boat border bottle branch bread bridge brook brush bucket button cabin camera candle canyon captain carpet
castle cellar chain chair chapel cherry chimney circle citizen cliff clock cloud coast coin collar comet compass copper
corner cottage cotton cradle crane creek crown curtain dancer desert desk diamond dinner doctor dolphin donkey door
dragon drawer dream drum eagle engine evening falcon farmer feather fence ferry fiddle field finger flag flame flower
forest fork fountain garden gate giant ginger glacier glove grain grape guitar hammer harbor harvest hat hawk helmet
hill honey horse hotel island ivory jacket jewel journal juniper kettle kitchen kite ladder lake lamp lantern leaf
lemon letter library lighthouse lion lizard magnet mailbox maple market meadow melon melody mill mirror monkey moon
morning mountain museum napkin needle nest notebook oak ocean office olive onion orchard otter oven owl paddle painter
palace paper parrot path pebble pencil pepper piano picnic pigeon pillow pilot pine planet plate pocket pond poplar
potato puddle quarry quilt rabbit raft railway rain ribbon ring river road robin rocket roof rope saddle sailor salad
salmon scarf school sculptor shadow shell shepherd shield shirt signal singer sky sled snow soldier song spider spoon
spring squirrel stable station statue stone storm stove street sugar summer table tailor teacher temple tent thread
throne thunder ticket tiger tower tractor train tree trumpet tulip tunnel turtle umbrella valley vase velvet village
violin wagon walnut water weaver whale wheel willow window winter wolf yacht zebra
""")

VERBS: tuple[str, ...] = listed("""
accept admire advise agree allow answer appear arrange arrive attend bake balance become begin behave believe belong
blend boil borrow bounce bring build carry catch celebrate change chase choose climb collect compare complain connect
consider continue cook count cover crawl create decide decorate deliver depend describe destroy develop discover divide
doubt draw drive earn employ encourage enjoy escape examine expand explain explore fasten float follow forget forgive
freeze gather glow grow guess handle happen hesitate hurry imagine improve include increase inform inspect invent invite
join jump knock laugh launch learn lend listen manage measure melt mention mix move multiply notice obey observe obtain
offer operate order owe paint perform persuade plant polish pour practise prefer prepare pretend prevent produce promise
protect prove publish pull punish push reach realise receive recognise record reduce reflect refuse regret relax release
remain remember remind remove repair repeat replace reply report rescue return ride rinse scatter search separate settle
share shine shout smile solve speak spread squeeze stretch succeed suggest supply support suppose surprise swim teach
tempt travel trust unlock vanish visit wander whisper wonder write
""")

WORD_SOURCES = ("own", "docstrings", "wonderwords", "web2")
"""Where `word_list` can read: our lists with the words of the pydoc text, the same with the docstrings' words, the
package wonderwords, the word list web2 of Debian's package miscfiles."""


def adjectives_and_nouns(source: str = "own") -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Adjectives and nouns from `source` ("own" or "wonderwords").

    Raises:
        Refused: an unknown source, or wonderwords isn't installed.
    """
    if source == "own":
        return ADJECTIVES, NOUNS
    if source == "wonderwords":
        return _wonderwords("adjectives"), _wonderwords("nouns")
    raise Refused(nearest(source, ("own", "wonderwords"), "source of key words"))


@functools.lru_cache(maxsize=4)
def word_list(source: str = "own") -> Text:
    """Distinct lower-case words, sorted, one a line; what counting tasks (RULER cwe) draw from.

    Raises:
        Refused: an unknown source, or its package isn't installed.
    """
    own = {word for word in (*ADJECTIVES, *NOUNS, *VERBS) if len(word) > 3}
    if source == "own":
        found = own | _words_of(load_text("pydoc"))
    elif source == "docstrings":
        found = own | _words_of(load_text("pydoc")) | _words_of(load_text("docstrings"))
    elif source == "wonderwords":
        found = {word for kind in ("adjectives", "nouns", "verbs") for word in _wonderwords(kind)}
    elif source == "web2":
        found = _words_of(load_text("web2"))
    else:
        raise Refused(nearest(source, WORD_SOURCES, "source of words"))
    return make_text(f"words-{source}", f"{len(found)} words ({source})", "\n".join(sorted(found)))


def _words_of(text: Text) -> set[str]:
    return set(re.findall(r"(?<![\w-])[a-z]{4,12}(?![\w-])", text.text))


@functools.lru_cache(maxsize=4)
def _wonderwords(category: str) -> tuple[str, ...]:
    try:
        from wonderwords import RandomWord
    except ImportError:
        raise Refused("words='wonderwords' needs the package wonderwords (pip install wonderwords); "
                      "the nearest choice without it is words='own'.") from None
    found = RandomWord().filter(include_categories=[category])
    return tuple(sorted({word.lower() for word in found if word.isalpha()}))


class Draws:
    """Draws that never repeat within one example: adjective-noun keys, numbers, UUIDs, letter codes."""

    def __init__(self, rng: random.Random, words: str = "own") -> None:
        self.rng = rng
        self.adjectives, self.nouns = adjectives_and_nouns(words)
        self.seen: set[str] = set()

    def draw(self, kind: str) -> str:
        """A new value of `kind`: "words", "numbers" (seven digits) or "uuids" (version 4)."""
        make = {"words": self._key, "numbers": self._number, "uuids": self._uuid}[kind]
        return self._new(make)

    def letters(self, count: int, alphabet: str) -> str:
        """A new string of `count` letters of `alphabet`."""
        return self._new(lambda: "".join(self.rng.choices(alphabet, k=count)))

    def _new(self, make: Callable[[], str]) -> str:
        found = make()
        while found in self.seen:
            found = make()
        self.seen.add(found)
        return found

    def _key(self) -> str:
        key = f"{self.rng.choice(self.adjectives)}-{self.rng.choice(self.nouns)}"
        # Once half of all pairs are used up, a number keeps the draw from slowing down or never ending.
        crowded = 2 * len(self.seen) > len(self.adjectives) * len(self.nouns)
        return f"{key}-{self.rng.randrange(10**6)}" if crowded else key

    def _number(self) -> str:
        return str(self.rng.randint(10**6, 10**7 - 1))

    def _uuid(self) -> str:
        return str(uuid.UUID(int=self.rng.getrandbits(128), version=4))

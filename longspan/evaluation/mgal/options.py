"""Options with letters: shuffled by the item's own seed, rotated for the study of letter bias."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from longspan.evaluation.mgal.language import normalise
from longspan.registry import Refused

LETTERS = "ABCDEFGHIJKLMN"
"""At most fourteen options, as published."""


@dataclass(frozen=True)
class Choices:
    """Options in the order shown, and the index of the right one."""

    options: tuple[str, ...]
    right: int

    @classmethod
    def shuffled(cls, gold: str, wrong: Sequence[str], language: str, rng: random.Random) -> Choices:
        """The gold among the wrong ones, in drawn order.

        Raises:
            Refused: fewer than two options or more than there are letters; two that are the same in normal form.
        """
        check_options(len(wrong) + 1)
        forms: dict[str, str] = {}
        for option in (gold, *wrong):
            form = normalise(option, language)
            if form in forms:
                raise Refused(f"options {forms[form]!r} and {option!r} are identical after normalisation; expected each once.")
            forms[form] = option
        order = rng.sample((gold, *wrong), len(wrong) + 1)
        return cls(tuple(order), order.index(gold))

    @property
    def letter(self) -> str:
        """Of the right option."""
        return LETTERS[self.right]

    def rotated(self, by: int) -> Choices:
        """The same options, each `by` letters on."""
        count = len(self.options)
        by %= count
        return Choices(self.options[count - by :] + self.options[: count - by], (self.right + by) % count)

    def rotations(self, k: int = 4) -> list[Choices]:
        """`k` cyclic rotations, evenly spread over all of them; the first is the order itself."""
        count = len(self.options)
        if not 1 <= k <= count:
            raise Refused(f"{k} rotations of {count} options; expected 1 to {count}.")
        return [self.rotated(i * count // k) for i in range(k)]

    def shown(self) -> str:
        """One line for each option."""
        return "\n".join(f"({letter}) {option}" for letter, option in zip(LETTERS, self.options))


def check_options(count: int) -> None:
    """Refuse fewer than two options, or more than letters."""
    if not 2 <= count <= len(LETTERS):
        raise Refused(f"{count} options: expected 2 to {len(LETTERS)}, such as {2 if count < 2 else len(LETTERS)}.")


def chosen_letter(prediction: str, count: int = len(LETTERS)) -> str | None:
    """The only letter in parentheses, of either case, or else one that stands alone where the answer begins.

    None where several different letters are named: that is no choice.
    """
    known = LETTERS[:count]
    found = {letter.upper() for letter in re.findall(rf"\(\s*([{known}{known.lower()}])\s*\)", prediction)}
    if not found and (alone := re.fullmatch(rf"\W*([{known.lower()}])\W*", prediction)):
        found = {alone[1].upper()}
    if not found and (first := re.match(rf"[\s(]*([{known}])(?![^\W\d_])", prediction)):
        found = {first[1], *_more(prediction[first.end() :], known)}
    return found.pop() if len(found) == 1 else None


def _more(rest: str, known: str) -> list[str]:
    """Letters listed after the first. "C. A school was built" lists none: there A opens the text of the option."""
    if re.fullmatch(rf"(?:\W*[{known}](?!\w))+\W*", rest):
        return re.findall(rf"[{known}]", rest)
    return re.findall(rf"^\W*(?:[,;/&+]|\b(?:and|or)\b)\W*(?!I\s+\w)([{known}])(?!\w)", rest)

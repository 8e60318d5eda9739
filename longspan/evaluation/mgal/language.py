"""What depends on the language of a text: its sentences, its normal form, its tokens, its numbers and names.

Sentences. Latin and Cyrillic: terminal punctuation, then space and a capital. Chinese: 。！？；;. Arabic: . ؟ ! ؛ before a space.

Normal form. NFKC, lower case (casefold), one space for any white space, digits of any script as ASCII; Arabic without vowel signs
and tatweel; Chinese without white space, for it is compared by character.
"""

from __future__ import annotations

import re
import unicodedata

CLOSING, OPENING = "[\"'”’»」』）)\\]]*", r"(?:«\s|[\"'“‘«「『（(\[¿¡])*"
ENDS = {"zh": re.compile(f"[。！？；;]+{CLOSING}"), "ar": re.compile(rf"[.؟!؛]+{CLOSING}(?=\s)")}
OTHER_END = re.compile(rf"[.!?…]+(?:\s»)?{CLOSING}(?=\s+{OPENING}(\w))")
VOWEL_SIGNS = re.compile("[\u0610-\u061a\u064b-\u065f\u0670\u06d6-\u06dc\u06df-\u06e4\u06e7\u06e8\u06ea-\u06ed\u0640]")
"""Tashkeel, Koranic signs and tatweel."""
HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
TOKEN = re.compile(rf"[{HAN}]|[^\W{HAN}]+")
NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")
LATIN = re.compile(r"(?<![^\W\d_])[A-Za-z][A-Za-z0-9]*(?:[-._+/][A-Za-z0-9]+)*")
CAPITAL = re.compile(r"(?<!\w)[^\W\d_]\w+")


def sentence_spans(text: str, language: str) -> list[tuple[int, int]]:
    """Character ranges of the sentences, without the white space between them."""
    starts, ends = [0], []
    for found in ENDS.get(language, OTHER_END).finditer(text):
        if language in ENDS or found[1].isupper():
            ends.append(found.end())
            starts.append(found.end())
    ends.append(len(text))
    spans = []
    for start, end in zip(starts, ends):
        piece = text[start:end]
        if piece.strip():
            spans.append((start + len(piece) - len(piece.lstrip()), start + len(piece.rstrip())))
    return spans


def sentences(text: str, language: str) -> list[str]:
    """The sentences of a text."""
    return [text[a:b] for a, b in sentence_spans(text, language)]


def normalise(text: str, language: str) -> str:
    """The form in which answers are compared."""
    text = unicodedata.normalize("NFKC", text).casefold()
    text = "".join(str(unicodedata.digit(c)) if c.isdigit() else c for c in text)
    if language == "ar":
        text = VOWEL_SIGNS.sub("", text)
    return ("" if language == "zh" else " ").join(text.split())


def tokens(text: str, language: str) -> list[str]:
    """Words of the normal form; in Han script each character is one."""
    return TOKEN.findall(normalise(text, "") if language == "zh" else normalise(text, language))


def names(text: str, language: str) -> set[str]:
    """Names and numbers in normal form.

    Numbers and, in Arabic and Chinese, words in Latin script; in the other languages capitalised words that don't open a
    sentence.
    """
    found = set(NUMBER.findall(normalise(text, "")))
    if language in ENDS:
        return found | {normalise(word, language) for word in LATIN.findall(text)}
    for sentence in sentences(text, language):
        words = CAPITAL.findall(sentence)
        found |= {normalise(word, language) for word in words[1:] if word[0].isupper()}
    return found

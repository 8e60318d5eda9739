from longspan.evaluation.mgal import LANGUAGES, own
from longspan.evaluation.mgal.items import spots, strings
from longspan.evaluation.mgal.language import sentences


def test_names_and_numbers_differ_and_are_the_same_in_every_language():
    corpus = own()
    found = [s for k in range(len(corpus)) for s in spots(corpus, k)]
    assert len(found) == 400 == len({s.string for s in found})
    assert {len([s for s in found if s.kind == kind]) for kind in ("name", "date")} == {200, 40}
    lower = [s.string.lower() for s in found if s.kind == "name"]
    assert not [(a, b) for a in lower for b in lower if a != b and a in b]


def test_every_paragraph_has_five_sentences_in_every_language():
    for language in LANGUAGES:
        assert {len(sentences(text, language)) for text in own().of(language)} == {5}
        assert all(len(strings(text)) >= 10 for text in own().of(language))

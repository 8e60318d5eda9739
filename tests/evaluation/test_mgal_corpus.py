import pytest

from longspan.evaluation.mgal import LANGUAGES, Aligned, folder, handbook, load_corpus, own
from longspan.registry import Refused

PAGE = """<html><body><h2>{title}</h2><div class="para">{long}<div class="para">{inner}</div> {tail}</div>
<div class="other">menu</div><div class="para">{short}</div><div class="para"></div></body></html>"""
LONG = "This paragraph is long enough to be counted, for it holds more than eighty characters in the English edition."


def aligned(**paragraphs):
    return Aligned("test", {language: tuple(texts) for language, texts in paragraphs.items()})


def write(root, **files):
    for name, lines in files.items():
        (root / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(root)


def test_own_text_is_aligned_in_six_languages():
    corpus = own()
    assert corpus.languages == LANGUAGES and len(corpus) == 40
    for row in zip(*(corpus.of(language) for language in LANGUAGES)):
        assert len(set(row)) == 6
    assert load_corpus("own") is corpus


def test_a_folder_of_aligned_files(tmp_path):
    corpus = folder(write(tmp_path, en=["One.", "Two."], fr=["Un.", "Deux."]))
    assert corpus.of("fr") == ("Un.", "Deux.") and corpus.languages == ("en", "fr") and len(corpus.sha256) == 64
    assert corpus.only("en").languages == ("en",)
    assert corpus.only("en").sha256 != corpus.sha256


@pytest.mark.parametrize("paragraphs,said", [
    ({"en": ["One.", "Two."], "fr": ["Un."]}, r"unequal paragraph counts \(en 2, fr 1\)"),
    ({"en": ["One."], "fr": ["One."]}, "paragraph 0 in fr is untranslated"),
    ({"en": ["One."], "fr": [" "]}, "paragraph 0 in fr is empty"),
    ({"fr": ["Un."]}, "no English paragraphs"),
    ({"en": [], "fr": []}, "no paragraphs"),
    ({"en": ["One."], "zz": ["Un."]}, "unknown language 'zz'"),
])
def test_corpora_that_do_not_fit_are_refused(paragraphs, said):
    with pytest.raises(Refused, match=said):
        aligned(**paragraphs)


def test_a_language_that_is_not_there_is_refused():
    with pytest.raises(Refused, match="no language 'ru'; expected one of en, fr"):
        aligned(en=["One."], fr=["Un."]).of("ru")


def test_folders_without_files_and_other_encodings_are_refused(tmp_path):
    with pytest.raises(Refused, match="expected a folder of files en"):
        folder(str(tmp_path / "none"))
    (tmp_path / "en.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(Refused, match="not UTF-8"):
        folder(str(tmp_path))


def pages(root, skip=()):
    names = {"ar-MA": "ar", "en-US": "en", "es-ES": "es", "fr-FR": "fr", "ru-RU": "ru", "zh-CN": "zh"}
    for name, language in names.items():
        (root / name).mkdir()
        own_text = LONG if language == "en" or language in skip else f"{language}: {LONG}"
        inner = f"{language} inner {LONG}"
        text = PAGE.format(title=f"Title {language}", long=own_text, inner=inner, tail="tail", short="Short.")
        (root / name / "page.html").write_text(text, encoding="utf-8")
    return root


def test_handbook_pages_are_read_block_by_block(tmp_path):
    corpus = handbook(pages(tmp_path))
    assert corpus.of("en") == (f"{LONG} tail", f"en inner {LONG}")
    assert corpus.of("fr")[0] == f"fr: {LONG} tail" and corpus.headings["ru"] == ("Title ru", "Title ru")


def test_handbook_paragraphs_left_in_english_are_left_out_everywhere(tmp_path):
    assert handbook(pages(tmp_path, skip=("es",))).of("en") == (f"en inner {LONG}",)


def test_a_missing_handbook_names_its_package(tmp_path):
    with pytest.raises(Refused, match="Debian package debian-handbook, which isn't installed"):
        handbook(tmp_path / "none")


def test_editions_that_differ_are_refused(tmp_path):
    pages(tmp_path)
    (tmp_path / "fr-FR" / "page.html").write_text('<div class="para">Un.</div>', encoding="utf-8")
    with pytest.raises(Refused, match="unequal paragraph counts"):
        handbook(tmp_path)

import gzip
import hashlib

import pytest

from longspan.evaluation import texts
from longspan.registry import Refused


def test_pydoc_text_is_there_with_its_hash():
    text = texts.load_text("pydoc")
    assert text.source == "pydoc_data.topics"
    assert text.sha256 == hashlib.sha256(text.text.encode()).hexdigest()
    assert len(text.text.split()) > 50_000
    assert texts.load_text("pydoc") is text


def test_words_join_to_the_text_again():
    text = texts.make_text("t", "here", "One  two.\n\n three\tfour")
    assert text.words == ("One", "  two.", "\n\n three", "\tfour")


def test_sentences():
    text = texts.make_text("t", "here", "Title\n*****\n\nFirst one.  See e.g. this\nline.\nSecond one! (Third.)\n\n" +
                           "word " * 100)
    assert text.sentences[:4] == ("Title", "First one.", "See e.g. this line.", "Second one!")
    assert text.sentences[4] == "(Third.)"
    assert max(map(len, text.sentences)) <= texts.LONGEST_UNIT
    assert " ".join(text.sentences[5:]).split() == ["word"] * 100


def test_a_word_longer_than_a_unit_is_cut():
    assert texts.make_text("t", "here", "x" * 500).sentences == ("x" * 240, "x" * 240, "x" * 20)


def test_docstrings_are_read_without_importing(tmp_path, monkeypatch):
    (tmp_path / "good.py").write_text('"""A module of three words."""\nraise SystemExit\n'
                                      'def f():\n    "Returns nothing at all."\nclass _C:\n    "Two words"\n')
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "_private.py").write_text('"""A private module, left out."""')
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "case.py").write_text('"""A test module, left out."""')
    monkeypatch.setattr(texts.sysconfig, "get_path", lambda name: str(tmp_path))
    _, text = texts._docstrings()
    assert text == "A module of three words.\n\nReturns nothing at all."


def test_no_docstrings_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(texts.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(Refused, match="no source files"):
        texts._docstrings()


@pytest.fixture()
def share(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "SHARE", tmp_path)
    texts.load_text.cache_clear()
    yield tmp_path
    texts.load_text.cache_clear()


@pytest.mark.parametrize("name,package", [("jargon", "jargon-text"), ("web2", "miscfiles"), ("bible", "sword-text-web"),
                                          ("debian-handbook", "debian-handbook")])
def test_missing_packages_are_named(share, name, package):
    with pytest.raises(Refused, match=f"Debian package {package}"):
        texts.load_text(name)


def test_debian_texts_are_read_where_they_are(share):
    (share / "doc/jargon-text").mkdir(parents=True)
    (share / "doc/jargon-text/jargon.txt.gz").write_bytes(gzip.compress("Hello.\n│ table │\nBye.".encode()))
    assert texts.load_text("jargon").text == "Hello.\nBye."
    (share / "dict").mkdir()
    (share / "dict/web2").write_text("aardvark\nzebra\n")
    assert texts.load_text("web2").text == "aardvark\nzebra"


def test_handbook_paragraphs(share):
    page = ('<html><head><title>no</title></head><body><ul><li>Next</li></ul><div class="section"><h2>1. Title</h2>'
            '<div class="para">One <b>bold</b>\n  word.<div class="note"><div class="para">Inner.</div></div>Tail.'
            '</div><div class="other">no</div></div></body></html>')
    folder = share / "doc/debian-handbook/html/fr-FR"
    folder.mkdir(parents=True)
    (folder / "a.html").write_text(page)
    assert texts.load_text("debian-handbook-fr-FR").text == "1. Title\n\nOne bold word.\n\nInner.\n\nTail."
    with pytest.raises(Refused, match="fr-FR"):
        texts.load_text("debian-handbook-fr-CA")


def test_unknown_names_and_files(tmp_path):
    with pytest.raises(Refused, match="did you mean 'pydoc'"):
        texts.load_text("pydocs")
    with pytest.raises(Refused, match="no such file"):
        texts.load_file(str(tmp_path / "none.txt"))
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(Refused, match="not UTF-8"):
        texts.load_file(str(tmp_path / "latin.txt"))
    (tmp_path / "good.txt").write_text("Grüße", encoding="utf-8")
    assert texts.load_file(str(tmp_path / "good.txt")).text == "Grüße"

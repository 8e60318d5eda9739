import pytest

from longspan.evaluation.mgal.language import names, normalise, sentence_spans, sentences, tokens


@pytest.mark.parametrize("language,text,expected", [
    ("en", "It costs 3.5 euros. See file.txt now! \"Why?\" he asked. etc. and so on.",
     ["It costs 3.5 euros.", "See file.txt now!", "\"Why?\" he asked. etc. and so on."]),
    ("fr", "Un jour. « Où ? » Là.", ["Un jour.", "« Où ? »", "Là."]),
    ("es", "Es así. ¿Quién? Nadie.", ["Es así.", "¿Quién?", "Nadie."]),
    ("ru", "Это так. Потом иначе.", ["Это так.", "Потом иначе."]),
    ("zh", "你好。再见！真的？是；好", ["你好。", "再见！", "真的？", "是；", "好"]),
    ("ar", "نعم. لماذا؟ هنا 3.5 كم؛ انتهى", ["نعم.", "لماذا؟", "هنا 3.5 كم؛", "انتهى"]),
])
def test_sentences_end_as_the_language_has_it(language, text, expected):
    assert sentences(text, language) == expected
    assert [text[a:b] for a, b in sentence_spans(text, language)] == expected


def test_no_sentences_in_white_space():
    assert sentences("  ", "en") == [] and sentences("", "zh") == []


@pytest.mark.parametrize("language,text,expected", [
    ("en", "Ｆｕｌｌ  Width\tTEXT", "full width text"), ("ar", "مُحَمَّـــد ١٢٣", "محمد 123"), ("zh", "中 文　字", "中文字"),
    ("fr", "É\u0301TÉ ²", "é\u0301té 2"), ("en", "STRASSE ß ۴۵", "strasse ss 45")])
def test_normal_form(language, text, expected):
    assert normalise(text, language) == expected


def test_chinese_is_compared_by_character():
    assert tokens("用 apt 安装2个", "zh") == ["用", "apt", "安", "装", "2", "个"]
    assert tokens("Les 2 fichiers, vite!", "fr") == ["les", "2", "fichiers", "vite"]
    assert tokens("كَتَبَ ٣", "ar") == ["كتب", "3"]


def test_names_are_capitals_inside_sentences_numbers_and_latin_words():
    assert names("The town of Kelmark had 12 men. Nobody left.", "en") == {"kelmark", "12"}
    assert names("在 Kelmark 岛，1931年", "zh") == {"kelmark", "1931"}
    assert names("جزيرة Kelmark عام ١٩٣١", "ar") == {"kelmark", "1931"}

"""Prompts: instruction, document, question, options, in the document's language unless English is asked for.

The instruction stands first, last (after the question and its options) or at both places. Right-to-left text stays in logical
order. The wording is our own: the published prompts aren't known.
"""

from __future__ import annotations

from dataclasses import dataclass

from longspan.evaluation.mgal.corpus import ENGLISH
from longspan.evaluation.mgal.items import MARKER, Item
from longspan.registry import Refused, nearest

PLACES = ("first", "last", "both")
PROMPT_LANGUAGES = ("document", "english")

INSTRUCTIONS: dict[str, dict[str, str]] = {
    "en": {"word-extract": "A word or number of the document is missing in the sentence below. Write only what is missing.",
           "word-choice": "A word or number of the document is missing in the sentence below. Choose what is missing and answer "
                          "with its letter only.",
           "sentence-cloze": "A sentence was taken out of the document where the marker stands. Choose the sentence that belongs "
                             "there and answer with its letter only.",
           "paragraph-fill": "A paragraph was taken out of the document where the marker stands. Write only this paragraph.",
           "paragraph-translate": "Translate into {target} only the paragraph of the document that begins with the words below.",
           "document-summary": "Summarise the document. Write one sentence a line.",
           "document-translate": "Translate the whole document into {target}, paragraph by paragraph."},
    "fr": {"word-extract": "Un mot ou un nombre du document manque dans la phrase ci-dessous. Écrivez seulement ce qui manque.",
           "word-choice": "Un mot ou un nombre du document manque dans la phrase ci-dessous. Choisissez ce qui manque et "
                          "répondez seulement par sa lettre.",
           "sentence-cloze": "Une phrase a été retirée du document à l'endroit du repère. Choisissez la phrase qui y va et "
                             "répondez seulement par sa lettre.",
           "paragraph-fill": "Un paragraphe a été retiré du document à l'endroit du repère. Écrivez seulement ce paragraphe.",
           "paragraph-translate": "Traduisez en {target} seulement le paragraphe du document qui commence par les mots suivants.",
           "document-summary": "Résumez le document. Écrivez une phrase par ligne.",
           "document-translate": "Traduisez tout le document en {target}, paragraphe par paragraphe."},
    "es": {"word-extract": "En la frase de abajo falta una palabra o un número del documento. Escriba solo lo que falta.",
           "word-choice": "En la frase de abajo falta una palabra o un número del documento. Elija lo que falta y responda solo "
                          "con su letra.",
           "sentence-cloze": "Se quitó una frase del documento donde está la marca. Elija la frase que va allí y responda solo "
                             "con su letra.",
           "paragraph-fill": "Se quitó un párrafo del documento donde está la marca. Escriba solo ese párrafo.",
           "paragraph-translate": "Traduzca al {target} solo el párrafo del documento que empieza con las palabras de abajo.",
           "document-summary": "Resuma el documento. Escriba una frase por línea.",
           "document-translate": "Traduzca todo el documento al {target}, párrafo por párrafo."},
    "ru": {"word-extract": "В предложении ниже пропущено слово или число из документа. Напишите только пропущенное.",
           "word-choice": "В предложении ниже пропущено слово или число из документа. Выберите пропущенное и ответьте только "
                          "буквой.",
           "sentence-cloze": "На месте метки из документа убрано предложение. Выберите, какое предложение там стоит, и ответьте "
                             "только буквой.",
           "paragraph-fill": "На месте метки из документа убран абзац. Напишите только этот абзац.",
           "paragraph-translate": "Переведите на {target} только тот абзац документа, который начинается словами ниже.",
           "document-summary": "Кратко изложите документ. Пишите по одному предложению в строке.",
           "document-translate": "Переведите весь документ на {target}, абзац за абзацем."},
    "zh": {"word-extract": "下面的句子缺少文档中的一个词或数字。只写出缺少的内容。",
           "word-choice": "下面的句子缺少文档中的一个词或数字。选出缺少的内容，只用字母回答。",
           "sentence-cloze": "文档中标记处的一个句子被拿掉了。选出应在那里的句子，只用字母回答。",
           "paragraph-fill": "文档中标记处的一个段落被拿掉了。只写出这个段落。",
           "paragraph-translate": "只把文档中以下面的文字开头的段落翻译成{target}。",
           "document-summary": "请概括这份文档。每行写一句。",
           "document-translate": "请把整份文档逐段翻译成{target}。"},
    "ar": {"word-extract": "تنقص الجملة أدناه كلمة أو رقم من المستند. اكتب الناقص فقط.",
           "word-choice": "تنقص الجملة أدناه كلمة أو رقم من المستند. اختر الناقص وأجب بحرفه فقط.",
           "sentence-cloze": "حذفت جملة من المستند في موضع العلامة. اختر الجملة التي مكانها هناك وأجب بحرفها فقط.",
           "paragraph-fill": "حذفت فقرة من المستند في موضع العلامة. اكتب هذه الفقرة فقط.",
           "paragraph-translate": "ترجم إلى {target} فقط فقرة المستند التي تبدأ بالكلمات أدناه.",
           "document-summary": "لخص المستند. اكتب جملة واحدة في كل سطر.",
           "document-translate": "ترجم المستند كله إلى {target} فقرة فقرة."},
}
NAMED: dict[str, dict[str, str]] = {
    "en": {"ar": "Arabic", "en": "English", "es": "Spanish", "fr": "French", "ru": "Russian", "zh": "Chinese"},
    "fr": {"ar": "arabe", "en": "anglais", "es": "espagnol", "fr": "français", "ru": "russe", "zh": "chinois"},
    "es": {"ar": "árabe", "en": "inglés", "es": "español", "fr": "francés", "ru": "ruso", "zh": "chino"},
    "ru": {"ar": "арабский", "en": "английский", "es": "испанский", "fr": "французский", "ru": "русский", "zh": "китайский"},
    "zh": {"ar": "阿拉伯语", "en": "英语", "es": "西班牙语", "fr": "法语", "ru": "俄语", "zh": "中文"},
    "ar": {"ar": "العربية", "en": "الإنجليزية", "es": "الإسبانية", "fr": "الفرنسية", "ru": "الروسية", "zh": "الصينية"},
}
ANSWER = {"en": "Answer:", "fr": "Réponse :", "es": "Respuesta:", "ru": "Ответ:", "zh": "答案：", "ar": "الجواب:"}


@dataclass(frozen=True)
class Prompt:
    """The pieces in order: `context` (before the question), `question`, and how the answer opens."""

    context: str
    question: str
    answer_prefix: str


def prompt(item: Item, place: str = "first", prompt_language: str = "document") -> Prompt:
    """The prompt of an item.

    Raises:
        Refused: another place of the instruction, or another prompt language.
    """
    if place not in PLACES:
        raise Refused(nearest(place, PLACES, "place of the instruction"))
    if prompt_language not in PROMPT_LANGUAGES:
        raise Refused(nearest(prompt_language, PROMPT_LANGUAGES, "prompt language"))
    own = str(item.details.get("source", item.language)) if prompt_language == "document" else ENGLISH
    instruction = INSTRUCTIONS[own][item.task].format(target=NAMED[own][str(item.details.get("target", item.language))])
    if item.task in ("sentence-cloze", "paragraph-fill"):
        instruction += f" {MARKER}"
    parts = [item.asked] * bool(item.asked) + ([item.choices.shown()] if item.choices else [])
    parts += [instruction] * (place != "first")
    context = instruction + "\n\n" + item.document if place != "last" else item.document
    return Prompt(context, "".join(f"\n\n{part}" for part in parts), ANSWER[own])

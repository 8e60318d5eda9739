"""A small aligned text of our own in six languages: forty paragraphs about stations and schools that never were.

Each paragraph has five sentences; names and numbers in them are all different and the same in every language, so that there is
something to ask about without any other text at hand.
"""

from __future__ import annotations

from longspan.evaluation.words import listed

PARAGRAPHS = 40
STARTS = listed("Kel Ost Vel Tar Bren Mor Sul Dran Fel Gor Hal Jun Lom Nar Pel Ruv Sig Wol Yar Zem")
ENDS = listed("mark vinde torpa essan ibold ugant alton erich ondal yshev")

STATION: dict[str, tuple[str, ...]] = {
    "en": ("In {y} a weather station was opened on the island of {a}.",
           "For {m} months the keeper there was a sailor called {b}.",
           "The wind was measured with {k} instruments that were made by {c}.",
           "However, letters travelled {p} miles to the harbour of {d}.",
           "At the end the archive in {e} held {n} notebooks."),
    "fr": ("En {y}, une station météo fut ouverte sur l'île de {a}.",
           "Pendant {m} mois, le gardien y fut un marin nommé {b}.",
           "Le vent était mesuré avec {k} instruments fabriqués par {c}.",
           "Cependant, les lettres voyageaient {p} milles jusqu'au port de {d}.",
           "À la fin, les archives de {e} contenaient {n} cahiers."),
    "es": ("En {y} se abrió una estación meteorológica en la isla de {a}.",
           "Durante {m} meses el guardián fue un marinero llamado {b}.",
           "El viento se medía con {k} instrumentos fabricados por {c}.",
           "Sin embargo, las cartas viajaban {p} millas hasta el puerto de {d}.",
           "Al final el archivo de {e} tenía {n} cuadernos."),
    "ru": ("В {y} году открыли метеостанцию на острове {a}.",
           "В течение {m} месяцев смотрителем там был моряк по имени {b}.",
           "Ветер измеряли {k} приборами, которые изготовил {c}.",
           "Однако письма шли {p} миль до гавани {d}.",
           "В конце в архиве города {e} было {n} тетрадей."),
    "zh": ("{y}年，一座气象站在一个叫做 {a} 的小岛上开放了。", "在{m}个月里，那里的看守人是一位名叫 {b} 的水手。",
           "风速用{k}台仪器来测量，它们的制造者是 {c} 工匠。", "但是，信件要走{p}英里才能到达名叫 {d} 的港口。",
           "到最后，名叫 {e} 的档案馆里有{n}本笔记。"),
    "ar": ("في عام {y} افتتحت محطة للأرصاد الجوية في جزيرة {a}.",
           "وعلى مدى {m} شهرا كان الحارس هناك بحارا اسمه {b}.",
           "وكانت الريح تقاس بواسطة {k} جهازا من صنع {c}.",
           "لكن الرسائل كانت تقطع {p} ميلا حتى ميناء {d}.",
           "وفي النهاية كان الأرشيف في {e} يضم {n} دفترا."),
}
SCHOOL: dict[str, tuple[str, ...]] = {
    "en": ("After the flood, in {y}, a school was built near the village of {a}.",
           "The first teacher walked {m} miles to get there and was called {b}.",
           "The children learned to read from {k} copies of a book by {c}.",
           "Therefore the lessons on {p} market days moved to the square of {d}.",
           "The last list of pupils, found in {e}, had {n} names."),
    "fr": ("Après la crue, en {y}, une école fut bâtie près du village de {a}.",
           "Le premier maître marcha {m} milles pour y arriver et s'appelait {b}.",
           "Les enfants apprenaient à lire dans {k} exemplaires d'un livre de {c}.",
           "Donc, pendant {p} jours de marché, les leçons avaient lieu sur la place de {d}.",
           "La dernière liste des élèves, trouvée à {e}, avait {n} noms."),
    "es": ("Después de la crecida, en {y}, se construyó una escuela cerca del pueblo de {a}.",
           "El primer maestro caminó {m} millas para llegar y se llamaba {b}.",
           "Los niños aprendían a leer con {k} ejemplares de un libro de {c}.",
           "Por eso, durante {p} días de mercado, las clases se daban en la plaza de {d}.",
           "La última lista de alumnos, hallada en {e}, tenía {n} nombres."),
    "ru": ("После наводнения, в {y} году, построили школу у деревни {a}.",
           "Первый учитель прошёл туда {m} миль, и звали его {b}.",
           "Дети учились читать по {k} экземплярам книги, которую написал {c}.",
           "Поэтому {p} базарных дней уроки шли на площади {d}.",
           "В последнем списке учеников, найденном в {e}, было {n} имён."),
    "zh": ("洪水过后，在{y}年，人们在名叫 {a} 的村庄附近盖了一所学校。", "第一位老师走了{m}英里才到那里，他的名字是 {b} 先生。",
           "孩子们用{k}本书学习认字，这本书的作者是 {c} 女士。", "因此，在{p}个赶集的日子里，课程搬到了名叫 {d} 的广场。",
           "最后一份学生名单在 {e} 被发现，上面有{n}个名字。"),
    "ar": ("بعد الفيضان بنيت في عام {y} مدرسة قرب قرية {a}.",
           "ومشى المعلم الأول {m} ميلا للوصول إليها وكان اسمه {b}.",
           "وتعلم الأطفال القراءة من {k} نسخة من كتاب ألفه {c}.",
           "لذلك انتقلت الدروس في {p} يوما من أيام السوق إلى ساحة {d}.",
           "وكانت آخر قائمة للتلاميذ، وقد وجدت في {e}، تضم {n} اسما."),
}


def own_paragraphs(language: str) -> tuple[str, ...]:
    """The forty paragraphs in one language."""
    names = [start + end for end in ENDS for start in STARTS]
    found = []
    for i in range(PARAGRAPHS):
        slots = dict(zip("abcde", names[5 * i : 5 * i + 5]))
        numbers = {"y": 1901 + i, "m": 201 + i, "k": 301 + i, "p": 401 + i, "n": 501 + i}
        sentences = (SCHOOL if i % 2 else STATION)[language]
        found.append(("" if language == "zh" else " ").join(s.format(**slots, **numbers) for s in sentences))
    return tuple(found)

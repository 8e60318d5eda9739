import random

import pytest
from tables_read_back import as_text, read_back

from longspan.evaluation.tables.pool import (
    Column,
    Database,
    Link,
    Table,
    find_links,
    is_key,
    own_sources,
    reached,
    read_csv,
)
from longspan.evaluation.tables.schemas import LANGUAGES, SCHEMAS, synthetic_sources
from longspan.evaluation.tables.serialise import FORMS, serialise
from longspan.registry import Refused


def write(folder, name, text):
    file = folder / f"{name}.csv"
    file.write_text(text, encoding="utf-8")
    return file


def test_csv_columns_get_the_narrowest_type(tmp_path):
    text = "id,watts,price,bought,note,code\nA,7,1.5,2024-01-02,x,007\nB,,2,,3,010\nC,-9,.5,2020-02-03,,1\n"
    found = read_csv(write(tmp_path, "lamps", text))
    assert found.name == "lamps"
    assert [c.type for c in found.columns] == ["text", "integer", "real", "date", "text", "text"]
    assert found.rows == (("A", 7, 1.5, "2024-01-02", "x", "007"), ("B", None, 2.0, None, "3", "010"),
                          ("C", -9, 0.5, "2020-02-03", None, "1"))


@pytest.mark.parametrize("text,said", [
    ("a,b\n1,2\n3\n", "row 2 has 1 cells; expected 2"), ("a,A\n1,2\n3,4\n", "two columns 'A'"),
    ("a,b\n1,2\n", "1 rows below the names; expected at least 2"), ("", "0 rows below"),
    ("a,\n1,2\n3,4\n", "column 2 has no name"),
])
def test_bad_csv_is_refused(tmp_path, text, said):
    with pytest.raises(Refused, match=said):
        read_csv(write(tmp_path, "bad", text))


def test_files_that_are_no_csv_are_refused(tmp_path):
    with pytest.raises(Refused, match="no such file"):
        read_csv(tmp_path / "none.csv")
    (tmp_path / "latin.csv").write_bytes(b"a,b\n\xe9,1\n\xe8,2\n")
    with pytest.raises(Refused, match="not UTF-8"):
        read_csv(tmp_path / "latin.csv")
    files = [write(tmp_path, "one", "a\n1\n2\n"), tmp_path / "other" / "one.csv"]
    files[1].parent.mkdir()
    files[1].write_text("a\n1\n2\n")
    with pytest.raises(Refused, match="two tables 'one'"):
        own_sources(files)


def test_tables_without_columns_or_with_a_short_row_are_refused():
    with pytest.raises(Refused, match="no columns"):
        Table("t", (), ())
    with pytest.raises(Refused, match="row 2 has 1 cells; expected 2"):
        Table("t", (Column("a", "text"), Column("b", "text")), (("x", "y"), ("z",)))
    with pytest.raises(Refused, match="did you mean 'integer'"):
        Column("a", "int")
    with pytest.raises(Refused, match="without a table"):
        Database(())


def test_links_are_found_by_name_and_content(tmp_path):
    lamps, rooms, odd = (read_csv(write(tmp_path, name, text)) for name, text in (
        ("lamps", "lamp,room\nA,r1\nB,r2\nC,r1\n"), ("rooms", "room,size\nr1,5\nr2,6\nr3,7\n"), ("odd", "size,lamp\n5,A\n9,Z\n")))
    assert find_links([lamps, rooms]) == [Link("lamps", "room", "rooms", "room")]
    assert find_links([lamps, rooms, odd]) == [Link("lamps", "room", "rooms", "room")]  # odd's lamp Z is nowhere
    own, _ = own_sources([tmp_path / "lamps.csv", tmp_path / "rooms.csv"])
    only_r1 = rooms.of(row for row in rooms.rows if row[0] == "r1")
    assert own.take(2, random.Random(0), {"rooms": only_r1}).rows == (("A", "r1"), ("C", "r1"))


def test_reached_follows_keys_from_child_to_parent():
    links = [Link("c", "b", "b", "b"), Link("b", "a", "a", "a"), Link("d", "a", "a", "a")]
    assert reached(links, "c") == ["b", "a"] and reached(links, "a") == []


@pytest.mark.parametrize("language", LANGUAGES)
def test_schemas_are_whole_in_each_language(language):
    sources = synthetic_sources(language)
    names = [source.name for source in sources]
    assert len(set(names)) == len(SCHEMAS) == 30
    drawn: dict[str, Table] = {}
    for source in sources:  # every parent stands before its children
        assert all(link.parent in drawn for link in source.links)
        table = drawn[source.name] = source.take(40, random.Random(source.name), drawn)
        assert is_key(table.values(table.columns[0].name)) and {c.type for c in table.columns} > {"text"}
        for link in source.links:
            assert set(table.values(link.column)) <= set(drawn[link.parent].values(link.key))
    assert sum(bool(source.links) for source in sources) == 20
    database = Database(tuple(drawn.values()))  # refuses names that only differ in case
    empty = [cell for table in database.tables for row in table.rows for cell in row].count(None)
    assert 0.01 < empty / sum(len(t.rows) * len(t.columns) for t in database.tables) < 0.05


def test_a_draw_depends_on_its_dice_alone():
    source = synthetic_sources("en")[4]
    assert source.take(9, random.Random(3), {}) == source.take(9, random.Random(3), {})
    assert source.take(9, random.Random(3), {}) != source.take(9, random.Random(4), {})


ODD = Table("odd | names", (Column("a; b: c", "text"), Column('q"', "real"), Column("n", "integer"), Column("d", "date")), (
    ('x | "y"; z: \\n', 1.5, 3, "2024-01-01"), ("line\none", 2e-07, None, None), ("a,b", None, -4, "2020-02-02")))


@pytest.mark.parametrize("form", FORMS)
def test_a_serialised_table_can_be_read_back(form):
    plain = synthetic_sources("zh")[2].take(30, random.Random(1), {})
    both = Database((plain, ODD))
    assert read_back(as_text(both, form), form).tables == both.tables
    head, rows = serialise(ODD, form)
    assert len(rows) == 3 and all(row.count("\n") == 1 for row in rows) and head.endswith("\n")


def test_unknown_serialisations_are_refused():
    with pytest.raises(Refused, match="did you mean 'markdown'"):
        serialise(ODD, "markdwn")

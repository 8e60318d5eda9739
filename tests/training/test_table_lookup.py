"""Tables of random tokens and questions about their cells."""

import pytest
import torch

from longspan.registry import Refused
from longspan.training import IGNORE, SYNTHETIC
from longspan.training.table_lookup import TableLookup


def test_the_label_is_the_cell_that_the_question_names():
    task = TableLookup(batch=32)
    batch = task(3)
    assert batch.ids.shape == (32, 8 * 4 + 2) and task.vocab_size == 64 + 64 + 3
    asked = set()
    for ids, labels in zip(batch.ids.tolist(), batch.labels.tolist()):
        table = [ids[4 * row : 4 * row + 4] for row in range(8)]
        cells = {key: row for key, *row in table}
        assert len(cells) == 8 and all(key < 64 <= min(row) and max(row) < 128 for key, row in cells.items())
        key, column = ids[-2], ids[-1] - 128
        assert labels == [IGNORE] * 33 + [cells[key][column]]
        asked.add((list(cells).index(key), column))
    assert len({row for row, _ in asked}) > 4 and {column for _, column in asked} == {0, 1, 2}


def test_further_questions_follow_the_answers():
    batch = TableLookup(rows=3, questions=4, batch=5)(0)
    assert batch.ids.shape == (5, 3 * 4 + 4 * 3 - 1)
    for ids, labels in zip(batch.ids.tolist(), batch.labels.tolist()):
        cells = {ids[4 * row]: ids[4 * row + 1 : 4 * row + 4] for row in range(3)}
        places = [t for t, label in enumerate(labels) if label != IGNORE]
        assert places == [13, 16, 19, 22]
        assert all(labels[t] == cells[ids[t - 1]][ids[t] - 128] for t in places)
        assert all(ids[t + 1] == labels[t] for t in places[:-1])


def test_batches_are_functions_of_their_numbers():
    task, other = TableLookup(batch=4), TableLookup(batch=4, split="held-out")
    assert torch.equal(task(1).ids, task(1).ids)
    assert not torch.equal(task(1).ids, task(2).ids) and not torch.equal(task(1).ids, other(1).ids)


@pytest.mark.parametrize("context", [10, 34, 60, 128, 700])
def test_it_fills_the_context(context):
    task = SYNTHETIC["table-lookup"].fit(context, 2)
    assert context - 2 <= task(0).ids.shape[1] <= context and task(0).ids.max() < task.vocab_size
    if context == 34:
        assert (task.rows, task.columns, task.questions) == (8, 4, 1)


@pytest.mark.parametrize("wrong,said", [
    ({"rows": 1}, "rows=1; expected at least 2"), ({"columns": 1}, "columns=1"), ({"questions": 0}, "questions=0"),
    ({"values": 1}, "values=1"), ({"keys": 7}, "keys=7; expected at least 8, one for each row"),
])
def test_tables_without_a_question_are_refused(wrong, said):
    with pytest.raises(Refused, match=said):
        TableLookup(**wrong)
    with pytest.raises(Refused, match="context=9: expected at least 10"):
        TableLookup.fit(9, 1)

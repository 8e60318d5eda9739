"""The ordering task and the machinery around the model that learns it."""

from __future__ import annotations

import pytest
import torch

from longspan.experiments.base import perform
from longspan.experiments.ordering import Course, Ordering, OrderModel, accuracy, answers, by_distance, knowledge, outputs
from longspan.experiments.temporal_order import EXPERIMENT, texts
from longspan.registry import Refused
from longspan.training import IGNORE


def test_labels_say_whether_the_first_item_came_earlier():
    task = Ordering(batch=5)
    batch = task(3)
    assert batch.ids.shape == (5, 34) and (batch.ids[:, 0] == 64).all() and (batch.ids[:, 17] == 65).all()
    for row, labels, places in zip(batch.ids.tolist(), batch.labels.tolist(), batch.extra["places"].tolist()):
        shown, asked = row[1:17], row[18:]
        assert len(set(shown)) == 16 and sorted(asked) == sorted(shown)
        assert [shown.index(item) for item in asked] == places
        for q in range(8):
            assert labels[19 + 2 * q] == (places[2 * q] < places[2 * q + 1])
        assert sum(label != IGNORE for label in labels) == 8


def test_batches_are_functions_of_their_number():
    task = Ordering(batch=4, seed=1)
    assert torch.equal(task(5).ids, task(5).ids) and not torch.equal(task(5).ids, task(6).ids)


def test_foils_were_never_shown():
    batch = Ordering(batch=6, foils=True)(0)
    for row in batch.ids.tolist():
        assert not set(row[1:17]) & set(row[18:])


@pytest.mark.parametrize("table", [True, False])
def test_positions_come_from_the_table_or_the_rotation(table):
    model = OrderModel(Ordering(), table)
    ids = Ordering(batch=2)(0).ids
    with torch.no_grad():
        plain = model(ids)
        if model.table is not None:
            model.table.weight.zero_()
            assert not torch.equal(model(ids), plain)
    assert plain.shape == (2, 34, 2)
    assert (model.table is not None) == table and str(model.decoder.config.position) == ("nope" if table else "rope")


def test_accuracy_is_that_of_the_signs():
    model, batch = OrderModel(Ordering(), True), Ordering(batch=16)(0)
    earlier = batch.labels[batch.labels != IGNORE].view(16, 8) == 1
    assert accuracy(model, batch) == pytest.approx(float(((answers(model, batch) > 0) == earlier).float().mean()))
    assert set(by_distance(model, batch)) == {"1", "2-3", "4-7", "8-15"}


def test_heads_are_read_at_the_questions_items():
    model, batch = OrderModel(Ordering(), False).eval(), Ordering(batch=3)(0)
    found = outputs(model, batch, range(18, 34))
    assert found.shape == (3, 4, 48, 12)
    other = batch.ids.clone()
    other[1, 33] = (other[1, 33] + 1) % 64
    changed = outputs(model, type(batch)(other, batch.labels), range(18, 34))
    same = (changed == found).all(-1).all(0).all(0)
    assert not same[31] and same[:31].all() and same[32:].all()


def test_a_map_of_an_untrained_model():
    model = OrderModel(Ordering(), False).eval()
    known = knowledge(model, Course(read=16, permutations=3), 0)
    assert known.found["R2"] < 0.2 and len(known.found["retrieval map"]) == 3 and "R2 without rotation" in known.found
    assert known.means.shape == (3, 4, 12)


def test_texts_are_different_sentences_and_pairs_lie_in_them():
    class Words:
        def __call__(self, text, add_special_tokens=False):
            return {"input_ids": text.split()}

    bodies, rest = texts(2, 300, Words())
    assert all(300 <= sum(len(s.split()) for s in body) < 400 for body in bodies)
    assert not set(bodies[0]) & set(bodies[1]) and not set(bodies[0]) & set(rest)


def test_the_published_scale_is_refused():
    with pytest.raises(Refused, match="Llama-3"):
        perform(EXPERIMENT, "paper")

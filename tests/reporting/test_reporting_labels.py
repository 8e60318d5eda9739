from __future__ import annotations

import math

from longspan.reporting.labels import Box, gap, overlap, place

FRAME = Box(0, 0, 700, 400)


def test_overlap_and_gap() -> None:
    assert overlap(Box(0, 0, 10, 10), Box(5, 5, 20, 20)) == 25
    assert overlap(Box(0, 0, 10, 10), Box(10, 0, 20, 10)) == 0
    assert gap(Box(0, 0, 10, 10), (13, 14)) == 5 and gap(Box(0, 0, 10, 10), (5, 5)) == 0


def test_labels_of_close_points_cover_neither_each_other_nor_the_points() -> None:
    anchors = [(300.0, 200.0), (306.0, 204.0), (300.0, 216.0), (290.0, 195.0), (650.0, 20.0), (20.0, 390.0)]
    sizes = [(150.0, 15.0)] * 6
    marks = [Box(x - 8, y - 8, x + 8, y + 8) for x, y in anchors]
    boxes = place(anchors, sizes, marks, FRAME)
    for i, box in enumerate(boxes):
        assert box.left >= 0 and box.top >= 0 and box.right <= 700 and box.bottom <= 400
        assert math.isclose(box.right - box.left, 150) and math.isclose(box.bottom - box.top, 15)
        assert all(overlap(box, other) == 0 for other in boxes[i + 1 :])
        assert all(overlap(box, other) < 4 for other in marks)  # of 2,250 square pixels


def test_a_lonely_label_stands_right_of_its_point_and_nearest_to_it() -> None:
    (box,) = place([(100.0, 100.0)], [(60.0, 14.0)], [], FRAME)
    assert box.left > 100 and box.top < 100 < box.bottom
    boxes = place([(100.0, 100.0), (130.0, 100.0)], [(60.0, 14.0)] * 2, [], FRAME)
    assert gap(boxes[0], (100, 100)) < gap(boxes[0], (130, 100))
    assert boxes == place([(100.0, 100.0), (130.0, 100.0)], [(60.0, 14.0)] * 2, [], FRAME)

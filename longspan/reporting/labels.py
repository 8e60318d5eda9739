"""Where the names of points go, so that they don't cover each other, the points or their intervals.

Every label tries places around its point, near ones first; the cost of a place is the area it would cover, much more
for leaving the picture, something when another point is nearer, plus a little for every pixel of distance. Labels are
placed one after the other, the most crowded point first, and then moved again a few times while the others stay. No
randomness: the same points give the same picture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

ANGLES = tuple(math.radians(a) for a in (0, 180, -35, 35, -145, 145, -90, 90, -65, 65, -115, 115))
DISTANCES = (12.0, 22.0, 36.0, 54.0, 76.0)
ROUNDS = 4


class Box(NamedTuple):
    """A rectangle in pixels, y downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def grown(self, by: float) -> Box:
        return Box(self.left - by, self.top - by, self.right + by, self.bottom + by)


def overlap(a: Box, b: Box) -> float:
    """Area both boxes cover."""
    return max(0.0, min(a.right, b.right) - max(a.left, b.left)) * max(
        0.0, min(a.bottom, b.bottom) - max(a.top, b.top)
    )


def place(
    anchors: Sequence[tuple[float, float]], sizes: Sequence[tuple[float, float]], obstacles: Sequence[Box], frame: Box
) -> list[Box]:
    """A box of `sizes[i]` (width, height) beside each of `anchors`, clear of `obstacles` and inside `frame`."""
    crowd = [sum(math.hypot(x - u, y - v) < 80 for u, v in anchors) for x, y in anchors]
    order = sorted(range(len(anchors)), key=lambda i: (-crowd[i], anchors[i], i))
    placed: dict[int, Box] = {}
    for _ in range(ROUNDS):
        before = dict(placed)
        for i in order:
            taken = [box.grown(2) for j, box in placed.items() if j != i] + list(obstacles)
            others = [a for j, a in enumerate(anchors) if j != i]
            tried = [
                (_cost(distance, box, taken, frame) + _doubt(box, anchors[i], others), box)
                for distance, box in _places(anchors[i], sizes[i])
            ]
            placed[i] = min(tried, key=lambda found: found[0])[1]
        if placed == before:
            break
    return [placed[i] for i in range(len(anchors))]


def _places(anchor: tuple[float, float], size: tuple[float, float]) -> list[tuple[float, Box]]:
    """(distance, box) of every place tried: the box touches a circle around the point from outside."""
    (x, y), (width, height) = anchor, size
    found = []
    for rank, distance in enumerate(DISTANCES):
        for turn, angle in enumerate(ANGLES):
            u, v = math.cos(angle), math.sin(angle)
            # The side of the box that faces the point lies on the circle; steep directions centre the box.
            left = x + u * distance - (0 if u > 0.3 else width if u < -0.3 else width / 2)
            top = y + v * distance - height / 2 + (height / 2 * v if abs(u) <= 0.3 else height / 3 * v)
            found.append((distance + 0.6 * turn + 2 * rank, Box(left, top, left + width, top + height)))
    return found


def _cost(distance: float, box: Box, taken: Sequence[Box], frame: Box) -> float:
    outside = (box.right - box.left) * (box.bottom - box.top) - overlap(box, frame)
    covered = [area for area in (overlap(box, other) for other in taken) if area]
    return distance + 30 * len(covered) + 5 * sum(covered) + 50 * outside


def _doubt(box: Box, own: tuple[float, float], others: Sequence[tuple[float, float]]) -> float:
    """A penalty for every point that is as near to the label as the point it names."""
    near = gap(box, own)
    return 25.0 * sum(gap(box, other) <= near + 2 for other in others)


def gap(box: Box, point: tuple[float, float]) -> float:
    """Distance from a point to the box; 0 inside."""
    x, y = point
    return math.hypot(max(box.left - x, 0, x - box.right), max(box.top - y, 0, y - box.bottom))

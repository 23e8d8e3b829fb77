"""Finds weights in half precision that hardly change, because changes below their rounding are lost at every step.

bfloat16 keeps eight bits of a value: with a learning rate of 1e-5 a weight of 0.02 stays as it is, step after step.
Looked at now and then, in a sample of the rows of some matrices. Rows and columns without any change do not count: the
gradients of embeddings, and of experts that were not asked, are zero there. Weights in float32 have room for such
changes and are not looked at, nor are vectors: a bias of zero keeps the smallest change. Pure.
"""

from __future__ import annotations

import numpy as np

from p2pnode.training.layout import Layout, LayoutEntry
from p2pnode.training.trainer_link.interface import Vector

#: Types with less than half of the bits of float32.
HALF = ("bfloat16", "float16")
#: Fewer changed values than this share are a finding.
MIN_SHARE = 0.1
#: A rate that rises from zero changes little at first: two looks in a row have to agree.
LOOKS = 2
STEPS_BETWEEN = 8
TENSORS, ROWS = 8, 32
#: Of a longer row no more is read.
ROW_VALUES = 1 << 14


class FewChanges:
    """Of one node's deltas. `dtype` is that of the weights; `share` of their values change, if these are too few."""

    def __init__(self, layout: Layout) -> None:
        half = [entry for entry in layout.entries if entry.kind == "parameter" and _is_half_matrix(entry)]
        self._entries = half[:: max(1, len(half) // TENSORS)]
        self._deltas = self._in_a_row = 0
        self.dtype = half[0].dtype if half else ""
        self.share: float | None = None

    def after_training(self, delta: Vector) -> None:
        """Called with each delta, `float32[total]`, that the trainer has made."""
        self._deltas += 1
        if self._deltas % STEPS_BETWEEN or not self._entries:
            return
        share = self._changed(delta)
        self._in_a_row = self._in_a_row + 1 if share < MIN_SHARE else 0
        self.share = share if self._in_a_row >= LOOKS else None

    def _changed(self, delta: Vector) -> float:
        changed = looked_at = 0
        for entry in self._entries:
            values = _rows(delta, entry) != 0.0
            if count := int(np.count_nonzero(values)):
                rows, columns = (int(np.count_nonzero(values.any(axis))) for axis in (1, 0))
                changed += count
                looked_at += min(rows * values.shape[1], columns * values.shape[0])
        return changed / looked_at if looked_at else 0.0


def _is_half_matrix(entry: LayoutEntry) -> bool:
    return entry.dtype in HALF and len(entry.shape) > 1 and entry.size > 0


def _rows(delta: Vector, entry: LayoutEntry) -> Vector:
    matrix = delta[entry.offset : entry.offset + entry.size].reshape(entry.shape[0], -1)
    return matrix[:: max(1, len(matrix) // ROWS), :ROW_VALUES]

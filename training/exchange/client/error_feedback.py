"""Error feedback: adds what a lossy codec left out of a delta to the next one (Seide et al. 2014, 1-bit SGD)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from training.encoding import codecs
from training.encoding.codecs import CodecName, Vector

#: Values sent of each block of 4,096 by the last sparse delta of a run: nearly the whole residual, at 0.44 bytes per
#: parameter. No later delta could carry what it leaves out.
LAST_SPARSE_VALUES = 1024


class ErrorFeedback:
    """The residual of this node's deltas, `float32[total]`; allocated with the first lossy delta."""

    def __init__(self, bounds: Sequence[tuple[int, int]], sparse_values: int = codecs.SPARSE_VALUES) -> None:
        self._bounds = bounds
        self._sparse_values = sparse_values
        self._residual: Vector | None = None
        #: Shards whose residual may differ from zero.
        self.residual_shards: set[int] = set()

    def residual(self, shard: int) -> Vector:
        """The residual of a shard, as a writable view."""
        if self._residual is None:
            self._residual = np.zeros(self._bounds[-1][1], dtype=np.float32)
        start, stop = self._bounds[shard]
        return self._residual[start:stop]

    def encode(self, shard: int, values: Vector, codec: CodecName, *, is_last: bool = False) -> codecs.Encoded:
        """Encode the sum of values and residual. The residual becomes what the encoding leaves out; after the last
        delta that is lost."""
        sparse_values = max(LAST_SPARSE_VALUES, self._sparse_values) if is_last else self._sparse_values
        encoded = codecs.encode_with_feedback(values, self.residual(shard), codec, sparse_values)
        self.residual_shards.add(shard)
        return encoded

    def move_to(self, delta: Vector, after: Callable[[int], None]) -> None:
        """Add the residual to a delta, `float32[total]`, decayed as `encode` does for the codec sparse, and clear it.
        `after` is called with the number of values of each shard that is done."""
        for shard in self.residual_shards:
            start, stop = self._bounds[shard]
            codecs.move_residual(delta[start:stop], self.residual(shard), "sparse")
            after(stop - start)
        self.residual_shards.clear()

    def clear_residual(self, shard: int) -> None:
        """Set the residual of a shard to zero: it was sent without loss."""
        if shard in self.residual_shards:
            self.residual_shards.discard(shard)
            self.residual(shard)[:] = 0.0

"""Values encoded once for all who pull them, not once for each: with seven peers a seventh of the work.

Pieces are kept under the version that they show, and the oldest go where there are too many: those who pull at one
moment go through the shards in one order, so that a few megabytes serve many shards.
"""

from __future__ import annotations

from weakref import ref

from training.encoding import codecs
from training.encoding.codecs import CodecName, Vector
from training.shards.state import ShardState

#: What is kept at most: a model of 16 million values whole, in bfloat16.
MOST_BYTES = 32 * 1024 * 1024


class EncodingCache:
    """The encoded pieces of the shards of one owner."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        #: Whose values, which version of them, and what they are encoded.
        self._pieces: dict[tuple[int, int, CodecName], tuple[ref[Vector], int, codecs.Encoded]] = {}
        self.size_bytes = 0

    def piece(self, shard: int, state: ShardState, offset: int, values: Vector, codec: CodecName) -> codecs.Encoded:
        """`values`, `float32[n]`, which are those of the state from `offset` on, as they travel."""
        key = (shard, offset, codec)
        found = self._pieces.get(key)
        if found is not None:
            if found[0]() is state.value and found[1] == state.version:
                return found[2]
            self._forget(key)
        encoded = codecs.encode(values, codec)
        self._pieces[key] = ref(state.value), state.version, encoded
        self.size_bytes += len(encoded)
        while self.size_bytes > self._most_bytes:
            self._forget(next(iter(self._pieces)))
        return encoded

    def _forget(self, key: tuple[int, int, CodecName]) -> None:
        self.size_bytes -= len(self._pieces.pop(key)[2])

"""Caches encoded values, so that several nodes that pull the same version cost one encoding. Pure.

A piece is kept together with the version it was encoded from; beyond a limit the oldest pieces are dropped. Nodes that
pull at the same time go through the shards in the same order, so that a few megabytes serve many shards.
"""

from __future__ import annotations

from weakref import ref

from training.encoding import codecs
from training.encoding.codecs import CodecName, Vector
from training.shards.state import ShardState

#: Enough for a whole model of 16 million values in bfloat16.
MAX_BYTES = 32 * 1024 * 1024


class EncodingCache:
    """The encoded pieces of the shards of one owner."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        #: By (shard, offset, codec): the array of the values, their version, and the encoded piece.
        self._pieces: dict[tuple[int, int, CodecName], tuple[ref[Vector], int, codecs.Encoded]] = {}
        self.size_bytes = 0

    def piece(self, shard: int, state: ShardState, offset: int, values: Vector, codec: CodecName) -> codecs.Encoded:
        """The encoding of `values`, `float32[n]`, which are those of the state from `offset` on."""
        key = (shard, offset, codec)
        found = self._pieces.get(key)
        if found is not None:
            if found[0]() is state.value and found[1] == state.version:
                return found[2]
            self._forget(key)
        encoded = codecs.encode(values, codec)
        self._pieces[key] = ref(state.value), state.version, encoded
        self.size_bytes += len(encoded)
        while self.size_bytes > self._max_bytes:
            self._forget(next(iter(self._pieces)))
        return encoded

    def _forget(self, key: tuple[int, int, CodecName]) -> None:
        self.size_bytes -= len(self._pieces.pop(key)[2])

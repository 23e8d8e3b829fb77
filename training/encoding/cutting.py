"""Cuts an encoded array into the encodings of its parts: their values are the same bits, and nothing is encoded anew.

A delta that is on its way, or in a log, when its shard is divided stays the delta that it was. Blocks cannot be cut
without decoding them, so the parts of a shard begin where blocks do (`training.layout.shard_bounds`). Arrays of one
block of any codec are the exception, for shards so small are those of tests. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from training.encoding import codecs, int4, sparse
from training.encoding.codecs import CodecName
from training.layout import BLOCK_VALUES

Encoded = bytes | bytearray | memoryview

#: An array of so many values is one block in every codec.
SMALLEST_BLOCK = int4.BLOCK_VALUES


def can_cut(sizes: Sequence[int]) -> bool:
    """Whether the encoding of an array can be cut into parts of these sizes, in every codec."""
    return sum(sizes) <= SMALLEST_BLOCK or not any(size % BLOCK_VALUES for size in sizes[:-1])


def cut(encoded: Encoded, codec: CodecName, sizes: Sequence[int]) -> list[Encoded]:
    """The encodings of the parts, of `sizes` values each: those of whole blocks are views of what is encoded. Raises
    `ValueError` if they are not parts of that, or begin within a block."""
    view, total = memoryview(encoded).cast("B"), sum(sizes)
    if not can_cut(sizes):
        raise ValueError(f"{total} values of {codec} cannot be cut into {list(sizes)}: blocks have {BLOCK_VALUES}")
    starts = list(accumulate(sizes, initial=0))
    if codec == "sparse":
        if sparse.check(view, total) != -(-total // BLOCK_VALUES):
            raise ValueError(f"{len(view)} bytes of {codec} are not {total} values")
        if total <= SMALLEST_BLOCK:
            return list(sparse.cut_block(view, total, starts))
        return [view[first:last] for first, last in pairwise(_sparse_bytes(view, starts))]
    if len(view) != codecs.size_bytes(codec, total):
        raise ValueError(f"{len(view)} bytes of {codec} are not {total} values")
    if codec == "int4" and total <= SMALLEST_BLOCK:
        return list(int4.cut_block(view, total, starts))
    if codec == "int8" and total <= SMALLEST_BLOCK:
        return [bytes(view[:4]) + bytes(view[4 + first : 4 + last]) for first, last in pairwise(starts)]
    places = [codecs.size_bytes(codec, start) for start in starts]
    return [view[first:last] for first, last in pairwise(places)]


def _sparse_bytes(view: memoryview, starts: Sequence[int]) -> list[int]:
    """The byte at which each of these values begins, all of them firsts of blocks, and the end."""
    places, at = [], 0
    for first, last in pairwise(starts):
        places.append(at)
        for _ in range(first, last, BLOCK_VALUES):
            at = sparse.block_end(view, at)
    return [*places, at]

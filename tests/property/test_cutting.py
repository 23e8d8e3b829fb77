"""Encoded arrays cut into parts: the parts decode to the same bits as the whole."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.encoding import codecs
from training.encoding.codecs import CodecName
from training.encoding.cutting import can_cut, cut
from training.layout import shard_bounds

FIXED = settings(derandomize=True, database=None, deadline=None, max_examples=60)
CODECS: list[CodecName] = ["float32", "bfloat16", "int8", "int4", "sparse"]


@FIXED
@given(
    codec=st.sampled_from(CODECS),
    shape=st.sampled_from(
        [(1, 1), (2, 2), (7, 3), (64, 2), (64, 64), (8192, 2), (20_000, 4), (12_289, 3), (16_384, 2)]
    ),
    zeros=st.sampled_from([0.0, 0.5, 0.999]),
    seed=st.integers(0, 99),
)
def test_parts_have_the_values_of_the_whole(codec: CodecName, shape: tuple[int, int], zeros: float, seed: int) -> None:
    """For slices as a division of shards makes them: nothing is lost, moved or encoded anew."""
    total, parts = shape
    rng = np.random.default_rng(seed)
    values = (rng.normal(size=total) * (rng.random(total) >= zeros)).astype(np.float32)
    residual = np.zeros(total, np.float32)
    encoded = (
        bytes(codecs.encode(values, codec))
        if codec != "sparse"
        else bytes(codecs.encode_with_feedback(values, residual, codec, int(rng.integers(1, 4097))))
    )
    whole = codecs.decoded(encoded, codec, total)
    bounds = shard_bounds(total, parts, parts)

    pieces = cut(encoded, codec, [stop - start for start, stop in bounds])

    assert len(pieces) == parts
    for (start, stop), piece in zip(bounds, pieces, strict=True):
        assert codecs.decoded(piece, codec, stop - start).tobytes() == whole[start:stop].tobytes()
    if total > 64:
        assert b"".join(pieces) == encoded


@pytest.mark.parametrize("codec", CODECS)
def test_no_part_begins_within_a_block(codec: CodecName) -> None:
    """It could not be decoded alone; the sizes are named."""
    assert not can_cut([5000, 5000])
    with pytest.raises(ValueError, match=r"10000 values of \w+ cannot be cut into \[5000, 5000\]"):
        cut(bytes(codecs.encode(np.zeros(10_000, np.float32), codec)), codec, [5000, 5000])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("sizes", [[4096, 4096], [4096, 4000], [40, 20]])
def test_what_is_no_encoding_of_so_many_values_is_refused(codec: CodecName, sizes: list[int]) -> None:
    """A log entry of a shard of another size would be cut into nonsense."""
    encoded = bytes(codecs.encode(np.ones(sum(sizes) + 5000, np.float32), codec))
    with pytest.raises(ValueError, match=r"are not|has more blocks|sends more values"):
        cut(encoded, codec, sizes)


@given(length=st.integers(4097, 100_000), factors=st.lists(st.sampled_from([2, 3, 4]), max_size=3))
def test_large_slices_are_divided_between_blocks(length: int, factors: list[int]) -> None:
    """So every division of a large shard can be cut."""
    parts = 1
    for factor in factors:
        parts *= factor
        if length // parts < 4096:
            return
        bounds = shard_bounds(length, parts, parts)
        assert can_cut([stop - start for start, stop in bounds])
        assert all(one[1] == other[0] for one, other in pairwise(bounds))
        assert min(stop - start for start, stop in bounds) >= 1

"""The shape of shared data: how many partitions it has."""

from __future__ import annotations

import pytest

from p2pnode.training.trainer_link.data_messages import PARTITIONS, UNKNOWN, DataShape


@pytest.mark.parametrize(
    ("size", "partitions"), [(1, 1), (PARTITIONS - 1, PARTITIONS - 1), (PARTITIONS, PARTITIONS), (10**9, PARTITIONS)]
)
def test_a_partition_has_a_sample_at_least(size: int, partitions: int) -> None:
    """A data set with few samples has as many partitions, a large one the most."""
    shape = DataShape("samples", size, 0)

    assert (shape.is_stream, shape.partitions) == (False, partitions)


def test_the_blocks_of_a_stream_are_not_known() -> None:
    """Its size is that of a block."""
    shape = DataShape("stream", 4, 0)

    assert (shape.is_stream, shape.partitions) == (True, UNKNOWN)

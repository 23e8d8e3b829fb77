"""Reads the records of a task in their order for one pass, a chunk at a time.

The order is a function of the task's `order` alone: the chunks are permuted, and the records inside each. So a node
that goes on with a task after another one knows which records its first `skip` were, and no node holds more than one
chunk. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from p2pnode.training.dispatch.permutation import EpochOrder
from p2pnode.training.dispatch.recordio import read_chunk
from p2pnode.training.trainer_link.record_messages import RecordTask

#: Places are computed so many at a time: a chunk of tiny records has millions.
_BLOCK_RECORDS = 4096


def places_in_order(task: RecordTask) -> Iterator[tuple[int, int]]:
    """(number of the chunk in the task, number of the record in the chunk), without the first `task.skip`."""
    shuffle, left = task.order != 0, task.skip
    count = len(task.chunks)
    for number in EpochOrder(count, task.order, 0, shuffle=shuffle).samples(0, count):
        records = task.chunks[number].records
        if left >= records:
            left -= records
            continue
        inside = EpochOrder(records, task.order, number + 1, shuffle=shuffle)
        for start in range(left, records, _BLOCK_RECORDS):
            for place in inside.samples(start, min(start + _BLOCK_RECORDS, records)):
                yield number, place
        left = 0


def records_in_order(task: RecordTask) -> Iterator[bytes]:
    """The records, without the first `task.skip`. Raises `OSError` and `RecordFileError`, for a file that cannot be
    read or that is no longer the one of the data set."""
    present, chunk = -1, None
    for number, place in places_in_order(task):
        if chunk is None or number != present:
            wanted = task.chunks[number]
            chunk = read_chunk(wanted.path, wanted.offset, records=wanted.records, number=wanted.index)
            present = number
        yield chunk[place]

"""The records of this machine's files as one stream, which `swarm.shard` divides among the nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from p2pnode.training.dispatch.dataset import LocalDataset
from p2pnode.training.dispatch.recordio import read_chunk
from p2pnode.training.trainer.records.record_draws import Decode


class RecordFileStream:
    """All records of the files, in their order. It skips whole chunks without reading them."""

    def __init__(self, dataset: LocalDataset, decode: Decode | None, start: int = 0) -> None:
        self._dataset = dataset
        self._decode = decode
        self._start = start

    def skip(self, records: int) -> RecordFileStream:
        """The stream without its first records."""
        return RecordFileStream(self._dataset, self._decode, self._start + records)

    def __iter__(self) -> Iterator[Any]:
        left, table = self._start, self._dataset.table
        for number in range(len(table)):
            place = table[number]
            if left >= place.records:
                left -= place.records
                continue
            path = self._dataset.paths[place.path]
            chunk = read_chunk(path, place.offset, records=place.records, number=place.index)
            for record in chunk[left:]:
                yield record if self._decode is None else self._decode(record)
            left = 0

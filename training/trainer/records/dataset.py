"""`swarm.records()`: an iterable data set of the records that this node is to train.

An iteration ends where no further record can be had now, at the latest at the end of a pass; then what a script has
trained is reported, and the next iteration waits for records. So no record waits in a batch for one that comes only
when it is trained itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from p2pnode.training.dispatch.chunks import LocalDataset
from p2pnode.training.dispatch.recordio import read_chunk
from p2pnode.training.trainer.records.record_draws import Decode, RecordDraws

#: Iterations in a row that gave records of which none was trained.
MAX_IDLE_ITERATIONS = 3

WORKERS = (
    "swarm.records with num_workers > 0 is not possible: what the workers fetch ahead would be leased and not trained. "
    "Use num_workers=0; decode in swarm.records(decode=…)"
)
DROPPED = (
    "the loader leaves out the last records of every iteration (drop_last=True), so their task can never be finished: "
    "use drop_last=False"
)


class SwarmRecords(IterableDataset[Any]):
    """Belongs to one script; made by `AttachedSwarm.records`. `flush` reports the optimiser steps since the last turn,
    if there are any, and takes the next order then, or where the daemon has cancelled this turn; it returns whether
    some of what is reported is in no delta yet: then it has to be called again."""

    def __init__(self, draws: RecordDraws, flush: Callable[[], bool]) -> None:
        self._draws: RecordDraws | None = draws
        self._flush: Callable[[], bool] | None = flush
        self._idle = 0
        self._trained = True
        #: The node ended while the script waited for records.
        self.stopped = False

    def __getstate__(self) -> dict[str, Any]:
        """A worker process gets nothing, and says why."""
        return {"_draws": None, "_flush": None}

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None or self._draws is None or self._flush is None:
            raise RuntimeError(WORKERS)
        return self._samples(self._draws, self._flush)

    def _samples(self, draws: RecordDraws, flush: Callable[[], bool]) -> Iterator[Any]:
        draws.restart()
        self._idle = 0 if self._trained else self._idle + 1
        if self._idle >= MAX_IDLE_ITERATIONS:
            raise RuntimeError(DROPPED)
        found = draws.draw(wait=False)
        if found is None:
            found = self._wait(draws, flush)
        if found is None:
            return
        self._trained = False
        while found is not None:
            yield found[0]
            found = draws.draw(wait=False)

    def _wait(self, draws: RecordDraws, flush: Callable[[], bool]) -> tuple[Any] | None:
        """Until there is a record; None: the node ends."""
        tasks = draws.tasks
        while True:
            has_rest = flush()
            if tasks.stopped:
                break
            found = draws.draw(wait=not has_rest)
            if found is not None:
                return found
            tasks.idle()
        self.stopped = True
        return None

    # -- progress ------------------------------------------------------------------------------------------------

    def count(self, samples: int) -> int:
        """`swarm.step` has counted so many records; returns how many were never drawn."""
        self._trained = True
        return 0 if self._draws is None else self._draws.count(samples)

    def report(self, turn: int, step: int | None, *, has_delta: bool) -> None:  # noqa: ARG002 - as `LinkedReader` has it
        """A turn that trains `step` is about to be reported: the daemon counts its records when that step is counted.
        Raises `DaemonGone`."""
        if self._draws is not None and step is not None:
            self._draws.report(turn, step)

    def state(self) -> str | None:
        """The position for the script's saved state; None where the daemon keeps it."""
        return None if self._draws is None else self._draws.tasks.state()


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

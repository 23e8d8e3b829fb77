"""Draws the records of tasks, and counts which are trained: in the order of drawing, as `swarm.step` says.

A task that cannot be read or decoded is given up, and the next one drawn. The order of its records is a function of the
task's `order` alone: the chunks are permuted, and the records inside each. So a node that goes on with a task after
another one knows which records its first `skip` were, and no node holds more than one chunk. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from p2pnode.training.dispatch.permutation import EpochOrder
from p2pnode.training.dispatch.recordio import RecordFileError, read_chunk
from p2pnode.training.trainer.records.task_source import TaskSource
from p2pnode.training.trainer.sampling.draws import ClaimProgress, Draws
from p2pnode.training.trainer_link.data_messages import Claim
from p2pnode.training.trainer_link.record_messages import RecordTask, TaskTrained

Decode = Callable[[bytes], Any]
#: Places are computed so many at a time: a chunk of tiny records has millions.
_BLOCK_RECORDS = 4096


class RecordDraws:
    """The records of one trainer. `decode` makes a sample of a record; None: the bytes."""

    def __init__(self, tasks: TaskSource, decode: Decode | None = None) -> None:
        self.tasks = tasks
        self._decode = decode
        self._draws = Draws()
        self._parts: dict[tuple[int, int], RecordTask] = {}
        #: Tasks that are drawn again, from where they are trained.
        self._again: list[ClaimProgress] = []
        self._present: tuple[ClaimProgress, RecordTask, Iterator[bytes]] | None = None

    def draw(self, *, wait: bool) -> tuple[Any] | None:
        """The next sample, in a tuple of one; None: there is none now. Raises `DaemonGone`."""
        while (present := self._present or self._next(wait=wait)) is not None:
            self._present = part, task, records = present
            try:
                record = next(records)
                sample = record if self._decode is None else self._decode(record)
            except StopIteration:
                self._present = None
            except OSError as error:
                self._give_up(part, task, f"{error.strerror or error}: {error.filename or ''}", missing=True)
            except RecordFileError as error:
                self._give_up(part, task, str(error), missing=False)
            except Exception as error:
                self._give_up(part, task, f"decode raised {type(error).__name__}: {error}", missing=False)
            else:
                part.drawn += 1
                return (sample,)
        return None

    def _next(self, *, wait: bool) -> tuple[ClaimProgress, RecordTask, Iterator[bytes]] | None:
        if self._again:
            part = self._again.pop(0)
            task = self._parts[part.claim.epoch, part.claim.partition]
        else:
            found = self.tasks.next_task(wait=wait)
            if found is None:
                return None
            task = found
            part = ClaimProgress.of(Claim(task.attempt, task.task, task.skip), task.records)
            self._parts[task.attempt, task.task] = task
        self._draws.add(part)
        return part, task, records_in_order(msgspec.structs.replace(task, skip=part.trained))

    def _give_up(self, part: ClaimProgress, task: RecordTask, reason: str, *, missing: bool) -> None:
        self._present = None
        part.size = part.drawn
        self.tasks.give_up(task, reason, missing=missing)

    def restart(self) -> None:
        """What was drawn and not trained is drawn again, before anything else."""
        self._present = None
        self._again = sorted([*self._draws.restart(), *self._again], key=lambda part: part.trained == 0)

    def count(self, samples: int) -> int:
        """So many more records are trained; returns how many of them were never drawn."""
        return self._draws.count(samples)

    def report(self, turn: int, step: int) -> None:
        """The delta of this turn is about to be reported. Raises `DaemonGone`."""
        trained = [TaskTrained(one.partition, one.epoch, one.offset) for one in self._draws.report()]
        for one in trained:
            task = self._parts.get((one.attempt, one.task))
            if task is not None and one.trained >= task.records:
                del self._parts[one.attempt, one.task]
        self.tasks.report(turn, step, trained)


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

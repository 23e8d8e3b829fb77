"""Record files for tests, and a connection whose daemon grants their chunks in memory."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

from p2pnode.training.dispatch.chunks import DatasetChunk
from p2pnode.training.dispatch.recordio import Compressor, RecordWriter, read_index
from p2pnode.training.trainer_link.record_messages import (
    RecordsGranted,
    RecordsTrained,
    RecordsUnreadable,
    RecordsWanted,
    RecordTask,
)


def write_records(path: Path, records: list[bytes], records_per_chunk: int) -> Path:
    """A file of such chunks, without compression."""
    with path.open("wb") as file:
        writer = RecordWriter(file, compressor=Compressor.NONE, records_per_chunk=records_per_chunk)
        writer.write_all(records)
        writer.flush()
    return path


def tasks_of(path: Path, chunks_per_task: int, order: int = 0) -> list[RecordTask]:
    """The tasks of one file, with attempt 1."""
    chunks = [
        DatasetChunk(str(path), number, chunk.offset, chunk.records)
        for number, chunk in enumerate(read_index(path).chunks)
    ]
    groups = [chunks[start : start + chunks_per_task] for start in range(0, len(chunks), chunks_per_task)]
    return [RecordTask(number, 1, 1, order, 0, group) for number, group in enumerate(groups)]


class RecordConnection:
    """What a trainer's records use of a `DaemonConnection`. `tasks` are granted in order; then there is none, or with
    `ends` the job is over."""

    def __init__(self, tasks: list[RecordTask], *, ends: bool = False) -> None:
        self.stopping = self.lost = self.cancelled = False
        self.tasks = deque(tasks)
        self.ends = ends
        self.trained: dict[int, int] = {}
        self.unreadable: list[RecordsUnreadable] = []
        self.sent: list[Any] = []
        self._answers: deque[RecordsGranted] = deque()

    def send(self, message: Any) -> None:
        self.sent.append(message)
        match message:
            case RecordsWanted(number, _):
                task = self.tasks.popleft() if self.tasks else None
                self._answers.append(RecordsGranted(number, task, is_over=self.ends and task is None))
            case RecordsTrained(_, _, trained):
                self.trained |= {one.task: one.trained for one in trained}
            case RecordsUnreadable():
                self.unreadable.append(message)

    def answer(self, *_: Any) -> RecordsGranted | None:
        if self.stopping or self.lost or self.cancelled or not self._answers:
            return None
        return self._answers.popleft()

    def interrupted(self) -> bool:
        return self.cancelled

"""What can be wrong with a RecordIO file. Each error names the file, and chunk and offset where there is one."""

from __future__ import annotations

from training.errors import TrainingError


class RecordFileError(TrainingError):
    """A RecordIO file cannot be used as asked.

    `path` is the file, `chunk` the number of the chunk from 0 (None: not known, or no particular one), `offset` the
    byte of the file where that chunk's header begins, and `problem` the text without them.
    """

    def __init__(self, path: str, problem: str, *, chunk: int | None = None, offset: int | None = None) -> None:
        self.path, self.problem, self.chunk, self.offset = path, problem, chunk, offset
        where = [] if chunk is None else [f"chunk {chunk}"]
        where += [] if offset is None else [f"offset {offset}"]
        super().__init__(": ".join([path, *([", ".join(where)] if where else []), problem]))

    def __reduce__(self) -> tuple[object, ...]:
        """Errors cross processes: a data loader raises in its workers."""
        return _again, (type(self), self.path, self.problem, self.chunk, self.offset)


class CorruptChunk(RecordFileError):
    """A chunk contradicts its header or its checksum, or there is something else where a header must be."""


class TornChunk(RecordFileError):
    """The file ends inside its last chunk: its writer was interrupted. All chunks before it are whole."""


class ChunkTooLarge(RecordFileError):
    """A chunk is larger than the reader's limit, compressed or not. It was not read."""


def _again(
    kind: type[RecordFileError], path: str, problem: str, chunk: int | None, offset: int | None
) -> RecordFileError:
    return kind(path, problem, chunk=chunk, offset=offset)

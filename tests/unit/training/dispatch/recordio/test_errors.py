"""What is wrong with a record file: each error names the file, and the chunk and its offset where they are known."""

from __future__ import annotations

import pickle

import pytest

from p2pnode.training.dispatch.recordio.layout import ChunkTooLarge, CorruptChunk, RecordFileError, TornChunk


@pytest.mark.parametrize(
    ("chunk", "offset", "text"),
    [
        (None, None, "a.recordio: cut"),
        (0, None, "a.recordio: chunk 0: cut"),
        (None, 0, "a.recordio: offset 0: cut"),
        (3, 99, "a.recordio: chunk 3, offset 99: cut"),
    ],
)
@pytest.mark.parametrize("kind", [CorruptChunk, TornChunk, ChunkTooLarge])
def test_an_error_says_what_is_known_and_survives_another_process(
    kind: type[RecordFileError], chunk: int | None, offset: int | None, text: str
) -> None:
    """The first chunk and the first byte are named too."""
    error = kind("a.recordio", "cut", chunk=chunk, offset=offset)
    copy = pickle.loads(pickle.dumps(error))

    assert str(error) == str(copy) == text
    assert (type(copy), copy.path, copy.problem, copy.chunk, copy.offset) == (kind, "a.recordio", "cut", chunk, offset)

"""The answer to a bundle as pieces: results, signs of life, and what is malformed."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.harness.environment.virtual_loop import run
from training.encoding.frames import BadFrame
from training.exchange.aggregation.bundles import MAX_PIECE_BYTES, Results, piece_of, read_pieces
from training.exchange.messages import PushResult

RESULTS: list[Results] = [(0, [PushResult(3, "ok", 7)]), (2, [PushResult.retry(1, "not_relayed")])]


async def body(*buffers: bytes) -> AsyncIterator[bytes]:
    for buffer in buffers:
        yield buffer


async def read(*buffers: bytes) -> list[list[Results]]:
    return [results async for results in read_pieces(body(*buffers))]


def test_pieces_are_read_as_they_were_written() -> None:
    """Wherever the body is cut; a sign of life has no results."""

    async def scenario() -> None:
        whole = piece_of(RESULTS) + piece_of([]) + piece_of(RESULTS[1:])
        assert await read(*(whole[at : at + 5] for at in range(0, len(whole), 5))) == [RESULTS, [], RESULTS[1:]]
        assert await read() == []

    run(scenario())


@pytest.mark.parametrize(
    "wrong",
    [
        (MAX_PIECE_BYTES + 1).to_bytes(4, "big"),
        (3).to_bytes(4, "big") + b"abc",
        piece_of(RESULTS)[:-1],
        b"\x00\x00",
    ],
)
def test_what_is_no_piece_is_a_bad_frame(wrong: bytes) -> None:
    """Too long, no results, or broken off; what came before counts."""

    async def scenario() -> None:
        found: list[Results] = []

        async def read_all() -> None:
            async for results in read_pieces(body(piece_of(RESULTS), wrong)):
                found.extend(results)

        with pytest.raises(BadFrame):
            await read_all()
        assert found == RESULTS

    run(scenario())

"""The streamed answer to a push: pieces of results, signs of life, and what is malformed."""

from __future__ import annotations

import pytest

from tests.harness.environment.virtual_loop import run
from tests.harness.swarms.exchange_overlay import chunks
from training.encoding.frames import BadFrame
from training.exchange.messages import MAX_PIECE_BYTES, SIGN_OF_LIFE, PushResult, piece_of, read_results

ONE, TWO = PushResult(1, "ok", 7), PushResult.retry(2, "backup_silent")


async def read(data: bytes, cut: int = 5) -> list[list[PushResult]]:
    pieces = [data[start : start + cut] for start in range(0, len(data), cut)]
    return [results async for results in read_results(chunks(pieces))]


def test_results_arrive_in_pieces() -> None:
    """Wherever the stream is cut; signs of life carry none."""

    async def scenario() -> None:
        data = SIGN_OF_LIFE + piece_of([ONE]) + SIGN_OF_LIFE + piece_of([TWO, ONE])
        for cut in (1, 3, len(data)):
            assert await read(data, cut) == [[ONE], [TWO, ONE]]
        assert await read(b"") == []

    run(scenario())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (piece_of([ONE])[:-1], "ended inside"),
        (b"\0\0", "ended inside"),
        ((MAX_PIECE_BYTES + 1).to_bytes(4, "big"), "a piece of"),
        (b"\0\0\0\1\xc1", "malformed piece"),
        (b"\0\0\0\x0a\x91\x94\0\xa2ok\0\xa2\xff\xff", "malformed piece"),
    ],
)
def test_a_malformed_stream_is_refused(data: bytes, reason: str) -> None:
    """What came before it was given out."""

    async def scenario() -> None:
        found = read_results(chunks([piece_of([ONE]), data]))
        assert await anext(found) == [ONE]
        with pytest.raises(BadFrame, match=reason):
            await anext(found)

    run(scenario())

"""The answer to a push as a stream: results as they become final, and signs of life between them.

An owner that forwards a delta to a backup over a slow line is silent for as long as that takes. If the origin knows
this stream (`Push.streams`) the owner answers at once: a head without results, then a body of small pieces. A piece is
its length (4 bytes, big-endian) and a MessagePack list of results; an empty one only says that the forward moves. What
has arrived of an answer that breaks off is valid. Pure.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import msgspec

from overlay.transport import Buffer
from training.encoding.frames import BadFrame, FrameReader
from training.exchange.messages import PushResult

_LENGTH_BYTES = 4
#: Longest piece: results of all shards, each with an owner and a reason.
MAX_PIECE_BYTES = 4 * 1024 * 1024
#: Says that the owner is at work.
SIGN_OF_LIFE = bytes(_LENGTH_BYTES)

_DECODER = msgspec.msgpack.Decoder(list[PushResult])


def piece_of(results: Sequence[PushResult]) -> bytes:
    """Some results as one piece of the stream."""
    data = msgspec.msgpack.encode(list(results))
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


async def read_results(body: AsyncIterator[Buffer]) -> AsyncIterator[list[PushResult]]:
    """The results of each piece that has some. Raises `BadFrame` for a malformed piece, and what the body raises."""
    reader, length = FrameReader(body), bytearray(_LENGTH_BYTES)
    while await reader.fill(memoryview(length), at_end_ok=True):
        size = int.from_bytes(length, "big")
        if size > MAX_PIECE_BYTES:
            raise BadFrame(f"a piece of {size} bytes in the answer to a push")
        if not size:
            continue
        data = bytearray(size)
        await reader.fill(memoryview(data))
        try:
            yield _DECODER.decode(data)
        except (ValueError, RecursionError) as error:
            raise BadFrame(f"a malformed piece in the answer to a push: {error}") from error

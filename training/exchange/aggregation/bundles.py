"""The messages of relayed pushes: many deltas in one request, and their answers as they come. Pure.

A bundle is a list of pushes, each with some shards, whose arrays follow in the body in that order. The answer is a
stream of pieces, as that of a push: 4 bytes of length, big-endian, and a MessagePack list of (place of the push in
the bundle, results). An empty piece says that the receiver is at work. What has arrived of an answer that breaks off
counts, as with a push.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from overlay.transport import Buffer
from training.encoding.codecs import CodecName
from training.encoding.frames import BadFrame, FrameReader, framed_bytes
from training.exchange.messages import Push, PushResult
from training.exchange.terms import Genesis

#: Pushes in one bundle, and nodes that one may pass: more than the digits of any swarm.
MAX_PUSHES = 4096
MAX_HOPS = 16
#: Encoded bytes in one bundle, unless a single push has more.
MAX_BUNDLE_BYTES = 32 * 1024 * 1024

_LENGTH_BYTES = 4
#: Longest piece of an answer.
MAX_PIECE_BYTES = 8 * 1024 * 1024


class Relay(msgspec.Struct, frozen=True, array_like=True):
    """Pushes of several nodes, to be added or handed on by the receiver. `hops`: how many nodes they have passed."""

    genesis: Genesis
    hops: Annotated[int, Meta(ge=1, le=MAX_HOPS)]
    pushes: Annotated[list[Push], Meta(max_length=MAX_PUSHES)]


class RelayAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The results follow in the body."""

    genesis: Genesis


#: The place of a push in its bundle, and the results of some of its shards.
Results = tuple[int, list[PushResult]]

_DECODER = msgspec.msgpack.Decoder(list[Results])


@dataclass(frozen=True, slots=True)
class Carried:
    """One encoded shard of a delta, and the number of values it decodes to."""

    shard: int
    encoded: bytes | bytearray | memoryview
    codec: CodecName
    values: int

    @property
    def framed_bytes(self) -> int:
        return framed_bytes(self.codec, self.values, len(self.encoded))


def piece_of(results: Sequence[Results]) -> bytes:
    """Some results as one piece of the answer; without any, a sign of life."""
    if not results:
        return bytes(_LENGTH_BYTES)
    data = msgspec.msgpack.encode(list(results))
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


async def read_pieces(body: AsyncIterator[Buffer]) -> AsyncIterator[list[Results]]:
    """The results of each piece; of a sign of life none. Raises `BadFrame` for a malformed piece, and what the body
    raises."""
    reader, length = FrameReader(body), bytearray(_LENGTH_BYTES)
    while await reader.fill(memoryview(length), at_end_ok=True):
        size = int.from_bytes(length, "big")
        if size > MAX_PIECE_BYTES:
            raise BadFrame(f"a piece of {size} bytes in the answer to a bundle")
        data = bytearray(size)
        await reader.fill(memoryview(data))
        try:
            yield _DECODER.decode(data) if size else []
        except (ValueError, RecursionError) as error:
            raise BadFrame(f"a malformed piece in the answer to a bundle: {error}") from error

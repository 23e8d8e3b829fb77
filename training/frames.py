"""Frames: how shards travel in the body of a request, at most 1 MiB at a time.

A frame is a 32-byte header and a payload. The header names the shard, which of its arrays the payload belongs to, the
first value, the codec, the payload's size, and the step and version it stands for. The receiver knows from the head
of the request which shards come and how long they are, so nothing is allocated on a stranger's word.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Iterator
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from overlay.transport import Buffer
from training import codecs
from training.codecs import CodecName, Vector

_HEADER = struct.Struct("<IIIBBHqQ")
HEADER_BYTES = _HEADER.size
MAX_PAYLOAD_BYTES = 1024 * 1024
SMALL_BODY_BYTES = 32 * 1024


class Part(IntEnum):
    """Which array of a shard a frame carries."""

    DELTA = 0
    VALUE = 1
    MOMENTUM = 2
    ACCUMULATED = 3
    PENDING = 4  # one delta of `pending`; `sequence` is its place in the head's list


class FrameHeader(NamedTuple):
    """`offset` counts values from the start of the shard; `sequence` numbers the arrays of one part."""

    shard: int
    offset: int
    payload_bytes: int
    codec: int
    part: int
    sequence: int
    step: int
    version: int


class BadFrame(Exception):
    """A body that is not what its head announced."""


def frames(
    shard: int, values: Vector, codec: CodecName, part: Part, *, step: int = 0, version: int = 0, sequence: int = 0
) -> Iterator[Buffer]:
    """A shard's array as header and payload buffers; each payload is encoded when it is asked for."""
    per_frame = codecs.values_within(codec, MAX_PAYLOAD_BYTES)
    for offset in range(0, values.size, per_frame):
        payload = codecs.encode(values[offset : offset + per_frame], codec)
        yield header(shard, offset, len(payload), codec, part, step=step, version=version, sequence=sequence)
        yield payload


def encoded_frames(
    shard: int, payload: Buffer, codec: CodecName, part: Part, *, step: int = 0, version: int = 0
) -> Iterator[Buffer]:
    """The same for values that are encoded already, without a copy."""
    per_frame = codecs.values_within(codec, MAX_PAYLOAD_BYTES)
    frame_bytes = codecs.size_bytes(codec, per_frame)
    view = memoryview(payload)
    for number, start in enumerate(range(0, len(view), frame_bytes)):
        piece = view[start : start + frame_bytes]
        yield header(shard, number * per_frame, len(piece), codec, part, step=step, version=version)
        yield piece


def header(
    shard: int,
    offset: int,
    payload_bytes: int,
    codec: CodecName,
    part: Part,
    *,
    step: int,
    version: int,
    sequence: int = 0,
) -> bytes:
    """One packed frame header."""
    return _HEADER.pack(shard, offset, payload_bytes, codecs.CODES[codec], part, sequence, step, version)


def whole_if_small(buffers: Iterator[Buffer], size_bytes: int) -> Iterator[Buffer] | list[Buffer]:
    """A small body as a list: it travels with its head, and can be sent again on a fresh connection when a kept one
    turns out to be dead. A large one stays an iterator."""
    return list(buffers) if size_bytes <= SMALL_BODY_BYTES else buffers


class FrameReader:
    """Takes frames off a body whose buffers are cut anywhere.

    One copy per payload: the buffers go into a bytearray of the announced, checked size.
    """

    def __init__(self, body: AsyncIterator[Buffer]) -> None:
        self._body = body
        self._left: memoryview = memoryview(b"")

    async def next(self) -> tuple[FrameHeader, bytearray] | None:
        """The next frame, or None at a clean end. Raises `BadFrame`."""
        raw = await self._take(HEADER_BYTES, at_end_ok=True)
        if raw is None:
            return None
        head = FrameHeader._make(_HEADER.unpack(raw))
        if head.payload_bytes > MAX_PAYLOAD_BYTES or head.codec not in codecs.NAMES:
            raise BadFrame(f"a frame of {head.payload_bytes} bytes in codec {head.codec}")
        payload = await self._take(head.payload_bytes, at_end_ok=False)
        if payload is None:
            raise BadFrame("the body ended inside a frame")
        return head, payload

    async def _take(self, size: int, *, at_end_ok: bool) -> bytearray | None:
        taken = bytearray(size)
        filled = 0
        while filled < size:
            if not len(self._left):
                try:
                    self._left = memoryview(await anext(self._body)).cast("B")
                except StopAsyncIteration:
                    if filled == 0 and at_end_ok:
                        return None
                    raise BadFrame("the body ended inside a frame") from None
                continue
            piece = self._left[: size - filled]
            taken[filled : filled + len(piece)] = piece
            self._left = self._left[len(piece) :]
            filled += len(piece)
        return taken


async def read_array(reader: FrameReader, shard: int, part: Part, size: int) -> tuple[Vector, bytearray, CodecName]:
    """The next `size` values, which must be the named part of the named shard.

    Returns the decoded float32 values, the payload as received (to be forwarded as it is) and its codec. Raises
    `BadFrame` for anything else.
    """
    values = np.empty(size, dtype=np.float32)
    encoded = bytearray()
    filled = 0
    codec: CodecName = "float32"
    while filled < size:
        frame = await reader.next()
        if frame is None:
            raise BadFrame(f"shard {shard} is missing")
        head, payload = frame
        if head.shard != shard or head.part != part or head.offset != filled:
            raise BadFrame(f"expected shard {shard} from value {filled}, got shard {head.shard} from {head.offset}")
        if filled and codecs.NAMES[head.codec] != codec:
            raise BadFrame(f"shard {shard} changes its codec at value {filled}")
        codec = codecs.NAMES[head.codec]
        try:
            count = codecs.count_values(codec, head.payload_bytes)
        except ValueError as error:
            raise BadFrame(str(error)) from error
        if filled + count < size and count % codecs.cut_values(codec):
            raise BadFrame(f"shard {shard} is cut inside a block, after value {filled + count}")
        if count == 0 or filled + count > size:
            raise BadFrame(f"shard {shard} has {size} values, a frame brings {count} more after {filled}")
        codecs.decode(payload, codec, values[filled : filled + count])
        encoded += payload
        filled += count
    return values, encoded, codec

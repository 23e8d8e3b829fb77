"""Frames: carry shards in the body of a request, at most 1 MiB each.

A frame is a 32-byte header and a payload. The header names the shard, which of its arrays the payload belongs to, the
offset, the codec, the payload's size, and the step and version. The head of the request lists the shards and their
lengths, so the sizes in frames never determine how much the receiver allocates. A payload whose size depends on its
values ends with a block; its size is bounded by what the values could need at most. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Callable, Iterator
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from p2pnode.overlay.transport import ArrivedBody, Buffer, DirectBody, SizedBody
from p2pnode.training.encoding import codecs
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.encoding.table import CODECS, NAMES, CodecName
from p2pnode.training.errors import TrainingError

_HEADER = struct.Struct("<IIIBBHqQ")
HEADER_BYTES = _HEADER.size
MAX_PAYLOAD_BYTES = 1024 * 1024
#: A larger body is tracked while it is sent: on a slow line a node sees how far it has come.
SMALL_BODY_BYTES = 32 * 1024


class Part(IntEnum):
    """Which array of a shard a frame carries."""

    DELTA = 0
    VALUE = 1
    MOMENTUM = 2
    PENDING = 4  # one delta of `pending`; `sequence` is its place in the head's list
    CHANGE = 5  # one change of a published value; `version` is the published version that it leads to
    BATCH = 7  # bytes: a batch of named values; `version` is their number in all, `step` is 1 in the last of its kind
    TABLE = 8  # bytes: a piece of a table of named values, in the same way
    UPDATES = 9  # bytes: updates of named values, in the same way
    RECORD = 10  # bytes: a message that may not fit the head, in the same way


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


class BadFrame(TrainingError):
    """A body does not match its head."""


def framed_bytes(codec: CodecName, values: int, encoded_bytes: int | None = None) -> int:
    """Bytes of an array with its frame headers. Where the size depends on the values the caller gives the bytes
    without."""
    if encoded_bytes is None:
        encoded_bytes = CODECS[codec].size_bytes(values)
    return encoded_bytes + HEADER_BYTES * -(-values // codecs.values_within(codec, MAX_PAYLOAD_BYTES))


def frames(
    shard: int,
    values: Vector,
    codec: CodecName,
    part: Part,
    *,
    step: int = 0,
    version: int = 0,
    sequence: int = 0,
    encode: Callable[[int, Vector], Buffer] | None = None,
) -> Iterator[Buffer]:
    """A shard's array as header and payload buffers. Each payload is encoded when it is requested, by `encode(offset,
    values)` if given. A float32 payload is the array's own memory: changes during the transfer may arrive, or not."""
    per_frame = codecs.values_within(codec, MAX_PAYLOAD_BYTES)
    for offset in range(0, values.size, per_frame):
        piece = values[offset : offset + per_frame]
        if codec == "float32":
            payload: Buffer = codecs.as_bytes(piece)
        else:
            payload = codecs.encode(piece, codec) if encode is None else encode(offset, piece)
        yield header(shard, offset, len(payload), codec, part, step=step, version=version, sequence=sequence)
        yield payload


def encoded_frames(
    shard: int, payload: Buffer, codec: CodecName, part: Part, *, step: int = 0, version: int = 0
) -> Iterator[Buffer]:
    """As `frames`, for values that are already encoded, without a copy."""
    per_frame = codecs.values_within(codec, MAX_PAYLOAD_BYTES)
    view = memoryview(payload)
    for number, (start, stop) in enumerate(codecs.arithmetic(codec).cuts(view, per_frame)):
        piece = view[start:stop]
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
    return _HEADER.pack(shard, offset, payload_bytes, CODECS[codec].number, part, sequence, step, version)


def blob_frames(shard: int, payload: Buffer, part: Part, *, is_last: bool = True) -> Iterator[Buffer]:
    """Bytes that are no values; at least one byte."""
    size = len(payload)
    if isinstance(payload, bytes) and size <= MAX_PAYLOAD_BYTES:
        return iter((header(shard, 0, size, "float32", part, step=int(is_last), version=size), payload))
    return _cut_blob(shard, payload, part, is_last=is_last)


def _cut_blob(shard: int, payload: Buffer, part: Part, *, is_last: bool) -> Iterator[Buffer]:
    view = memoryview(payload).cast("B")
    for offset in range(0, len(view), MAX_PAYLOAD_BYTES):
        piece = view[offset : offset + MAX_PAYLOAD_BYTES]
        yield header(shard, offset, len(piece), "float32", part, step=int(is_last), version=len(view))
        yield piece


def blob_framed_bytes(size_bytes: int) -> int:
    """Bytes on the wire of `blob_frames`."""
    return size_bytes + HEADER_BYTES * -(-size_bytes // MAX_PAYLOAD_BYTES)


def list_if_small(buffers: Iterator[Buffer], size_bytes: int) -> Iterator[Buffer] | list[Buffer]:
    """A small body as a list. It is sent with its head, and can be sent again on a new connection if a pooled one has
    been closed. A large body stays an iterator."""
    return [bytes(buffer) for buffer in buffers] if size_bytes <= SMALL_BODY_BYTES else buffers


def sized(buffers: Iterator[Buffer], size_bytes: int) -> SizedBody | list[Buffer]:
    """As `list_if_small`, for a body of known size, headers included (`framed_bytes`); a large one carries its size."""
    return [bytes(buffer) for buffer in buffers] if size_bytes <= SMALL_BODY_BYTES else SizedBody(buffers, size_bytes)


class FrameReader:
    """Reads frames from a body whose buffers may be cut anywhere.

    Payloads go directly into the target, whose size was checked before: without a copy if the body supports that
    (`DirectBody`), otherwise with one.
    """

    def __init__(self, body: AsyncIterator[Buffer]) -> None:
        self._body = body
        # Not isinstance: the check of a protocol takes as long as reading a small frame.
        self._direct: DirectBody | None = body if hasattr(body, "read_into") else None  # type: ignore[assignment]
        self._whole: ArrivedBody | None = body if hasattr(body, "take") else None  # type: ignore[assignment]
        self._left: memoryview = memoryview(b"")
        self._raw = memoryview(bytearray(HEADER_BYTES))
        #: Whether `_raw` is the next header already.
        self._has_header = False

    async def header(self) -> FrameHeader | None:
        """The next frame's header, or None at a clean end. Raises `BadFrame`."""
        if self._whole is not None:
            raw = self._whole.take(HEADER_BYTES)
            if len(raw) < HEADER_BYTES:
                if len(raw):
                    raise BadFrame("the body ended inside a frame")
                return None
        elif self._has_header or await self.fill(self._raw, at_end_ok=True):
            raw, self._has_header = self._raw, False
        else:
            return None
        head = FrameHeader(*_HEADER.unpack(raw))
        if head.payload_bytes > MAX_PAYLOAD_BYTES or head.codec not in NAMES:
            raise BadFrame(f"a frame of {head.payload_bytes} bytes in codec {head.codec}")
        return head

    async def payload(self, memory: memoryview, size_bytes: int) -> None:
        """Fill the first bytes with a frame's payload. Memory behind them is free for what follows: the header of the
        next frame, which must come, is read along with them, because each read that has to wait costs a turn of the
        loop. Raises `BadFrame`."""
        behind = size_bytes + HEADER_BYTES
        if self._direct is None or len(memory) < behind:
            await self.fill(memory[:size_bytes])
            return
        await self.fill(memory[:behind])
        self._raw[:] = memory[size_bytes:behind]
        self._has_header = True

    async def blob(self, size_bytes: int) -> memoryview:
        """The next bytes, which the caller may keep: without a copy where the whole body is here. Raises `BadFrame`."""
        if self._whole is not None:
            piece = self._whole.take(size_bytes)
            if len(piece) < size_bytes:
                raise BadFrame("the body ended inside a frame")
            return piece
        piece = new_memory(size_bytes)
        await self.fill(piece)
        return piece

    async def fill(self, target: memoryview, *, at_end_ok: bool = False) -> bool:
        """Fill the target with the next bytes; False at the end of the body, if that is allowed. Raises `BadFrame`."""
        filled, size = 0, len(target)
        if self._direct is not None:
            filled = await self._direct.read_into(target)
            if filled < size and (filled or not at_end_ok):
                raise BadFrame("the body ended inside a frame")
            return filled == size
        while filled < size:
            if not len(self._left):
                try:
                    self._left = memoryview(await anext(self._body)).cast("B")
                except StopAsyncIteration:
                    if filled == 0 and at_end_ok:
                        return False
                    raise BadFrame("the body ended inside a frame") from None
                continue
            piece = self._left[: size - filled]
            target[filled : filled + len(piece)] = piece
            self._left = self._left[len(piece) :]
            filled += len(piece)
        return True


#: Gives memory for a number of encoded bytes: new memory, or the same each time.
Allocate = Callable[[int], memoryview]


def new_memory(size_bytes: int) -> memoryview:
    """New memory, not zeroed, because it is about to be filled."""
    return np.empty(size_bytes, dtype=np.uint8).data


class ReusedMemory:
    """Reuses the same memory for each array: fresh pages cost several times as much as the copy into them."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def __call__(self, size_bytes: int) -> memoryview:
        if len(self._memory) < size_bytes:
            self._memory = new_memory(size_bytes)
        return self._memory[:size_bytes]


async def read_encoded(
    reader: FrameReader,
    shard: int,
    part: Part,
    size: int,
    allocate: Allocate = new_memory,
    *,
    version: int | None = None,
) -> tuple[memoryview, CodecName]:
    """Read the next `size` values without decoding them, and their codec.

    Raises `BadFrame` if they are not the given part of the given shard, or not of the `version`, if one is given.
    """
    encoded = memoryview(b"")
    pieces: list[memoryview] = []
    filled = at_byte = 0
    codec: CodecName = "float32"
    while filled < size:
        head = await reader.header()
        if head is None:
            raise BadFrame(f"shard {shard} is missing")
        if head.shard != shard or head.part != part or head.offset != filled:
            raise BadFrame(f"expected shard {shard} from value {filled}, got shard {head.shard} from {head.offset}")
        if version is not None and head.version != version:
            raise BadFrame(f"expected shard {shard} in version {version}, got version {head.version}")
        if filled and NAMES[head.codec] != codec:
            raise BadFrame(f"shard {shard} changes its codec at value {filled}")
        codec = NAMES[head.codec]
        if CODECS[codec].has_fixed_size:
            count = _counted(head, size - filled)
            if not filled:
                encoded = allocate(CODECS[codec].size_bytes(size))
            await reader.payload(encoded[at_byte:], head.payload_bytes)
            at_byte += head.payload_bytes
        else:
            if head.payload_bytes > codecs.arithmetic(codec).max_bytes(size - filled):
                raise BadFrame(f"{head.payload_bytes} bytes of {codec} are more than {size - filled} values need")
            payload = (new_memory if filled else allocate)(head.payload_bytes)
            pieces.append(payload)
            await reader.fill(payload)
            count = _counted(head, size - filled, payload)
        filled += count
    if pieces:
        encoded = pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))
    return encoded, codec


async def read_blob(reader: FrameReader, shard: int, part: Part, limit_bytes: int) -> tuple[memoryview, bool]:
    """Read the bytes of `blob_frames`, and whether they are the last of their kind. Raises `BadFrame`, also for more
    than `limit_bytes`."""
    pieces: list[memoryview] = []
    filled, size, is_last = 0, 1, False
    while filled < size:
        head = await reader.header()
        if head is None or head.shard != shard or head.part != part or head.offset != filled:
            raise BadFrame(f"expected bytes of shard {shard} from {filled}, got {head}")
        size, is_last = head.version, bool(head.step)
        if not 0 < head.payload_bytes <= size - filled or size > limit_bytes:
            raise BadFrame(f"{head.payload_bytes} of {size} bytes after {filled}; at most {limit_bytes} are read")
        piece = await reader.blob(head.payload_bytes)
        pieces.append(piece)
        filled += head.payload_bytes
    return (pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))), is_last


def _counted(head: FrameHeader, most: int, payload: memoryview | None = None) -> int:
    """How many of the next `most` values of an array a frame brings; `payload`: what it has, where that determines it.
    Raises `BadFrame`, also for a payload that could not be decoded."""
    codec = NAMES[head.codec]
    try:
        if payload is None:
            count = CODECS[codec].count_values(head.payload_bytes, most)
        else:
            count = codecs.arithmetic(codec).count_values(payload, most)
    except ValueError as error:
        raise BadFrame(f"shard {head.shard} from value {head.offset}: {error}") from error
    if count == 0:
        raise BadFrame(f"shard {head.shard}: a frame brings nothing after value {head.offset}")
    return count


async def read_array(reader: FrameReader, shard: int, part: Part, size: int) -> tuple[Vector, memoryview, CodecName]:
    """Read the next `size` values as float32, with the payload as received, for forwarding, and its codec. Values in
    the codec float32 are the payload's own memory. Raises `BadFrame`."""
    encoded, codec = await read_encoded(reader, shard, part, size)
    return codecs.decoded(encoded, codec, size), encoded, codec

"""Compresses and decompresses the payload of a chunk, never to more bytes than allowed. Pure.

Snappy is the framing format: an identifier of the stream, then frames of at most 64 KiB, each with a masked CRC-32C.
The sizes in the frames are added up before anything is decompressed: the output is allocated once, and a chunk that
announces too much costs nothing. Gzip announces no size: it is decompressed up to the limit.
Source: google/snappy, `framing_format.txt`; RFC 1952.
"""

from __future__ import annotations

import zlib

from p2pnode.training.dispatch.recordio.layout import Compressor, MalformedChunk

#: The first frame of each stream.
SNAPPY_IDENTIFIER = b"\xff\x06\x00\x00sNaPpY"
GZIP_MAGIC = b"\x1f\x8b\x08"

_COMPRESSED, _UNCOMPRESSED, _IDENTIFIER, _FIRST_SKIPPABLE = 0x00, 0x01, 0xFF, 0x80
_FRAME_HEAD_BYTES = 4
_FRAME_CRC_BYTES = 4
#: The most bytes a frame may become.
_FRAME_BYTES = 65_536
#: zlib's level 6: what Go's writer takes.
_GZIP_LEVEL = 6
#: zlib: a window of 32 KiB, and the header and trailer of gzip.
_GZIP_WINDOW = 31


class OutputTooLarge(Exception):
    """The payload would become more bytes than allowed."""


def compress(payload: bytes, compressor: Compressor) -> bytes:
    """The payload as it is in the file."""
    if compressor is Compressor.SNAPPY:
        import cramjam  # 2 MB of code that nobody else needs

        return bytes(cramjam.snappy.compress(payload))
    if compressor is Compressor.GZIP:
        packer = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP_WINDOW)
        return packer.compress(payload) + packer.flush()
    return payload


def decompress(payload: bytes, compressor: Compressor, max_bytes: int) -> bytes:
    """The records of a payload. Raises `MalformedChunk` if it is not of this compressor, and `OutputTooLarge` if it
    would become more than `max_bytes`."""
    if compressor is Compressor.SNAPPY:
        return _unsnap(payload, max_bytes)
    if compressor is Compressor.GZIP:
        return _gunzip(payload, max_bytes)
    if len(payload) > max_bytes:
        raise OutputTooLarge
    return payload


def _unsnap(payload: bytes, max_bytes: int) -> bytes:
    import cramjam

    size = snappy_bytes(payload)
    if size > max_bytes:
        raise OutputTooLarge
    output = bytearray(size)
    try:
        written = cramjam.snappy.decompress_into(payload, output)
    except cramjam.DecompressionError as error:
        raise MalformedChunk(f"the payload is not what its snappy frames announce: {error}") from None
    if written != size:
        raise MalformedChunk(f"the payload decompresses to {written} bytes, and its snappy frames announce {size}")
    return bytes(output)


def snappy_bytes(payload: bytes) -> int:
    """How many bytes the frames of a snappy stream announce in all. Raises `MalformedChunk`."""
    if not payload.startswith(SNAPPY_IDENTIFIER):
        raise MalformedChunk("the payload is not a snappy stream: it does not begin with the identifier of the format")
    total, at, end = 0, 0, len(payload)
    while at < end:
        if at + _FRAME_HEAD_BYTES > end:
            raise MalformedChunk("the payload ends inside the head of a snappy frame")
        kind = payload[at]
        body = at + _FRAME_HEAD_BYTES
        at = body + (payload[at + 1] | payload[at + 2] << 8 | payload[at + 3] << 16)
        if at > end:
            raise MalformedChunk("the payload ends inside a snappy frame")
        if kind == _COMPRESSED:
            size = _varint(payload, body + _FRAME_CRC_BYTES, at)
        elif kind == _UNCOMPRESSED:
            size = at - body - _FRAME_CRC_BYTES
        elif kind < _FIRST_SKIPPABLE:
            raise MalformedChunk(f"a snappy frame is of type {kind:#04x}, which nobody may skip")
        else:
            if kind == _IDENTIFIER and payload[body:at] != SNAPPY_IDENTIFIER[_FRAME_HEAD_BYTES:]:
                raise MalformedChunk("an identifier inside the snappy stream is of another format")
            continue
        if not 0 <= size <= _FRAME_BYTES:
            raise MalformedChunk(f"a snappy frame announces {size} bytes, and the format allows {_FRAME_BYTES}")
        total += size
    return total


def _varint(payload: bytes, at: int, end: int) -> int:
    """The length at the beginning of a raw snappy block."""
    value = 0
    for shift in range(0, 35, 7):
        if at >= end:
            break
        value |= (payload[at] & 0x7F) << shift
        if payload[at] < 0x80:
            return value
        at += 1
    raise MalformedChunk("a snappy frame has no length")


def _gunzip(payload: bytes, max_bytes: int) -> bytes:
    """Several members one after the other are one stream, as for every gzip reader."""
    parts: list[bytes] = []
    room, rest = max_bytes, payload
    while rest:
        unpacker = zlib.decompressobj(_GZIP_WINDOW)
        try:
            # One byte more than allowed tells a stream that ends at the limit from one that goes on.
            part = unpacker.decompress(rest, room + 1)
        except zlib.error as error:
            raise MalformedChunk(f"the payload is not gzip: {error}") from None
        if len(part) > room:
            raise OutputTooLarge
        if not unpacker.eof:
            raise MalformedChunk("the payload ends inside its gzip stream")
        parts.append(part)
        room -= len(part)
        rest = unpacker.unused_data
    return parts[0] if len(parts) == 1 else b"".join(parts)

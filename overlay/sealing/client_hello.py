"""Parses the server name of a TLS ClientHello, before TLS sends anything. Pure."""

from __future__ import annotations

from p2pnode.overlay.errors import Refused

#: That of p2pnode has about 520 bytes, or 1,800 with a post-quantum key share.
MAX_HELLO_BYTES = 4096
_RECORD_HEAD = 5
_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 22, 1, 0, 0


def server_name(data: bytes) -> bytes | None:
    """The server name in a ClientHello (RFC 8446 section 4.1.2, RFC 6066 section 3); None while it is incomplete.

    Raises `Refused` for anything but one ClientHello in one record.
    """
    if data[:1] and data[0] != _HANDSHAKE:
        raise Refused("stranger")
    if len(data) < _RECORD_HEAD:
        return None
    size = int.from_bytes(data[3:5], "big")
    if size > MAX_HELLO_BYTES - _RECORD_HEAD or size < 4:
        raise Refused("stranger")
    record = data[_RECORD_HEAD : _RECORD_HEAD + size]
    if record[:1] and record[0] != _CLIENT_HELLO:
        raise Refused("stranger")
    if len(record) < size:
        return None
    hello = _Reader(record[4:])
    hello.skip(2 + 32)
    hello.skip(hello.read_int(1))
    hello.skip(hello.read_int(2))
    hello.skip(hello.read_int(1))
    extensions = _Reader(hello.take(hello.read_int(2)))
    while extensions.left:
        kind, content = extensions.read_int(2), _Reader(extensions.take(extensions.read_int(2)))
        if kind == _SERVER_NAME:
            names = _Reader(content.take(content.read_int(2)))
            if names.read_int(1) == _HOST_NAME:
                return names.take(names.read_int(2))
    raise Refused("stranger")


class _Reader:
    """Reads fields one after the other. Raises `Refused` where the data ends."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._offset = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._offset

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise Refused("stranger")
        self._offset += size
        return self._data[self._offset - size : self._offset]

    def skip(self, size: int) -> None:
        self.take(size)

    def read_int(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

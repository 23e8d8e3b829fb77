"""Reads the server name out of a TLS ClientHello, before any TLS is answered. Pure."""

from __future__ import annotations

from overlay.sealing.refusal import Refused

#: A ClientHello of ours has about 520 bytes, 1,800 with a post-quantum key share.
MOST_HELLO_BYTES = 4096
_RECORD_HEAD = 5
_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 22, 1, 0, 0


def server_name(beginning: bytes) -> bytes | None:
    """The server name in a ClientHello (RFC 8446 section 4.1.2, RFC 6066 section 3); None while bytes are missing.

    Raises `Refused` for anything else than one whole ClientHello in one record.
    """
    if beginning[:1] and beginning[0] != _HANDSHAKE:
        raise Refused("stranger")
    if len(beginning) < _RECORD_HEAD:
        return None
    size = int.from_bytes(beginning[3:5], "big")
    if size > MOST_HELLO_BYTES - _RECORD_HEAD or size < 4:
        raise Refused("stranger")
    record = beginning[_RECORD_HEAD : _RECORD_HEAD + size]
    if record[:1] and record[0] != _CLIENT_HELLO:
        raise Refused("stranger")
    if len(record) < size:
        return None
    hello = _Reader(record[4:])
    hello.skip(2 + 32)
    hello.skip(hello.number(1))
    hello.skip(hello.number(2))
    hello.skip(hello.number(1))
    extensions = _Reader(hello.take(hello.number(2)))
    while extensions.left:
        kind, content = extensions.number(2), _Reader(extensions.take(extensions.number(2)))
        if kind == _SERVER_NAME:
            names = _Reader(content.take(content.number(2)))
            if names.number(1) == _HOST_NAME:
                return names.take(names.number(2))
    raise Refused("stranger")


class _Reader:
    """Takes a message apart; what is not there is refused."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise Refused("stranger")
        self._at += size
        return self._data[self._at - size : self._at]

    def skip(self, size: int) -> None:
        self.take(size)

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

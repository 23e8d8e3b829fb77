"""Takes a small message that is here as a whole out of a connection's buffer, and writes one, in one pass each.

Most requests and answers of a node are a kilobyte, and begin as both ends of this project begin them. Read part by part
(`http1`, `framing`) such a message costs ten times as much. What looks otherwise, or is not here yet, is left in the
buffer for those. Pure.
"""

from __future__ import annotations

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.sockets import http1 as http
from p2pnode.overlay.sockets.framing import LENGTH_BYTES, WholeBody, WholeMessage

_END = b"\r\n\r\n"
_LENGTH = b"Content-Length: "
_OK = http.response_start(http.OK) + _LENGTH
#: Of a response: the digits of the size, and the empty line.
_SIZE_BYTES = http.MAX_SIZE_DIGITS + len(_END)


def request(to: Address, name: str, message: bytes) -> bytes:
    """A request whose head and body are `message`."""
    return b"%b%b%d\r\n\r\n%b" % (http.request_start(to.host, to.port, name), _LENGTH, len(message), message)


def response(message: bytes) -> bytes:
    """An answer to a request, after which others may follow on the connection."""
    return b"%b%d\r\n\r\n%b" % (_OK, len(message), message)


def take_request(buffered: bytearray) -> tuple[http.RequestHead, WholeMessage] | None:
    """Which request it is, and its head and body."""
    end = buffered.find(_END, 0, http.MAX_KNOWN_BYTES)
    if end < 0:
        return None
    start, field, digits = bytes(buffered[:end]).rpartition(_LENGTH)
    if not field or not digits.isdigit() or len(digits) > http.MAX_SIZE_DIGITS:
        return None
    size_bytes, begin = int(digits), end + len(_END)
    if len(buffered) < begin + size_bytes:
        return None
    known = http.request_without_length(start)
    if known is None or not known.name or (message := _take_message(buffered, begin, size_bytes)) is None:
        return None
    return known, message


def take_response(buffered: bytearray) -> WholeMessage | None:
    """Head and body of an answer to a request that was not refused."""
    if not buffered.startswith(_OK):
        return None
    end = buffered.find(_END, len(_OK), len(_OK) + _SIZE_BYTES)
    digits = buffered[len(_OK) : end]
    if end < 0 or not digits.isdigit():
        return None
    size_bytes, begin = int(digits), end + len(_END)
    return _take_message(buffered, begin, size_bytes) if len(buffered) >= begin + size_bytes else None


def _take_message(buffered: bytearray, begin: int, size_bytes: int) -> WholeMessage | None:
    """Head and body of a message of so many bytes from here on; takes all up to its end."""
    start, stop = begin + LENGTH_BYTES, begin + size_bytes
    middle = start + int.from_bytes(buffered[begin:start], "big")
    if size_bytes < LENGTH_BYTES or middle > stop:
        return None
    message = bytes(buffered[start:middle]), WholeBody(bytes(buffered[middle:stop]))
    del buffered[:stop]
    return message

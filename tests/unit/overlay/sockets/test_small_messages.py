"""Small messages in one pass: the same bytes as part by part, and only what is here as a whole is taken."""

from __future__ import annotations

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.sockets import http1 as http
from p2pnode.overlay.sockets import small_messages
from p2pnode.overlay.sockets.framing import small_message

TO = Address("10.0.0.1", 8468)
MESSAGE = small_message(b"head", [b"bo", b"dy"]) or b""
REQUEST = small_messages.request(TO, "echo", MESSAGE)
RESPONSE = small_messages.response(MESSAGE)


def test_the_bytes_are_those_of_http() -> None:
    """Nodes that read and write part by part see no difference."""
    assert http.request_head(TO, "echo", len(MESSAGE)) + MESSAGE == REQUEST
    assert http.response_head(http.OK, len(MESSAGE), is_last=False) + MESSAGE == RESPONSE


def test_a_whole_message_is_taken_and_what_follows_stays() -> None:
    """Name, head and body of a request, head and body of a response."""
    buffered = bytearray(REQUEST + b"next")
    taken = small_messages.take_request(buffered)
    assert taken is not None
    known, (head, body) = taken
    assert (known.name, head, bytes(body.take(100)), buffered) == ("echo", b"head", b"body", b"next")
    buffered = bytearray(RESPONSE + b"next")
    found = small_messages.take_response(buffered)
    assert found is not None
    assert (found[0], bytes(found[1].take(100)), buffered) == (b"head", b"body", b"next")


@pytest.mark.parametrize("missing", range(1, len(REQUEST) + 1))
def test_a_message_that_is_not_here_as_a_whole_is_left(missing: int) -> None:
    """Whatever is missing at its end."""
    for take, whole in ((small_messages.take_request, REQUEST), (small_messages.take_response, RESPONSE)):
        buffered = bytearray(whole[:-missing])
        assert take(buffered) is None
        assert buffered == whole[:-missing]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"POST", b"GET"),
        (b"/p2p/echo", b"/"),
        (b"X-P2PNode: 1\r\n", b""),
        (b"Content-Length: 12", b"Content-Length: twelve"),
        (b"Content-Length: 12", b"Content-Length: 3"),
        (b"Content-Length: 12", b"Content-Length: " + b"0" * 16 + b"12"),
        (b"Content-Length: 12", b"Content-Length: 12\r\nConnection: close"),
        (b"Content-Length: 12", b"Transfer-Encoding: chunked"),
        (b"\0\0\0\4", b"\0\0\0\x0b"),
        (b"200 OK", b"409 Conflict"),
        (b"octet-stream", b"json"),
    ],
)
def test_what_looks_otherwise_is_left_to_the_general_parser(old: bytes, new: bytes) -> None:
    """It refuses it, or reads it part by part."""
    for take, whole in ((small_messages.take_request, REQUEST), (small_messages.take_response, RESPONSE)):
        if old in whole:
            buffered = bytearray(whole.replace(old, new, 1))
            assert take(buffered) is None
            assert buffered == whole.replace(old, new, 1)

"""The server name of a ClientHello: read once it is complete, and any other bytes refused."""

from __future__ import annotations

import contextlib
import random

import pytest

from p2pnode.overlay.errors import Refused
from p2pnode.overlay.sealing.tickets import MAX_HELLO_BYTES, server_name
from tests.unit.overlay.sealing.hellos import hello


def test_the_name_is_read_once_the_hello_is_complete() -> None:
    """Every proper prefix gives None, the whole ClientHello its server name."""
    data = hello("example.org")

    assert {server_name(data[:size]) for size in range(len(data))} == {None}
    assert server_name(data) == b"example.org"


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1",
        b"\x15\x03\x01\x00\x02\x02\x28",
        b"\x16\x03\x01\xff\xff",
        b"\x16\x03\x01\x00\x03\x01",
        b"\x16\x03\x01\x00\x04\x02abc",
        b"\x16\x03\x01\x00\x04\x01\x00\x00\x00",
    ],
    ids=["HTTP", "alert", "too long", "too short", "another handshake message", "empty"],
)
def test_other_first_bytes_are_refused(data: bytes) -> None:
    """What cannot become a ClientHello in one record is refused at once."""
    with pytest.raises(Refused, match="stranger"):
        server_name(data)


def test_a_hello_without_a_server_name_is_refused() -> None:
    """TLS to a bare address sends no server name."""
    with pytest.raises(Refused, match="stranger"):
        server_name(hello("127.0.0.1"))


def test_any_bytes_give_a_name_or_a_refusal() -> None:
    """Random bytes, and a ClientHello with random changes, raise no other error."""
    rng = random.Random(11)
    print("seed 11")
    beginning = hello("example.org")
    for _ in range(3000):
        junk = bytearray(beginning[: rng.randint(0, len(beginning))])
        for _ in range(rng.randint(0, 6)):
            if junk:
                junk[rng.randrange(len(junk))] = rng.randrange(256)
        for data in (bytes(junk), rng.randbytes(rng.randint(0, 600)), b"\x16\x03\x01" + rng.randbytes(200)):
            with contextlib.suppress(Refused):
                name = server_name(data)
                assert name is None or len(name) <= MAX_HELLO_BYTES

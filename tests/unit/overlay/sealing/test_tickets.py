"""Admission tickets: which first bytes of a connection are admitted, and the reasons of refusals."""

from __future__ import annotations

import contextlib
import random

import pytest

from p2pnode.overlay.errors import Refused
from p2pnode.overlay.sealing import tickets
from p2pnode.overlay.sealing.handshake import CLOCK_BOUND_S
from p2pnode.overlay.sealing.swarm_key import KeyRing, SwarmKey
from p2pnode.overlay.sealing.tickets import MAX_HELLO_BYTES, TicketVerdict, TicketVerifier, server_name
from tests.unit.overlay.sealing.hellos import hello

KEY, NEXT_KEY = SwarmKey(b"\1" * 32), SwarmKey(b"\2" * 32)
RING = KeyRing((KEY,))
NODE, OTHER = b"n" * 20, b"o" * 20
WALL = 1_767_225_600.0


def verifier(
    own_id: bytes = NODE, keys: KeyRing = RING, run: str = "tests", started: float = WALL - 10
) -> TicketVerifier:
    token = random.Random(f"{own_id.hex()}/{started}/{keys.fingerprints}").randbytes
    return TicketVerifier(keys, run, own_id, token, started_wall=started)


def refusal(gate: TicketVerifier, data: bytes, wall: float = WALL) -> str:
    with pytest.raises(Refused) as caught:
        gate.verify(data, wall)
    return str(caught.value)


def test_a_ticket_is_admitted_once() -> None:
    """A ClientHello with a ticket for this node, or for any node, is admitted once."""
    gate, member = verifier(), verifier(OTHER)
    for recipient in (NODE, b""):
        data = hello(member.make_ticket(recipient, WALL))

        assert gate.verify(data, WALL) is TicketVerdict.ADMITTED
        assert refusal(gate, data) == "replayed"


def test_reasons_of_refusals() -> None:
    """Wrong key, run or recipient, clocks beyond the bound, and a time before this node's start have their reasons."""
    gate = verifier()
    cases = {
        "another key": (verifier(OTHER, KeyRing((NEXT_KEY,))).make_ticket(NODE, WALL), "stranger"),
        "another run": (verifier(OTHER, run="other").make_ticket(NODE, WALL), "stranger"),
        "another recipient": (verifier(OTHER).make_ticket(OTHER, WALL), "stranger"),
        "early clock": (verifier(OTHER).make_ticket(NODE, WALL - CLOCK_BOUND_S - 1), "clock"),
        "late clock": (verifier(OTHER).make_ticket(NODE, WALL + CLOCK_BOUND_S + 1), "clock"),
        "before our start": (verifier(OTHER).make_ticket(NODE, WALL - 11), "before_start"),
        "no ticket": ("example.org", "stranger"),
    }

    assert {name: refusal(gate, hello(ticket)) for name, (ticket, _) in cases.items()} == {
        name: reason for name, (_, reason) in cases.items()
    }


def test_a_wrong_clock_is_reported_for_members_only() -> None:
    """The difference of a member's clock is reported; a ticket under another key is not."""
    ahead: list[float] = []
    gate = TicketVerifier(KeyRing((KEY,)), "tests", NODE, bytes, started_wall=WALL, clock_differs=ahead.append)
    refusal(gate, hello(verifier(OTHER).make_ticket(NODE, WALL + 90)))
    refusal(gate, hello(verifier(OTHER, KeyRing((NEXT_KEY,))).make_ticket(NODE, WALL + 90)))

    assert ahead == [pytest.approx(90)]


def test_tickets_during_a_rotation() -> None:
    """A ticket under either of two valid keys is admitted; one under a removed key is refused."""
    gate = verifier(keys=KeyRing((NEXT_KEY, KEY)))
    old, new = verifier(OTHER), verifier(OTHER, KeyRing((NEXT_KEY,)))
    assert gate.verify(hello(old.make_ticket(NODE, WALL)), WALL) is TicketVerdict.ADMITTED
    assert gate.verify(hello(new.make_ticket(NODE, WALL)), WALL) is TicketVerdict.ADMITTED
    gate.use(KeyRing((NEXT_KEY,)))

    assert refusal(gate, hello(old.make_ticket(NODE, WALL + 1))) == "stranger"


def test_an_incomplete_hello_gets_no_verdict_yet() -> None:
    """Every proper prefix of a ClientHello is incomplete; the whole one is admitted."""
    gate = verifier()
    data = hello(verifier(OTHER).make_ticket(NODE, WALL))
    verdicts = {gate.verify(data[:size], WALL) for size in range(len(data))}

    assert verdicts == {TicketVerdict.INCOMPLETE}
    assert gate.verify(data, WALL) is TicketVerdict.ADMITTED


def test_forgotten_tickets_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """When memory is full the oldest ticket is forgotten, and tickets up to its time are refused from then on."""
    monkeypatch.setattr(tickets, "MAX_TICKETS", 2)
    gate, member = verifier(), verifier(OTHER)
    hellos = [hello(member.make_ticket(NODE, WALL + number)) for number in range(3)]
    for data in hellos:
        assert gate.verify(data, WALL) is TicketVerdict.ADMITTED

    assert refusal(gate, hellos[0]) == "before_start"
    assert refusal(gate, hellos[1]) == "replayed"


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

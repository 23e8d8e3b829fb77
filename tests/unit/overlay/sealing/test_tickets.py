"""Admission tickets: which first bytes of a connection are admitted, and the reasons of refusals."""

from __future__ import annotations

import random

import pytest

from p2pnode.overlay.errors import Refused
from p2pnode.overlay.sealing import tickets
from p2pnode.overlay.sealing.handshake import CLOCK_BOUND_S
from p2pnode.overlay.sealing.swarm_key import KeyRing, SwarmKey
from p2pnode.overlay.sealing.tickets import TicketVerdict, TicketVerifier
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

"""Which handshake inits are accepted: fresh ones, once each."""

from __future__ import annotations

import pytest

from p2pnode.overlay.errors import Refused
from p2pnode.overlay.identity import Identity, identity_from_seed
from p2pnode.overlay.sealing import handshake
from p2pnode.overlay.sealing.handshake import (
    CLOCK_BOUND_S,
    Epoch,
    HandshakeInit,
    InitFilter,
    make_init,
    microseconds,
)
from p2pnode.overlay.sealing.swarm_key import SwarmKey

EPOCH, OTHER_EPOCH = Epoch(SwarmKey(b"\1" * 32), "tests"), Epoch(SwarmKey(b"\2" * 32), "tests")
SENDER = identity_from_seed(b"s" * 32)
STARTED = 1_767_225_600.0
WALL = STARTED + 100.0


def init_at(wall: float, sender: Identity = SENDER, boot: bytes = b"b" * 8, epoch: Epoch = EPOCH) -> HandshakeInit:
    return make_init(sender, epoch, b"r" * 20, boot, microseconds(wall), b"i" * 8, b"e" * 32)


def filter_of(clocks: list[float] | None = None) -> InitFilter:
    return InitFilter(STARTED, lambda _node_id, ahead_s: (clocks if clocks is not None else []).append(ahead_s))


def refusal(inits: InitFilter, init: HandshakeInit, wall: float = WALL) -> str:
    """The reason for which an init is refused, "" if it is accepted."""
    try:
        inits.check(init, EPOCH, wall)
    except Refused as reason:
        return str(reason)
    return ""


@pytest.mark.parametrize("ahead_s", [CLOCK_BOUND_S + 1, -CLOCK_BOUND_S - 1])
def test_a_clock_beyond_the_bound_is_refused_and_reported_once(ahead_s: float) -> None:
    """Both directions are refused; the difference is reported once per node, and only for a valid signature."""
    clocks: list[float] = []
    inits = filter_of(clocks)

    assert refusal(inits, init_at(WALL + ahead_s, epoch=OTHER_EPOCH)) == "clock"
    assert clocks == []
    assert [refusal(inits, init_at(WALL + ahead_s)) for _ in range(3)] == ["clock"] * 3
    assert clocks == [pytest.approx(ahead_s)]


def test_an_unsigned_init_is_refused_and_not_remembered() -> None:
    """A signature for another epoch is invalid, and does not block the init of the real sender."""
    inits = filter_of()

    assert refusal(inits, init_at(WALL + 5, epoch=OTHER_EPOCH)) == "unsigned"
    assert refusal(inits, init_at(WALL)) == ""


def test_forgotten_senders_cannot_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """When memory is full the oldest sender is forgotten, and inits up to its time are refused from then on."""
    monkeypatch.setattr(handshake, "MAX_SENDERS", 2)
    inits = filter_of()
    senders = [identity_from_seed(bytes([number]) * 32) for number in range(3)]
    for number, sender in enumerate(senders):
        assert refusal(inits, init_at(WALL + number, sender)) == ""

    assert refusal(inits, init_at(WALL, senders[0])) == "before_start"
    assert refusal(inits, init_at(WALL + 1, senders[1])) == "replayed"

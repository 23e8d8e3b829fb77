"""The two handshake messages: what they contain, whose signature is valid, and the keys that both ends derive."""

from __future__ import annotations

import dataclasses

import pytest

from p2pnode.overlay.errors import Refused
from p2pnode.overlay.identity import Identity, identity_from_seed
from p2pnode.overlay.sealing import handshake
from p2pnode.overlay.sealing.handshake import (
    CLOCK_BOUND_S,
    INIT,
    INIT_BYTES,
    RESPONSE,
    RESPONSE_BYTES,
    Epoch,
    HandshakeInit,
    HandshakeResponse,
    InitFilter,
    make_init,
    make_response,
    microseconds,
    session_keys,
)
from p2pnode.overlay.sealing.swarm_key import SwarmKey

EPOCH, OTHER_EPOCH = Epoch(SwarmKey(b"\1" * 32), "tests"), Epoch(SwarmKey(b"\1" * 32), "other")
INITIATOR, RESPONDER = identity_from_seed(b"i" * 32), identity_from_seed(b"r" * 32)
EPHEMERAL, RESPONSE_EPHEMERAL = b"e" * 32, b"f" * 32
INIT_MESSAGE = make_init(INITIATOR, EPOCH, RESPONDER.node_id, b"boot---i", 1_000_000, b"index--i", EPHEMERAL)
RESPONSE_MESSAGE = make_response(RESPONDER, EPOCH, INIT_MESSAGE, b"boot---r", b"index--r", RESPONSE_EPHEMERAL)


def test_messages_are_read_as_written() -> None:
    """Both messages survive sealing under the epoch's key, with the documented sizes."""
    init = EPOCH.seal(INIT, INIT_MESSAGE.content, b"n" * 12)
    response = EPOCH.seal(RESPONSE, RESPONSE_MESSAGE.content, b"n" * 12)

    assert (len(init), len(response)) == (INIT_BYTES, RESPONSE_BYTES)
    assert HandshakeInit.read(EPOCH.open(init) or b"") == INIT_MESSAGE
    assert HandshakeResponse.read(EPOCH.open(response) or b"") == RESPONSE_MESSAGE
    assert (INIT_MESSAGE.node_id, RESPONSE_MESSAGE.node_id) == (INITIATOR.node_id, RESPONDER.node_id)
    assert RESPONSE_MESSAGE.init_index == INIT_MESSAGE.index


def test_another_epoch_or_kind_opens_nothing() -> None:
    """The key of another run does not open a message, and neither does a changed first byte."""
    sealed = EPOCH.seal(INIT, INIT_MESSAGE.content, b"n" * 12)

    assert OTHER_EPOCH.open(sealed) is None
    assert EPOCH.open(bytes([RESPONSE]) + sealed[1:]) is None


def test_a_message_of_another_length_is_none() -> None:
    """Content of a wrong size is not read."""
    for size in (0, len(INIT_MESSAGE.content) - 1, len(INIT_MESSAGE.content) + 1):
        assert HandshakeInit.read(bytes(size)) is None
    for size in (0, len(RESPONSE_MESSAGE.content) - 1, len(RESPONSE_MESSAGE.content) + 1):
        assert HandshakeResponse.read(bytes(size)) is None


def test_signatures_bind_sender_epoch_and_init() -> None:
    """A signature is invalid under another epoch, for another public key, and for a response to another init."""
    other_init = make_init(INITIATOR, EPOCH, RESPONDER.node_id, b"boot---i", 1_000_001, b"index--i", EPHEMERAL)

    assert INIT_MESSAGE.is_signed(EPOCH)
    assert not INIT_MESSAGE.is_signed(OTHER_EPOCH)
    assert not dataclasses.replace(INIT_MESSAGE, public_key=RESPONDER.public_key).is_signed(EPOCH)
    assert RESPONSE_MESSAGE.is_signed(EPOCH, INIT_MESSAGE)
    assert not RESPONSE_MESSAGE.is_signed(EPOCH, other_init)
    assert not RESPONSE_MESSAGE.is_signed(OTHER_EPOCH, INIT_MESSAGE)


def test_both_ends_derive_the_same_keys() -> None:
    """One key per direction, equal at both ends and different for another response."""
    ours = session_keys(EPOCH, INIT_MESSAGE, RESPONSE_MESSAGE, EPHEMERAL, RESPONSE_MESSAGE.ephemeral)
    theirs = session_keys(EPOCH, INIT_MESSAGE, RESPONSE_MESSAGE, RESPONSE_EPHEMERAL, INIT_MESSAGE.ephemeral)
    again = make_response(RESPONDER, EPOCH, INIT_MESSAGE, b"boot---s", b"index--r", RESPONSE_EPHEMERAL)

    assert ours is not None
    assert ours == theirs
    assert ours[0] != ours[1]
    assert session_keys(EPOCH, INIT_MESSAGE, again, EPHEMERAL, again.ephemeral) != ours


def test_golden_keys() -> None:
    """Messages and keys of fixed inputs never change: nodes of different versions share a swarm."""
    keys = session_keys(EPOCH, INIT_MESSAGE, RESPONSE_MESSAGE, EPHEMERAL, RESPONSE_MESSAGE.ephemeral)

    assert keys is not None
    assert [key.hex()[:16] for key in keys] == ["1a5b0be2d6cfe3c2", "7c2bc37cb3b896c3"]
    assert INIT_MESSAGE.content[-64:].hex()[:16] == "a8be45acf6e172a2"
    assert RESPONSE_MESSAGE.content[-64:].hex()[:16] == "9fa9ee26ab2ed536"


@pytest.mark.parametrize("point", [bytes(32), b"\1" + bytes(31)], ids=["zero", "one"])
def test_an_ephemeral_key_of_low_order_gives_no_keys(point: bytes) -> None:
    """A public key that forces the shared secret to zero is refused."""
    assert session_keys(EPOCH, INIT_MESSAGE, RESPONSE_MESSAGE, EPHEMERAL, point) is None


# -- which handshake inits are accepted


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

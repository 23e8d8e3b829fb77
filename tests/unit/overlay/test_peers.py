"""Peers: how heartbeats change what is known, and which peers count as workers and for barriers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.peers import (
    STALL_FLOOR_S,
    STALL_STEPS,
    VERSION_CHARACTERS,
    Activity,
    Contact,
    Heartbeat,
    Peer,
    PeerTable,
    shown_version,
)
from tests.harness.builders.peers import heartbeat


def test_steps_only_increase_within_an_incarnation() -> None:
    """A heartbeat that was overtaken on its way changes nothing; a newer incarnation starts again."""
    table = PeerTable()
    changes = [
        table.observe(heartbeat(step=5, activity=2), Address("10.0.0.1", 8468), 1.0),
        table.observe(heartbeat(step=3, activity=3), Address("10.0.0.1", 8468), 2.0),
        table.observe(heartbeat(step=2, incarnation=2, activity=2), Address("10.0.0.1", 8468), 3.0),
        table.observe(heartbeat(step=9, activity=2), Address("10.0.0.1", 8468), 4.0),
    ]
    peer = table.get(b"n" * 20)

    assert [change and change.kind for change in changes] == ["up", None, "restarted", None]
    assert peer is not None
    assert (peer.step, peer.incarnation, peer.activity) == (2, 2, Activity.TRAINING)


def test_progress_is_a_rising_step_or_the_beginning_of_training() -> None:
    """`last_progress` changes with step, incarnation, READY and TRAINING, and with nothing else."""
    table = PeerTable()
    progress = []
    for now, change in enumerate(
        [
            {},
            {},
            {"activity": 1},
            {"activity": 2},
            {"activity": 2},
            {"activity": 2, "step": 1},
            {"activity": 3, "step": 1},
        ]
    ):
        table.observe(heartbeat(**change), Address("10.0.0.1", 8468), float(now))
        peer = table.get(b"n" * 20)
        assert peer is not None
        progress.append(peer.last_progress)

    assert progress == [0.0, 0.0, 2.0, 3.0, 3.0, 5.0, 5.0]


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("0.1.0", "0.1.0"),
        ("0.1\n0.2", ""),
    ],
)
def test_a_version_is_shown_only_if_it_looks_like_one(said: str, shown: str) -> None:
    """It is text that a peer chose, and terminals and pages show it."""
    table = PeerTable()
    table.observe(heartbeat(), Address("10.0.0.1", 8468), 0.0)
    table.note_version(b"n" * 20, "0.0.9")
    table.note_version(b"n" * 20, said)
    table.note_version(b"x" * 20, said)
    peer = table.get(b"n" * 20)
    assert peer is not None
    assert peer.version == shown
    assert len(table) == 1


def test_a_restarted_peer_has_no_version_until_it_says_one() -> None:
    """A restart is how a node is upgraded: the former version would be wrong."""
    table = PeerTable()
    table.observe(heartbeat(), Address("10.0.0.1", 8468), 0.0)
    table.note_version(b"n" * 20, "0.1.0")
    table.observe(heartbeat(step=5), Address("10.0.0.1", 8468), 1.0)
    peer = table.get(b"n" * 20)
    assert peer is not None
    assert peer.version == "0.1.0"
    table.observe(heartbeat(incarnation=2), Address("10.0.0.1", 8468), 2.0)
    assert peer.version == ""
    table.note_version(b"n" * 20, "0.2.0")
    assert peer.version == "0.2.0"


def test_changes_of_address_and_eligibility_and_clones_are_reported() -> None:
    """`moved`, `eligible` and `clone`; a clone changes nothing."""
    table = PeerTable()
    table.observe(heartbeat(), Address("10.0.0.1", 8468), 0.0)
    kinds = [
        table.observe(heartbeat(), Address("10.0.0.2", 8468), 1.0),
        table.observe(heartbeat(eligible=True), Address("10.0.0.2", 8468), 2.0),
        table.observe(heartbeat(boot_id=8, step=50), Address("10.0.0.3", 8468), 3.0),
    ]
    peer = table.get(b"n" * 20)

    assert [change and change.kind for change in kinds] == ["moved", "eligible", "clone"]
    assert peer is not None
    assert (peer.address.host, peer.step) == ("10.0.0.2", 0)
    assert table.at(Address("10.0.0.2", 8468)) == peer.node_id
    assert table.at(Address("10.0.0.1", 8468)) is None


NODE = b"n" * 20
PEER = Peer(
    contact=Contact(NODE, Address("10.0.0.1", 8468)),
    incarnation=1,
    boot_id=1,
    activity=Activity.TRAINING,
    step=3,
    step_seconds=1.0,
    samples=8,
    eligible=True,
    last_heard=100.0,
    last_progress=100.0,
)


def peer(**changes: Any) -> Peer:
    return replace(PEER, **changes)


@pytest.mark.parametrize("activity", [one for one in Activity if one is not Activity.TRAINING])
def test_only_a_node_that_trains_is_a_worker(activity: Activity) -> None:
    """Whatever its progress."""
    assert peer().is_worker(100.0)
    assert not peer(activity=activity).is_worker(100.0)


@pytest.mark.parametrize(("step_s", "allowed_s"), [(0.1, STALL_FLOOR_S), (2.5, STALL_FLOOR_S), (30.0, 120.0)])
def test_a_worker_may_be_idle_for_ten_seconds_or_four_of_its_steps(step_s: float, allowed_s: float) -> None:
    """Whichever is longer, and to the end of it."""
    assert allowed_s == max(STALL_FLOOR_S, STALL_STEPS * step_s)
    idle = peer(step_seconds=step_s, last_heard=100.0 + allowed_s)
    assert idle.is_worker(1000.0)
    assert not replace(idle, last_heard=100.1 + allowed_s).is_worker(1000.0)


def test_time_since_the_last_heartbeat_is_no_idleness() -> None:
    """Nor is a heartbeat that is later than the caller's `now` looked at beyond it."""
    assert peer(last_heard=101.0).is_worker(10_000.0)
    assert peer(last_heard=200.0).is_worker(105.0)
    assert not peer(last_heard=200.0).is_worker(115.0)


def test_a_ready_peer_counts_for_ten_seconds() -> None:
    """From its last progress, or from when the asking node itself began."""
    ready = peer(activity=Activity.READY)
    assert ready.counts_for_barrier(110.0)
    assert not ready.counts_for_barrier(110.1)
    assert ready.counts_for_barrier(130.0, since=120.0)
    assert not ready.counts_for_barrier(130.1, since=120.0)


def test_a_first_step_counts_however_long_it_takes_if_both_began_together() -> None:
    """Of a peer that began more than ten seconds after the asking node, no longer than any idleness."""
    first = peer(step=0, step_seconds=0.0, last_heard=900.0)
    assert first.is_in_first_step
    assert first.counts_for_barrier(900.0, since=90.0)
    assert not first.counts_for_barrier(900.0, since=89.9)
    assert replace(first, last_heard=109.0).counts_for_barrier(900.0, since=89.9)
    assert not peer().is_in_first_step
    assert not replace(first, activity=Activity.STALLED).counts_for_barrier(101.0, since=100.0)


@pytest.mark.parametrize("said", ["0.1.0", "1!2.0-rc_1", "1.2.3.dev4+g0123abc", "v" * VERSION_CHARACTERS])
def test_what_looks_like_a_version_is_shown_as_it_is(said: str) -> None:
    """The characters of PEP 440 and of semantic versions, up to forty."""
    assert shown_version(said) == said


@pytest.mark.parametrize("said", ["", ".1", "v" * (VERSION_CHARACTERS + 1), "0.1\n", "<b>1</b>", "\x1b[31m1", "١.0"])
def test_any_other_text_is_shown_as_nothing(said: str) -> None:
    """It may be shown on terminals and pages, and a peer chose it."""
    assert shown_version(said) == ""


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("node_id", b"n" * 19),
        ("incarnation", 1 << 48),
        ("boot_id", -1),
        ("port", 0),
        ("port", 65536),
        ("host", "h" * 46),
        ("activity", 7),
        ("step", 1 << 48),
        ("step_seconds", 1.1e9),
        ("step_seconds", math.nan),
        ("samples", -1),
    ],
)
def test_a_heartbeat_out_of_range_is_not_decoded(field: str, value: object) -> None:
    """Every field has a range, so nothing behind the decoder meets a larger number."""
    good = Heartbeat(NODE, 1, 1, 8468)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(good), type=Heartbeat) == good
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.structs.replace(good, **{field: value})), type=Heartbeat)

"""The table of peers: how heartbeats change what is known."""

from __future__ import annotations

import random
from dataclasses import fields

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.peer_table import MOST_VERSIONS, PeerTable
from p2pnode.overlay.peers import Activity, Peer
from p2pnode.overlay.row_index import RESTING_ROWS
from tests.harness.builders.peers import heartbeat, ids


def test_steps_only_increase_within_an_incarnation() -> None:
    """A heartbeat that was overtaken on its way changes nothing; a newer incarnation starts again."""
    table = PeerTable()
    changes = [
        table.observe(heartbeat(step=5, activity=2), "10.0.0.1", 1.0),
        table.observe(heartbeat(step=3, activity=3), "10.0.0.1", 2.0),
        table.observe(heartbeat(step=2, incarnation=2, activity=2), "10.0.0.1", 3.0),
        table.observe(heartbeat(step=9, activity=2), "10.0.0.1", 4.0),
    ]
    peer = table.get(b"n" * 20)

    assert [change and change.kind for change in changes] == ["up", None, "restarted", None]
    assert peer is not None
    assert (peer.step, peer.incarnation, peer.activity) == (2, 2, Activity.TRAINING)


def test_peers_of_one_host_share_its_text() -> None:
    """Each datagram brings a copy of the text: neither a new peer keeps its own, nor one that has moved."""
    table = PeerTable()
    first, second = ids(2)
    table.observe(heartbeat(first), "".join(["10.0.0", ".1"]), 1.0)
    table.observe(heartbeat(second), "".join(["10.0.0", ".2"]), 1.0)
    table.observe(heartbeat(second), "".join(["10.0.0.", "1"]), 2.0)

    assert table.hosts[0] == "10.0.0.1"
    assert table.hosts[0] is table.hosts[1]


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
        table.observe(heartbeat(**change), "10.0.0.1", float(now))
        peer = table.get(b"n" * 20)
        assert peer is not None
        progress.append(peer.last_progress)

    assert progress == [0.0, 0.0, 2.0, 3.0, 3.0, 5.0, 5.0]


def test_a_worker_that_sends_heartbeats_without_progress_is_skipped() -> None:
    """Missing heartbeats are not a stall; heartbeats without a step for more than 10 s and four step times are."""
    table = PeerTable()
    table.observe(heartbeat(activity=2), "10.0.0.1", 0.0)
    peer = table.get(b"n" * 20)
    assert peer is not None

    assert peer.is_worker(50.0), "no heartbeat since"
    table.observe(heartbeat(activity=2, step_seconds=5.0), "10.0.0.1", 19.0)
    assert peer.is_worker(19.0), "four steps of 5 s"
    table.observe(heartbeat(activity=2, step_seconds=5.0), "10.0.0.1", 21.0)
    assert not peer.is_worker(21.0)
    table.observe(heartbeat(activity=2, step_seconds=5.0, step=1), "10.0.0.1", 22.0)
    assert peer.is_worker(22.0)


def test_a_first_step_counts_for_a_barrier_of_a_node_that_began_with_it() -> None:
    """However long it takes, unless its node announces a stall; a joiner that began later counts for 10 s."""
    table = PeerTable()
    table.observe(heartbeat(activity=2), "10.0.0.1", 0.0)
    table.observe(heartbeat(activity=2), "10.0.0.1", 300.0)
    peer = table.get(b"n" * 20)
    assert peer is not None

    assert peer.is_in_first_step
    assert peer.counts_for_barrier(300.0, since=0.0)
    assert not peer.is_worker(300.0)
    assert peer.counts_for_barrier(300.0, since=-10.0)
    assert not peer.counts_for_barrier(300.0, since=-11.0), "it joined later"
    table.observe(heartbeat(activity=2, step=1, step_seconds=300.0), "10.0.0.1", 310.0)
    assert not peer.is_in_first_step
    assert peer.counts_for_barrier(310.0, since=-11.0)
    table.observe(heartbeat(activity=4, step=1, step_seconds=0.0), "10.0.0.1", 320.0)
    assert not peer.counts_for_barrier(320.0, since=0.0), "stalled"


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
    table.observe(heartbeat(), "10.0.0.1", 0.0)
    table.note_version(b"n" * 20, "0.0.9")
    table.note_version(b"n" * 20, said)
    table.note_version(b"x" * 20, said)
    peer = table.get(b"n" * 20)
    assert peer is not None
    assert peer.version == shown
    assert len(table) == 1


def test_peers_of_one_version_share_its_text() -> None:
    """A text of its own for each of four thousand peers would take a quarter of a megabyte."""
    table = PeerTable()
    for node_id in (b"n" * 20, b"m" * 20):
        table.observe(heartbeat(node_id), "10.0.0.1", 0.0)
        table.note_version(node_id, b"0.3.1".decode())
    one, other = table
    assert one.version == "0.3.1"
    assert one.version is other.version


def test_versions_that_nobody_says_any_more_make_room_for_others() -> None:
    """Each peer shows the version that it said last; where too many differ, those that come last show none."""
    table = PeerTable()
    nodes = ids(MOST_VERSIONS)
    for node_id in nodes:
        table.observe(heartbeat(node_id), "10.0.0.1", 0.0)
    for number in range(3 * MOST_VERSIONS):
        table.note_version(nodes[0], f"0.0.{number}")
        table.note_version(nodes[1], f"0.1.{number % 2}")
    assert table.get(nodes[0]).version == f"0.0.{3 * MOST_VERSIONS - 1}"  # type: ignore[union-attr]
    assert table.get(nodes[1]).version == "0.1.1"  # type: ignore[union-attr]

    for number, node_id in enumerate(nodes):
        table.note_version(node_id, f"1.0.{number}")
    shown = [peer.version for peer in table]
    assert shown == [*(f"1.0.{number}" for number in range(MOST_VERSIONS - 1)), ""]


def test_a_restarted_peer_has_no_version_until_it_says_one() -> None:
    """A restart is how a node is upgraded: the former version would be wrong."""
    table = PeerTable()
    table.observe(heartbeat(), "10.0.0.1", 0.0)
    table.note_version(b"n" * 20, "0.1.0")
    table.observe(heartbeat(step=5), "10.0.0.1", 1.0)
    peer = table.get(b"n" * 20)
    assert peer is not None
    assert peer.version == "0.1.0"
    table.observe(heartbeat(incarnation=2), "10.0.0.1", 2.0)
    assert peer.version == ""
    table.note_version(b"n" * 20, "0.2.0")
    assert peer.version == "0.2.0"


def test_changes_of_address_and_eligibility_and_clones_are_reported() -> None:
    """`moved`, `eligible` and `clone`; a clone changes nothing."""
    table = PeerTable()
    table.observe(heartbeat(), "10.0.0.1", 0.0)
    kinds = [
        table.observe(heartbeat(), "10.0.0.2", 1.0),
        table.observe(heartbeat(eligible=True), "10.0.0.2", 2.0),
        table.observe(heartbeat(boot_id=8, step=50), "10.0.0.3", 3.0),
    ]
    peer = table.get(b"n" * 20)

    assert [change and change.kind for change in kinds] == ["moved", "eligible", "clone"]
    assert peer is not None
    assert (peer.address.host, peer.step) == ("10.0.0.2", 0)
    assert table.at(Address("10.0.0.2", 8468)) == peer.node_id
    assert table.at(Address("10.0.0.1", 8468)) is None


def numbered(number: int) -> bytes:
    return number.to_bytes(20, "big")


def test_a_row_is_used_again_only_after_a_while_and_with_nothing_of_its_former_peer() -> None:
    """Whoever holds a `Peer` for a moment longer than its peer lives reads no other peer; `remove` returns a copy."""
    table = PeerTable()
    table.observe(heartbeat(numbered(0), step=7, samples=3, step_seconds=2.0, activity=2), "10.0.0.1", 1.0, 0.5)
    table.note_capacity(numbered(0), 9)
    table.note_version(numbered(0), "1.2")
    held = table.get(numbered(0))
    last = table.remove(numbered(0))
    for number in range(1, RESTING_ROWS):
        table.observe(heartbeat(numbered(number)), "10.0.0.2", 2.0, 0.25)
        table.note_capacity(numbered(number), 3)
        table.remove(numbered(number))

    assert held is not None
    assert last is not None
    assert (held.step, held.samples, held.version, held.round_trip_s) == (7, 3, "1.2", 0.5)
    for number in range(RESTING_ROWS, 2 * RESTING_ROWS):
        table.observe(heartbeat(numbered(number)), "10.0.0.2", 3.0, 0.25)
        table.note_capacity(numbered(number), 4)
        table.remove(numbered(number))
    table.observe(heartbeat(b"z" * 20), "10.0.0.3", 4.0)
    fresh = table.get(b"z" * 20)
    assert fresh is not None
    assert (fresh.capacity, fresh.version, fresh.round_trip_s, fresh.step, fresh.last_heard) == (0, "", None, 0, 4.0)
    assert (last.node_id, last.step, last.capacity, last.version, last.address.host) == (
        numbered(0),
        7,
        9,
        "1.2",
        "10.0.0.1",
    )
    assert len(table.ports) <= RESTING_ROWS + 2, "rows are used again"


def test_an_address_is_found_among_peers_of_the_same_port_and_not_after_its_peer_is_gone() -> None:
    """Most nodes have the default port, so the port alone says nothing."""
    table = PeerTable()
    for number in range(20):
        table.observe(heartbeat(numbered(number)), f"10.0.0.{number + 1}", 0.0)
    table.remove(numbered(4))

    assert table.at(Address("10.0.0.4", 8468)) == numbered(3)
    assert table.at(Address("10.0.0.5", 8468)) is None
    assert table.at(Address("10.0.0.4", 8469)) is None
    assert (table.sharing("10.0.0.4"), table.sharing("10.0.0.5")) == (1, 0)


def test_peers_are_what_a_plain_record_of_each_would_be() -> None:
    """A thousand heartbeats, restarts, moves and removals of twelve peers, against one object per peer."""
    rng = random.Random(24)
    table, plain = PeerTable(), dict[bytes, Peer]()
    for at in range(1000):
        node_id, now = numbered(rng.randrange(12)), float(at)
        if rng.random() < 0.1:
            table.remove(node_id)
            plain.pop(node_id, None)
            continue
        known = plain.get(node_id)
        beat = heartbeat(
            node_id,
            incarnation=(known.incarnation if known else 1) + (rng.random() < 0.1),
            step=(known.step if known else 0) + rng.randrange(2),
            activity=rng.choice([1, 2, 3]),
            eligible=rng.random() < 0.5,
            samples=at,
            step_seconds=rng.random(),
        )
        table.observe(beat, f"10.0.0.{rng.randrange(1, 4)}", now)
        shown = table.get(node_id)
        assert shown is not None
        if known is None or beat.incarnation > known.incarnation or beat.step >= known.step:
            assert (shown.step, shown.samples, shown.step_seconds) == (beat.step, at, beat.step_seconds)
            assert (shown.activity, shown.eligible) == (beat.activity, beat.eligible)
        assert shown.last_heard == now
        plain[node_id] = Peer(
            *(getattr(shown, name) for name in ("contact", "incarnation", "boot_id", "activity", "step")),
            *(getattr(shown, name) for name in ("step_seconds", "samples", "eligible")),
            *(getattr(shown, name) for name in ("last_heard", "last_progress")),
        )
        for each in table:
            record = plain[each.node_id]
            assert (each.contact, each.step, each.last_progress) == (record.contact, record.step, record.last_progress)
        assert set(table.ids()) == set(plain)


@pytest.mark.parametrize("seed", range(3))
def test_a_heartbeat_that_changes_nothing_else_is_merged_alike_in_one_pass(seed: int) -> None:
    """`observe_again` does what `observe` does, or nothing: it declines what moves, restarts, leaves or is new."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    slow, quick = PeerTable(), PeerTable()
    merged = declined = 0
    for step in range(600):
        now, rtt = float(step), rng.choice([None, rng.random()])
        node_id = rng.choice([b"n" * 20, b"m" * 20])
        known = slow.get(node_id)
        address, incarnation, boot_id = (
            (known.address, known.incarnation, known.boot_id) if known else (Address("10.0.0.1", 8468), 1, 7)
        )
        changed = rng.choice(["", "", "", "host", "port", "start", "boot", "old"])
        seen = heartbeat(
            node_id,
            incarnation=max(0, incarnation + {"start": 1, "old": -1}.get(changed, 0)),
            boot_id=boot_id + (changed == "boot"),
            activity=rng.choice([1, 3, 6]) if rng.random() < 0.05 else 2,
            step=max(0, step // 10 + rng.randrange(-1, 2)),
            step_seconds=rng.random(),
            samples=rng.randrange(100),
            eligible=rng.random() < 0.9,
        )
        if changed in ("host", "port"):
            address = (
                Address(f"10.0.0.{rng.randrange(2, 9)}", 8468) if changed == "host" else Address("10.0.0.1", step + 1)
            )
        if rng.random() < 0.02:
            slow.remove(node_id)
            quick.remove(node_id)
        change = slow.observe(seen, address.host, now, rtt, address=address)
        if quick.observe_again(seen, address, now, rtt):
            merged += 1
            assert change is None
        else:
            declined += 1
            assert quick.observe(seen, address.host, now, rtt, address=address) == change
        assert [_known(peer) for peer in quick] == [_known(peer) for peer in slow]
    assert min(merged, declined) > 50


def _known(peer: Peer) -> list[object]:
    return [getattr(peer, field.name) for field in fields(Peer)]


@pytest.mark.parametrize("large", ["incarnation", "step", "samples"])
def test_a_counter_above_four_bytes_is_kept_and_the_others_do_not_change(large: str) -> None:
    """Columns have four bytes a counter until one needs more: of a new peer, a restarted one, or the same start."""
    table = PeerTable()
    table.observe(heartbeat(b"n" * 20, incarnation=3, step=7, samples=9), "10.0.0.1", 0.0)
    table.observe(heartbeat(b"m" * 20, incarnation=3, step=7, samples=9), "10.0.0.2", 0.0)
    many = {"incarnation": 3, "step": 7, "samples": 9, large: (1 << 32) + 5}
    table.observe(heartbeat(b"m" * 20, **many), "10.0.0.2", 1.0)
    fresh = PeerTable()
    fresh.observe(heartbeat(b"m" * 20, **many), "10.0.0.2", 1.0)
    for seen in (table.get(b"m" * 20), fresh.get(b"m" * 20)):
        assert seen is not None
        assert {name: getattr(seen, name) for name in many} == many
    other = table.get(b"n" * 20)
    assert other is not None
    assert (other.incarnation, other.step, other.samples) == (3, 7, 9)

"""Two processes with one identity: this node's, and a peer's."""

from __future__ import annotations

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.kademlia.messages import DuplicateIdentity, pack_contact
from p2pnode.overlay.membership import identity_conflict
from p2pnode.overlay.membership.actions import LogEvent, Notify, SendDuplicateIdentity, Verify
from p2pnode.overlay.membership.identity_conflict import REPORT_PAUSE_S, IdentityConflicts, is_conflict, is_same_start
from p2pnode.overlay.peer_table import PeerTable
from p2pnode.overlay.peers import Contact, Peer
from tests.harness.builders.peers import heartbeat, ids

OWN, OTHER = ids(2)
HERE, THERE = Address("10.0.0.1", 8468), Address("10.0.0.2", 8468)


def conflicts() -> IdentityConflicts:
    return IdentityConflicts(OWN, boot_id=7)


def peer(**changes: object) -> Peer:
    table = PeerTable()
    table.observe(heartbeat(OTHER, **changes), HERE.host, 0.0)
    found = table.get(OTHER)
    assert found is not None
    return found


def test_our_id_from_another_start_is_verified_and_an_echo_is_not() -> None:
    """The claimed address and the source are pinged, and a time-out there counts as no failure."""
    found = conflicts()
    claimed, source = (Verify(Contact(OWN, address), counts_as_failure=False) for address in (HERE, THERE))

    assert found.on_own_id(heartbeat(OWN, boot_id=8), HERE, THERE, proven=False) == (claimed, source)
    assert found.on_own_id(heartbeat(OWN, boot_id=7), HERE, THERE, proven=False) == ()
    assert found.duplicate_of_self == ""


def test_a_proven_duplicate_of_us_is_an_error_once() -> None:
    """It is logged as an error and notified as `twin` with the own id; the second proof adds nothing."""
    found = conflicts()
    logged, notified = found.on_own_id(heartbeat(OWN, boot_id=8, incarnation=4), HERE, THERE, proven=True)

    assert isinstance(logged, LogEvent)
    assert (logged.level, logged.event) == ("error", "identity_used_twice")
    assert isinstance(notified, Notify)
    assert (notified.change.kind, notified.change.node_id) == ("twin", OWN)
    assert found.duplicate_of_self == str(THERE)
    assert found.on_proof(5, 9, HERE) == ()


@pytest.mark.parametrize(("node_id", "boot_id", "expected"), [(OWN, 8, True), (OWN, 7, False), (OTHER, 8, False)])
def test_a_report_of_a_duplicate_is_verified(node_id: bytes, boot_id: int, expected: bool) -> None:
    """Only where it names the own id under another start."""
    report = DuplicateIdentity(boot_id, pack_contact(Contact(node_id, THERE)))

    verify = Verify(Contact(OWN, THERE), counts_as_failure=False)
    assert conflicts().on_report(report) == ((verify,) if expected else ())


def test_two_starts_of_a_peer_are_told_of_each_other() -> None:
    """Logged and notified once; reported to both again after a pause."""
    found, known = conflicts(), peer(boot_id=1)
    second = heartbeat(OTHER, boot_id=2)
    reports = [
        SendDuplicateIdentity(known.contact, DuplicateIdentity(2, pack_contact(Contact(OTHER, THERE)))),
        SendDuplicateIdentity(Contact(OTHER, THERE), DuplicateIdentity(1, pack_contact(known.contact))),
    ]

    first = found.on_conflict(second, THERE, THERE, known, 0.0)
    assert [type(action) for action in first[:2]] == [LogEvent, Notify]
    assert list(first[2:]) == reports
    assert found.on_conflict(second, THERE, THERE, known, REPORT_PAUSE_S - 0.1) == ()
    assert found.on_conflict(second, THERE, THERE, known, REPORT_PAUSE_S) == reports


def test_the_remembered_conflicts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is forgotten."""
    monkeypatch.setattr(identity_conflict, "MAX_REPORTED", 2)
    found, known = conflicts(), peer(boot_id=1)
    for node_id in ids(5):
        found.on_conflict(heartbeat(node_id, boot_id=2), THERE, THERE, known, 0.0)

    assert len(found) == 2


@pytest.mark.parametrize(
    ("incarnation", "boot_id", "same", "conflict"),
    [(5, 1, True, False), (5, 2, False, True), (4, 1, False, True), (6, 2, False, False)],
)
def test_a_higher_incarnation_is_a_restart_and_no_conflict(
    incarnation: int, boot_id: int, same: bool, conflict: bool
) -> None:
    """An equal incarnation under another start, and a lower one, cannot have followed the known start."""
    known, seen = peer(incarnation=5, boot_id=1), heartbeat(OTHER, incarnation=incarnation, boot_id=boot_id)

    assert (is_same_start(seen, known), is_conflict(seen, known)) == (same, conflict)

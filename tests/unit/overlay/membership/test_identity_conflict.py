"""Two processes that run with one identity: this node's, or a peer's."""

from __future__ import annotations

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.kademlia.messages import DuplicateIdentity, pack_contact
from p2pnode.overlay.membership import identity_conflict
from p2pnode.overlay.membership.identity_conflict import REPORT_PAUSE_S, IdentityConflicts, is_conflict, is_same_start
from p2pnode.overlay.peers import Contact, Peer, PeerTable
from tests.harness.builders.peers import heartbeat, ids
from tests.harness.environment.simulated import ListLog, Record
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by
from tests.harness.stubs.recording_network import Done, RecordingNetwork

OWN, OTHER = ids(2)
HERE, THERE = Address("10.0.0.1", 8468), Address("10.0.0.2", 8468)


class Conflicts(IdentityConflicts):
    """They record what they do."""

    def __init__(self) -> None:
        self.network = RecordingNetwork()
        self.records: list[Record] = []
        super().__init__(OWN, 7, self.network, ListLog(self.records))

    def done(self) -> list[Done]:
        """Since the last call."""
        return self.network.take()

    def logged(self) -> list[tuple[str, str]]:
        """Level and name of each event."""
        return [(record.level, record.event) for record in self.records]


def peer(**changes: object) -> Peer:
    table = PeerTable()
    table.observe(heartbeat(OTHER, **changes), HERE, 0.0)
    found = table.get(OTHER)
    assert found is not None
    return found


@run_by(run)
async def test_our_id_from_another_start_is_verified_and_an_echo_is_not() -> None:
    """The claimed address and the source are pinged, and a time-out there counts as no failure."""
    found = Conflicts()
    for boot_id in (8, 7):
        found.on_own_id(heartbeat(OWN, boot_id=boot_id), HERE, THERE, proven=False)

    assert found.done() == [("verify oneself", Contact(OWN, HERE)), ("verify oneself", Contact(OWN, THERE))]
    assert found.duplicate_of_self == ""


@run_by(run)
async def test_a_proven_duplicate_of_us_is_an_error_once() -> None:
    """It is logged as an error and notified as `twin` with the own id; the second proof adds nothing."""
    found = Conflicts()
    found.on_own_id(heartbeat(OWN, boot_id=8, incarnation=4), HERE, THERE, proven=True)
    found.on_proof(5, 9, HERE)

    assert found.logged() == [("error", "identity_used_twice")]
    assert found.done() == [("twin", OWN)]
    assert found.duplicate_of_self == str(THERE)


@pytest.mark.parametrize(("node_id", "boot_id", "expected"), [(OWN, 8, True), (OWN, 7, False), (OTHER, 8, False)])
@run_by(run)
async def test_a_report_of_a_duplicate_is_verified(node_id: bytes, boot_id: int, expected: bool) -> None:
    """Only where it names the own id under another start."""
    found = Conflicts()
    found.on_report(DuplicateIdentity(boot_id, pack_contact(Contact(node_id, THERE))))

    assert found.done() == ([("verify oneself", Contact(OWN, THERE))] if expected else [])


@run_by(run)
async def test_two_starts_of_a_peer_are_told_of_each_other() -> None:
    """Logged and notified once; reported to both again after a pause."""
    found, known = Conflicts(), peer(boot_id=1)
    second = Contact(OTHER, THERE)
    reports = [
        ("report", known.contact, DuplicateIdentity(2, pack_contact(second))),
        ("report", second, DuplicateIdentity(1, pack_contact(known.contact))),
    ]
    times = (0.0, REPORT_PAUSE_S - 0.1, REPORT_PAUSE_S)
    told = [found.on_conflict(heartbeat(OTHER, boot_id=2), THERE, THERE, known, now) for now in times]

    assert told == [True, False, True]
    assert found.done() == [("clone", OTHER), *reports, *reports]
    assert found.logged() == [("warning", "identity_used_twice")]


@run_by(run)
async def test_the_remembered_conflicts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is forgotten."""
    monkeypatch.setattr(identity_conflict, "MAX_REPORTED", 2)
    found, known = Conflicts(), peer(boot_id=1)
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

"""Finds two processes that run with one identity: a copied state directory, or a stolen key.

Another process counts as a duplicate of this node only when it proves the id with the key, under another start
(`boot_id`). Two processes of one identity never list each other as peers. So a third node that receives heartbeats of
both reports each to the other. That is only a hint, and each verifies it. Restarts are no conflict: a new start has a
higher incarnation, and the older one sends nothing more.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.ids import short
from p2pnode.overlay.kademlia.messages import DuplicateIdentity, pack_contact, unpack_contact
from p2pnode.overlay.membership.actions import Action, LogEvent, Notify, SendDuplicateIdentity, Verify
from p2pnode.overlay.peers import Contact, Heartbeat, Peer, PeerChange

#: The two processes of one id are reported to each other at most once in this time.
REPORT_PAUSE_S = 1.0
#: Ids whose last report is remembered.
MAX_REPORTED = 1024


class IdentityConflicts:
    """Conflicts over this node's id and over those of peers."""

    def __init__(self, own_id: bytes, boot_id: int) -> None:
        self.duplicate_of_self = ""  # the address of the other process with this node's key, once that is proven
        self._own_id = own_id
        self._boot_id = boot_id
        self._reported: dict[bytes, float] = {}

    def __len__(self) -> int:
        """Peers in conflict that are remembered."""
        return len(self._reported)

    # -- this node's id ------------------------------------------------------------------------------------------

    def on_own_id(self, heartbeat: Heartbeat, claimed: Address, source: Address, *, proven: bool) -> Sequence[Action]:
        """A datagram of another process carries this node's id: ask for the proof; with it, stop this node."""
        if heartbeat.boot_id == self._boot_id:
            return ()
        if proven:
            return self.on_proof(heartbeat.incarnation, heartbeat.boot_id, source)
        return (self._verify(claimed), self._verify(source))

    def on_proof(self, incarnation: int, boot_id: int, source: Address) -> Sequence[Action]:
        """A process at this address has signed the request just sent with this node's key, under another start."""
        if boot_id == self._boot_id or self.duplicate_of_self:
            return ()
        self.duplicate_of_self = str(source)
        reason = f"{source} runs with the same key, as incarnation {incarnation} of this node"
        return (
            LogEvent("error", "identity_used_twice", {"address": str(source), "reason": reason}),
            Notify(PeerChange(self._own_id, "twin", reason)),
        )

    def on_report(self, report: DuplicateIdentity) -> Sequence[Action]:
        """A peer reports that another process uses this node's id."""
        contact = unpack_contact(report.contact)
        if report.boot_id == self._boot_id or contact is None or contact.node_id != self._own_id:
            return ()
        return (self._verify(contact.address),)

    def _verify(self, address: Address) -> Verify:
        return Verify(Contact(self._own_id, address), counts_as_failure=False)

    # -- a peer's id ---------------------------------------------------------------------------------------------

    def on_conflict(
        self, heartbeat: Heartbeat, claimed: Address, source: Address, known: Peer, now: float
    ) -> Sequence[Action]:
        """Two starts of one id send heartbeats at the same time: report each to the other."""
        if now < self._reported.get(heartbeat.node_id, 0.0):
            return ()
        actions: list[Action] = []
        if self._reported.pop(heartbeat.node_id, None) is None:
            reason = f"{source} and {known.address} both send as this node"
            actions += (
                LogEvent("warning", "identity_used_twice", {"peer": short(heartbeat.node_id), "reason": reason}),
                Notify(PeerChange(heartbeat.node_id, "clone", reason)),
            )
        self._reported[heartbeat.node_id] = now + REPORT_PAUSE_S
        if len(self._reported) > MAX_REPORTED:
            del self._reported[next(iter(self._reported))]
        second = Contact(heartbeat.node_id, claimed)
        return [
            *actions,
            SendDuplicateIdentity(known.contact, DuplicateIdentity(heartbeat.boot_id, pack_contact(second))),
            SendDuplicateIdentity(second, DuplicateIdentity(known.boot_id, pack_contact(known.contact))),
        ]


def is_same_start(heartbeat: Heartbeat, known: Peer) -> bool:
    """Whether this heartbeat is of the known process."""
    return heartbeat.incarnation == known.incarnation and heartbeat.boot_id == known.boot_id


def is_conflict(heartbeat: Heartbeat, known: Peer) -> bool:
    """A start that cannot have followed the known one: an older one that still sends, or another of its number."""
    return heartbeat.incarnation < known.incarnation or (
        heartbeat.incarnation == known.incarnation and heartbeat.boot_id != known.boot_id
    )

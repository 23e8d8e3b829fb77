"""Finds two processes that run with one identity: a copied state directory, or a stolen key.

Another process counts as a duplicate of this node only when it proves the id with the key, under another start
(`boot_id`). Two processes of one identity never list each other as peers. So a third node that receives heartbeats of
both reports each to the other. That is only a hint, and each verifies it. Restarts are no conflict: a new start has a
higher incarnation, and the older one sends nothing more.
"""

from __future__ import annotations

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.environment import Log
from p2pnode.overlay.ids import short
from p2pnode.overlay.kademlia.messages import DuplicateIdentity, pack_contact, unpack_contact
from p2pnode.overlay.membership.network import Network
from p2pnode.overlay.peers import Contact, Heartbeat, Peer, PeerChange

#: The two processes of one id are reported to each other at most once in this time.
REPORT_PAUSE_S = 1.0
#: Ids whose last report is remembered.
MAX_REPORTED = 1024


class IdentityConflicts:
    """Conflicts over this node's id and over those of peers."""

    def __init__(self, own_id: bytes, boot_id: int, network: Network, log: Log) -> None:
        self.duplicate_of_self = ""  # the address of the other process with this node's key, once that is proven
        self._own_id = own_id
        self._boot_id = boot_id
        self._network = network
        self._log = log
        self._reported: dict[bytes, float] = {}

    def __len__(self) -> int:
        """Peers in conflict that are remembered."""
        return len(self._reported)

    # -- this node's id ------------------------------------------------------------------------------------------

    def on_own_id(self, heartbeat: Heartbeat, claimed: Address, source: Address, *, proven: bool) -> None:
        """A datagram of another process carries this node's id: ask for the proof; with it, stop this node."""
        if heartbeat.boot_id == self._boot_id:
            return
        if proven:
            self.on_proof(heartbeat.incarnation, heartbeat.boot_id, source)
        else:
            self._verify(claimed)
            self._verify(source)

    def on_proof(self, incarnation: int, boot_id: int, source: Address) -> None:
        """A process at this address has signed the request just sent with this node's key, under another start."""
        if boot_id == self._boot_id or self.duplicate_of_self:
            return
        self.duplicate_of_self = str(source)
        reason = f"{source} runs with the same key, as incarnation {incarnation} of this node"
        self._log.error("identity_used_twice", address=str(source), reason=reason)
        self._network.notify(PeerChange(self._own_id, "twin", reason))

    def on_report(self, report: DuplicateIdentity) -> None:
        """A peer reports that another process uses this node's id."""
        contact = unpack_contact(report.contact)
        if report.boot_id != self._boot_id and contact is not None and contact.node_id == self._own_id:
            self._verify(contact.address)

    def _verify(self, address: Address) -> None:
        self._network.verify(Contact(self._own_id, address), counts_as_failure=False)

    # -- a peer's id ---------------------------------------------------------------------------------------------

    def on_conflict(self, heartbeat: Heartbeat, claimed: Address, source: Address, known: Peer, now: float) -> bool:
        """Two starts of one id send at the same time: report each to the other. False: that was just done."""
        node_id = heartbeat.node_id
        if now < self._reported.get(node_id, 0.0):
            return False
        is_first = self._reported.pop(node_id, None) is None
        self._reported[node_id] = now + REPORT_PAUSE_S
        if len(self._reported) > MAX_REPORTED:
            del self._reported[next(iter(self._reported))]
        if is_first:
            reason = f"{source} and {known.address} both send as this node"
            self._log.warning("identity_used_twice", peer=short(node_id), reason=reason)
            self._network.notify(PeerChange(node_id, "clone", reason))
        second = Contact(node_id, claimed)
        self._network.report_duplicate(known.contact, DuplicateIdentity(heartbeat.boot_id, pack_contact(second)))
        self._network.report_duplicate(second, DuplicateIdentity(known.boot_id, pack_contact(known.contact)))
        return True


def is_same_start(heartbeat: Heartbeat, known: Peer) -> bool:
    """Whether this heartbeat is of the known process."""
    return heartbeat.incarnation == known.incarnation and heartbeat.boot_id == known.boot_id


def is_conflict(heartbeat: Heartbeat, known: Peer) -> bool:
    """A start that cannot have followed the known one: an older one that still sends, or another of its number."""
    return heartbeat.incarnation < known.incarnation or (
        heartbeat.incarnation == known.incarnation and heartbeat.boot_id != known.boot_id
    )

"""What the rules of membership do to the swarm.

`overlay.membership.service` does it on the wire; a test records it. Where nothing can be sent, a call may fail, and
tell so, before it returns: a rule changes its own state first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from p2pnode.overlay.kademlia.messages import DuplicateIdentity, Gossip
from p2pnode.overlay.peers import Contact, PeerChange


class Network(Protocol):
    """One node's way to the others, and to the subscribers of changes on this node."""

    def probe(self, node_id: bytes) -> None:
        """Ping a member, or one that is remembered as dead."""

    def probe_through(self, node_id: bytes, via: Sequence[bytes]) -> None:
        """Ask these to ping a member."""

    def tell(self, node_id: bytes, news: Gossip) -> None:
        """Send gossip to one node now."""

    def broadcast(self, news: Gossip, *, at_once: bool = False) -> None:
        """Piggyback gossip on datagrams; `at_once` also sends it to known contacts now."""

    def verify(self, contact: Contact, *, counts_as_failure: bool = True) -> None:
        """Ping a contact, which must prove its id; the response is an event like any other."""

    def check_address(self, contact: Contact, otherwise: Callable[[], None]) -> None:
        """Ping a contact; call `otherwise` when it does not answer."""

    def report_duplicate(self, to: Contact, report: DuplicateIdentity) -> None:
        """Report to one of two processes with the same id where the other is."""

    def notify(self, change: PeerChange) -> None:
        """Log a change of a peer and pass it to the subscribers."""

"""Facts about nodes that the datagram protocol reports as they pass. `overlay.membership.service` interprets them."""

from __future__ import annotations

from typing import Protocol

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.kademlia.messages import Gossip
from p2pnode.overlay.peers import Contact, Heartbeat, Peer


class ProtocolEvents(Protocol):
    """Receives the events."""

    def on_response(
        self, heartbeat: Heartbeat, source: Address, rtt_s: float | None, asked: Contact, *, proven: bool = False
    ) -> None:
        """The node that was asked answered; `rtt_s` is None when it asked others first. `proven`: it proved its id.
        May arrive late, after `on_timeout`."""

    def on_id_mismatch(self, heartbeat: Heartbeat, source: Address, asked: Contact, *, proven: bool = False) -> None:
        """Another node answered at the address of the one that was asked."""

    def on_request(self, heartbeat: Heartbeat, source: Address) -> None:
        """A node sent a request."""

    def on_timeout(self, contact: Contact) -> None:
        """A node answered neither the call nor its retry."""

    def on_own_id(self, heartbeat: Heartbeat, source: Address, *, proven: bool = False) -> None:
        """A datagram of another process carries this node's id; `proven`: it has the key too."""

    def on_gossip(self, news: Gossip, sender: bytes) -> None:
        """A datagram of `sender` carried this gossip."""


class PeerView(Protocol):
    """What the protocol reads of peers to choose its time-outs, and who gets gossip."""

    def peer(self, node_id: bytes) -> Peer | None:
        """What is known of a node, its round trips included."""

    def stretch(self) -> float:
        """The factor of this node's time-outs (local health)."""

    def is_doubtful(self, node_id: bytes) -> bool:
        """Whether it is suspected, or remembered as dead or as having left: what is sent to it is probably lost."""

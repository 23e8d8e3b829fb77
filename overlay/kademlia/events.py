"""What the datagram protocol tells of: facts about nodes, as they pass. `overlay.membership.members` judges them."""

from __future__ import annotations

from typing import Protocol

from overlay.addresses import Address
from overlay.kademlia.messages import Gossip
from overlay.peers import Contact, Heartbeat, Peer


class ProtocolEvents(Protocol):
    """Whoever wants to know."""

    def answered(
        self, beat: Heartbeat, source: Address, rtt_s: float | None, asked: Contact, *, proven: bool = False
    ) -> None:
        """The node we asked answered; `rtt_s` is None when it asked others first. `proven`: it proved its id.
        It may come late, after `silent`."""

    def impostor(self, beat: Heartbeat, source: Address, asked: Contact, *, proven: bool = False) -> None:
        """Another node answered at the address of the one we asked."""

    def spoke(self, beat: Heartbeat, source: Address) -> None:
        """A node asked us something."""

    def silent(self, contact: Contact) -> None:
        """A node did not answer, with a retry."""

    def own_id_used(self, beat: Heartbeat, source: Address, *, proven: bool = False) -> None:
        """A datagram of another process claims our own id; `proven`: it has our key."""

    def news(self, news: Gossip, sender: bytes) -> None:
        """A piece of gossip."""

    def peer(self, node_id: bytes) -> Peer | None:
        """What is known of a node, for its round trips."""

    def stretch(self) -> float:
        """By how much our own time-outs stretch (local health)."""

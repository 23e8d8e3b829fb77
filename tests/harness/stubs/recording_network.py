"""Records what the rules of membership do to the swarm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from p2pnode.overlay.kademlia.messages import DuplicateIdentity, Gossip
from p2pnode.overlay.peers import Contact, PeerChange

Done = tuple[Any, ...]


class RecordingNetwork:
    """Stands in the place of `Membership`: each call is a tuple of what it does and to whom."""

    def __init__(self) -> None:
        self._done: list[Done] = []
        #: What to do when the address that was checked last does not answer.
        self.otherwise: Callable[[], None] = lambda: None

    def take(self) -> list[Done]:
        """What has been done since the last call."""
        done, self._done = self._done, []
        return done

    def probe(self, node_id: bytes) -> None:
        self._done.append(("probe", node_id))

    def probe_through(self, node_id: bytes, via: Sequence[bytes]) -> None:
        self._done.append(("probe through", node_id, *sorted(via)))

    def tell(self, node_id: bytes, news: Gossip) -> None:
        self._done.append(("tell", node_id, news))

    def broadcast(self, news: Gossip, *, at_once: bool = False) -> None:
        self._done.append(("broadcast at once" if at_once else "broadcast", news))

    def verify(self, contact: Contact, *, counts_as_failure: bool = True) -> None:
        self._done.append(("verify" if counts_as_failure else "verify oneself", contact))

    def check_address(self, contact: Contact, otherwise: Callable[[], None]) -> None:
        self._done.append(("check", contact))
        self.otherwise = otherwise

    def report_duplicate(self, to: Contact, report: DuplicateIdentity) -> None:
        self._done.append(("report", to, report))

    def notify(self, change: PeerChange) -> None:
        self._done.append((change.kind, change.node_id))

    def changed(self, node_id: bytes, kind: str, reason: str) -> None:
        """What the failure detector finds of a member."""
        self._done.append((kind, node_id, reason))

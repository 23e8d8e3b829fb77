"""The peers of a node: those that live, for `/peers`, and those that it lost in the last hour.

The list has the furthest ahead first, with the age of each number and the shards that they own. A lost peer that comes
back is forgotten, so what is shown is what is missing now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from p2pnode.lifecycle.node import Node
from p2pnode.overlay.peers import Activity, Peer, PeerChange
from p2pnode.status.schema import LostPeer, PeerStatus

#: Peers kept, the newest ones; more are counted by nobody and matter to nobody.
MAX_KEPT = 32
#: A loss is old news after this long.
KEPT_S = 3600.0


def peer_list(node: Node) -> list[PeerStatus]:
    """One entry per live peer, furthest ahead first."""
    now = node.environment.clock.monotonic()
    step = node.progress.step
    ordered = sorted(node.overlay.members(), key=lambda peer: (-peer.step, peer.node_id))
    owned = _owned(node)
    return [
        PeerStatus(
            id=peer.node_id.hex(),
            address=str(peer.address),
            step=peer.step,
            lag=step - peer.step,
            state=_state(node, peer.node_id, peer.activity),
            round_trip_ms=None if peer.round_trip_s is None else round(1000 * peer.round_trip_s, 3),
            last_seen_seconds=round(now - peer.last_heard, 3),
            incarnation=peer.incarnation,
            step_seconds=peer.step_seconds,
            eligible=peer.eligible,
            progress_seconds=round(max(0.0, now - peer.last_progress), 3),
            samples=peer.samples,
            shards=None if owned is None else owned[peer.node_id],
            version=peer.version or None,
        )
        for peer in ordered
    ]


def _owned(node: Node) -> Counter[bytes] | None:
    """Shards per owner, as far as this node knows."""
    exchange = node.exchange
    if exchange is None or not node.config.exchange.enabled:
        return None
    return Counter(known.owner.node_id for known in exchange.store.ownership.known_owners.values())


def _state(node: Node, node_id: bytes, activity: Activity) -> str:
    if node.overlay.is_suspect(node_id):
        return "suspect"
    return "waiting_for_nodes" if activity is Activity.READY else activity.name.lower()


class _Loss(NamedTuple):
    change: PeerChange
    at_s: float


class LostPeers:
    """Follows the changes of peers. `now` returns monotonic seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._losses: dict[bytes, _Loss] = {}

    def note(self, change: PeerChange) -> None:
        """A change in the state of a peer."""
        if change.kind in ("up", "returned", "restarted"):
            self._losses.pop(change.node_id, None)
        elif change.kind in ("dead", "left") and change.last is not None:
            self._losses.pop(change.node_id, None)
            if len(self._losses) >= MAX_KEPT:
                del self._losses[next(iter(self._losses))]
            self._losses[change.node_id] = _Loss(change, self._now())

    def rows(self) -> list[LostPeer]:
        """The peers that are missing, newest loss first."""
        now = self._now()
        return [
            _row(loss.change, loss.change.last, now - loss.at_s)
            for loss in reversed(self._losses.values())
            if loss.change.last is not None and now - loss.at_s <= KEPT_S
        ]


def _row(change: PeerChange, last: Peer, seconds: float) -> LostPeer:
    return LostPeer(
        id=change.node_id.hex(),
        address=str(last.address),
        how="left" if change.kind == "left" else "dead",
        reason=change.reason,
        step=last.step,
        seconds_ago=round(max(0.0, seconds), 3),
    )

"""The peers of a node for `/peers`: furthest ahead first, with the age of each number and the shards that they own."""

from __future__ import annotations

from collections import Counter

from overlay.peers import Activity
from p2pnode.lifecycle.node import Node
from p2pnode.status.schema import PeerStatus


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

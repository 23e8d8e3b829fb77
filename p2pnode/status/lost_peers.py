"""Remembers the peers that this node lost in the last hour: whom, when, why, and at which step they were. Pure.

A peer that comes back is forgotten, so what is shown is what is missing now.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from overlay.peers import Peer, PeerChange
from p2pnode.status.schema import LostPeer

#: Peers kept, the newest ones; more are counted by nobody and matter to nobody.
MAX_KEPT = 32
#: A loss is old news after this long.
KEPT_S = 3600.0


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

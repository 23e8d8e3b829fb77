"""Tells the other nodes that `training.until` holds, so that the run ends on all of them.

The metric is one of the shared model, so one node's evaluations are enough; often only one evaluates. A node that ends
by its goal tells up to `FANOUT` random nodes, and each of those does the same when it ends: all know it within a
few steps. The manifest holds `until` equal on all nodes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from p2pnode.overlay.environment import Log
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import Buffer, RequestRejected, Response, TransportError
from p2pnode.training.swarm import Swarm

#: With n nodes, log n + some are enough for nearly all of them (Kermarrec et al. 2003); the rest learn it from others.
FANOUT = 16
TIMEOUT_S = 3.0


class GoalReached(msgspec.Struct, frozen=True, array_like=True):
    """`until` held in consecutive evaluations; `step` is that of the last model evaluated."""

    genesis: Annotated[bytes, Meta(max_length=16)]
    until: Annotated[str, Meta(max_length=1000)]
    step: Annotated[int, Meta(ge=0, lt=1 << 62)]


class GoalAnnouncement:
    """Sends and receives the news of one node. `on_reached` is called once for each message of another node."""

    def __init__(
        self, swarm: Swarm, genesis: bytes, until: str, log: Log, draw: random.Random, on_reached: Callable[[], None]
    ) -> None:
        self._swarm = swarm
        self._genesis = genesis
        self._until = until
        self._log = log
        self._random = draw
        self._on_reached = on_reached
        self._heard = False
        swarm.register("goal_reached", self._on_message)

    async def announce(self, step: int) -> None:
        """Tell the nodes that train. One that does not answer is told by another."""
        message = msgspec.msgpack.encode(GoalReached(self._genesis, self._until, step))
        peers = sorted(self._swarm.members(), key=lambda peer: peer.node_id)
        chosen = self._random.sample(peers, min(FANOUT, len(peers)))
        await asyncio.gather(*(self._tell(peer.contact, message) for peer in chosen))

    async def _tell(self, to: Contact, message: bytes) -> None:
        try:
            async with self._swarm.request(to, "goal_reached", message, timeout_s=TIMEOUT_S):
                return
        except TransportError as error:
            self._log.debug("goal_not_told", peer=to.node_id.hex()[:8], reason=str(error))

    async def _on_message(self, sender: Contact, payload: bytes, _stream: AsyncIterator[Buffer]) -> Response:
        try:
            message = msgspec.msgpack.decode(payload, type=GoalReached)
        except (ValueError, RecursionError) as error:
            raise RequestRejected(f"malformed GoalReached: {error}") from error
        if message.genesis != self._genesis or not self._until or message.until != self._until:
            raise RequestRejected("another swarm, or another training.until")
        if not self._heard:
            self._heard = True
            self._log.info("goal_reached_elsewhere", node=sender.node_id.hex()[:8], step=message.step)
        self._on_reached()
        return Response(b"")

"""Detects nodes that train on exactly the same data, as those do that seed their shuffling alike.

Two nodes that begin with the same vector and train on the same batches make the same first delta, to the bit. So after
its first step a node sends a digest of that delta to a few nodes, which compare it with their own. The digest covers a
sample of the values: a chance hit is impossible, and hashing takes no time. Nodes that do not begin together have
different bases, so that it says nothing about them.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from overlay.environment import Log
from overlay.ids import short
from overlay.peers import Contact
from overlay.transport import Buffer, RequestRejected, Response, TransportError
from training.swarm import Swarm
from training.trainer_link.interface import Vector

#: Nodes that are asked. Where all nodes train on the same data, one is enough.
FANOUT = 8
TIMEOUT_S = 3.0
SAMPLED_VALUES = 1 << 16
#: Digests of other nodes kept until this node has its own.
MAX_KEPT = 256

ADVICE = "seed the order of the data with swarm.seed (a task: with node_seed), or take swarm.sampler(dataset)"

Digest = Annotated[bytes, Meta(min_length=16, max_length=16)]


class FirstDelta(msgspec.Struct, frozen=True, array_like=True):
    """The digest of the sender's first delta."""

    genesis: Annotated[bytes, Meta(max_length=16)]
    digest: Digest


class FirstDeltaAnswer(msgspec.Struct, frozen=True, array_like=True):
    """That of the receiver; None while it has made no step."""

    digest: Digest | None


def delta_digest(delta: Vector) -> bytes | None:
    """Sixteen bytes for a delta, `float32[total]`; None for one without a value that is not zero, which proves
    nothing: a learning rate may begin at zero."""
    sampled = np.ascontiguousarray(delta[:: max(1, delta.size // SAMPLED_VALUES)])
    if not sampled.any():
        return None
    return hashlib.blake2b(sampled.data, digest_size=16).digest()


class DuplicateData:
    """Compares this node's first delta with those of others; `nodes` are the nodes with the same one."""

    def __init__(self, swarm: Swarm, genesis: bytes, log: Log, draw: random.Random) -> None:
        self._swarm = swarm
        self._genesis = genesis
        self._log = log
        self._random = draw
        self._mine: bytes | None = None
        self._asking: asyncio.Task[None] | None = None
        self._theirs: dict[bytes, bytes] = {}
        self.nodes: list[bytes] = []
        swarm.register("first_delta", self._on_message)

    def after_step(self, delta: Vector) -> None:
        """Called after each step of this node; only the first delta that has a value counts. Others are asked in the
        background."""
        if self._mine is not None or (digest := delta_digest(delta)) is None:
            return
        self._mine = digest
        for node, theirs in self._theirs.items():
            self._compare(node, theirs)
        self._theirs.clear()
        self._asking = asyncio.create_task(self._ask_some(digest), name="first-delta")

    async def stop(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _ask_some(self, digest: bytes) -> None:
        peers = sorted(self._swarm.members(), key=lambda peer: peer.node_id)
        chosen = self._random.sample(peers, min(FANOUT, len(peers)))
        await asyncio.gather(*(self._ask(peer.contact, digest) for peer in chosen))

    async def _ask(self, peer: Contact, digest: bytes) -> None:
        message = msgspec.msgpack.encode(FirstDelta(self._genesis, digest))
        try:
            async with self._swarm.request(peer, "first_delta", message, timeout_s=TIMEOUT_S) as answer:
                theirs = msgspec.msgpack.decode(answer.head, type=FirstDeltaAnswer).digest
        except (TransportError, ValueError, RecursionError) as error:
            self._log.debug("first_delta_not_compared", peer=short(peer.node_id), reason=str(error))
            return
        if theirs is not None:
            self._compare(peer.node_id, theirs)

    async def _on_message(self, sender: Contact, payload: bytes, _stream: AsyncIterator[Buffer]) -> Response:
        try:
            message = msgspec.msgpack.decode(payload, type=FirstDelta)
        except (ValueError, RecursionError) as error:
            raise RequestRejected(f"malformed FirstDelta: {error}") from error
        if message.genesis != self._genesis:
            raise RequestRejected("another swarm: the genesis differs")
        if self._mine is not None:
            self._compare(sender.node_id, message.digest)
        elif len(self._theirs) < MAX_KEPT:
            self._theirs[sender.node_id] = message.digest
        return Response(msgspec.msgpack.encode(FirstDeltaAnswer(self._mine)))

    def _compare(self, node: bytes, digest: bytes) -> None:
        if digest == self._mine and node not in self.nodes and len(self.nodes) < MAX_KEPT:
            self.nodes.append(node)
            self._log.warning("same_data", node=short(node), hint=ADVICE)

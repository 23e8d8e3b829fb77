"""Detects nodes that train on exactly the same data, as those do that seed their shuffling alike.

Two nodes that begin together and train on the same batches make nearly parallel deltas, step after step. They are not
equal: a joiner's first weights are rounded, and machines round differently. How near they have to be depends on the
model, on its batches and on the learning rate, so a node measures it: with the same batches two deltas of a step are
far nearer to each other than to what all other deltas of both nodes explain. Large batches and a steady drift make all
deltas alike, those of other steps too, and are no finding.

A node keeps a sample of the values of its first deltas, and sends them to a few nodes, which compare them with their
own. Nodes that do not begin together compare different batches, so that it says nothing about them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from p2pnode.overlay.environment import Log
from p2pnode.overlay.ids import short
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import Buffer, RequestRejected, Response, TransportError
from p2pnode.training.swarm import Swarm
from p2pnode.training.trainer_link.interface import Vector

#: Nodes that are asked. Where all nodes train on the same data, one is enough.
FANOUT = 8
TIMEOUT_S = 3.0
#: Deltas of a node that are compared, and values of each. The distance of 104 pairs with different data was never below
#: 0.97, that of 82 with the same data never above 0.23 (digits and text; SGD, momentum, AdamW; batches of 8 to 512).
STEPS, VALUES = 6, 1024
MAX_DISTANCE = 0.4
#: Squared length below which a part of a delta is rounding: deltas that are all parallel prove nothing.
ROUNDING = 1e-10
#: In models with fewer values two nodes with different data may make the same deltas.
MIN_VALUES = 256
#: Nodes whose deltas are compared at most, once each.
MAX_NODES = 256

ADVICE = "seed the order of the data with swarm.seed (a task: with node_seed), or take swarm.sampler(dataset)"

#: `float32[STEPS, n]`, little-endian, of n sampled values.
Sample = Annotated[bytes, Meta(max_length=4 * STEPS * VALUES)]


class FirstDeltas(msgspec.Struct, frozen=True, array_like=True):
    """Sampled values of the sender's first deltas."""

    genesis: Annotated[bytes, Meta(max_length=16)]
    sample: Sample


class FirstDeltasAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Those of the receiver; None while it has made fewer steps."""

    sample: Sample | None


def sampled(delta: Vector) -> Vector:
    """The values of a delta, `float32[total]`, that all nodes compare: all, or `VALUES` spread over its length."""
    if delta.size <= VALUES:
        return delta.copy()
    # The golden ratio spreads them evenly, and not in step with the rows of a matrix.
    places = np.arange(VALUES, dtype=np.int64) * (round(delta.size * 0.6180339887) | 1) % delta.size
    return delta[places]


def distance(mine: npt.NDArray[np.float64], theirs: npt.NDArray[np.float64]) -> float:
    """How far two nodes' deltas of a step are from each other, both `float64[steps, n]`, as a multiple of how far they
    are from what the deltas of all other steps explain: the median over the steps of squared lengths, about 1 or more
    with different data."""
    rows = np.concatenate([mine, theirs])
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    if not np.isfinite(lengths).all() or not lengths.all() or np.count_nonzero(rows.any(axis=0)) < MIN_VALUES:
        return np.inf
    rows /= lengths
    products = rows @ rows.T
    found = []
    for step in range(len(mine)):
        both = [step, len(mine) + step]
        others = [row for row in range(len(rows)) if row not in both]
        shared = products[np.ix_(both, others)]
        explained = shared @ np.linalg.pinv(products[np.ix_(others, others)], rcond=1e-12, hermitian=True) @ shared.T
        apart = 2.0 * (1.0 - float(products[both[0], both[1]]) ** 2)
        found.append((apart + ROUNDING) / (max(0.0, 2.0 - float(np.trace(explained))) + ROUNDING))
    return float(np.median(found))


class DuplicateData:
    """Compares this node's first deltas with those of others; `nodes` are the nodes with the same data."""

    def __init__(self, swarm: Swarm, genesis: bytes, log: Log, draw: random.Random) -> None:
        self._swarm = swarm
        self._genesis = genesis
        self._log = log
        self._random = draw
        self._deltas: list[Vector] = []
        self._mine: bytes | None = None
        self._asking: asyncio.Task[None] | None = None
        self._compared: set[bytes] = set()
        self.nodes: list[bytes] = []
        swarm.register("first_deltas", self._on_message)

    def after_training(self, delta: Vector) -> None:
        """Called with each delta, `float32[total]`, that the trainer has made. Those without a value do not count: a
        learning rate may begin at zero. After the first ones, others are asked in the background."""
        if self._mine is not None or not (values := sampled(delta)).any():
            return
        self._deltas.append(values)
        if len(self._deltas) == STEPS:
            self._mine = np.array(self._deltas, "<f4").tobytes()
            self._asking = asyncio.create_task(self._ask_some(self._mine), name="first-deltas")

    async def stop(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _ask_some(self, mine: bytes) -> None:
        peers = sorted(self._swarm.members(), key=lambda peer: peer.node_id)
        chosen = self._random.sample(peers, min(FANOUT, len(peers)))
        await asyncio.gather(*(self._ask(peer.contact, mine) for peer in chosen))

    async def _ask(self, peer: Contact, mine: bytes) -> None:
        message = msgspec.msgpack.encode(FirstDeltas(self._genesis, mine))
        try:
            async with self._swarm.request(peer, "first_deltas", message, timeout_s=TIMEOUT_S) as answer:
                theirs = msgspec.msgpack.decode(answer.head, type=FirstDeltasAnswer).sample
        except (TransportError, ValueError, RecursionError) as error:
            self._log.debug("first_deltas_not_compared", peer=short(peer.node_id), reason=str(error))
            return
        if theirs is not None:
            self._compare(peer.node_id, theirs)

    async def _on_message(self, sender: Contact, payload: bytes, _stream: AsyncIterator[Buffer]) -> Response:
        try:
            message = msgspec.msgpack.decode(payload, type=FirstDeltas)
        except (ValueError, RecursionError) as error:
            raise RequestRejected(f"malformed FirstDeltas: {error}") from error
        if message.genesis != self._genesis:
            raise RequestRejected("another swarm: the genesis differs")
        # The node that is slower asks the faster one, and both compare then.
        self._compare(sender.node_id, message.sample)
        return Response(msgspec.msgpack.encode(FirstDeltasAnswer(self._mine)))

    def _compare(self, node: bytes, sample: bytes) -> None:
        if self._mine is None or len(sample) != len(self._mine):
            return
        if node in self._compared or len(self._compared) >= MAX_NODES:
            return
        self._compared.add(node)
        mine, theirs = (np.frombuffer(one, "<f4").reshape(STEPS, -1).astype(np.float64) for one in (self._mine, sample))
        if distance(mine, theirs) < MAX_DISTANCE:
            self.nodes.append(node)
            self._log.warning("same_data", node=short(node), hint=ADVICE)

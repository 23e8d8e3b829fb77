"""Gives all nodes the same bits once training has ended: of the values of shards, and of the model's integer buffers.

Owner and backup of a shard have added the same deltas, but in any order, so rounding and momentum may differ. While
nodes train that does not matter. At the end it does: the owner may die after some nodes have fetched the final value,
and the others fetch it from the former backup. So an owner serves a final pull of a shard only after its backup has
confirmed the digest of the value. A backup whose digest differs is dropped, and becomes a learner again: it gets a copy
of the state.

Integer buffers are in no vector. All nodes take those of the first owner of shard `BUFFERS_SHARD` that has finished. It
names them once its backup keeps them too. Promise 11.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import TransportError
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.exchange.directory import OwnerDirectory
from p2pnode.training.exchange.owner.replication import lacks_backup
from p2pnode.training.exchange.ownership_messages import (
    CompareCopies,
    CopyDigest,
    FinalBuffers,
    FinalBuffersAnswer,
    FinalDone,
    TransferResult,
)
from p2pnode.training.exchange.rpc import ExchangeRpc
from p2pnode.training.exchange.run_state import RebalanceRequests, SwarmView
from p2pnode.training.exchange.store.records import Owned
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.swarm import Swarm

#: The backup hashes its copies before it answers: 100 million values take a second.
COMPARE_TIMEOUT_S = 10.0
#: The owner hands the buffers to its backup before it answers.
BUFFERS_TIMEOUT_S, BUFFERS_RETRY_S = 10.0, 0.2
#: For what a node says before it leaves.
FAREWELL_TIMEOUT_S = 2.0
#: Whose owner's integer buffers all nodes take.
BUFFERS_SHARD = 0


def value_digest(value: Vector) -> bytes:
    """Sixteen bytes that differ where the bits of two values, `float32[n]`, differ."""
    return hashlib.blake2b(value.data, digest_size=16).digest()


def _mark(owned: Owned, backup: Contact) -> tuple[bytes, int, int]:
    """What a confirmation is valid for: this backup, this state, this version."""
    return backup.node_id, id(owned.state), owned.state.version


@dataclass(eq=False)
class FinalValues:
    """What one node serves, asks and keeps when training has ended."""

    swarm: Swarm
    store: ShardStore
    view: SwarmView
    rpc: ExchangeRpc
    directory: OwnerDirectory
    rebalance: RebalanceRequests
    environment: Environment

    def __post_init__(self) -> None:
        self._executor = self.environment.executor
        self._confirmed: dict[int, tuple[bytes, int, int]] = {}
        self._one_at_a_time = asyncio.Lock()
        #: The integer buffers that all nodes take, as far as this node knows, and the backup that keeps them too.
        self._buffers: bytes | None = None
        self._kept_by = b""
        #: Nodes that have their final values.
        self._done: dict[bytes, None] = {}

    def register(self) -> None:
        """Register the request handlers."""
        self.rpc.answer("compare", CompareCopies, self._on_compare)
        self.rpc.answer("final_buffers", FinalBuffers, self._on_final_buffers, waits=True)
        self.rpc.answer("final_done", FinalDone, self._on_final_done)

    # -- values -------------------------------------------------------------------------------------------------

    def is_final(self, shard: int) -> bool:
        """Whether the value of a shard owned here may be served: no node can get other bits, unless two die at once."""
        owned = self.store.owned.get(shard)
        if owned is None or owned.moving:
            return False
        if owned.backup is None:
            # A learner is none: it has no state yet, and the former backup would take over with other bits.
            return not self.view.expects_backups()
        return self._confirmed.get(shard) == _mark(owned, owned.backup)

    async def prepare(self, shards: Iterable[int], step: int) -> None:
        """Make the deltas of steps up to `step` visible, and compare each of these shards with its backup."""
        async with self._one_at_a_time:
            asked: dict[bytes, tuple[Contact, dict[int, Owned]]] = {}
            for shard in shards:
                owned = self.store.owned.get(shard)
                if owned is None:
                    continue
                self.store.fold(shard, step)
                if owned.backup is not None and not self.is_final(shard) and not owned.moving:
                    asked.setdefault(owned.backup.node_id, (owned.backup, {}))[1][shard] = owned
                elif lacks_backup(self.view, owned):
                    self.rebalance.wake()
            await asyncio.gather(*(self._compare(backup, theirs) for backup, theirs in asked.values()))

    async def _compare(self, backup: Contact, shards: dict[int, Owned]) -> None:
        copies, marks = [], {}
        for shard, owned in shards.items():
            state, marks[shard] = owned.state, _mark(owned, backup)
            digest = await self._executor.run(value_digest, state.value)
            copies.append(CopyDigest(shard, owned.term, state.folded_step, marks[shard][2], digest))
        try:
            message = CompareCopies(copies)
            answer = await self.rpc.ask(backup, "compare", message, TransferResult, COMPARE_TIMEOUT_S)
        except TransportError as error:
            self.swarm.suspect(backup.node_id, str(error))
            return
        same = dict.fromkeys(answer.taken)
        for shard, owned in shards.items():
            is_there = self.store.owned.get(shard) is owned and owned.backup == backup
            if not is_there or _mark(owned, backup) != marks[shard]:
                continue  # changed since it was hashed
            if shard in same:
                self._confirmed[shard] = marks[shard]
            else:
                self.environment.log.debug("backup_differs", shard=shard, backup=backup.node_id.hex()[:8])
                self.store.drop_backup(shard, self.rpc.me)
                self.rebalance.wake()

    async def _on_compare(self, sender: Contact, message: CompareCopies) -> TransferResult:
        same, furthest = [], self.view.plausible_steps().furthest
        for copy in message.copies:
            state = self.store.backed_as(copy.shard, copy.term, sender, min(copy.folded_step, furthest))
            if state is None or state.version != copy.version:
                continue
            digest = await self._executor.run(value_digest, state.value)
            if state.version == copy.version and digest == copy.digest:
                same.append(copy.shard)
        return TransferResult(same, [])

    # -- integer buffers ----------------------------------------------------------------------------------------

    async def agree_on_buffers(self, mine: bytes, timeout_s: float) -> bytes | None:
        """The buffers of the first owner of the first shard that has finished. `mine` are this node's. None if that
        owner has not named them within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    if BUFFERS_SHARD in self.store.owned:
                        self._buffers = mine if self._buffers is None else self._buffers
                        found = await self._kept_buffers()
                    else:
                        found = await self._ask_for_buffers()
                    if found is not None:
                        self._buffers = found
                        return found
                    await asyncio.sleep(BUFFERS_RETRY_S * self.environment.entropy.random.uniform(0.5, 1.5))
        except TimeoutError:
            return None

    async def _kept_buffers(self) -> bytes | None:
        """The buffers that this node names as the owner: its backup keeps them too. None if it cannot say yet."""
        owned, buffers = self.store.owned.get(BUFFERS_SHARD), self._buffers
        if owned is None or buffers is None:
            return None
        if owned.backup is None:
            return None if self.view.expects_backups() else buffers
        backup = owned.backup
        if self._kept_by != backup.node_id:
            try:
                await self._request_buffers(backup, FinalBuffers(buffers))
            except TransportError as error:
                self.swarm.suspect(backup.node_id, str(error))
                return None
            self._kept_by = backup.node_id
        return buffers

    async def _ask_for_buffers(self) -> bytes | None:
        groups, unknown = self.directory.by_owner([BUFFERS_SHARD])
        for owner, _ in groups:
            try:
                return await self._request_buffers(owner, FinalBuffers())
            except TransportError as error:
                self.directory.failed(owner, error)
        await self.directory.refresh([BUFFERS_SHARD] if not groups or unknown else [])
        return None

    async def _request_buffers(self, to: Contact, message: FinalBuffers) -> bytes | None:
        return (await self.rpc.ask(to, "final_buffers", message, FinalBuffersAnswer, BUFFERS_TIMEOUT_S)).buffers

    async def _on_final_buffers(self, _sender: Contact, message: FinalBuffers) -> FinalBuffersAnswer:
        if message.buffers is None:
            return FinalBuffersAnswer(await self._kept_buffers())
        self._buffers = message.buffers
        return FinalBuffersAnswer(self._buffers)

    # -- the farewell -------------------------------------------------------------------------------------------

    async def announce(self) -> None:
        """Tell the owners that this node has its final values, so that they may leave."""
        known = self.store.ownership.known_owners.values()
        owners = {each.owner.node_id: each.owner for each in known if each.owner.node_id != self.store.node_id}
        message = FinalDone()

        async def tell(owner: Contact) -> None:
            with contextlib.suppress(TransportError):  # it leaves a little later
                await self.rpc.ask(owner, "final_done", message, TransferResult, FAREWELL_TIMEOUT_S)

        await asyncio.gather(*(tell(owner) for owner in owners.values() if not self.view.is_gone(owner.node_id)))

    def is_done(self, node_id: bytes) -> bool:
        """Whether this node has its final values, as it has said."""
        return node_id in self._done

    async def _on_final_done(self, sender: Contact, _message: FinalDone) -> TransferResult:
        self._done[sender.node_id] = None
        return TransferResult([], [])

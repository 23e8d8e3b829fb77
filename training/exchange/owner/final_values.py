"""Makes the owner and the backup of a shard hold the same bits, once training has ended.

Both have added the same deltas, but in any order, so rounding and momentum may differ. While nodes train that does not
matter. At the end it does: the owner may die after some nodes have fetched the final value, and the others fetch it
from the former backup. So an owner serves a final pull of a shard only after its backup has confirmed the digest of the
value. A backup whose digest differs is dropped, and becomes a learner again: it gets a copy of the state.

The shard `BUFFERS_SHARD` also has one node's integer buffers of the model, which no vector holds: those of its first
owner that finished, confirmed in the same way.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
from typing import NamedTuple

from overlay.peers import Contact
from overlay.transport import TransportError
from training.encoding.codecs import Vector
from training.encoding.frames import FrameReader
from training.exchange.context import ExchangeContext
from training.exchange.directory import OwnerDirectory
from training.exchange.messages import record_frames
from training.exchange.owner.replication import lacks_backup
from training.exchange.ownership_messages import (
    CompareCopies,
    CopyDigest,
    FinalBuffers,
    FinalBuffersAnswer,
    IntegerBuffers,
    TransferResult,
)
from training.exchange.store.records import Owned

#: The backup hashes its copies before it answers: 100 million values take a second.
COMPARE_TIMEOUT_S = 10.0
#: The owner compares the buffers with its backup before it answers.
BUFFERS_TIMEOUT_S, BUFFERS_RETRY_S = 10.0, 0.2
#: Whose owner's integer buffers all nodes take.
BUFFERS_SHARD = 0


class _Mark(NamedTuple):
    """What a confirmation is valid for: this backup, this state, this version, and with or without buffers."""

    backup: bytes
    state: int
    version: int
    has_buffers: bool


def value_digest(value: Vector) -> bytes:
    """Sixteen bytes that differ where the bits of two values, `float32[n]`, differ."""
    return hashlib.blake2b(value.data, digest_size=16).digest()


class FinalValues:
    """Decides which of this node's shards may be served as final, and brings their backups to the same bits."""

    def __init__(self, context: ExchangeContext) -> None:
        self._context = context
        self._store = context.store
        self._run = context.run
        self._view = context.view
        self._rpc = context.rpc
        self._executor = context.environment.executor
        self._log = context.environment.log
        self._confirmed: dict[int, _Mark] = {}
        self._one_at_a_time = asyncio.Lock()

    def is_final(self, shard: int) -> bool:
        """Whether the value of a shard owned here may be served: no node can get other bits, unless two die at once."""
        owned = self._store.owned.get(shard)
        if owned is None or owned.moving:
            return False
        if owned.backup is None:
            # A learner is none: it has no state yet, and the former backup would take over with other bits.
            return not self._view.expects_backups()
        return self._confirmed.get(shard) == self._mark(shard, owned, owned.backup)

    def _mark(self, shard: int, owned: Owned, backup: Contact) -> _Mark:
        has_buffers = shard == BUFFERS_SHARD and self._run.final_buffers is not None
        return _Mark(backup.node_id, id(owned.state), owned.state.version, has_buffers)

    async def prepare(self, shards: Iterable[int], step: int) -> None:
        """Make the deltas of steps up to `step` visible, and compare each of these shards with its backup."""
        async with self._one_at_a_time:
            asked: dict[bytes, tuple[Contact, dict[int, Owned]]] = {}
            for shard in shards:
                owned = self._store.owned.get(shard)
                if owned is None:
                    continue
                if self._context.synchronous:
                    self._store.fold(shard, step)
                if owned.backup is not None and not self.is_final(shard) and not owned.moving:
                    asked.setdefault(owned.backup.node_id, (owned.backup, {}))[1][shard] = owned
                elif lacks_backup(self._view, owned):
                    self._context.rebalance.wake()
            await asyncio.gather(*(self._compare(backup, theirs) for backup, theirs in asked.values()))

    async def confirmed_buffers(self, step: int) -> bytes | None:
        """The integer buffers that all nodes take, once the backup has them too; None if this node cannot say yet."""
        if self._run.final_buffers is None or BUFFERS_SHARD not in self._store.owned:
            return None
        await self.prepare([BUFFERS_SHARD], step)
        return self._run.final_buffers if self.is_final(BUFFERS_SHARD) else None

    async def _compare(self, backup: Contact, shards: dict[int, Owned]) -> None:
        copies, marks = [], {}
        for shard, owned in shards.items():
            marks[shard] = self._mark(shard, owned, backup)
            digest = await self._executor.run(value_digest, owned.state.value)
            state = owned.state
            copies.append(CopyDigest(shard, owned.term, state.folded_step, state.version, digest))
        buffers = self._run.final_buffers if BUFFERS_SHARD in shards else None
        message = CompareCopies(copies, buffers is not None)
        body = () if buffers is None else record_frames(BUFFERS_SHARD, IntegerBuffers(buffers))
        try:
            answer = await self._rpc.ask(backup, "compare", message, TransferResult, COMPARE_TIMEOUT_S, body)
        except TransportError as error:
            self._context.swarm.suspect(backup.node_id, str(error))
            return
        same = dict.fromkeys(answer.taken)
        for copy in copies:
            owned = shards[copy.shard]
            is_unchanged = self._store.owned.get(copy.shard) is owned and owned.backup == backup
            if not is_unchanged or self._mark(copy.shard, owned, backup) != marks[copy.shard]:
                continue
            if owned.state.version != copy.version:
                continue  # changed while it was hashed
            if copy.shard in same:
                self._confirmed[copy.shard] = marks[copy.shard]
            else:
                self._log.debug("backup_differs", shard=copy.shard, backup=backup.node_id.hex()[:8])
                self._store.drop_backup(copy.shard, self._context.me())
                self._context.rebalance.wake()


class BufferAgreement:
    """Finds the buffers that all nodes take."""

    def __init__(self, context: ExchangeContext, directory: OwnerDirectory, final_values: FinalValues) -> None:
        self._context = context
        self._run = context.run
        self._directory = directory
        self._final_values = final_values

    async def agree(self, mine: bytes, timeout_s: float) -> bytes | None:
        """The buffers of the first owner of the first shard that has finished. `mine` are this node's. None if that
        owner has not named them within `timeout_s`."""
        run = self._run
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    if BUFFERS_SHARD in self._context.store.owned:
                        run.final_buffers = mine if run.final_buffers is None else run.final_buffers
                        found = await self._final_values.confirmed_buffers(run.step)
                    else:
                        found = await self._ask()
                    if found is not None:
                        run.final_buffers = found
                        return found
                    await asyncio.sleep(BUFFERS_RETRY_S * self._context.jitter())
        except TimeoutError:
            return None

    async def _ask(self) -> bytes | None:
        groups, unknown = self._directory.by_owner([BUFFERS_SHARD])
        for owner, _ in groups:
            try:
                question = FinalBuffers()
                async with self._context.rpc.question(owner, "final_buffers", question, BUFFERS_TIMEOUT_S) as answer:
                    if self._context.rpc.decoded(owner, answer.head, FinalBuffersAnswer).has_buffers:
                        reader = FrameReader(answer.body)
                        return (await self._context.rpc.record(owner, reader, BUFFERS_SHARD, IntegerBuffers)).buffers
            except TransportError as error:
                self._directory.failed(owner, error)
        await self._directory.refresh([BUFFERS_SHARD] if not groups or unknown else [])
        return None

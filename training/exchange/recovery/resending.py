"""Sends acknowledged deltas again, under the same identity, if the present owner of their shard lacks them.

A shard may lose deltas that its owner had acknowledged: the owner restarts from its disk, or it crashes together with
its backup. A node therefore keeps its last acknowledged deltas (`training.exchange.delta`). When a shard has
another owner than the one that acknowledged, or that one was restarted, the node first asks the present owner which of
the deltas it lacks. Usually the owner lacks none, and the node sends nothing. The others are sent as those of a repair:
an owner adds them at any age, and without momentum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import TransportError
from p2pnode.training.exchange.delta import Acknowledged, AcknowledgedKey, SentDeltas
from p2pnode.training.exchange.directory import PARTNER_TIMEOUT_S
from p2pnode.training.exchange.ownership_messages import (
    MAX_ASKED,
    AskedDelta,
    FindLacking,
    LackingDeltas,
)
from p2pnode.training.exchange.recovery.reconciliation import SplitReconciler, first_batch
from p2pnode.training.exchange.rpc import ExchangeRpc
from p2pnode.training.exchange.run_state import RunState, SwarmView
from p2pnode.training.exchange.store.records import LogEntry
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.shards.applied import DeltaId

#: Seconds between two searches for deltas whose shard has another owner.
EVERY_S = 1.0

#: Deltas whose shard has another owner than the one that acknowledged them, by the node id of the present owner.
Moved = dict[bytes, tuple[Contact, list[AcknowledgedKey]]]


@dataclass(eq=False)
class Resending:
    """Both sides of one node: it sends its own deltas again, and it tells other nodes which of theirs it lacks."""

    sent: SentDeltas
    store: ShardStore
    view: SwarmView
    run: RunState
    rpc: ExchangeRpc
    reconciler: SplitReconciler
    environment: Environment

    def __post_init__(self) -> None:
        self._log = self.environment.log
        self._next_s = 0.0
        self.rpc.answer("lacking", FindLacking, self._on_question)

    def due(self) -> Moved:
        """The deltas whose shard has another owner than the one that acknowledged them, at most once per `EVERY_S`."""
        moved: Moved = {}
        now_s = self.environment.clock.monotonic()
        if self.store.holds_values or now_s < self._next_s:
            return moved
        self._next_s = now_s + EVERY_S
        # There are a few hundred pairs of a shard and a former owner, and many thousand deltas: the pairs come first.
        present: dict[tuple[int, bytes], Contact] = {}
        for shard, former in self.sent.owners():
            known = self.store.believed_owner(shard)
            if known is not None and known.owner.node_id != former and not self.view.is_gone(known.owner.node_id):
                present[shard, former] = known.owner
        if not present:
            return moved
        for key, delta in self.sent.acknowledged.items():
            new_owner = present.get((key.shard, delta.owner))
            if new_owner is not None and key.identity.incarnation == self.run.incarnation:
                _, keys = moved.setdefault(new_owner.node_id, (new_owner, []))
                if len(keys) < MAX_ASKED:
                    keys.append(key)
        return moved

    async def send(self, moved: Moved) -> None:
        """Ask the present owners which of these deltas they lack, and send them those."""
        for owner, keys in moved.values():
            try:
                lacking = await self._lacking(owner, keys)
                while lacking and await self._send_some(owner, lacking):
                    lacking = [key for key in lacking if self._is_still_lacking(key, owner)]
            except TransportError as error:
                self._log.debug("deltas_not_sent_again", owner=owner.node_id.hex()[:8], reason=str(error))

    def _is_still_lacking(self, key: AcknowledgedKey, owner: Contact) -> bool:
        """Whether the delta is still kept, and the owner has not acknowledged it meanwhile."""
        delta = self.sent.acknowledged.get(key)
        return delta is not None and delta.owner != owner.node_id

    async def _lacking(self, owner: Contact, keys: list[AcknowledgedKey]) -> list[AcknowledgedKey]:
        """Ask the present owner which of the deltas it lacks; note those that it has. Raises `TransportError`."""
        asked = {key: delta for key in keys if (delta := self.sent.acknowledged.get(key)) is not None}
        deltas = [AskedDelta(key.shard, key.identity.step, delta.push.base_step) for key, delta in asked.items()]
        question = FindLacking(self.run.incarnation, deltas)
        if owner.node_id == self.store.node_id:
            answer = self._answer(owner.node_id, question)
        else:
            answer = await self.rpc.ask(owner, "lacking", question, LackingDeltas, PARTNER_TIMEOUT_S)
        # The answer names a delta by its place in the question.
        lacking, not_owned = frozenset(answer.lacking), frozenset(answer.not_owned)
        for place, key in enumerate(asked):
            if place not in lacking and key.shard not in not_owned:
                self.sent.moved(key, owner.node_id)
        return [key for place, key in enumerate(asked) if place in lacking]

    async def _send_some(self, owner: Contact, keys: Sequence[AcknowledgedKey]) -> bool:
        """Send an owner the first of the deltas that it lacks, of any age; returns whether the owner has added any.

        Raises `TransportError`.
        """
        # An owner that counts more workers than this message says scales the weight down by the quotient. This node may
        # have counted too few workers, as after it lost and found its owner. So it sends the larger of its two counts.
        workers_now = max(1.0, self.view.worker_count())
        wanted = {key: delta for key in keys if (delta := self.sent.acknowledged.get(key)) is not None}
        batch = first_batch([(key.shard, _entry(key, delta, workers_now)) for key, delta in wanted.items()])
        if not batch:
            return False
        answer = await self.reconciler.send(owner, batch)
        refused = frozenset(answer.refused)
        # The answer counts the added deltas without naming them. If one is missing, all except the refused are retried.
        is_done = answer.added + len(refused) >= len(batch)
        for place, key in enumerate(list(wanted)[: len(batch)]):
            if place in refused:
                self.sent.drop(key)
            elif is_done:
                self.sent.moved(key, owner.node_id)
        added = answer.added if is_done else 0
        self.run.counters.deltas_sent_again += added
        if added or refused:
            self._log.warning("deltas_sent_again", count=added, refused=len(refused))
        return added > 0

    # -- answers to other nodes -----------------------------------------------------------------------------------

    async def _on_question(self, sender: Contact, message: FindLacking) -> LackingDeltas:
        return self._answer(sender.node_id, message)

    def _answer(self, node: bytes, message: FindLacking) -> LackingDeltas:
        """Which of the deltas of `node` the shards owned here lack for certain."""
        not_owned: dict[int, None] = {}
        lacking: list[int] = []
        for place, delta in enumerate(message.deltas):
            if (owned := self.store.owned.get(delta.shard)) is None:
                not_owned[delta.shard] = None
                continue
            state, identity = owned.state, DeltaId(node, message.incarnation, delta.step)
            may_have = state.knows(identity) or state.applied.may_have_forgotten(identity)
            # The value that the era began with may include deltas from before, which the state does not list.
            if not may_have and delta.base_step >= state.era_step:
                lacking.append(place)
        return LackingDeltas(list(not_owned), lacking)


def _entry(key: AcknowledgedKey, delta: Acknowledged, workers: float) -> LogEntry:
    item = delta.item
    return LogEntry(key.identity, delta.push.weight, item.encoded, item.codec, max(workers, delta.push.workers), 0.0)

"""Checks what relays report: whether owners have the deltas that they are said to have.

A relay could keep a delta and answer that its owner has it. So of some answers a node asks the owner itself, which
lists the deltas of the value that this node has pulled since. One that is missing there, and again half a minute later,
was not delivered: it is sent to its owner, and the relay that reported it is avoided. Where the shard has had another
owner since, or the owner does not list so old a version, nothing follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from overlay.transport import TransportError
from training.exchange.context import ExchangeContext
from training.exchange.directory import OwnerDirectory
from training.exchange.messages import Push, PushResult
from training.exchange.ownership_messages import ListDeltas, ListedDeltas, set_of
from training.exchange.terms import Term
from training.shards.applied import Applied, DeltaId

#: One answer in so many is checked, and so many wait for that at most.
CHECKED, MAX_WAITING = 32, 16
#: A pull that has not brought the version of an answer within so many steps will not: there is no such version.
STEPS_UNTIL_PULLED = 16
#: A delta that is missing is looked for once more after this long: two sides of a split may be about to be repaired.
AGAIN_S = 30.0
LIST_TIMEOUT_S = 2.0


@dataclass(slots=True)
class Reported:
    """A delta that an owner has by the answer of a relay. `term`: that of the owner then; `step`: that of this node."""

    relay: bytes
    identity: DeltaId
    shard: int
    version: int
    term: Term
    step: int
    #: When it was first missing.
    missing_s: float | None = None


class DeliveryChecks:
    """The checks of one node. `on_missing` hears of a delta that was not delivered."""

    def __init__(
        self, context: ExchangeContext, directory: OwnerDirectory, on_missing: Callable[[Reported], object]
    ) -> None:
        self._context = context
        self._directory = directory
        self._on_missing = on_missing
        self._store = context.store
        self._clock = context.environment.clock
        self._random = context.environment.entropy.random
        self.waiting: list[Reported] = []
        self._task: asyncio.Task[None] | None = None

    def note(self, relay: bytes, push: Push, result: PushResult) -> None:
        """A relay has answered that an owner has a shard of a delta. What is held for a step or a window is not
        checked: it is in no value yet."""
        if self._context.synchronous or self._store.rule.robust == "trimmed-mean":
            return
        known = self._store.ownership.known_owners.get(result.shard)
        if known is None or len(self.waiting) >= MAX_WAITING or self._random.random() * CHECKED >= 1.0:
            return
        identity = DeltaId(push.node, push.incarnation, push.step)
        step = self._context.run.step
        self.waiting.append(Reported(relay, identity, result.shard, result.version, known.term, step))

    def begin(self) -> None:
        """Check what can be checked now, in the background."""
        if self._task is None and (due := [one for one in self.waiting if self._is_due(one)]):
            self._task = asyncio.create_task(self._check_all(due), name="delivery-checks")

    async def halt(self) -> None:
        """End the checks under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _is_due(self, one: Reported) -> bool:
        if one.missing_s is not None:
            return self._clock.monotonic() - one.missing_s >= AGAIN_S
        _, version = self._context.replica.version_of(one.shard)
        return version >= one.version or self._context.run.step >= one.step + STEPS_UNTIL_PULLED

    async def _check_all(self, due: list[Reported]) -> None:
        try:
            for one in due:
                listed = await self._listed(one)
                if listed is None or one.identity in listed or listed.may_have_forgotten(one.identity):
                    self.waiting.remove(one)
                elif one.missing_s is None:
                    one.missing_s = self._clock.monotonic()
                else:
                    self.waiting.remove(one)
                    self._on_missing(one)
        finally:
            self._task = None

    async def _listed(self, one: Reported) -> Applied | None:
        """The deltas of the value that this node has pulled, as its owner says; None if nothing follows from that."""
        term, version = self._context.replica.version_of(one.shard)
        groups, _ = self._directory.by_owner([one.shard])
        if term != one.term or not groups or groups[0][0].node_id in (one.relay, self._context.swarm.node_id):
            return None
        question = ListDeltas(self._context.genesis, [(one.shard, *term, version)])
        try:
            answer = await self._context.rpc.ask(groups[0][0], "list", question, ListedDeltas, LIST_TIMEOUT_S)
        except TransportError:
            return None
        rows = dict(answer.listed).get(one.shard)
        return None if rows is None else set_of(rows, dict(answer.forgotten).get(one.shard))

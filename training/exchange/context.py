"""What the services of one node's exchange share. No field changes while they run; each service has its own state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from overlay.environment import Environment
from overlay.peers import Contact
from training.exchange.claims import SelfClaims
from training.exchange.codec_choice import CodecChoice
from training.exchange.cooperative import LoopTurns
from training.exchange.counters import Counters
from training.exchange.kept_deltas import KeptDeltas
from training.exchange.rebalance_requests import RebalanceRequests
from training.exchange.recovery.acknowledged import AcknowledgedDeltas
from training.exchange.rpc import ExchangeRpc
from training.exchange.run_state import RunState
from training.exchange.store.replica import Replica
from training.exchange.store.shard_store import ShardStore
from training.exchange.swarm_view import SwarmView
from training.exchange.term_reports import TermReports
from training.exchange.terms import ZERO_TERM, OwnerInfo, Term
from training.exchange.wait_credit import OwnerWait, WaitCredit
from training.settings import ExchangeSettings
from training.swarm import Swarm


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeContext:
    """`synchronous`: the barrier family is bsp. `stale_limit`: a delta whose base is more steps behind the median is
    refused; None: none is."""

    swarm: Swarm
    environment: Environment
    genesis: bytes
    settings: ExchangeSettings
    synchronous: bool
    stale_limit: int | None
    store: ShardStore
    replica: Replica
    run: RunState
    view: SwarmView
    rpc: ExchangeRpc
    rebalance: RebalanceRequests
    codec: CodecChoice
    claims: SelfClaims = field(default_factory=SelfClaims)
    #: How high the terms are that other members know.
    reports: TermReports = field(default_factory=TermReports)
    counters: Counters = field(default_factory=Counters)
    #: This node's own deltas on their way.
    kept: KeptDeltas = field(default_factory=KeptDeltas)
    #: Those that have arrived, for as long as they may have to be sent again.
    acknowledged: AcknowledgedDeltas = field(default_factory=AcknowledgedDeltas)
    #: How long this node's steps may still wait for owners that give no results.
    wait_credit: WaitCredit = field(default_factory=WaitCredit)

    @property
    def turns(self) -> LoopTurns:
        """The turns of the loop, which all passes over values and messages share."""
        return self.rpc.turns

    def owner_wait(self, began_s: float) -> OwnerWait:
        """What a step that waits for owners from now on goes by. `began_s`: in the seconds of `StepWait`."""
        known_owners = self.store.ownership.known_owners

        def owner_of(shard: int) -> bytes:
            known = known_owners.get(shard)
            return b"" if known is None else known.owner.node_id

        return OwnerWait(self.wait_credit, owner_of, began_s, self.view.median_step_seconds)

    def lied(self, node: bytes, reason: str) -> None:
        """A member has sent what no honest one sends; a repeated liar is left out (`training.exchange.trust`)."""
        if node == self.swarm.node_id:
            return  # handed on by this node itself
        if (found := self.view.trust.note(node, reason, self.environment.clock.monotonic())) is None:
            self.environment.log.debug("member_lied", source=node.hex()[:8], reason=reason)
            return
        self.environment.log.warning("member_distrusted", source=node.hex(), reason=found.reason, lies=found.lies)
        self.view.invalidate()
        self.rebalance.wake()

    def misbehaved(self, node: bytes, reason: str) -> None:
        """A member has done what an honest one does rarely; a repeated one is left out for a time."""
        if node == self.swarm.node_id or node not in self.view.trust:
            return
        self.environment.log.debug("member_misbehaved", source=node.hex()[:8], reason=reason)
        if (until_s := self.view.reliability.misbehaved(node, self.environment.clock.monotonic())) is None:
            return
        self.view.trust.suspend(node, until_s)
        self.view.invalidate()
        self.rebalance.wake()

    def claimed(self, node: bytes, infos: Iterable[OwnerInfo]) -> None:
        """A member has named owners, itself perhaps."""
        now_s = self.environment.clock.monotonic()
        for info in infos:
            if info.owner == node and self.store.ownership.is_plausible(info.term):
                self.claims.note(node, info.shard, info.term, now_s)

    def believed(self, teller: bytes, infos: Iterable[OwnerInfo]) -> list[OwnerInfo]:
        """Of what a member says unasked about owners, what is believed: what it says of itself, and of shards that have
        no living owner. Another node that it names is asked before anything is changed, even where the member owned the
        shard: else it could move the shard away as often as it likes, and have it back, for nothing."""
        found = list[OwnerInfo]()
        for info in infos:
            if info.owner == teller or not self._displaces(info):
                found.append(info)
            elif info.owner != self.swarm.node_id:
                self.rebalance.check(info)
        return found

    def _displaces(self, info: OwnerInfo) -> bool:
        """Whether a claim raises the term of a shard whose known owner lives."""
        known = self.store.ownership.known_owners.get(info.shard)
        return known is not None and info.term > known.term and not self.view.is_gone(known.owner.node_id)

    def denied(self, node: bytes, shard: int, named: Term | None, asked_s: float, fence: Term = ZERO_TERM) -> None:
        """A member that was asked at this moment does not own a shard, as it says (`SelfClaims.contradicts`)."""
        if self.claims.contradicts(node, shard, named, asked_s, fence):
            self.misbehaved(node, "claim")

    def answered_about(self, node: bytes, asked: Iterable[int], answered: Iterable[int]) -> None:
        """A member that was asked about some shards has answered about these: no honest one names others."""
        if not {*answered} <= {*asked}:
            self.misbehaved(node, "answer")

    def me(self) -> Contact:
        return Contact(self.swarm.node_id, self.swarm.address)

    def jitter(self) -> float:
        """A factor of 0.5 to 1.5, so that many nodes do not retry at the same moments."""
        return self.environment.entropy.random.uniform(0.5, 1.5)

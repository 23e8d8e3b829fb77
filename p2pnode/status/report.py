"""Builds the answers of the status API from a node's memory: `/status`, `/peers`, `/steps`, `/readyz`, `/metrics`.

The types of the answers are in `p2pnode.status.schema`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import NamedTuple

from p2pnode import __version__
from p2pnode.lifecycle.node import Node
from p2pnode.overlay.environment import Clock
from p2pnode.status import SCHEMA
from p2pnode.status.events import EventRing
from p2pnode.status.health import findings, summary
from p2pnode.status.metrics import families
from p2pnode.status.prometheus import Family
from p2pnode.status.schema import (
    BarrierStatus,
    BusyStatus,
    DataStatus,
    DispatchStatus,
    ExchangeStatus,
    Finding,
    FinishingStatus,
    LineStatus,
    LoopStatus,
    LostPeer,
    NodeStatus,
    PeerStatus,
    PopulationStatus,
    ResultStatus,
    Status,
    SwarmStatus,
    TrainingStatus,
    WaitingStatus,
)
from p2pnode.status.sections import (
    LostPeers,
    coordination_status,
    device_status,
    dispatch_status,
    gpu_status,
    line_status,
    memory_status,
    ongoing,
    peer_list,
    quarantined,
    server_status,
    values_status,
)
from p2pnode.training import kernels
from p2pnode.training.exchange.exchange import Exchange
from p2pnode.training.progress import StepRow

PERIOD_S = 0.1
KEPT = round(60 / PERIOD_S)


class LoopDelay:
    """Measures until cancelled."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._delays_s: deque[float] = deque(maxlen=KEPT)

    async def run(self) -> None:
        while True:
            due = self._clock.monotonic() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            self._delays_s.append(max(0.0, self._clock.monotonic() - due))

    def report(self) -> LoopStatus:
        """Median, 99th percentile and maximum in milliseconds, None before the first measurement.

        The number of the loop's tasks is in it too: it must not grow with time.
        """
        ordered = sorted(self._delays_s)

        def at(share: float) -> float | None:
            return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) if ordered else None

        return LoopStatus(
            delay_ms_p50=at(0.5), delay_ms_p99=at(0.99), delay_ms_max=at(1.0), tasks=len(asyncio.all_tasks())
        )


#: How old the sizes of the exchange may be, in seconds.
SIZES_FRESH_S = 1.0


class StatusReport:
    """What a node says of itself. Every method answers at once, from memory, on the loop's thread."""

    def __init__(
        self,
        node: Node,
        events: EventRing,
        loop_delay: LoopDelay,
        *,
        keys: Callable[[], list[str]] = list,
        findings: Callable[[], list[Finding]] = list,
    ) -> None:
        """`keys`: the fingerprints of the valid swarm keys, the one in use first. `findings`: of other services."""
        self._keys = keys
        self._findings = findings
        self._node = node
        self._events = events
        self._loop_delay = loop_delay
        self._started = node.environment.clock.monotonic()
        self._lost = LostPeers(node.environment.clock.monotonic)
        node.overlay.on_change(self._lost.note)
        self._sizes_at: tuple[Exchange, float, _Sizes] | None = None

    @property
    def events(self) -> EventRing:
        return self._events

    def leave(self) -> None:
        self._node.leave()

    def pause(self) -> None:
        self._node.pause()

    def resume(self) -> None:
        self._node.resume()

    def metrics(self) -> list[Family]:
        """Counters and sizes, for `/metrics`."""
        return families(self._node, self.status(), is_ready=self.ready()[0])

    def _health(self) -> list[Finding]:
        """What needs attention, here and in other services."""
        node = self._node
        return [
            *findings(node, node.overlay.report(), self._line(), self._dispatch(), self._lost.rows()),
            *self._findings(),
        ]

    def _passed_s(self, since: float) -> float:
        """Seconds since a monotonic time."""
        return round(max(0.0, self._node.environment.clock.monotonic() - since), 3)

    def status(self) -> Status:
        """The whole status."""
        node = self._node
        overlay = node.overlay
        report = overlay.report()
        population = overlay.population()
        progress = node.progress
        keys, lost = self._keys(), self._lost.rows()
        return Status(
            schema=SCHEMA,
            summary=self._summary(lost),
            node=NodeStatus(
                id=overlay.node_id.hex(),
                incarnation=node.incarnation,
                version=__version__,
                address=str(overlay.address),
                role=node.config.node.role,
                client_only=node.config.node.client_only,
                eligible=overlay.heartbeat.eligible,
                uptime_seconds=self._passed_s(self._started),
            ),
            run=node.config.swarm.run,
            swarm=SwarmStatus(closed=bool(keys), keys=keys),
            state=node.state,
            step=progress.step,
            population=PopulationStatus(
                estimate=round(population.estimate, 2),
                low=round(population.low, 2),
                high=round(population.high, 2),
                exact=population.exact,
                observations=population.observations,
                zone_estimate=population.zone_estimate,
                workers=round(overlay.workers(), 2),
            ),
            barrier=BarrierStatus(
                method=node.barrier.method,
                sample=self._sample(),
                staleness=node.barrier.staleness,
                quantile=node.barrier.quantile,
                queries=node.gate.queries,
            ),
            waiting=self._waiting(),
            training=TrainingStatus(
                loss=progress.loss,
                metrics=progress.metrics,
                evaluated_step=progress.evaluated_step,
                evaluated_samples=progress.evaluated_samples,
                optimizer_steps=progress.optimizer_steps,
                samples=progress.samples,
                step_seconds=progress.step_seconds,
                trainer=node.trainer.state,
                trainer_failures=progress.trainer_failures,
                busy=self._busy(),
                finishing=self._finishing(),
                training_share=progress.training_share,
                best=None if node.loop is None else node.loop.best.best(),
            ),
            result=self._result(),
            exchange=self._exchange(),
            memory=memory_status(node),
            overlay=report.flat(),
            loop=self._loop_delay.report(),
            health=self._health(),
            data=self._data(),
            line=self._line(),
            dispatch=self._dispatch(),
            lost=lost,
            progress=ongoing(node, self._passed_s(self._started)),
            members_quarantined=quarantined(node.exchange),
            values=values_status(node.exchange),
            server=server_status(node.engine.tasks),
            devices=device_status(node.trainer),
            gpus=gpu_status(node.gpus),
            coordination=coordination_status(node.trainer),
        )

    def peers(self) -> list[PeerStatus]:
        """One entry per live peer, furthest ahead first."""
        return peer_list(self._node)

    def steps(self, limit: int) -> list[StepRow]:
        """The last `limit` steps, oldest first."""
        rows = list(self._node.progress.steps)
        return rows[len(rows) - min(limit, len(rows)) :]

    def ready(self) -> tuple[bool, str]:
        """Whether the node trains, and its summary."""
        is_ready = self._node.state in ("training", "waiting", "finished", "paused", "serving")
        return is_ready, self._summary(self._lost.rows())

    def _summary(self, lost: Sequence[LostPeer]) -> str:
        return summary(self._node, lost, self._waiting(), self._finishing(), self._dispatch())

    def _sample(self) -> int:
        if not self._node.barrier.samples:
            return 0
        if self._node.barrier.complete:
            return len(self._node.overlay.members())
        return self._node.gate.present_sample_size()

    def _busy(self) -> BusyStatus | None:
        busy = self._node.trainer.busy
        return None if busy is None else BusyStatus(what=busy.what, since_seconds=self._passed_s(busy.since))

    def _finishing(self) -> FinishingStatus | None:
        finishing = self._node.progress.finishing
        if finishing is None:
            return None
        left_s = finishing.deadline - self._node.environment.clock.monotonic()
        return FinishingStatus(
            what=finishing.what,
            since_seconds=self._passed_s(finishing.since),
            deadline_seconds=round(max(0.0, left_s), 3),
        )

    def _waiting(self) -> WaitingStatus | None:
        waiting = self._node.gate.waiting
        if waiting is None:
            return None
        return WaitingStatus(
            since_seconds=self._passed_s(waiting.since),
            behind=waiting.behind,
            sampled=waiting.sampled,
            slowest=waiting.slowest.hex(),
            its_step=waiting.its_step,
        )

    def _data(self) -> DataStatus | None:
        """None unless the script shares a data set."""
        member = self._node.data.member
        if member is None:
            return None
        return DataStatus(
            kind=member.shape.kind,
            size=member.shape.size,
            epoch=member.epoch,
            open_epoch=member.ledger.first[0],
            trained=member.ledger.trained_share(),
            nodes=len(member.view()),
            joining=member.joining,
        )

    def _dispatch(self) -> DispatchStatus | None:
        """None unless this node serves or draws dispatched records."""
        node, now = self._node, self._node.environment.clock.monotonic()
        return dispatch_status(node.config.dispatch.source, *node.dispatch.facts(), now)

    def _exchange(self) -> ExchangeStatus:
        exchange = self._node.exchange
        if exchange is None:
            return ExchangeStatus(arithmetic=kernels.name())
        store, sizes = exchange.store, self._sizes(exchange)
        return ExchangeStatus(
            **asdict(exchange.counters),
            arithmetic=kernels.name(),
            shards=len(store),
            shards_by=self._node.startup.shards_by or "",
            shards_owned=len(store.owned),
            shards_backed=len(store.backed),
            shards_without_backup=(
                sum(owned.backup is None for owned in store.owned.values())
                if self._node.config.exchange.replicas
                else 0
            ),
            merged_last_step=self._node.progress.merged_last_step,
            outstanding_steps=exchange.outbox.steps,
            state_bytes=sizes.states,
            repair_reach_seconds=store.log.reach_s,
            repair_log_bytes=store.log.size_bytes,
            published_bytes=sizes.published,
            shards_to_mend=sum(copy.is_usable for copy in store.superseded.values()),
        )

    def _sizes(self, exchange: Exchange) -> _Sizes:
        """Walk through all shards, at most once a second."""
        now, known = self._node.environment.clock.monotonic(), self._sizes_at
        if known is None or known[0] is not exchange or now - known[1] >= SIZES_FRESH_S:
            known = exchange, now, _Sizes(exchange.store.size_bytes, exchange.publisher.size_bytes)
            self._sizes_at = known
        return known[2]

    def _line(self) -> LineStatus:
        exchange, line = self._node.exchange, self._node.overlay.line
        if exchange is None:
            return line_status(line, None, None)
        return line_status(line, exchange.codec, exchange.codec_control.facts(), exchange.push_client.held_back)

    def _result(self) -> ResultStatus | None:
        result = self._node.result
        if result is None:
            return None
        return ResultStatus(
            reason=result.end,
            steps=result.step,
            best=result.best,
            model=result.model or None,
            sha256=result.sha256 or None,
            load=result.how_to_load,
            may_differ=result.why_differs or None,
        )


class _Sizes(NamedTuple):
    """Memory of the exchange, in bytes."""

    states: int
    published: int

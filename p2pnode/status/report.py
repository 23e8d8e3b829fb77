"""Builds the answers of the status API from a node's memory: `/status`, `/peers`, `/steps`, `/readyz`, `/metrics`.

The summary is one sentence: whether the node is connected, whether it learns, which peer it waits for, and what its
user should do. The types of the answers are in `p2pnode.status.schema`.
"""

from __future__ import annotations

from collections.abc import Callable

from overlay.ids import short
from overlay.peers import Activity
from overlay.report import OverlayReport
from p2pnode import __version__
from p2pnode.config.rules import warnings_for
from p2pnode.lifecycle.node import Node
from p2pnode.lifecycle.startup import WAITING_HINT
from p2pnode.status.dispatch import dispatch_findings, dispatch_metrics, dispatch_status
from p2pnode.status.distrust import distrusted_members, trust_again
from p2pnode.status.events import EventRing
from p2pnode.status.limits import SCHEMA
from p2pnode.status.line import line_findings, line_status
from p2pnode.status.loop_delay import LoopDelay
from p2pnode.status.metrics import collect, health_metrics, line_metrics
from p2pnode.status.prometheus import Family
from p2pnode.status.schema import (
    BarrierStatus,
    BestStatus,
    BusyStatus,
    DataStatus,
    DispatchStatus,
    ExchangeStatus,
    Finding,
    FinishingStatus,
    LineStatus,
    MemoryStatus,
    NodeStatus,
    PeerStatus,
    PopulationStatus,
    ResultStatus,
    Status,
    SwarmStatus,
    TrainingStatus,
    WaitingStatus,
)
from training import kernels
from training.duplicate_data import ADVICE
from training.progress import StepRow

#: A barrier that waits longer than this is a finding of `/status`.
LONG_WAIT_S = 10.0


class StatusReport:
    """A `StatusSource` over a node."""

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

    @property
    def events(self) -> EventRing:
        return self._events

    def leave(self) -> None:
        self._node.leave()

    def pause(self) -> None:
        self._node.pause()

    def resume(self) -> None:
        self._node.resume()

    def trust(self, prefix: str) -> bool:
        return trust_again(self._node.exchange, prefix)

    def metrics(self) -> list[Family]:
        """Counters and sizes, for `/metrics`."""
        exchange = None if self._node.exchange is None else self._exchange()
        return [
            *collect(
                self._node, self._node.overlay.report(), exchange, self._loop_delay.report(), uptime_s=self._uptime_s()
            ),
            *line_metrics(self._line()),
            *dispatch_metrics(self._dispatch()),
            *health_metrics(self.ready()[0], self._health(self._node.overlay.report())),
        ]

    def _uptime_s(self) -> float:
        return round(self._node.environment.clock.monotonic() - self._started, 3)

    def status(self) -> Status:
        """The whole status."""
        node = self._node
        overlay = node.overlay
        report = overlay.report()
        population = overlay.population()
        progress = node.progress
        keys = self._keys()
        return Status(
            schema=SCHEMA,
            summary=self._summary(),
            node=NodeStatus(
                id=overlay.node_id.hex(),
                incarnation=node.incarnation,
                version=__version__,
                address=str(overlay.address),
                role=node.config.node.role,
                client_only=node.config.node.client_only,
                eligible=overlay.heartbeat.eligible,
                uptime_seconds=self._uptime_s(),
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
            ),
            result=self._result(),
            exchange=self._exchange(),
            memory=self._memory(),
            overlay=report.flat(),
            loop=self._loop_delay.report(),
            health=self._health(report),
            data=self._data(),
            line=self._line(),
            dispatch=self._dispatch(),
            members_distrusted=distrusted_members(node.exchange, node.environment.clock.monotonic()),
        )

    def peers(self) -> list[PeerStatus]:
        """One entry per live peer, furthest ahead first."""
        now = self._node.environment.clock.monotonic()
        step = self._node.progress.step
        ordered = sorted(self._node.overlay.members(), key=lambda peer: (-peer.step, peer.node_id))
        return [
            PeerStatus(
                id=peer.node_id.hex(),
                address=str(peer.address),
                step=peer.step,
                lag=step - peer.step,
                state=self._peer_state(peer.node_id, peer.activity),
                round_trip_ms=None if peer.round_trip_s is None else round(1000 * peer.round_trip_s, 3),
                last_seen_seconds=round(now - peer.last_heard, 3),
                incarnation=peer.incarnation,
                step_seconds=peer.step_seconds,
                eligible=peer.eligible,
            )
            for peer in ordered
        ]

    def _peer_state(self, node_id: bytes, activity: Activity) -> str:
        if self._node.overlay.is_suspect(node_id):
            return "suspect"
        return "waiting_for_nodes" if activity is Activity.READY else activity.name.lower()

    def steps(self, limit: int) -> list[StepRow]:
        """The last `limit` steps, oldest first."""
        rows = list(self._node.progress.steps)
        return rows[len(rows) - min(limit, len(rows)) :]

    def ready(self) -> tuple[bool, str]:
        """Whether the node trains, and its summary."""
        state = self._node.state
        if state in ("training", "waiting", "finished", "paused", "serving"):
            return True, self._summary()
        return False, self._summary()

    def _sample(self) -> int:
        if not self._node.barrier.samples:
            return 0
        if self._node.barrier.complete:
            return len(self._node.overlay.members())
        return self._node.gate.sample_now()

    def _busy(self) -> BusyStatus | None:
        busy = self._node.trainer.busy
        if busy is None:
            return None
        now = self._node.environment.clock.monotonic()
        return BusyStatus(what=busy.what, since_seconds=round(max(0.0, now - busy.since), 3))

    def _finishing(self) -> FinishingStatus | None:
        finishing = self._node.progress.finishing
        if finishing is None:
            return None
        now = self._node.environment.clock.monotonic()
        return FinishingStatus(
            what=finishing.what,
            since_seconds=round(now - finishing.since, 3),
            deadline_seconds=round(max(0.0, finishing.deadline - now), 3),
        )

    def _waiting(self) -> WaitingStatus | None:
        waiting = self._node.gate.waiting
        if waiting is None:
            return None
        return WaitingStatus(
            since_seconds=round(self._node.environment.clock.monotonic() - waiting.since, 3),
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
        counters, store = exchange.counters, exchange.store
        return ExchangeStatus(
            arithmetic=kernels.name(),
            enabled=self._node.config.exchange.enabled,
            shards=len(store),
            shards_owned=len(store.owned),
            shards_backed=len(store.backed),
            shards_without_backup=(
                sum(owned.backup is None for owned in store.owned.values())
                if self._node.config.exchange.replicas
                else 0
            ),
            bytes_sent=counters.bytes_sent,
            bytes_received=counters.bytes_received,
            merged_last_step=self._node.progress.merged_last_step,
            refused=counters.refused,
            refused_here=dict(counters.refused_here),
            unusual_norms=counters.unusual_norms,
            clipped=counters.clipped,
            outstanding_steps=exchange.push_client.outstanding_steps,
            lost=counters.lost,
            state_bytes=store.size_bytes,
            repair_reach_seconds=store.log.reach_s,
            repair_log_bytes=store.log.size_bytes,
            repaired=counters.repaired,
            published_bytes=exchange.publisher.size_bytes,
            shards_followed=counters.followed,
            chains_entered=counters.chains_entered,
            chain_mismatches=counters.chain_mismatches,
            lost_in_splits=counters.lost_in_splits,
            lost_in_restarts=max(0, counters.lost_in_restarts),
            shards_to_mend=len(store.superseded),
            merged=counters.merged,
        )

    def _line(self) -> LineStatus:
        exchange, line = self._node.exchange, self._node.overlay.line
        if exchange is None or not self._node.config.exchange.enabled:
            return line_status(line, None, None)
        return line_status(line, exchange.context.codec, exchange.codec_control.facts())

    def _result(self) -> ResultStatus | None:
        result = self._node.result
        if result is None:
            return None
        best = result.best
        return ResultStatus(
            reason=result.end,
            steps=result.step,
            best=None if best is None else BestStatus(metric=best.metric, value=best.value, step=best.step),
            model=result.model or None,
            sha256=result.sha256 or None,
            load=result.how_to_load,
            may_differ=result.why_differs or None,
        )

    def _memory(self) -> MemoryStatus:
        budget = self._node.budget()
        return MemoryStatus(
            budget_bytes=None if budget is None else budget.total,
            parts={} if budget is None else budget.parts(),
            available_bytes=self._node.environment.available_memory(),
            trainer_bytes=self._node.trainer_bytes,
        )

    def _summary(self) -> str:
        node = self._node
        population = node.overlay.population()
        others = max(0, round(population.estimate) - 1)
        about = "" if population.exact else "about "
        company = f"{about}{others} peer{'' if others == 1 else 's'}"
        step = node.progress.step
        match node.state:
            case "joining":
                failures = "; ".join(f"{address}: {reason}" for address, reason in node.overlay.attempts.items())
                return f"joining; {failures}" if failures else "joining: starting the trainer and looking for peers"
            case "waiting_for_nodes":
                need = node.config.training.min_nodes
                return f"waiting for nodes: have {node.nodes_ready()}, need {need}"
            case "training":
                return f"training at step {step} with {company}; waiting for no peer"
            case "waiting":
                waiting = self._waiting()
                if waiting is None:
                    return f"training at step {step} with {company}; waiting for no peer"
                return (
                    f"at step {step} with {company}; waiting for {waiting.slowest[:8]} "
                    f"at step {waiting.its_step} since {waiting.since_seconds:.1f} s"
                )
            case "stalled":
                return f"stalled at step {step}: the trainer makes no progress; the node continues to own its shards"
            case "finished" | "leaving" if (finishing := self._finishing()) is not None:
                left = f"{finishing.deadline_seconds:.0f} s left"
                return f"finished at step {step} ({finishing.what}); waiting for the script to end by itself, {left}"
            case "serving":
                return f"master of the records, with {company}; {self._serving()}"
            case state:
                return f"{state} at step {step} with {company}"

    def _serving(self) -> str:
        status = self._dispatch()
        if status is None or not status.serves:
            return f"it does not serve: {'' if status is None else status.last_error}"
        if status.tasks is None:
            return "no data set is registered yet"
        return f"pass {status.pass_number}: {status.done} of {status.tasks} tasks done, {status.leased} leased"

    def _health(self, overlay: OverlayReport) -> list[Finding]:
        node = self._node
        findings = [_warning(advice.what, advice.do) for advice in warnings_for(node.config)]
        findings += self._findings()
        for address, reason in node.overlay.attempts.items():
            findings.append(_warning(f"bootstrap {address}: {reason}", "check that it runs and the address is right"))
        if node.waits_for_swarm:
            findings.append(
                _warning(f"no member of run {node.config.swarm.run} answers; this node waits", WAITING_HINT)
            )
        if overlay.counters.get("peers_refused_crowded"):
            limit = node.config.swarm.ids_per_address
            findings.append(
                _warning(
                    f"more than {limit} nodes of one address try to join; the others are refused",
                    "raise swarm.ids_per_address on all nodes if these share an address behind a NAT",
                )
            )
        findings += _unreached(overlay, node.overlay.address.port, meant=node.config.node.client_only)
        if node.progress.stalled:
            hang_s = node.config.training.hang_s
            what = f"the trainer makes no progress: silent for longer than training.hang_s = {hang_s:g}, or failing"
            do = "see trainer.log in the state directory; in a long pass call swarm.alive() or use swarm.busy()"
            findings.append(Finding(level="error", what=what, do=do))
        findings += [_warning(what, do) for what, do in node.data.warnings()]
        findings += dispatch_findings(self._dispatch(), *node.dispatch.facts())
        exchange = node.exchange
        if exchange is not None:
            control = exchange.codec_control
            findings += line_findings(self._line(), exchange.context.codec, overlaps=control.facts().overlaps)
        if exchange is not None and exchange.push_client.outstanding_steps:
            steps = exchange.push_client.outstanding_steps
            findings.append(_warning(f"deltas of {len(steps)} steps wait for their owners", "see /steps"))
        if node.loop is not None and (missing := node.loop.missing_evaluations()):
            findings.append(_warning(missing, "call swarm.evaluate with that metric, or leave training.until empty"))
        if node.duplicates is not None and node.duplicates.nodes:
            same = node.duplicates.nodes
            others = f" and {len(same) - 1} more" if len(same) > 1 else ""
            what = f"this node and {short(same[0])}{others} train on exactly the same data"
            findings.append(_warning(what, ADVICE))
        waiting = node.gate.waiting
        if waiting is not None and node.environment.clock.monotonic() - waiting.since > LONG_WAIT_S:
            findings.append(_warning(f"waiting for {short(waiting.slowest)}", "see /peers"))
        return findings


def _unreached(overlay: OverlayReport, port: int, *, meant: bool) -> list[Finding]:
    """The port that no peer reaches, unless that is `meant`; and the router that does not open it."""
    reachable, mapping = overlay.reachable, overlay.mapping
    if meant or reachable.reached:
        return []
    if not reachable.reason:  # not known yet
        if mapping is None or not mapping.reason:
            return []
        return [_warning(f"no port was opened in the router: {mapping.reason}", "see the log")]
    what = f"your port {port} cannot be reached from outside: {reachable.reason}."
    if mapping is None:
        second = 'set node.nat = "auto", if your router supports UPnP'
    else:
        second = f"allow UPnP in your router ({mapping.reason or 'it has opened ' + mapping.address})"
    return [
        _warning(
            f"{what} This node trains and receives updates, but owns no shards",
            f"one of three things: (1) forward UDP and TCP {port} to this machine in your router and its firewall; "
            f"(2) {second}; (3) leave it so, and set node.client_only = true",
        )
    ]


def _warning(what: str, do: str) -> Finding:
    return Finding(level="warning", what=what, do=do)

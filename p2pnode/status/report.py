"""What a node says of itself: `/status`, `/peers`, `/steps` and `/readyz`, made from memory when asked.

The summary answers the four questions first: am I connected, am I learning, whom do I wait for, what should I do. The
keys are those of DESIGN section 6; others may be added, none changes its meaning within a schema.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from overlay.ids import short
from overlay.peers import Activity
from p2pnode import __version__
from p2pnode.config.rules import warnings_for
from p2pnode.lifecycle.node import Node
from p2pnode.status.events import EventRing
from p2pnode.status.loop_delay import LoopDelay
from p2pnode.status.metrics import families
from p2pnode.status.prometheus import Family
from training import kernels

SCHEMA = 1


class StatusReport:
    """A `StatusSource` over a node."""

    def __init__(
        self,
        node: Node,
        events: EventRing,
        loop_delay: LoopDelay,
        *,
        keys: Callable[[], list[str]] = list,
    ) -> None:
        """`keys`: fingerprints of the swarm keys valid now, the one in use first; none in an open swarm."""
        self._keys = keys
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

    def metrics(self) -> list[Family]:
        """Counters and sizes, for `/metrics`."""
        return families(self._node, self._loop_delay, self._uptime_s())

    def _uptime_s(self) -> float:
        return round(self._node.environment.clock.monotonic() - self._started, 3)

    def status(self) -> dict[str, Any]:
        """The whole status, `schema` 1."""
        node = self._node
        overlay = node.overlay
        population = overlay.population()
        progress = node.progress
        return {
            "schema": SCHEMA,
            "summary": self._summary(),
            "node": {
                "id": overlay.node_id.hex(),
                "incarnation": node.incarnation,
                "version": __version__,
                "address": str(overlay.address),
                "role": "peer",
                "client_only": node.config.node.client_only,
                "eligible": overlay.beat.eligible,
                "uptime_seconds": self._uptime_s(),
            },
            "run": node.config.swarm.run,
            "swarm": {"closed": bool(self._keys()), "keys": self._keys()},
            "state": node.state,
            "step": progress.step,
            "population": {
                "estimate": round(population.estimate, 2),
                "low": round(population.low, 2),
                "high": round(population.high, 2),
                "exact": population.exact,
                "observations": population.observations,
                "zone_estimate": population.zone_estimate,
                "workers": round(overlay.workers(), 2),
            },
            "barrier": {
                "method": node.barrier.method,
                "sample": self._sample(),
                "staleness": node.barrier.staleness,
                "quantile": node.barrier.quantile,
                "queries": node.gate.queries,
            },
            "waiting": self._waiting(),
            "training": {
                "loss": progress.loss,
                "metrics": progress.metrics,
                "evaluated_step": progress.evaluated_step,
                "evaluated_samples": progress.evaluated_samples,
                "optimizer_steps": progress.optimizer_steps,
                "samples": progress.samples,
                "step_seconds": progress.step_seconds,
                "trainer": node.trainer.state,
                "trainer_failures": progress.trainer_failures,
            },
            "exchange": self._exchange(),
            "memory": self._memory(),
            "overlay": overlay.report(),
            "loop": self._loop_delay.report(),
            "health": self._health(),
        }

    def peers(self) -> list[dict[str, Any]]:
        """One entry per live peer, furthest ahead first."""
        now = self._node.environment.clock.monotonic()
        step = self._node.progress.step
        ordered = sorted(self._node.overlay.members(), key=lambda peer: (-peer.step, peer.node_id))
        return [
            {
                "id": peer.node_id.hex(),
                "address": str(peer.address),
                "step": peer.step,
                "lag": step - peer.step,
                "state": self._peer_state(peer.node_id, peer.activity),
                "round_trip_ms": None if peer.round_trip_s is None else round(1000 * peer.round_trip_s, 3),
                "last_seen_seconds": round(now - peer.last_heard, 3),
                "incarnation": peer.incarnation,
                "step_seconds": peer.step_seconds,
                "eligible": peer.eligible,
            }
            for peer in ordered
        ]

    def _peer_state(self, node_id: bytes, activity: Activity) -> str:
        if self._node.overlay.is_suspect(node_id):
            return "suspect"
        return "waiting_for_nodes" if activity is Activity.READY else activity.name.lower()

    def steps(self, limit: int) -> list[dict[str, Any]]:
        """The last `limit` steps, oldest first: phases in seconds, what was acknowledged, whose deltas were merged."""
        rows = list(self._node.progress.steps)
        return rows[len(rows) - min(limit, len(rows)) :]

    def ready(self) -> tuple[bool, str]:
        """Whether the node trains, and why not."""
        state = self._node.state
        if state in ("training", "waiting", "finished", "paused"):
            return True, self._summary()
        return False, self._summary()

    # -- parts --------------------------------------------------------------------------------------------------

    def _sample(self) -> int:
        if not self._node.barrier.samples:
            return 0
        if self._node.barrier.complete:
            return len(self._node.overlay.members())
        return self._node.gate.sample_now()

    def _waiting(self) -> dict[str, Any] | None:
        waiting = self._node.gate.waiting
        if waiting is None:
            return None
        return {
            "since_seconds": round(self._node.environment.clock.monotonic() - waiting.since, 3),
            "behind": waiting.behind,
            "sampled": waiting.sampled,
            "slowest": waiting.slowest.hex(),
            "its_step": waiting.its_step,
        }

    def _exchange(self) -> dict[str, Any]:
        exchange = self._node.exchange
        if exchange is None:
            return {
                "arithmetic": kernels.name(),
                "shards": 0,
                "shards_owned": 0,
                "shards_backed": 0,
                "bytes_sent": 0,
                "bytes_received": 0,
                "merged_last_step": 0,
                "refused": 0,
                "refused_here": {},
                "unusual_norms": 0,
                "clipped": 0,
                "outstanding_steps": [],
                "lost": 0,
                "state_bytes": 0,
                "repair_reach_seconds": 0.0,
                "repair_log_bytes": 0,
                "repaired": 0,
                "lost_in_splits": 0,
                "shards_to_mend": 0,
            }
        counters = exchange.counters
        return {
            "arithmetic": kernels.name(),
            "enabled": self._node.config.exchange.enabled,
            "shards": len(exchange.store),
            "shards_owned": len(exchange.store.owned),
            "shards_backed": len(exchange.store.backed),
            "bytes_sent": counters.bytes_sent,
            "bytes_received": counters.bytes_received,
            "merged_last_step": self._node.progress.merged_last_step,
            "refused": counters.refused,
            "refused_here": dict(counters.refused_here),
            "unusual_norms": counters.unusual_norms,
            "clipped": counters.clipped,
            "outstanding_steps": exchange.pushing.outstanding_steps,
            "lost": counters.lost,
            "state_bytes": exchange.store.size_bytes,
            "repair_reach_seconds": exchange.store.log.reach_s,
            "repair_log_bytes": exchange.store.log.size_bytes,
            "repaired": counters.repaired,
            "lost_in_splits": counters.lost_in_splits,
            "shards_to_mend": len(exchange.store.remnants),
        }

    def _memory(self) -> dict[str, Any]:
        """The budget of the exchange by parts, and what is free; the trainer's own memory is not in it."""
        budget = self._node.budget()
        return {
            "budget_bytes": None if budget is None else budget.total,
            "parts": {} if budget is None else budget.parts(),
            "available_bytes": self._node.environment.available_memory(),
        }

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
                return f"training at step {step} with {company}; waiting for nobody"
            case "waiting":
                waiting = self._waiting()
                if waiting is None:
                    return f"training at step {step} with {company}; waiting for nobody"
                return (
                    f"at step {step} with {company}; waiting for {waiting['slowest'][:8]} "
                    f"at step {waiting['its_step']} since {waiting['since_seconds']:.1f} s"
                )
            case "stalled":
                return f"stalled at step {step}: the trainer does not move; the node goes on owning its shards"
            case state:
                return f"{state} at step {step} with {company}"

    def _health(self) -> list[dict[str, str]]:
        node = self._node
        findings = [_finding("warning", advice.what, advice.do) for advice in warnings_for(node.config)]
        for address, reason in node.overlay.attempts.items():
            findings.append(
                _finding("warning", f"bootstrap {address}: {reason}", "check that it runs and the address is right")
            )
        overlay = node.overlay.report()
        if overlay.get("peers_refused_crowded"):
            limit = node.config.swarm.ids_per_address
            findings.append(
                _finding(
                    "warning",
                    f"more than {limit} nodes of one address want in; the others are not taken in",
                    "raise swarm.ids_per_address on all nodes where they share one behind a NAT",
                )
            )
        findings += _unreached(overlay, node.overlay.address.port, meant=node.config.node.client_only)
        if node.progress.stalled:
            findings.append(_finding("error", "the trainer does not move", "see trainer.log in the state directory"))
        exchange = node.exchange
        if exchange is not None and exchange.pushing.outstanding_steps:
            steps = exchange.pushing.outstanding_steps
            findings.append(_finding("warning", f"deltas of {len(steps)} steps wait for their owners", "see /steps"))
        waiting = node.gate.waiting
        if waiting is not None and node.environment.clock.monotonic() - waiting.since > 10:
            findings.append(_finding("warning", f"waiting for {short(waiting.slowest)}", "see /peers"))
        return findings


def _unreached(overlay: dict[str, Any], port: int, *, meant: bool) -> list[dict[str, str]]:
    """The port that nobody reaches, unless that is `meant`; and the router that does not open it."""
    reachable, mapping = overlay["reachable"], overlay["mapping"]
    if meant or reachable["reached"]:
        return []
    if not reachable["reason"]:  # not found out yet
        unopened = mapping is not None and mapping["reason"]
        return [_finding("warning", f"no port was opened in the router: {unopened}", "see the log")] if unopened else []
    what = f"your port {port} cannot be reached from outside: {reachable['reason']}."
    if mapping is None:
        second = 'set node.nat = "auto", if your router speaks UPnP'
    else:
        second = f"allow UPnP in your router ({mapping['reason'] or 'it has opened ' + mapping['address']})"
    return [
        _finding(
            "warning",
            f"{what} This node trains and learns, and owns nothing",
            f"one of three things: (1) forward UDP and TCP {port} to this machine in your router and its firewall; "
            f"(2) {second}; (3) leave it so, and set node.client_only = true",
        )
    ]


def _finding(level: str, what: str, do: str) -> dict[str, str]:
    return {"level": level, "what": what, "do": do}

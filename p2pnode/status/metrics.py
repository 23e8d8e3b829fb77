"""Collects the metric families of `/metrics` from counters that exist anyway.

Names follow Prometheus' practice: base units, `_total` on counters, few labels. No label is a peer's id, because a
swarm of a thousand nodes would then make a million series.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

from p2pnode import __version__
from p2pnode.lifecycle.node import Node
from p2pnode.lifecycle.state import State
from p2pnode.overlay.report import OverlayReport
from p2pnode.own_memory import resident_bytes
from p2pnode.status.prometheus import Family, Sample, single
from p2pnode.status.schema import ExchangeStatus, Finding, LineStatus, LoopStatus

#: Counters of the overlay that are metrics of their own; every other counter is an event.
_OWN = ("datagrams_in", "datagrams_out", "bytes_out", "requests_in", "requests_out")


def collect(
    node: Node, overlay: OverlayReport, exchange: ExchangeStatus | None, loop: LoopStatus, *, uptime_s: float
) -> list[Family]:
    """All metric families, in the order of the page."""
    return [
        single("p2pnode_build_info", "gauge", "The version, as a label.", 1, {"version": __version__}),
        single("p2pnode_uptime_seconds", "gauge", "Seconds since the start.", uptime_s),
        single("process_resident_memory_bytes", "gauge", "Resident memory of the daemon.", resident_bytes()),
        *_training(node),
        *_overlay(overlay),
        *_transport(overlay.socket),
        *(() if exchange is None else _exchange(exchange)),
        _loop(loop),
    ]


def _training(node: Node) -> Iterator[Family]:
    progress, population = node.progress, node.overlay.population()
    states: list[Sample] = [({"state": state}, int(state == node.state)) for state in get_args(State)]
    yield Family("p2pnode_state", "gauge", "1 for the state the node is in.", states)
    yield single("p2pnode_step", "gauge", "Step that this node has completed.", progress.step)
    phases: list[Sample] = [({"phase": phase}, seconds) for phase, seconds in progress.phase_seconds.items()]
    text = "Time of steps by phase; a step is exchanged while the next one is trained."
    yield Family("p2pnode_phase_seconds_total", "counter", text, phases)
    yield single("p2pnode_step_seconds", "gauge", "Median time of this node's steps.", progress.step_seconds)
    if progress.training_share is not None:
        text = "Share of the time of the last steps in which the trainer trained."
        yield single("p2pnode_training_share", "gauge", text, progress.training_share)
    yield single(
        "p2pnode_optimizer_steps_total", "counter", "Optimiser steps since the start.", progress.optimizer_steps
    )
    yield single("p2pnode_samples_total", "counter", "Samples trained on.", progress.samples)
    yield single("p2pnode_trainer_failures_total", "counter", "Times the trainer failed.", progress.trainer_failures)
    yield single("p2pnode_loss", "gauge", "Loss of the last step.", progress.loss)
    metrics: list[Sample] = [({"metric": name}, value) for name, value in sorted(progress.metrics.items())]
    yield Family("p2pnode_metric", "gauge", "Metrics as last evaluated or trained.", metrics)
    estimates: list[Sample] = [
        ({"bound": "estimate"}, population.estimate),
        ({"bound": "low"}, population.low),
        ({"bound": "high"}, population.high),
    ]
    yield Family("p2pnode_population", "gauge", "Nodes of the swarm, estimated, with its interval.", estimates)
    yield single("p2pnode_workers", "gauge", "Live nodes that train.", node.overlay.workers())
    needed: list[Sample] = [
        ({"what": "needed"}, node.config.training.min_nodes),
        ({"what": "ready"}, node.nodes_ready()),
    ]
    text = "Nodes that the start waits for (training.min_nodes), and those that are ready, train or have finished."
    yield Family("p2pnode_nodes", "gauge", text, needed)
    waiting = node.gate.waiting
    since = 0.0 if waiting is None else node.environment.clock.monotonic() - waiting.since
    yield single(
        "p2pnode_barrier_waiting_seconds", "gauge", "How long the barrier has been waiting; 0: it is not.", since
    )
    yield single("p2pnode_barrier_queries_total", "counter", "Peers asked for their step.", node.gate.queries)


def _overlay(report: OverlayReport) -> Iterator[Family]:
    counters = dict(sorted(report.counters.items()))
    ways: list[Sample] = [
        ({"direction": "in"}, counters.get("datagrams_in", 0)),
        ({"direction": "out"}, counters.get("datagrams_out", 0)),
    ]
    yield Family("p2pnode_datagrams_total", "counter", "Datagrams received and sent.", ways)
    sent = counters.get("bytes_out", 0)
    yield single("p2pnode_datagram_sent_bytes_total", "counter", "Bytes of datagrams sent.", sent)
    dropped = _labelled(counters, "dropped_", "reason")
    yield Family("p2pnode_datagrams_dropped_total", "counter", "Datagrams dropped unanswered.", dropped)
    ways = [
        ({"direction": "in"}, counters.get("requests_in", 0)),
        ({"direction": "out"}, counters.get("requests_out", 0)),
    ]
    yield Family("p2pnode_requests_total", "counter", "Requests received and sent.", ways)
    refused = _labelled(counters, "refused_", "reason")
    yield Family("p2pnode_requests_refused_total", "counter", "Requests of peers that were over a quota.", refused)
    failed = [
        (labels, count)
        for labels, count in _labelled(counters, "requests_", "kind")
        if labels["kind"] not in ("in", "out")
    ]
    yield Family("p2pnode_requests_failed_total", "counter", "Requests of this node that failed.", failed)
    prefixes = ("dropped_", "refused_", "requests_")
    rest: list[Sample] = [
        ({"event": key}, count)
        for key, count in sorted([*counters.items(), ("calls_waiting", report.calls_waiting)])
        if key not in _OWN and not key.startswith(prefixes)
    ]
    yield Family("p2pnode_overlay_events_total", "counter", "What happened to datagrams and calls.", rest)
    yield single("p2pnode_peers", "gauge", "Live peers known.", report.peers)
    yield single("p2pnode_contacts", "gauge", "Contacts in the routing table.", report.contacts)
    yield single("p2pnode_suspects", "gauge", "Peers suspected of being dead.", report.suspects)
    trip_s = None if report.round_trip_ms is None else report.round_trip_ms / 1000
    yield single("p2pnode_round_trip_seconds", "gauge", "Mean round trip of datagrams.", trip_s)
    yield single(
        "p2pnode_reachable", "gauge", "1 when peers can open streams to this node.", int(report.reachable.reached)
    )


def _transport(counters: Mapping[str, int]) -> Iterator[Family]:
    """What the transport refused before it was a message: everything from nodes that are not members."""
    refused: list[Sample] = [
        ({"channel": channel, **labels}, count)
        for channel, prefix in (("datagram", "seal_dropped_"), ("stream", "streams_dropped_"))
        for labels, count in _labelled(counters, prefix, "reason")
    ]
    text = "Datagrams and connections dropped unanswered: unauthenticated, replayed, forged."
    yield Family("p2pnode_strangers_refused_total", "counter", text, refused)
    pairs = counters.get("seal_pairs")
    yield single("p2pnode_seal_pairs", "gauge", "Incarnations of nodes with a shared datagram key.", pairs)
    rest: list[Sample] = [
        ({"event": key}, count)
        for key, count in counters.items()
        if key != "seal_pairs" and not key.startswith(("seal_dropped_", "streams_dropped_"))
    ]
    yield Family("p2pnode_transport_events_total", "counter", "What happened at the socket and its seal.", rest)


def _exchange(exchange: ExchangeStatus) -> Iterator[Family]:
    ways: list[Sample] = [({"direction": "in"}, exchange.bytes_received), ({"direction": "out"}, exchange.bytes_sent)]
    yield Family("p2pnode_exchange_bytes_total", "counter", "Bytes of deltas, values and states.", ways)
    shards: list[Sample] = [({"role": "owner"}, exchange.shards_owned), ({"role": "backup"}, exchange.shards_backed)]
    yield Family("p2pnode_shards", "gauge", "Shards held here.", shards)
    unsafe = exchange.shards_without_backup
    yield single("p2pnode_shards_without_backup", "gauge", "Shards owned here that lack their backup.", unsafe)
    yield single("p2pnode_shard_state_bytes", "gauge", "Memory of the shards held here.", exchange.state_bytes)
    yield single(
        "p2pnode_published_bytes", "gauge", "Memory of published values and changes.", exchange.published_bytes
    )
    pulls: list[Sample] = [
        ({"way": "changes"}, exchange.shards_followed),
        ({"way": "whole"}, exchange.publications_entered),
    ]
    yield Family("p2pnode_published_pulls_total", "counter", "Shards pulled as published values.", pulls)
    yield single(
        "p2pnode_publication_mismatches_total",
        "counter",
        "Shards that had other bits than their owner's published value.",
        exchange.publication_mismatches,
    )
    yield single("p2pnode_deltas_merged_total", "counter", "Shards of deltas added here as owner.", exchange.merged)
    refused: list[Sample] = [({"reason": key}, count) for key, count in sorted(exchange.refused_here.items())]
    yield Family("p2pnode_deltas_refused_total", "counter", "Shards of others' deltas refused here.", refused)
    yield single(
        "p2pnode_unusual_norms_total", "counter", "Shards of deltas far longer than the median.", exchange.unusual_norms
    )
    yield single("p2pnode_clipped_total", "counter", "Shards of deltas that were shortened.", exchange.clipped)
    yield single(
        "p2pnode_own_deltas_refused_total", "counter", "Shards of own deltas refused by owners.", exchange.refused
    )
    yield single("p2pnode_outstanding_steps", "gauge", "Steps not acknowledged yet.", len(exchange.outstanding_steps))


def health_metrics(ready: bool, findings: Sequence[Finding]) -> Iterator[Family]:
    """Whether the node has joined and trains, and how much needs attention; `/status` says what."""
    yield single("p2pnode_ready", "gauge", "1 when this node has joined and trains, as /readyz says.", int(ready))
    levels: list[Sample] = [
        ({"level": level}, sum(finding.level == level for finding in findings))
        for level in ("info", "warning", "error")
    ]
    yield Family("p2pnode_health_findings", "gauge", "Findings under health in /status now, by level.", levels)


def line_metrics(line: LineStatus) -> Iterator[Family]:
    """The line of this node, and what a step sends over it."""
    rates: list[Sample] = [
        ({"direction": "in"}, line.download_bytes_per_s),
        ({"direction": "out"}, line.upload_bytes_per_s),
    ]
    yield Family("p2pnode_line_bytes_per_second", "gauge", "Measured rates of this node's line.", rates)
    parts: list[Sample] = [
        ({"what": "needed"}, line.needed_bytes_per_step),
        ({"what": "carried"}, line.carried_bytes_per_step),
    ]
    text = "Bytes that a step sends, and that the line carries while a step trains."
    yield Family("p2pnode_line_step_bytes", "gauge", text, parts)
    yield single("p2pnode_codec", "gauge", "The codec of the pushes, as a label.", 1, {"codec": line.codec})


def _loop(loop: LoopStatus) -> Family:
    # Not `quantile`, a label of summaries only: these are of one minute, and a summary's counts would never end.
    delays_ms = {"median": loop.delay_ms_p50, "p99": loop.delay_ms_p99, "max": loop.delay_ms_max}
    samples: list[Sample] = [
        ({"statistic": statistic}, None if delay_ms is None else delay_ms / 1000)
        for statistic, delay_ms in delays_ms.items()
    ]
    return Family("p2pnode_loop_delay_seconds", "gauge", "How late the event loop was in the last minute.", samples)


def _labelled(counters: Mapping[str, int], prefix: str, label: str) -> list[Sample]:
    return [({label: key.removeprefix(prefix)}, count) for key, count in counters.items() if key.startswith(prefix)]

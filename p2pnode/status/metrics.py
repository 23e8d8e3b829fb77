"""The metric families of `/metrics`: the numbers of `/status`, and some counters that only `/metrics` has.

Names follow Prometheus' conventions: base units, `_total` on counters, few labels. No label is a peer's id, because a
swarm of a thousand nodes would then have a million series. `docs/metrics.md` is generated from the source text of the
calls of `gauge` and `counter`, so their first two arguments are literals.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import get_args

from p2pnode.lifecycle.node import Node
from p2pnode.lifecycle.state import State
from p2pnode.overlay.report import OverlayReport
from p2pnode.own_memory import resident_bytes
from p2pnode.status.prometheus import Family, counter, gauge
from p2pnode.status.schema import (
    DeviceStatus,
    DispatchStatus,
    ExchangeStatus,
    LineStatus,
    LoopStatus,
    ServerStatus,
    Status,
    ValuesStatus,
)

#: Counters of the overlay that have a family of their own. Counters with one of the prefixes share a family per prefix.
#: All other counters are labels of `p2pnode_overlay_events_total`.
_WITH_OWN_FAMILY = ("datagrams_in", "datagrams_out", "bytes_out", "requests_in", "requests_out")
_WITH_FAMILY_PER_PREFIX = ("dropped_", "refused_", "requests_")


def families(node: Node, status: Status, *, is_ready: bool) -> Iterator[Family]:
    """All metric families. A part that the node does not have (yet), such as the exchange, has no families."""
    yield gauge("p2pnode_build_info", "The version, as a label.", version={status.node.version: 1})
    yield gauge("p2pnode_uptime_seconds", "Seconds since the start.", status.node.uptime_seconds)
    yield gauge("process_resident_memory_bytes", "Resident memory of the daemon.", resident_bytes())
    yield gauge("p2pnode_ready", "1 when this node has joined and trains, as /readyz says.", int(is_ready))
    counts = {level: sum(found.level == level for found in status.health) for level in ("info", "warning", "error")}
    yield gauge("p2pnode_health_findings", "Findings under health in /status now, by level.", level=counts)
    yield from _training(node, status)
    yield from overlay_families(node.overlay.report())
    yield from _loop(status.loop)
    if node.exchange is not None:
        yield from _exchange(status.exchange)
    if status.line is not None:
        yield from _line(status.line)
    if status.dispatch is not None:
        yield from _dispatch(status.dispatch)
    if status.values is not None:
        yield from _values(status.values)
    if status.server is not None:
        yield from _server(status.server)
    yield from _devices(status.devices)


def _training(node: Node, status: Status) -> Iterator[Family]:
    training, population, barrier = status.training, status.population, status.barrier
    states = {state: int(state == status.state) for state in get_args(State)}
    yield gauge("p2pnode_state", "1 for the state the node is in.", state=states)
    yield gauge("p2pnode_step", "Step that this node has completed.", status.step)
    yield counter(
        "p2pnode_phase_seconds_total",
        "Time of steps by phase; a step is exchanged while the next one is trained.",
        phase=node.progress.phase_seconds,
    )
    yield gauge("p2pnode_step_seconds", "Median time of this node's steps.", training.step_seconds)
    yield gauge(
        "p2pnode_training_share",
        "Share of the time of the last steps in which the trainer trained.",
        training.training_share,
    )
    yield counter("p2pnode_optimizer_steps_total", "Optimiser steps since the start.", training.optimizer_steps)
    yield counter("p2pnode_samples_total", "Samples trained on.", training.samples)
    yield counter("p2pnode_trainer_failures_total", "Times the trainer failed.", training.trainer_failures)
    yield gauge("p2pnode_loss", "Loss of the last step.", training.loss)
    yield gauge(
        "p2pnode_metric", "Metrics as last evaluated or trained.", metric=dict(sorted(training.metrics.items()))
    )
    bounds = {"estimate": population.estimate, "low": population.low, "high": population.high}
    yield gauge("p2pnode_population", "Nodes of the swarm, estimated, with its interval.", bound=bounds)
    yield gauge("p2pnode_workers", "Live nodes that train.", population.workers)
    yield gauge(
        "p2pnode_nodes",
        "Nodes that the start waits for (training.min_nodes), and those that are ready, train or have finished.",
        what={"needed": node.config.training.min_nodes, "ready": node.nodes_ready()},
    )
    yield gauge(
        "p2pnode_barrier_waiting_seconds",
        "How long the barrier has been waiting; 0: it does not wait.",
        0.0 if status.waiting is None else status.waiting.since_seconds,
    )
    yield counter("p2pnode_barrier_queries_total", "Peers asked for their step.", barrier.queries)


def overlay_families(report: OverlayReport) -> Iterator[Family]:
    """What the overlay counts: datagrams, requests, peers, and what its transport refused."""
    counters, socket = dict(sorted(report.counters.items())), report.socket

    def in_and_out(kind: str) -> dict[str, int]:
        return {direction: counters.get(f"{kind}_{direction}", 0) for direction in ("in", "out")}

    yield counter("p2pnode_datagrams_total", "Datagrams received and sent.", direction=in_and_out("datagrams"))
    yield counter("p2pnode_datagram_sent_bytes_total", "Bytes of datagrams sent.", counters.get("bytes_out", 0))
    yield counter(
        "p2pnode_datagrams_dropped_total", "Datagrams dropped unanswered.", reason=_with_prefix(counters, "dropped_")
    )
    yield counter("p2pnode_requests_total", "Requests received and sent.", direction=in_and_out("requests"))
    refused = _with_prefix(counters, "refused_")
    yield counter("p2pnode_requests_refused_total", "Requests of peers that were over a quota.", reason=refused)
    requests = _with_prefix(counters, "requests_")
    failed = {kind: count for kind, count in requests.items() if kind not in ("in", "out")}
    yield counter("p2pnode_requests_failed_total", "Requests of this node that failed.", kind=failed)
    events = {
        key: count
        for key, count in sorted({**counters, "calls_waiting": report.calls_waiting}.items())
        if key not in _WITH_OWN_FAMILY and not key.startswith(_WITH_FAMILY_PER_PREFIX)
    }
    yield counter("p2pnode_overlay_events_total", "What happened to datagrams and calls.", event=events)
    yield gauge("p2pnode_peers", "Live peers known.", report.peers)
    yield gauge("p2pnode_contacts", "Contacts in the routing table.", report.contacts)
    yield gauge("p2pnode_suspects", "Peers suspected of being dead.", report.suspects)
    trip_s = None if report.round_trip_ms is None else report.round_trip_ms / 1000
    yield gauge("p2pnode_round_trip_seconds", "Mean round trip of datagrams.", trip_s)
    yield gauge("p2pnode_reachable", "1 when peers can open streams to this node.", int(report.reachable.reached))
    yield counter(
        "p2pnode_strangers_refused_total",
        "Datagrams and connections dropped unanswered: unauthenticated, replayed, forged.",
        [
            ({"channel": channel, "reason": reason}, count)
            for channel, prefix in (("datagram", "seal_dropped_"), ("stream", "streams_dropped_"))
            for reason, count in _with_prefix(socket, prefix).items()
        ],
    )
    pairs = socket.get("seal_pairs")
    yield gauge("p2pnode_seal_pairs", "Incarnations of other nodes with which this node shares a datagram key.", pairs)
    socket_events = {
        key: count
        for key, count in socket.items()
        if key != "seal_pairs" and not key.startswith(("seal_dropped_", "streams_dropped_"))
    }
    yield counter("p2pnode_transport_events_total", "What happened at the socket and its seal.", event=socket_events)


def _with_prefix(counters: Mapping[str, int], prefix: str) -> dict[str, int]:
    """The counters whose names begin with the prefix, under the rest of their names."""
    return {key.removeprefix(prefix): count for key, count in counters.items() if key.startswith(prefix)}


def _loop(loop: LoopStatus) -> Iterator[Family]:
    # The label is not called `quantile`. Prometheus uses that name in summaries, which count since the start of the
    # process; these delays are those of the last minute.
    delays_ms = {"median": loop.delay_ms_p50, "p99": loop.delay_ms_p99, "max": loop.delay_ms_max}
    yield gauge(
        "p2pnode_loop_delay_seconds",
        "How late the event loop was in the last minute.",
        statistic={name: None if delay_ms is None else delay_ms / 1000 for name, delay_ms in delays_ms.items()},
    )


def _exchange(found: ExchangeStatus) -> Iterator[Family]:
    ways = {"in": found.bytes_received, "out": found.bytes_sent}
    yield counter("p2pnode_exchange_bytes_total", "Bytes of deltas, values and states.", direction=ways)
    yield gauge(
        "p2pnode_shards", "Shards held here.", role={"owner": found.shards_owned, "backup": found.shards_backed}
    )
    yield gauge(
        "p2pnode_shards_without_backup", "Shards owned here that lack their backup.", found.shards_without_backup
    )
    yield gauge("p2pnode_shard_state_bytes", "Memory of the shards held here.", found.state_bytes)
    yield gauge("p2pnode_published_bytes", "Memory of published values and changes.", found.published_bytes)
    pulls = {"changes": found.shards_followed, "whole": found.publications_entered}
    yield counter("p2pnode_published_pulls_total", "Shards pulled as published values.", way=pulls)
    yield counter(
        "p2pnode_publication_mismatches_total",
        "Pulled shards that differed from the value that their owner published.",
        found.publication_mismatches,
    )
    yield counter("p2pnode_deltas_merged_total", "Shards of deltas added here as owner.", found.merged)
    refused = dict(sorted(found.refused_here.items()))
    yield counter("p2pnode_deltas_refused_total", "Shards of others' deltas refused here.", reason=refused)
    yield counter("p2pnode_unusual_norms_total", "Shards of deltas far longer than the median.", found.unusual_norms)
    yield counter("p2pnode_clipped_total", "Shards of deltas that were shortened.", found.clipped)
    yield counter("p2pnode_own_deltas_refused_total", "Shards of own deltas refused by owners.", found.refused)
    yield gauge("p2pnode_outstanding_steps", "Steps not acknowledged yet.", len(found.outstanding_steps))


def _line(line: LineStatus) -> Iterator[Family]:
    rates = {"in": line.download_bytes_per_s, "out": line.upload_bytes_per_s}
    yield gauge("p2pnode_line_bytes_per_second", "Measured rates of this node's line.", direction=rates)
    yield gauge(
        "p2pnode_line_step_bytes",
        "Bytes that a step sends, and that the line carries while a step trains.",
        what={"needed": line.needed_bytes_per_step, "carried": line.carried_bytes_per_step},
    )
    yield gauge("p2pnode_codec", "The codec of the pushes, as a label.", codec={line.codec: 1})


def _dispatch(found: DispatchStatus) -> Iterator[Family]:
    tasks = {"todo": found.todo, "leased": found.leased, "done": found.done, "failed": found.failed}
    yield gauge("p2pnode_dispatch_tasks", "Tasks of the pass by state.", state=tasks)
    yield gauge("p2pnode_dispatch_pass", "The present pass over the records.", found.pass_number)
    yield gauge("p2pnode_dispatch_serves", "1 when this node serves the queue.", int(found.serves))
    yield counter("p2pnode_dispatch_discarded_total", "Tasks that were given up.", found.discarded)
    yield counter(
        "p2pnode_dispatch_records_total",
        "Dispatched records that this node trained in completed steps.",
        found.records_trained,
    )
    yield counter(
        "p2pnode_dispatch_superseded_total",
        "Tasks that this node no longer held when it reported or renewed them.",
        found.tasks_superseded,
    )


def _values(found: ValuesStatus) -> Iterator[Family]:
    yield gauge("p2pnode_values_keys", "Keys of the shards owned here.", found.keys)
    yield gauge("p2pnode_values_bytes", "Memory of the values owned here.", found.bytes)
    fates = {"applied": found.updates, "refused": found.refused}
    yield counter("p2pnode_values_updates_total", "Updates of values owned here.", fate=fates)
    yield counter("p2pnode_values_reads_total", "Keys owned here that were read.", found.reads)
    yield counter("p2pnode_values_batches_total", "Batches of updates added here.", found.batches)
    yield gauge(
        "p2pnode_values_waiting_updates",
        "Updates that wait: here for their batch, or this node's own for their owners.",
        at={"owner": found.waiting, "origin": found.unanswered},
    )
    yield gauge("p2pnode_values_waiting_bytes", "Bytes of updates that wait here.", found.waiting_bytes)


def _server(found: ServerStatus) -> Iterator[Family]:
    yield gauge("p2pnode_server_version", "Updates in the values of the parameter server.", found.version)
    yield gauge("p2pnode_server_workers", "Workers of the parameter server.", found.workers)
    tasks = {"held": found.held, "waiting": found.waiting}
    yield gauge("p2pnode_server_open_tasks", "Tasks with workers, and those that came back.", state=tasks)
    yield counter("p2pnode_server_tasks_given_total", "Tasks given for the first time.", found.given)
    yield counter("p2pnode_server_tasks_done_total", "Tasks whose update counts.", found.done)
    yield counter(
        "p2pnode_server_tasks_again_total",
        "Tasks given again, after an error, a death, or the end of their lease.",
        found.again,
    )
    yield counter("p2pnode_server_updates_refused_total", "Updates that were too old.", found.refused)
    yield gauge("p2pnode_server_updates_lost", "Updates that died with worker and server.", found.lost)


def _devices(devices: list[DeviceStatus]) -> Iterator[Family]:
    labels = [{"index": str(device.index), "device": device.device} for device in devices]
    yield gauge(
        "p2pnode_device_up",
        "1 for a trainer of this node that runs, 0 for one that does not.",
        [(label, int(device.state == "running")) for label, device in zip(labels, devices, strict=True)],
    )
    yield counter(
        "p2pnode_device_failures_total",
        "Times this trainer of the node failed.",
        [(label, device.failures) for label, device in zip(labels, devices, strict=True)],
    )
    yield counter(
        "p2pnode_device_samples_total",
        "Samples that this trainer of the node trained on.",
        [(label, device.samples) for label, device in zip(labels, devices, strict=True)],
    )
    yield counter(
        "p2pnode_device_optimizer_steps_total",
        "Optimiser steps of this trainer of the node.",
        [(label, device.optimizer_steps) for label, device in zip(labels, devices, strict=True)],
    )

"""The metric families of `/metrics`: the numbers of `/status`, and some counters that only `/metrics` has.

Most families are annotations of fields in `p2pnode.status.schema`. Names follow Prometheus' conventions: base units,
`_total` on counters, few labels. No label is a peer's id, because a swarm of a thousand nodes would then have a million
series. `docs/metrics.md` is generated from the source text of the calls of `gauge` and `counter`, so their first two
arguments are literals.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import get_args, get_type_hints

from msgspec import Struct

from p2pnode.lifecycle.environment import State
from p2pnode.lifecycle.node import Node
from p2pnode.overlay.report import OverlayReport
from p2pnode.own_memory import resident_bytes
from p2pnode.status.prometheus import Family, counter, gauge
from p2pnode.status.schema import Status

#: Counters of the overlay that have a family of their own. Counters with one of the prefixes share a family per prefix.
#: All other counters are labels of `p2pnode_overlay_events_total`.
_WITH_OWN_FAMILY = ("datagrams_in", "datagrams_out", "bytes_out", "requests_in", "requests_out")
_WITH_FAMILY_PER_PREFIX = ("dropped_", "refused_", "requests_")


def families(node: Node, status: Status, *, is_ready: bool) -> list[Family]:
    """All metric families. A part that the node does not have (yet), such as the exchange, has no families."""
    return _merged(_families(node, status, is_ready=is_ready))


def _families(node: Node, status: Status, *, is_ready: bool) -> Iterator[Family]:
    yield gauge("p2pnode_build_info", "The version, as a label.", version={status.node.version: 1})
    yield gauge("process_resident_memory_bytes", "Resident memory of the daemon.", resident_bytes())
    yield gauge("p2pnode_ready", "1 when this node has joined and trains, as /readyz says.", int(is_ready))
    counts = {level: sum(found.level == level for found in status.health) for level in ("info", "warning", "error")}
    yield gauge("p2pnode_health_findings", "Findings under health in /status now, by level.", level=counts)
    states = {state: int(state == status.state) for state in get_args(State)}
    yield gauge("p2pnode_state", "1 for the state the node is in.", state=states)
    yield counter(
        "p2pnode_phase_seconds_total",
        "Time of steps by phase; a step is exchanged while the next one is trained.",
        phase=node.progress.phase_seconds,
    )
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
    # The label is not called `quantile`. Prometheus uses that name in summaries, which count since the start of the
    # process; these delays are those of the last minute.
    loop = status.loop
    delays_ms = {"median": loop.delay_ms_p50, "p99": loop.delay_ms_p99, "max": loop.delay_ms_max}
    yield gauge(
        "p2pnode_loop_delay_seconds",
        "How late the event loop was in the last minute.",
        statistic={name: None if delay_ms is None else delay_ms / 1000 for name, delay_ms in delays_ms.items()},
    )
    if status.line is not None:
        yield gauge("p2pnode_codec", "The codec of the pushes, as a label.", codec={status.line.codec: 1})
    yield from overlay_families(node.overlay.report())
    parts = (status, status.node, status.population, status.barrier, status.training)
    further = (status.line, status.dispatch, status.values, status.server)
    for part in (*parts, status.exchange if status.exchange.shards else None, *further):
        if part is not None:
            yield from _of_fields(part)
    for device in status.devices:
        labels = {"index": str(device.index), "device": device.device}
        runs = [(labels, int(device.state == "running"))]
        yield gauge("p2pnode_device_up", "1 for a trainer of this node that runs, 0 for one that does not.", runs)
        yield from _of_fields(device, labels)

    for gpu in status.gpus:
        yield from _of_fields(gpu, {"device": gpu.device, "name": gpu.name})


@functools.cache
def _annotated(part: type[Struct]) -> list[tuple[str, Family]]:
    """The fields of a type that are metrics too, with their families."""
    return [
        (name, family)
        for name, hint in get_type_hints(part, include_extras=True).items()
        for family in getattr(hint, "__metadata__", ())
        if isinstance(family, Family)
    ]


def _of_fields(part: Struct, labels: Mapping[str, str] = {}) -> Iterator[Family]:
    """The families of a part of the status. Of a list the length is shown, of a table a sample for each of its keys."""
    for name, family in _annotated(type(part)):
        value, ((own, _),) = getattr(part, name), family.samples
        samples = [({**labels, **own}, len(value) if isinstance(value, list) else value)]
        if isinstance(value, Mapping):
            samples = [({**labels, label: key}, value[key]) for label in own for key in sorted(value)]
        yield replace(family, samples=samples)


def _merged(found: Iterable[Family]) -> list[Family]:
    """One family of each name."""
    by_name: dict[str, Family] = {}
    for family in found:
        known = by_name.setdefault(family.name, family)
        if known is not family:
            by_name[family.name] = replace(known, samples=[*known.samples, *family.samples])
    return list(by_name.values())


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

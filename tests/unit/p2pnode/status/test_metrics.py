"""The metric families: which counter becomes which metric."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec

from p2pnode.config.settings import Config
from p2pnode.overlay.discovery.population import counted
from p2pnode.overlay.report import OverlayReport, ReachabilityReport, SamplingReport
from p2pnode.status.metrics import collect, health_metrics
from p2pnode.status.prometheus import render
from p2pnode.status.schema import ExchangeStatus, Finding, LoopStatus
from p2pnode.training.progress import Progress
from tests.harness.project.exposition import complaints

NODE: Any = SimpleNamespace(
    progress=Progress(step=7),
    state="training",
    overlay=SimpleNamespace(population=lambda: counted(3), workers=lambda: 2.0),
    gate=SimpleNamespace(waiting=None, queries=5),
    config=Config(),
    nodes_ready=lambda: 1,
)
OVERLAY = OverlayReport(
    counters={"datagrams_in": 4, "dropped_content": 2, "refused_rate": 3, "requests_timeout": 1, "retries": 6},
    socket={"seal_pairs": 2, "seal_dropped_unknown": 8, "not_sent": 9},
    peers=2,
    calls_waiting=1,
    contacts=2,
    suspects=0,
    lost=0,
    sampling=SamplingReport(0, 0, None, 0.0, None, None, 0),
    lookup=None,
    local_health=0,
    round_trip_ms=5.0,
    reachable=ReachabilityReport(reached=True, reason="", confirmed_by=[]),
    mapping=None,
)
LOOP = LoopStatus(delay_ms_p50=1.0, delay_ms_p99=2.0, delay_ms_max=3.0, tasks=1)


def page(overlay: OverlayReport = OVERLAY, exchange: ExchangeStatus | None = None) -> list[str]:
    return render(collect(NODE, overlay, exchange, LOOP, uptime_s=1.0)).splitlines()


def test_counters_become_labelled_metrics_by_their_prefix() -> None:
    """Reasons and kinds become labels; a counter without a metric of its own is an event."""
    lines = page()

    assert 'p2pnode_datagrams_total{direction="in"} 4' in lines
    assert 'p2pnode_datagrams_dropped_total{reason="content"} 2' in lines
    assert 'p2pnode_requests_refused_total{reason="rate"} 3' in lines
    assert 'p2pnode_requests_failed_total{kind="timeout"} 1' in lines
    assert [line for line in lines if line.startswith("p2pnode_overlay_events_total")] == [
        'p2pnode_overlay_events_total{event="calls_waiting"} 1',
        'p2pnode_overlay_events_total{event="retries"} 6',
    ]
    assert 'p2pnode_strangers_refused_total{channel="datagram",reason="unknown"} 8' in lines
    assert 'p2pnode_transport_events_total{event="not_sent"} 9' in lines
    assert 'p2pnode_state{state="training"} 1' in lines


def test_the_page_keeps_the_rules() -> None:
    """Every family of this module is named and labelled as Prometheus' practice asks."""
    exchange = ExchangeStatus(arithmetic="numpy", refused_here={"late": 1})
    families = [
        *collect(NODE, OVERLAY, exchange, LOOP, uptime_s=1.0),
        *health_metrics(True, [Finding(level="warning", what="a", do="b")]),
    ]
    text = render(families)

    assert complaints(text) == []
    assert 'p2pnode_health_findings{level="warning"} 1' in text
    assert 'p2pnode_loop_delay_seconds{statistic="max"} 0.003' in text


def test_times_are_seconds_and_unknown_values_are_left_out() -> None:
    """Milliseconds of the status become seconds; without a round trip there is no sample."""
    assert "p2pnode_round_trip_seconds 0.005" in page()
    assert 'p2pnode_loop_delay_seconds{statistic="p99"} 0.002' in page()
    unknown = page(msgspec.structs.replace(OVERLAY, round_trip_ms=None))
    assert not any("p2pnode_round_trip_seconds" in line for line in unknown)


def test_the_exchange_has_metrics_only_when_there_is_one() -> None:
    """Before the node has an exchange its families are absent; later they have the status' numbers."""
    assert not any("p2pnode_shards" in line for line in page())

    lines = page(exchange=ExchangeStatus(arithmetic="numpy", shards_owned=3, outstanding_steps=[1, 2]))

    assert 'p2pnode_shards{role="owner"} 3' in lines
    assert "p2pnode_outstanding_steps 2" in lines

"""The metric families: which number of the status, and which counter, becomes which metric; and what Prometheus' own
parser makes of the page."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from p2pnode.overlay.report import OverlayReport, ReachabilityReport, SamplingReport
from p2pnode.status.metrics import families, overlay_families
from p2pnode.status.prometheus import counter, gauge, render
from p2pnode.status.schema import (
    DeviceStatus,
    DispatchStatus,
    Finding,
    GpuStatus,
    LoopStatus,
    ServerStatus,
    ValuesStatus,
)
from tests.harness.project.exposition import complaints, known_families
from tests.harness.runner.stories import played_by
from tests.harness.swarms.status_swarm import report, simulate
from tests.harness.swarms.swarm import Swarm

OVERLAY = OverlayReport(
    counters={"datagrams_in": 4, "dropped_content": 2, "refused_rate": 3, "requests_timeout": 1, "retries": 6},
    socket={"seal_pairs": 2, "seal_dropped_unknown": 8, "not_sent": 9},
    peers=2,
    calls_waiting=1,
    contacts=2,
    suspects=0,
    lost=0,
    sampling=SamplingReport(0, 0, None),
    lookup=None,
    local_health=0,
    round_trip_ms=5.0,
    reachable=ReachabilityReport(reached=True, reason="", confirmed_by=[]),
    mapping=None,
)


def numbered(part: type[Struct], **given: str) -> Any:
    """A part of the status whose fields have the numbers from 1 up."""
    numbers = {field.name: number for number, field in enumerate(msgspec.structs.fields(part), 1)}
    return part(**numbers | given)


#: Samples of the page, and the numbers that they show.
SHOWN = {
    'p2pnode_dispatch_tasks{state="todo"}': 10,
    'p2pnode_dispatch_tasks{state="failed"}': 13,
    "p2pnode_dispatch_serves": 2,
    "p2pnode_values_keys": 1,
    'p2pnode_values_waiting_updates{at="owner"}': 8,
    'p2pnode_values_waiting_updates{at="origin"}': 10,
    "p2pnode_server_updates_lost": 9,
    'p2pnode_device_up{index="1",device="cpu"}': 1,
    'p2pnode_device_failures_total{index="1",device="cpu"}': 5,
    'p2pnode_shards{role="owner"}': 3,
    'p2pnode_shards{role="backup"}': 1,
    "p2pnode_outstanding_steps": 2,
    'p2pnode_deltas_refused_total{reason="late"}': 1,
    'p2pnode_line_bytes_per_second{direction="out"}': 2_500_000,
    'p2pnode_codec{codec="int8"}': 1,
    'p2pnode_health_findings{level="warning"}': 1,
    'p2pnode_loop_delay_seconds{statistic="max"}': 0.003,
    'p2pnode_state{state="training"}': 1,
    "p2pnode_ready": 1,
}


def test_counters_become_labelled_metrics_by_their_prefix() -> None:
    """Reasons and kinds become labels; a counter without a metric of its own is an event."""
    lines = render(overlay_families(OVERLAY)).splitlines()

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


def test_a_round_trip_is_in_seconds_and_an_unknown_one_is_left_out() -> None:
    """Milliseconds of the status become seconds; without a round trip there is no sample."""
    assert "p2pnode_round_trip_seconds 0.005" in render(overlay_families(OVERLAY)).splitlines()
    assert "round_trip" not in render(overlay_families(msgspec.structs.replace(OVERLAY, round_trip_ms=None)))


@played_by(simulate)
async def test_status_and_metrics_agree(swarm: Swarm) -> None:
    """Every number has a place of its own, and every described family comes from some node; one that has no exchange
    yet, and no records, values, server or devices, has no families of them."""
    host = swarm.start("n0")
    assert not any("p2pnode_shards" in family.name for family in report(swarm, host).metrics())
    await swarm.until(lambda: host.living.progress.step >= 2, within_s=30, what="it trains")
    plain = report(swarm, host).status()
    line = plain.line
    assert line is not None
    full = msgspec.structs.replace(
        plain,
        dispatch=numbered(DispatchStatus),
        values=numbered(ValuesStatus),
        server=numbered(ServerStatus),
        devices=[numbered(DeviceStatus, device="cpu", state="running")],
        gpus=[numbered(GpuStatus, device="cuda:0", name="H100", error=None)],
        health=[Finding(level="warning", what="a", do="b")],
        loop=LoopStatus(delay_ms_p50=1.0, delay_ms_p99=2.0, delay_ms_max=3.0, tasks=1),
        line=msgspec.structs.replace(line, upload_bytes_per_s=2_500_000, codec="int8", needed_bytes_per_step=60),
        exchange=msgspec.structs.replace(
            plain.exchange, shards_owned=3, shards_backed=1, outstanding_steps=[1, 2], refused_here={"late": 1}
        ),
    )
    made = families(host.living, full, is_ready=True)
    page = render(made)
    assert complaints(page) == []
    of_the_server = {"p2pnode_http_refused_total": "counter"}
    assert {family.name: family.kind for family in made} | of_the_server == known_families()
    shown = dict(line.rpartition(" ")[::2] for line in page.splitlines() if not line.startswith("#"))
    assert {name: float(shown[name]) for name in SHOWN} == SHOWN
    text = render(families(host.living, plain, is_ready=False))
    names = {family.name for family in text_string_to_metric_families(text)}
    parts = ("p2pnode_dispatch", "p2pnode_values", "p2pnode_dev", "p2pnode_gpu")
    assert not [name for name in names if name.startswith(parts)]


def parsed(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    return {
        sample.name: [(s.labels, s.value) for s in family.samples if s.name == sample.name]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_parser_reads_what_was_written() -> None:
    """Names, labels, values and kinds survive, whatever a label holds."""
    nasty = 'a "quote", a \\ backslash\nand a new line'
    page = render(
        [
            gauge("p2pnode_step", "Completed\nsteps \\ all.", 12),
            counter("p2pnode_dropped_total", "Dropped.", reason={nasty: 3, "b": 1.5}),
        ]
    )

    assert parsed(page) == {
        "p2pnode_step": [({}, 12.0)],
        "p2pnode_dropped_total": [({"reason": nasty}, 3.0), ({"reason": "b"}, 1.5)],
    }
    assert "# TYPE p2pnode_dropped_total counter" in page


def test_numbers_that_are_none_and_values_that_are_missing() -> None:
    """Infinite and undefined numbers have their names; None, and a family without values, are left out."""
    page = render(
        [
            gauge("a", "A.", math.inf),
            gauge("b", "B.", -math.inf),
            gauge("c", "C.", math.nan),
            gauge("d", "D.", None),
            gauge("e", "E.", []),
            gauge("f", "F.", True),
        ]
    )
    found = parsed(page)

    assert found["a"] == [({}, math.inf)]
    assert found["b"] == [({}, -math.inf)]
    assert math.isnan(found["c"][0][1])
    assert found["f"] == [({}, 1.0)]
    assert "d" not in found
    assert "# HELP e" not in page

"""The overlay's report in the form of `/status`."""

from __future__ import annotations

from p2pnode.overlay.report import OverlayReport, ReachabilityReport, SamplingReport


def test_the_counters_stand_beside_the_other_fields() -> None:
    """`flat` has every counter and every field, and no key `counters`."""
    report = OverlayReport(
        counters={"retries": 6},
        socket={"not_sent": 9},
        peers=2,
        calls_waiting=1,
        contacts=2,
        suspects=0,
        lost=0,
        sampling=SamplingReport(0, 0, None),
        lookup=None,
        local_health=0,
        round_trip_ms=None,
        reachable=ReachabilityReport(reached=True, reason="", confirmed_by=[]),
        mapping=None,
    )

    flat = report.flat()

    assert flat["retries"] == 6
    assert flat["socket"] == {"not_sent": 9}
    assert flat["reachable"] is report.reachable
    assert "counters" not in flat
    assert list(flat)[:3] == ["retries", "socket", "peers"]

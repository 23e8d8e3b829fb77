"""What a running node says of itself becomes findings."""

from __future__ import annotations

from typing import Any

from p2pnode.doctor.examine import node_checks

STATUS: dict[str, Any] = {
    "summary": "training at step 7",
    "node": {"version": "1"},
    "overlay": {"reachable": {"reached": True, "reason": "two peers"}},
    "loop": {"delay_ms_p99": 3.0},
    "line": {"upload_bytes_per_s": 2_000_000, "download_bytes_per_s": None},
    "health": [
        {"level": "warning", "what": "disk full", "do": "free space"},
        {"level": "error", "what": "hung", "do": "x"},
    ],
}
PEERS = [{"id": name * 40, "round_trip_ms": trip} for name, trip in (("a", 1.5), ("b", None), ("c", 30.0), ("d", 9.0))]


def test_everything_under_health_is_a_finding_with_its_level() -> None:
    """And the node's summary, its reachability, its loop, its line with two peers."""
    checks = node_checks(STATUS, PEERS, "1")
    assert [(check.name, check.level) for check in checks] == [
        *((name, "ok") for name in ("node", "reachable", "delay", "line")),
        ("health", "warning"),
        ("health", "error"),
    ]
    line = next(check.what for check in checks if check.name == "line")
    assert line == "2.00 MB/s up; a round trip of 1.50 ms to aaaaaaaa; a round trip of 30.0 ms to cccccccc"


def test_a_node_of_another_version_or_a_late_loop_is_a_warning() -> None:
    """A node that was not restarted after an installation; a line that is not measured yet has when it will be."""
    checks = node_checks(STATUS | {"line": None, "health": [], "loop": {"delay_ms_p99": 900.0}}, PEERS[:1], "2")
    line = checks[-1]
    assert line.what == "its speed is not measured yet; a round trip of 1.50 ms to aaaaaaaa"
    assert "after some steps" in line.do
    assert [(check.name, check.level) for check in checks if check.level != "ok"] == [
        ("version", "warning"),
        ("delay", "warning"),
        ("line", "info"),
    ]


def test_an_answer_of_any_other_version_is_read() -> None:
    """Nothing is required."""
    assert [check.name for check in node_checks({}, [], "2")] == ["node", "reachable", "line"]

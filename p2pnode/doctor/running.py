"""What a running node says of itself, as findings of the doctor. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from p2pnode.doctor.check import DoctorCheck, error, info, ok, warning
from p2pnode.terminal.numbers import duration, rate, short
from p2pnode.terminal.status_view import findings, part

#: Peers of which the round trip is named.
NAMED_PEERS = 2
#: A loop that is this late answers heartbeats late.
LATE_MS = 200.0


def node_checks(status: Mapping[str, Any], peers: Sequence[Mapping[str, Any]], version: str) -> list[DoctorCheck]:
    """Its summary, version, reachability, loop, line, and everything under `health`."""
    node = part(status, "node")
    found = [ok("node", str(status.get("summary", "")))]
    if node.get("version") not in (None, version):
        found.append(
            warning(
                "version",
                f"the node runs version {node['version']}, and this command is {version}",
                "start the node again, so that it runs the installed version",
            )
        )
    reachable = part(part(status, "overlay"), "reachable")
    if reachable.get("reached"):
        found.append(ok("reachable", f"peers can connect to this node ({reachable.get('reason') or 'confirmed'})"))
    elif not reachable.get("reason"):
        found.append(info("reachable", "no peer has tried to connect to this node yet"))
    delay_ms = part(status, "loop").get("delay_ms_p99")
    if isinstance(delay_ms, int | float):
        what = f"the event loop is up to {duration(delay_ms / 1000)} late"
        do = "see what else runs on this machine; set training.threads lower than the number of cores"
        found.append(ok("delay", what) if delay_ms < LATE_MS else warning("delay", what, do))
    found += _line(part(status, "line"), peers)
    for entry in findings(status):
        level, what, do = str(entry.get("level")), str(entry.get("what", "")), str(entry.get("do", ""))
        make = {"error": error, "warning": warning}.get(level, info)
        found.append(make("health", what, do))
    return found


def _line(line: Mapping[str, Any], peers: Sequence[Mapping[str, Any]]) -> list[DoctorCheck]:
    up = line.get("upload_bytes_per_s") or line.get("upload_at_least_bytes_per_s")
    down = line.get("download_bytes_per_s")
    least = "" if line.get("upload_bytes_per_s") else "at least "
    speeds = [f"{least}{rate(up)} up"] if up else []
    speeds += [f"{rate(down)} down"] if down else []
    near = [peer for peer in peers if isinstance(peer.get("round_trip_ms"), int | float)][:NAMED_PEERS]
    trips = [f"{duration(peer['round_trip_ms'] / 1000)} to {short(peer.get('id'))}" for peer in near]
    parts = [*speeds, *(f"a round trip of {trip}" for trip in trips)]
    if speeds:
        return [ok("line", "; ".join(parts))]
    do = "its node measures it while it exchanges deltas: look again after some steps"
    return [info("line", "; ".join(["its speed is not measured yet", *parts]), do)]

"""All findings of the doctor, in order, each as soon as it is known."""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple

from p2pnode import __version__
from p2pnode.client import NodeClient, RunningNode
from p2pnode.config.rules import check_start, warnings_for
from p2pnode.config.settings import Config
from p2pnode.directory_lock import is_locked
from p2pnode.doctor import gather, machine
from p2pnode.doctor.check import DoctorCheck, error, info, ok, warning
from p2pnode.doctor.visit import visit
from p2pnode.errors import UserError
from p2pnode.keys.key_files import find_keys, own_input
from p2pnode.terminal.numbers import duration, rate, short
from p2pnode.terminal.status_view import findings, part
from p2pnode.training import kernels

#: Peers of which the round trip is named.
NAMED_PEERS = 2
#: A loop that is this late answers heartbeats late.
LATE_MS = 200.0


class Examination(NamedTuple):
    """What to look at. `node`: the one that runs on the state directory. `time_server`: to compare the clock with."""

    config: Config
    node: RunningNode | None
    time_server: str = ""
    #: Without: what needs other machines is left out.
    network: bool = True


async def examine(asked: Examination) -> AsyncIterator[DoctorCheck]:
    """Raises nothing that a user can mend: it is a finding."""
    async for check in _machine(asked):
        yield check
    for check in _place(asked):
        yield check
    if asked.node is not None:
        for check in _running(asked.node):
            yield check
        return
    folder = asked.config.state_folder
    if is_locked(folder):
        yield error(
            "node",
            f"a process has the state directory {folder}, and no HTTP API of it answers",
            "it starts, or hangs: look again in a moment, then end it with `p2pnode leave --now`",
        )
        return
    ports = gather.port_checks(asked.config)
    for check in ports:
        yield check
    if not asked.network or any(check.level == "error" for check in ports):
        return
    async for check in _swarm(asked):
        yield check


async def _machine(asked: Examination) -> AsyncIterator[DoctorCheck]:
    yield machine.version_check(__version__, platform.python_version(), kernels.name())
    yield machine.files_check(gather.file_limit())
    yield machine.delay_check(gather.longest_delay_s())
    offset, server = None, asked.time_server
    if server:
        try:
            offset = await asyncio.to_thread(gather.clock_offset_s, server)
        except (OSError, ValueError) as failure:
            what = f"the time server {server} did not answer: {getattr(failure, 'strerror', None) or failure}"
            yield info("clock", what, "name another one, or let UDP to port 123 out")
    yield machine.clock_check(gather.clock_is_set(), offset, server)
    found = await asyncio.to_thread(gather.torch_facts)
    for check in machine.torch_check(found, asked.config.training.device, gather.has_nvidia()):
        yield check


def _place(asked: Examination) -> list[DoctorCheck]:
    config, folder = asked.config, asked.config.state_folder
    runs = "" if asked.node is None else f"its node is process {asked.node.pid}, HTTP API at {asked.node.address}"
    found = [machine.folder_check(str(folder), folder.exists(), gather.is_writable(folder), runs)]
    try:
        found.append(machine.disk_check(str(folder), gather.free_bytes(folder), gather.checkpoint_bytes(folder)))
    except OSError as failure:
        found.append(error("disk", f"{folder}: {failure.strerror or failure}", "name another folder with --state-dir"))
    found += [machine.secret_check(file) for file in gather.secret_files(config)]
    found += [error("settings", problem.what, problem.do) for problem in check_start(config)]
    found += [warning("settings", problem.what, problem.do) for problem in warnings_for(config)]
    alone = gather.loopback_check(config)
    return found if alone is None else [*found, alone]


def _running(node: RunningNode) -> list[DoctorCheck]:
    client = NodeClient.of(node)
    try:
        return node_checks(client.status(), client.peers(), __version__)
    except UserError as failure:
        return [error("node", f"process {node.pid} runs, and its API does not answer: {failure.message}", failure.hint)]


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


async def _swarm(asked: Examination) -> AsyncIterator[DoctorCheck]:
    config = asked.config
    if config.swarm.key_file == "-":
        yield info("key", "the swarm key comes through standard input, so the swarm was not visited")
        return
    try:
        keys = find_keys(config, dict(os.environ), own_input())
        async for check in visit(config, keys):
            yield check
    except UserError as failure:
        yield error("key", failure.message, failure.hint)

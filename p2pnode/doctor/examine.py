"""All findings of the doctor, in order, each as soon as it is known."""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

from p2pnode import __version__
from p2pnode.client import NodeClient, RunningNode
from p2pnode.config.rules import check_start, warnings_for
from p2pnode.config.settings import Config
from p2pnode.directory_lock import is_locked
from p2pnode.doctor import machine
from p2pnode.doctor.machine import DoctorCheck, error, info, ok, warning
from p2pnode.doctor.visit import visit
from p2pnode.errors import UserError
from p2pnode.keys.key_files import find_keys, own_input
from p2pnode.terminal.status_view import objects, part
from p2pnode.training import kernels
from p2pnode.training.devices.gpus import has_gpu


class Examination(NamedTuple):
    """What to look at. `node`: the one that runs on the state directory."""

    config: Config
    node: RunningNode | None
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
    ports = machine.port_checks(asked.config)
    for check in ports:
        yield check
    if not asked.network or any(check.level == "error" for check in ports):
        return
    async for check in _swarm(asked):
        yield check


async def _machine(asked: Examination) -> AsyncIterator[DoctorCheck]:
    yield machine.version_check(__version__, platform.python_version(), kernels.name())
    yield machine.files_check(machine.file_limit())
    yield machine.delay_check(machine.longest_delay_s())
    yield machine.clock_check(machine.clock_is_set())
    found = await asyncio.to_thread(machine.torch_facts)
    for check in machine.torch_check(found, asked.config.training.device, has_gpu()):
        yield check


def _place(asked: Examination) -> list[DoctorCheck]:
    config, folder = asked.config, asked.config.state_folder
    runs = "" if asked.node is None else f"its node is process {asked.node.pid}, HTTP API at {asked.node.address}"
    found = [machine.folder_check(str(folder), folder.exists(), machine.is_writable(folder), runs)]
    try:
        found.append(machine.disk_check(str(folder), machine.free_bytes(folder), machine.checkpoint_bytes(folder)))
    except OSError as failure:
        found.append(error("disk", f"{folder}: {failure.strerror or failure}", "name another folder with --state-dir"))
    found += [machine.secret_check(file) for file in machine.secret_files(config)]
    found += [error("settings", problem.what, problem.do) for problem in check_start(config)]
    found += [warning("settings", problem.what, problem.do) for problem in warnings_for(config)]
    alone = machine.loopback_check(config)
    return found if alone is None else [*found, alone]


def _running(node: RunningNode) -> list[DoctorCheck]:
    client = NodeClient.of(node)
    try:
        return node_checks(client.status(), __version__)
    except UserError as failure:
        return [error("node", f"process {node.pid} runs, and its API does not answer: {failure.message}", failure.hint)]


def node_checks(status: Mapping[str, Any], version: str) -> list[DoctorCheck]:
    """Its summary, its version, and everything under `health`."""
    found = [ok("node", str(status.get("summary", "")))]
    runs = part(status, "node").get("version")
    if runs not in (None, version):
        found.append(
            warning(
                "version",
                f"the node runs version {runs}, and this command is {version}",
                "start the node again, so that it runs the installed version",
            )
        )
    for entry in objects(status, "health"):
        level, what, do = str(entry.get("level")), str(entry.get("what", "")), str(entry.get("do", ""))
        make = {"error": error, "warning": warning}.get(level, info)
        found.append(make("health", what, do))
    return found


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

"""The daemon: a node on the real clock, disk and sockets, with signal handlers, a lock file and the HTTP API.

`p2pnode start` and `p2pnode run` call `run`. SIGTERM and SIGINT make the node leave; a second one ends the process at
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import ipaddress
import os
import platform
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from p2pnode import logs
from p2pnode.client import STATUS_FILE, status_file
from p2pnode.config.directory_record import Given, check_run
from p2pnode.config.settings import Config
from p2pnode.config.state_folders import run_of
from p2pnode.config.tracker import PACKAGES, parse_tracker
from p2pnode.directory_lock import empty_again, is_fresh, locked
from p2pnode.errors import ExitCode, UserError, package_missing, state_directory_unusable
from p2pnode.keys import api_token
from p2pnode.keys.closed_swarm import ClosedSwarm, open_closed_swarm
from p2pnode.keys.key_files import find_keys, own_input, save_invitation
from p2pnode.lifecycle.environment import NodeEnvironment
from p2pnode.lifecycle.node import Node
from p2pnode.log_file import bounded
from p2pnode.overlay.addresses import Address, is_loopback
from p2pnode.overlay.background_output import BackgroundOutput, descriptor_writer
from p2pnode.overlay.bootstrap import lan
from p2pnode.overlay.environment import Disk, Entropy, Environment
from p2pnode.overlay.identity import UnreadableIdentity, load_identity
from p2pnode.overlay.ids import short
from p2pnode.overlay.nat import upnp
from p2pnode.overlay.nat.port_mapping import Gateway
from p2pnode.overlay.sealing.invitation import Invitation
from p2pnode.overlay.sealing.swarm_key import KeyRing
from p2pnode.overlay.sockets.transport import SocketTransport
from p2pnode.overlay.supervision import logged, supervised
from p2pnode.overlay.system import FolderDisk, SystemClock, SystemEntropy, ThreadExecutor, shorten_slice
from p2pnode.overlay.transport import PortInUse, Transport
from p2pnode.own_memory import private_bytes, trim_heap, tune_malloc
from p2pnode.status.events import EventLog, EventRing
from p2pnode.status.findings import tracker_findings
from p2pnode.status.report import LoopDelay, StatusReport
from p2pnode.tracking.service import Tracking, Writing
from p2pnode.training.devices.start import make_trainer as make_device_trainer
from p2pnode.training.dispatch.chunks import read_dataset
from p2pnode.training.dispatch.store import Store
from p2pnode.training.supervisor.launch import NodeStart
from p2pnode.training.supervisor.process import missing_output
from p2pnode.training.trainer_link.interface import Trainer
from p2pnode.training.trainer_link.record_messages import RecordSource
from p2pnode.training.trainer_link.shared_memory import available_memory_bytes

if TYPE_CHECKING:
    from p2pnode.status.server import StatusServer

#: Requested if the router has given our port away: neither well known nor ephemeral on most systems.
EXTERNAL_PORTS = (10000, 32768)


def run(
    config: Config,
    *,
    command: list[str] | None = None,
    invitation: Invitation | None = None,
    given: Mapping[str, Given] | None = None,
    reopens: bool = False,
    make_trainer: Callable[..., Trainer] = make_device_trainer,
) -> int:
    """Run a node until it has left; returns the exit code. `command` is the user's own training program.

    `invitation` is kept in the state directory, and `given`, the settings chosen for this start, once the node is in
    its swarm. `reopens`: open the swarm again although another node founded it. `make_trainer` takes what
    `training.devices.start.make_trainer` takes. Raises `UserError` for everything the user can fix. A start that is
    refused because of its run, its key or another process writes nothing, and one that fails before its node has
    entered a swarm leaves a fresh directory empty.
    """
    tune_malloc()
    shorten_slice()
    folder = config.state_folder
    if config.node.nat == "auto" and not upnp.is_installed():
        raise package_missing('node.nat = "auto"', "async-upnp-client", "nat")
    if config.swarm.discover == "lan" and not lan.is_installed():
        raise package_missing('swarm.discover = "lan"', "zeroconf", "lan")
    tracker = parse_tracker(config.training.tracker)
    if tracker is not None and not _is_installed(PACKAGES.get(tracker.kind, "csv")):
        raise package_missing(f'training.tracker = "{tracker.kind}"', PACKAGES[tracker.kind], tracker.kind)
    check_run(run_of(folder), config, folder)
    fresh = is_fresh(folder)
    keys = None if invitation is not None else find_keys(config, os.environ, own_input())
    code = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked(folder))
        stack.callback(lambda: empty_again(folder) if fresh and code != 0 else None)
        stream = stack.enter_context(logs.LogStream(sys.stderr, folder))
        # Again: the first look was at a directory that another process may have been using.
        check_run(run_of(folder), config, folder)
        if invitation is not None:
            save_invitation(folder, invitation.run, list(invitation.addresses), invitation.keys)
            keys = find_keys(config, os.environ, own_input())
        node = _main(config, folder, keys, stream, _Start(command, given or {}, reopens, make_trainer))
        try:
            import uvloop  # absent on Windows
        except ImportError:
            code = asyncio.run(node)
        else:
            code = uvloop.run(node)
        return code


class _Start(NamedTuple):
    """What a start was told besides its configuration; see `run`."""

    command: list[str] | None
    given: Mapping[str, Given]
    reopens: bool
    make_trainer: Callable[..., Trainer]


async def _main(config: Config, folder: Path, keys: KeyRing | None, stream: logs.LogStream, start: _Start) -> int:
    clock = SystemClock()
    events = EventRing()
    log = EventLog(events, logs.configure(config.log, stream), clock)
    printed = BackgroundOutput(
        bounded(folder, descriptor_writer(sys.stdout.fileno())),
        note=missing_output,
        on_drop=lambda: log.warning("output_dropped", reason="nobody reads the standard output of this process"),
    )
    workers = ThreadExecutor()

    def make_trainer(node_id: bytes, incarnation: int, on_state: Callable[[str], None]) -> Trainer:
        return start.make_trainer(
            config.training,
            config.devices,
            command=start.command,
            node=NodeStart(node_id, incarnation, _record_source(config)),
            state_dir=folder,
            environment=machine,
            on_state=on_state,
            # The user's own program prints to the terminal; a task class prints to trainer.log.
            on_output=None if start.command is None else printed.put,
        )

    entropy, disk = SystemEntropy(), FolderDisk(folder)
    machine = Environment(clock=clock, entropy=entropy, disk=disk, executor=workers, log=log)
    sealed: ClosedSwarm | None = None
    transport: Transport
    if keys is None:
        transport = SocketTransport(config.node.host, config.node.port, log=log, clock=clock)
        write = log.info if is_loopback(config.node.host) else log.warning
        write("swarm_open", reason="there is no swarm key: anyone who reaches the port can join, read and write")
    else:
        try:
            identity = load_identity(disk, entropy)
        except (UnreadableIdentity, OSError) as error:
            raise state_directory_unusable(folder, error) from error
        sealed = await open_closed_swarm(config, identity, keys, folder, machine)
        transport = sealed.transport
        log.info("swarm_closed", keys=keys.fingerprints)
    environment = NodeEnvironment(
        transport=transport,
        clock=clock,
        entropy=entropy,
        disk=disk,
        executor=workers,
        log=log,
        make_trainer=make_trainer,
        state_path=folder,
        available_memory=available_memory_bytes,
        private_memory=private_bytes,
        gateway=_gateway(config, entropy),
        lan=lan.ZeroconfLan() if config.swarm.discover == "lan" else None,
        given=start.given,
        reopens=start.reopens,
        make_store=lambda: _open_store(config, folder, machine),
        read_dataset=lambda: read_dataset(config.dispatch.records, _data_folder(config)),
    )
    node = Node(config, environment)
    _leave_on_signals(node)
    loop_delay = LoopDelay(clock)
    services: list[asyncio.Task[None]] = []

    def serve(name: str, service: Callable[[], Awaitable[None]]) -> None:
        services.append(asyncio.create_task(supervised(name, service, logged(log)), name=name))

    serve("loop-delay", loop_delay.run)
    if sealed is not None:
        serve("swarm-key", sealed.watch)
    token_path = api_token.token_path(folder, config.status.token_file)
    token = await workers.run(api_token.load_or_create, token_path, entropy.token(api_token.TOKEN_BYTES))
    tracking = _tracking(config, folder, node, clock, log)
    report = StatusReport(
        node,
        events,
        loop_delay,
        keys=lambda: [] if sealed is None else sealed.keys.fingerprints,
        findings=lambda: [] if tracking is None else tracker_findings(tracking.name, tracking.problem, tracking.lost),
    )
    if tracking is not None:
        serve("tracker", tracking.run)
    # Joining and loading the trainer take seconds; meanwhile this process imports its HTTP server.
    running = asyncio.create_task(node.run(), name="node")
    server: StatusServer | None = None
    try:
        await workers.run(importlib.import_module, "p2pnode.status.server")
        from p2pnode.status.server import StatusServer

        server = StatusServer(report, config.status, token, clock)
        address = await server.start()
        await workers.run(_write_status_file, disk, folder, address, node, token_path)
        trim_heap()
        log.info(
            "started",
            id=node.overlay.node_id.hex(),
            status=f"http://{address}",
            incarnation=node.incarnation,
            run=config.swarm.run,
            state_dir=str(folder),
        )
        await running
        if node.result is not None:
            printed.put("\n".join([*node.result.lines(), ""]).encode())
    except PortInUse as error:
        raise UserError(
            str(error),
            hint="another node may run here: choose another port with --port or node.port; 0 takes a free one",
            exit_code=ExitCode.CANNOT_BIND,
        ) from error
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for service in services:
            service.cancel()
        await asyncio.gather(*services, return_exceptions=True)
        if tracking is not None:
            await tracking.close()
        (folder / STATUS_FILE).unlink(missing_ok=True)
        if server is not None:
            await server.stop()
        workers.close()
        printed.drain(logs.DRAIN_S)
    return node.exit_code


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _tracking(config: Config, folder: Path, node: Node, clock: SystemClock, log: EventLog) -> Tracking | None:
    tracker = parse_tracker(config.training.tracker)
    if tracker is None:
        return None
    writing = Writing(tracker, folder.absolute(), config.swarm.run, short(node.overlay.node_id))

    def others() -> dict[str, float]:
        return {"peers": len(node.overlay.members()), "population": node.overlay.population().estimate}

    return Tracking(writing, node.progress, clock=clock, log=log, others=others)


def _data_folder(config: Config) -> str:
    """The folder that `dispatch.records` are below."""
    return str(Path(config.training.data_dir).expanduser().absolute())


def _open_store(config: Config, folder: Path, machine: Environment) -> Store:
    """The store of a master, not opened yet; SQLite and etcd are imported by masters alone."""
    from p2pnode.training.dispatch.open_store import open_store

    return open_store(config.dispatch.store, folder, machine, name=platform.node() or "master")


def _record_source(config: Config) -> RecordSource | None:
    """Where this node's trainer gets records from; None: no records are set."""
    dispatch = config.dispatch
    if not dispatch.records:
        return None
    return RecordSource(
        dispatch.source,
        dispatch.records,
        _data_folder(config),
        dispatch.shuffle,
        dispatch.passes,
        config.training.seed,
    )


def _gateway(config: Config, entropy: Entropy) -> Gateway | None:
    """The router that forwards ports to this machine, if the user wants it to be asked."""
    if config.node.nat == "off":
        return None
    host = ipaddress.ip_address(config.node.host)
    source = "" if host.is_unspecified or host.version == 6 else config.node.host
    return upnp.UpnpGateway(lambda: entropy.random.randrange(*EXTERNAL_PORTS), source=source)


def _write_status_file(disk: Disk, folder: Path, address: Address, node: Node, token_path: Path) -> None:
    """Write the file through which the commands find this node (`p2pnode.client`)."""
    entry = status_file(str(address), os.getpid(), node.overlay.node_id.hex(), str(token_path.resolve()))
    try:
        disk.write(STATUS_FILE, entry)
    except OSError as error:
        raise state_directory_unusable(folder, error) from error


def _leave_on_signals(node: Node) -> None:
    loop = asyncio.get_running_loop()
    seen = 0

    def handle(number: int) -> None:
        nonlocal seen
        seen += 1
        if seen > 1:
            # The second signal ends at once: nothing more is handed over or saved.
            os._exit(128 + number)
        node.leave()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle, number)

"""Runs several nodes on this machine as one command: `p2pnode start --local N`.

Each node is a process with its own directory, ports and share of the cores. The first one founds, unless the swarm of
this run is here already or elsewhere; the others join through it. What they print gets the number of the node in front.
Ctrl-C ends all: a first one asks them to leave, a second one ends them at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any, NamedTuple

from p2pnode.background import state_of
from p2pnode.client import NodeClient, find
from p2pnode.config.directory_record import read_record, settings_of
from p2pnode.config.load import Loaded
from p2pnode.config.state_folders import LOCAL, local_folders
from p2pnode.config.toml import toml
from p2pnode.directory_lock import is_locked, locked
from p2pnode.errors import ExitCode, UserError
from p2pnode.log_file import bounded, open_log
from p2pnode.overlay.addresses import Address, is_loopback, split_address, usable_host
from p2pnode.training.devices.gpus import VISIBLE, visible_gpus

#: Settings that each node has of its own, so that another one does not take them over.
OWN = frozenset(
    {
        "node.state_dir",
        "node.port",
        "node.advertise",
        "node.role",
        "status.port",
        "status.token_file",
        "swarm.bootstrap",
        "swarm.key_file",
        "swarm.run",
        "training.threads",
    }
)


class PlannedNode(NamedTuple):
    """One node to start. A port of 0 takes a free one; `threads` are those of its trainer. An empty `role` is that of
    the settings."""

    number: int
    port: int
    status_port: int
    threads: int
    role: str = ""


def plan(count: int, running: Collection[int], cores: int, *, port: int = 0, status_port: int = 0) -> list[PlannedNode]:
    """`count` nodes beside those with the numbers `running`: the lowest free numbers, and an equal share of the cores.

    With a port, node N takes the N-th from it on. Raises `ValueError` if that leaves the range of ports.
    """
    threads = max(1, cores // (len(running) + count))
    numbers = [number for number in range(1, len(running) + count + 1) if number not in running][:count]
    nodes = [
        PlannedNode(number, port and port + number - 1, status_port and status_port + number - 1, threads)
        for number in numbers
    ]
    for node in nodes:
        for chosen in (node.port, node.status_port):
            if chosen > 65535:
                raise ValueError(f"node {node.number} would need port {chosen}, and the last one is 65535")
    listening = {node.port for node in nodes if node.port}
    if both := sorted(listening & {node.status_port for node in nodes if node.status_port}):
        raise ValueError(f"port {both[0]} would be used twice, for a node and for the API of another")
    return nodes


def gpu_of(number: int, device: str | list[str], gpus: Sequence[str]) -> dict[str, str]:
    """What the environment of node `number` says of the GPUs: each node sees one, its own where there are enough.
    Nothing where the setting names devices, and where there is no choice."""
    if device not in ("auto", "cuda") or len(gpus) < 2:
        return {}
    return {VISIBLE: gpus[(number - 1) % len(gpus)]}


def with_count(arguments: list[str], takes_value: Collection[str], *, stops_at_program: bool) -> list[str]:
    """The arguments with `--local 1` for a `--local` without a number.

    `takes_value`: the options whose next argument is their value. `stops_at_program`: what follows the first argument
    that is no option belongs to another program.
    """
    found = []
    at = 0
    while at < len(arguments):
        argument = arguments[at]
        if argument == "--" or (stops_at_program and not argument.startswith("-")):
            break
        found.append(argument)
        at += 1
        if argument == "--local" and not (at < len(arguments) and arguments[at].lstrip("-").isdigit()):
            found.append("1")
        elif argument in takes_value or argument == "--local":
            found += arguments[at : at + 1]
            at += 1
    return found + arguments[at:]


POLL_INTERVAL_S = 0.1
#: When a node has ended, the others are looked at this often.
LOOK_INTERVAL_S = 1.0
#: Longest wait for a started node to write where its API listens; a loaded machine imports slowly.
START_TIMEOUT_S = 120.0
#: Longest line that gets one number in front.
MAX_LINE_BYTES = 1 << 16
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class LocalNode:
    """One node's process. What it prints gets its number in front, or goes to its own log where somebody watches."""

    def __init__(
        self,
        number: int,
        folder: Path,
        command: Sequence[str],
        given: str = "",
        *,
        logs: bool = False,
        more: Mapping[str, str] | None = None,
    ) -> None:
        """`given` is its standard input, `more` what its environment has beside that of this process."""
        self.number = number
        self.folder = folder
        self.printers: list[threading.Thread] = []
        output = subprocess.PIPE
        if logs:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            output = open_log(folder)
        # A session of its own: a Ctrl-C at the terminal reaches only this process, which passes it on.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, **more} if more else None,
        )
        if logs:
            os.close(output)
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(given.encode())
            self.process.stdin.close()
        for source, target in ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr)):
            if source is not None:
                # The log of a start in the background is that of all its nodes.
                arguments = (source, bounded(folder.parent, _writer(target)), f"[{number}] ".encode())
                self.printers.append(threading.Thread(target=_forward, args=arguments, daemon=True))
                self.printers[-1].start()

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    @property
    def exit_code(self) -> int:
        """As a shell reports it: 128 and the number of the signal that ended it."""
        code = self.process.wait()
        return code if code >= 0 else 128 - code

    @property
    def is_up(self) -> bool:
        """Whether its API listens."""
        found = find(self.folder)
        return found is not None and found.pid == self.process.pid

    def end(self) -> None:
        """Kill it, if it still runs, and print what it has said."""
        if self.runs:
            self.process.kill()
        for printer in self.printers:
            printer.join(1.0)


_printing = threading.Lock()


def _writer(target: Any) -> Callable[[bytes], None]:
    def write(data: bytes) -> None:
        target.buffer.write(data)
        target.buffer.flush()

    return write


def _forward(source: IO[bytes], write: Callable[[bytes], object], prefix: bytes) -> None:
    """Copy lines with a prefix, whole ones at a time, until the source ends."""
    with source:
        while line := source.readline(MAX_LINE_BYTES):
            with _printing, contextlib.suppress(OSError, ValueError):
                write(prefix + line.rstrip(b"\n") + b"\n")


#: How often the nodes have been asked to end, if it were for the watcher: 1 asks them to leave, 2 ends them at once, 3
#: kills them. It is called ten times a second.
Watch = Callable[[Sequence[LocalNode]], int]


class LocalStart(NamedTuple):
    """What `p2pnode start --local` or `p2pnode run --local` was told. `arguments` are those for every node, and
    `invitation` the line of one, which goes to their standard input. The first `servers` of the nodes are servers.
    `each` has the settings of one node by its number. With a `watch` nothing is printed here."""

    loaded: Loaded
    nodes: int
    arguments: Sequence[str]
    command: Sequence[str] | None = None
    invitation: str = ""
    reopens: bool = False
    servers: int = 0
    program: Sequence[str] = (sys.executable, "-m", "p2pnode")
    each: Callable[[int], Mapping[str, Any]] = lambda _number: {}
    watch: Watch | None = None


def run_local(start: LocalStart, interrupts: Interrupts | None = None) -> int:
    """Start the nodes and wait until all have ended; the exit code of the first that failed. Raises `UserError`."""
    with (interrupts or Interrupts()).caught() as counted:
        return _LocalRun(start, counted).run()


class _LocalRun:
    """The nodes of one command."""

    def __init__(self, start: LocalStart, interrupts: Interrupts) -> None:
        self._start = start
        self._interrupts = interrupts
        self._home = start.loaded.config.state_folder
        self._nodes: list[LocalNode] = []
        #: How often they have been asked to end.
        self._asked = 0
        self._told: set[int] = set()

    def run(self) -> int:
        try:
            with _one_start_at_a_time(self._home / LOCAL, self._interrupts):
                is_alone = self._start_all()
            return self._wait(is_alone=is_alone)
        finally:
            for node in self._nodes:
                node.end()

    def _start_all(self) -> bool:
        """Start the nodes, the founder first; the others get the addresses of those that run. Returns whether these
        nodes know no other ones."""
        start, home = self._start, self._home
        known = [address for place in (home, *local_folders(home)) if (address := _address_of(place))]
        running = [int(place.name) for place in local_folders(home) if is_locked(place)]
        elsewhere = bool(start.loaded.config.swarm.bootstrap or start.invitation)
        for node in _planned(start, running):
            folder = home / LOCAL / str(node.number)
            command = [*start.program, *_arguments(start, node, folder, known)]
            logs = start.watch is not None
            more = gpu_of(node.number, start.loaded.config.training.device, visible_gpus())
            self._nodes.append(LocalNode(node.number, folder, command, start.invitation, logs=logs, more=more))
            if not known and not elsewhere:
                self._until_up()
                known = [address] if (address := _address_of(folder)) else []
            if self._interrupts.count or self._asked or not all(started.runs for started in self._nodes):
                break
        else:
            self._until_up()
        return not running and not elsewhere

    def _until_up(self) -> None:
        """Wait until every node's API listens or one has ended."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while all(node.runs for node in self._nodes) and not all(node.is_up for node in self._nodes):
            if self._look() or time.monotonic() > deadline:
                return

    def _wait(self, *, is_alone: bool) -> int:
        """Wait for all. When the only node of a start failed before the others, they were not started.

        Where these nodes know no others (`is_alone`), one that has not joined when all that have are gone is ended.
        """
        looked_at = time.monotonic()
        while any(node.runs for node in self._nodes):
            has_ended = is_alone and not all(node.runs for node in self._nodes)
            if has_ended and time.monotonic() - looked_at > LOOK_INTERVAL_S:
                looked_at = time.monotonic()
                _end_left_out(self._nodes)
            self._look()
        self._look()
        return next((code for node in self._nodes if (code := node.exit_code)), ExitCode.OK)

    def _look(self) -> int:
        """Tell what has failed, pass signals on, and let a moment pass; how often the nodes have been asked to end."""
        # At once: the others may wait for it as long as they are let.
        self._tell_failed()
        wanted = 0 if self._start.watch is None else self._start.watch(self._nodes)
        wanted = max(wanted, self._interrupts.count)
        if wanted > self._asked:
            self._asked = wanted
            for node in self._nodes:
                if node.runs:
                    node.process.send_signal(signal.SIGTERM if wanted < 3 else signal.SIGKILL)
        time.sleep(POLL_INTERVAL_S)
        return self._asked

    def _tell_failed(self) -> None:
        """Print the exit codes other than 0 of nodes that have ended, once."""
        for node in self._nodes:
            if node.number in self._told or node.runs or self._start.watch is not None:
                continue
            if code := node.exit_code:
                self._told.add(node.number)
                left = sum(other.runs for other in self._nodes)
                go_on = f"; {left} of {len(self._nodes)} nodes go on" if left else ""
                sys.stderr.write(f"[{node.number}] ended with exit code {code}{go_on}\n")


def _planned(start: LocalStart, running: Collection[int]) -> list[PlannedNode]:
    """The nodes in the order of their start. Raises `UserError` if the ports do not suffice."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    port, status_port = _chosen(start.loaded, "node.port"), _chosen(start.loaded, "status.port")
    try:
        planned = plan(start.nodes, running, cores, port=port, status_port=status_port)
    except ValueError as error:
        raise UserError(f"--local {start.nodes}: {error}", "choose other ports, or none", ExitCode.USAGE) from None
    home = start.loaded.config.state_folder
    # The founder of an earlier start first: the others wait for it.
    planned.sort(key=lambda node: not read_record(home / LOCAL / str(node.number)).founder)
    if not start.servers:
        return planned
    # A server comes first because a worker founds no swarm.
    return [node._replace(role="server" if place < start.servers else "peer") for place, node in enumerate(planned)]


def _arguments(start: LocalStart, node: PlannedNode, folder: Path, known: Sequence[str]) -> list[str]:
    """The command line of one node."""
    loaded = start.loaded
    config = loaded.config
    settings: dict[str, Any] = {}
    if not read_record(folder).run:
        here = _settings_here(config.state_folder)
        settings |= {key: value for key, value in here.items() if key not in OWN and key not in loaded.chosen}
    key = _key_file(start)
    if key:
        settings["swarm.key_file"] = key
    # A founder of an earlier start gets no bootstraps: it would wait for others instead of opening its swarm.
    if known or not read_record(folder).founder:
        settings["swarm.bootstrap"] = [*known, *config.swarm.bootstrap, *_remote(folder, loaded)]
    if not _chosen(loaded, "training.threads"):
        settings["training.threads"] = node.threads
    # A program may end within a second: nobody would be left to join, and what it computed would be of one node alone.
    if start.command and start.nodes > 1 and "training.min_nodes" not in loaded.chosen:
        settings["training.min_nodes"] = start.nodes
    if node.role:
        settings["node.role"] = node.role
    if "log.format" not in loaded.chosen and sys.stderr.isatty():
        settings["log.format"] = "console"
    settings |= start.each(node.number)
    settings |= {
        "node.state_dir": str(folder.absolute()),
        "node.port": node.port,
        "status.port": node.status_port,
        "swarm.run": config.swarm.run,
    }
    found = ["run" if start.command else "start", *start.arguments]
    for key, value in settings.items():
        if value != []:
            found += ["--set", f"{key}={toml(value)}"]
    if start.invitation:
        found += ["--invite", "-"]
    if start.reopens and not known:
        found.append("--reopen")
    return [*found, "--", *start.command] if start.command else found


def _chosen(loaded: Loaded, key: str) -> int:
    """A number that was chosen for this start; 0 otherwise."""
    section, _, name = key.partition(".")
    return int(getattr(getattr(loaded.config, section), name)) if key in loaded.chosen else 0


def _settings_here(home: Path) -> Mapping[str, Any]:
    """The settings of the first node of this run that has been in its swarm."""
    for place in (home, *local_folders(home)):
        record = read_record(place)
        if record.run:
            return settings_of(record)
    return {}


def _key_file(start: LocalStart) -> str:
    """The swarm key's file for a node without an invitation; empty if it finds the key itself, or the swarm is open."""
    config = start.loaded.config
    if start.invitation:
        return ""
    home, source = config.state_folder, config.swarm.key_file
    if source == "-":
        raise UserError(
            "--local starts several processes, and a swarm key on standard input can be read once",
            "keep the key in a file: swarm.key_file",
            ExitCode.USAGE,
        )
    if source.startswith("$"):
        return ""
    for file in (source, *(str(place / "swarm.key") for place in local_folders(home))):
        if file and Path(file).expanduser().is_file():
            return str(Path(file).expanduser().absolute())
    return source


def _remote(folder: Path, loaded: Loaded) -> list[str]:
    """The remembered bootstraps of a node on other machines: the flag with the addresses here would hide them."""
    if "swarm.bootstrap" in loaded.chosen:
        return []
    found = settings_of(read_record(folder)).get("swarm.bootstrap", [])
    return [address for address in found if not is_loopback(split_address(address)[0])]


def _address_of(folder: Path) -> str:
    """Where the node of a directory can be dialled from this machine; empty if none runs or it does not answer."""
    found = find(folder)
    if found is None or not found.alive:
        return ""
    try:
        host, port = split_address(str(NodeClient.of(found).status()["node"]["address"]))
    except UserError:
        return ""
    if usable_host(host) is None:
        host = "::1" if ":" in host else "127.0.0.1"
    return str(Address(host, port))


def _end_left_out(nodes: Sequence[LocalNode]) -> None:
    """End the nodes that cannot join any more, because every node that could let them in has ended."""
    running = [node for node in nodes if node.runs]
    if not running or not all(_is_joining(node.folder) for node in running):
        return
    for node in running:
        sys.stderr.write(
            f"[{node.number}] the other nodes have ended before this one could join them; it ends too. Have them wait "
            "for one another with training.min_nodes\n"
        )
        node.process.send_signal(signal.SIGTERM)


def _is_joining(folder: Path) -> bool:
    """Whether a node runs and has not found its swarm."""
    found = find(folder)
    return found is not None and found.alive and state_of(found) == "joining"


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP instead of ending at once: the started processes must end first."""

    def __init__(self) -> None:
        self.count = 0

    def _add(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1

    @contextlib.contextmanager
    def caught(self) -> Iterator[Interrupts]:
        former: dict[signal.Signals, Callable[..., Any] | int | None] = {
            number: signal.signal(number, self._add) for number in _SIGNALS
        }
        try:
            yield self
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def _one_start_at_a_time(folder: Path, interrupts: Interrupts) -> Iterator[None]:
    """Hold the lock of `local/` while nodes start. Of two starts at one moment, the second must find the nodes of the
    first instead of founding too."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(folder))
            except UserError:
                if not is_locked(folder) or interrupts.count or time.monotonic() > deadline:
                    raise
            else:
                yield
                return
        time.sleep(POLL_INTERVAL_S)

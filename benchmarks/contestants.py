"""What takes turns in `peers` and `memory`: groups of processes behind a gate that exchange the same vectors.

A contestant starts, is timed turn by turn, and ends with everything it started. Nothing here evaluates.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from benchmarks.daemons import Daemon, Daemons, status, wait_until
from benchmarks.gate import Gate, Turn
from benchmarks.record import NotMeasured
from p2pnode.training.settings import BarrierMethod, BarrierSettings, ExchangeSettings, TrainingSettings

#: Longest turn, and longest start of a group.
TURN_S = 120.0
START_S = 120.0
#: Shards are at rest when no node's number of them has changed for this long.
REST_S = 1.5
SHARDS = 64
LEAVE_S = 10.0


class Contestant(Protocol):
    """Takes turns."""

    name: str
    peers: int

    def ready(self) -> None: ...

    def turn(self) -> Turn: ...


class Way(NamedTuple):
    """One way for p2pnode's daemons to exchange."""

    codec: str = "float32"
    replicas: int = 0
    barrier: BarrierMethod = "asp"

    @property
    def name(self) -> str:
        parts = [self.codec, "plain"]
        parts += ["a backup"] if self.replicas else []
        return ", ".join(parts + ([self.barrier] if self.barrier != "asp" else []))


class Ours:
    """Daemons of this project with a trainer that takes no time."""

    def __init__(
        self,
        way: Way,
        peers: int,
        parameters: int,
        folder: Path,
        *,
        free_steps: int = 1,
        checkpoint_s: float = 0.0,
        shards: int = SHARDS,
    ) -> None:
        """`shards`: 0 for as many as the founder chooses."""
        self.name = f"p2pnode {way.name}"
        self.peers = peers
        self.parameters = parameters
        self.way = way
        self._checkpoint_s = checkpoint_s
        self._shards = shards
        self._gate = Gate(folder / "gate")
        self._group = Daemons(folder)
        self.nodes: list[Daemon] = []
        try:
            self._start(peers, free_steps)
            self.shares = self._settle()
        except BaseException:
            self.stop()  # no other code knows these daemons
            raise

    def _start(self, peers: int, free_steps: int) -> None:
        for number in range(peers):
            options = {
                "gate": str(self._gate.path),
                "parameters": self.parameters,
                "seed": number,
                "free_steps": free_steps,
            }
            node = self._group.start(
                TrainingSettings(options=options, min_nodes=peers, checkpoint_s=self._checkpoint_s, eval_steps=0),
                bootstrap=self.nodes[0].listens_at if self.nodes else "",
                command=("benchmarks.gated_daemon",),
                barrier=BarrierSettings(method=self.way.barrier),
                exchange=msgspec.structs.replace(exchange_settings(self.way), shards=self._shards),
            )
            self.nodes.append(node)
            if number == 0:
                wait_until(node, lambda found: bool(found["node"]["address"]), what="listening")
                wait_until(node, lambda found: found["state"] != "joining", what="founded")
        self._gate.admit(peers, START_S)
        self._gate.wait_ready(START_S)

    def _settle(self) -> list[int]:
        """Wait until every shard has one owner, a backup where there should be one, and stays; returns the shares."""
        deadline = time.monotonic() + START_S
        last: list[tuple[int, int]] = []
        since = time.monotonic()
        while time.monotonic() < deadline:
            found = [status(node) for node in self.nodes]
            shares = [(one["exchange"]["shards_owned"], one["exchange"]["shards_backed"]) for one in found if one]
            owned, backed = (sum(column) for column in zip(*shares, strict=True)) if shares else (0, 0)
            shards = max((one["exchange"]["shards"] for one in found if one), default=0)
            whole = len(shares) == self.peers and owned == shards and min(shares)[0] > 0
            whole = whole and backed == shards * self.way.replicas
            if shares != last or not whole:
                last, since = shares, time.monotonic()
            elif time.monotonic() - since > REST_S:
                return [owned for owned, _ in shares]
            time.sleep(0.1)
        raise NotMeasured(f"the shards of {self.name} did not come to rest: {last}")

    def ready(self) -> None:
        """Wait until all of its peers wait."""
        self._gate.wait_ready(TURN_S)

    def turn(self) -> Turn:
        return self._gate.turn(TURN_S)

    def checkpoints(self) -> list[int]:
        """How many each node has written."""
        clients = [node.client for node in self.nodes if node.client is not None]
        return [
            sum(event["event"] == "checkpoint_written" for event in client.events()["events"]) for client in clients
        ]

    @property
    def pids(self) -> list[int]:
        """The process of each node, in the order of `nodes`."""
        return [node.pid for node in self.nodes]

    def leave(self) -> None:
        """Ask the daemons to end, and wait until they have."""
        for node in self.nodes:
            node.signal(signal.SIGTERM)
        deadline = time.monotonic() + LEAVE_S
        while time.monotonic() < deadline and any(node.exit_code is None for node in self.nodes):
            time.sleep(0.05)

    def stop(self) -> None:
        """End the daemons, by force where they take long: their shards are not needed any more."""
        self.leave()
        for node in self.nodes:
            node.signal(signal.SIGKILL)
        self._gate.close()


def exchange_settings(way: Way) -> ExchangeSettings:
    """Defaults but for the way. Pulls carry values: float32, or bfloat16 where the deltas are that or smaller."""
    pull = "float32" if way.codec == "float32" else "bfloat16"
    return ExchangeSettings(
        codec=way.codec,  # type: ignore[arg-type]
        pull_codec=pull,  # type: ignore[arg-type]
        replicas=way.replicas,
        shards=SHARDS,
    )


@contextlib.contextmanager
def ours(way: Way, peers: int, parameters: int) -> Iterator[Ours]:
    """A group of daemons that is gone at the end."""
    with tempfile.TemporaryDirectory(prefix="p2pnode-bench-", ignore_cleanup_errors=True) as folder:
        group: Ours | None = None
        try:
            group = Ours(way, peers, parameters, Path(folder))
            yield group
        finally:
            if group is not None:
                group.stop()


class Program:
    """Another contestant: a program that starts its peers, each of which comes to the gate."""

    def __init__(
        self, name: str, command: Sequence[str], peers: int, folder: Path, environment: dict[str, str]
    ) -> None:
        self.name = name
        self.peers = peers
        self._log = folder / "log.txt"
        self._gate = Gate(folder / "gate")
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, "--gate", str(folder / "gate"), "--peers", str(peers)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **environment},
            )
        try:
            self._gate.admit(peers, START_S)
            self._gate.wait_ready(START_S)
        except NotMeasured as error:
            lines = "\n".join(self._log.read_text(errors="replace").splitlines()[-12:])
            self.stop()
            raise NotMeasured(f"{name}: {error}; its last lines:\n{lines}") from error

    def ready(self) -> None:
        """Wait until all of its peers wait."""
        self._gate.wait_ready(TURN_S)

    def turn(self) -> Turn:
        return self._gate.turn(TURN_S)

    def said(self) -> str:
        """Its output so far."""
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        """End the whole session of the program: its peers have processes of their own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._gate.close()


@contextlib.contextmanager
def program(
    name: str, command: Sequence[str], peers: int, environment: dict[str, str] | None = None
) -> Iterator[Program]:
    """A program that is gone at the end."""
    with tempfile.TemporaryDirectory(prefix="p2pnode-bench-", ignore_cleanup_errors=True) as folder:
        contestant = Program(name, command, peers, Path(folder), environment or {})
        try:
            yield contestant
        finally:
            contestant.stop()


def module(name: str, *arguments: str) -> list[str]:
    """The command of a module of this repository."""
    return [sys.executable, "-m", name, *arguments]


def alternate(contestants: Sequence[Contestant], turns: int, *, warm: int = 6) -> list[list[Turn]]:
    """Turns of each, taken one after the other; the order is reversed every time, against drift. `warm` unmeasured
    turns come first: connections, caches, and memory. The daemons' repair logs grow for five turns. A virtual machine
    needs 20 µs for each page that its host had not given it yet, twice the processor time of a whole turn."""

    def turn(contestant: Contestant) -> Turn:
        # What the one before does after its turn (hivemind: its matchmaking) would be measured too.
        for one in contestants:
            one.ready()
        return contestant.turn()

    for _ in range(warm):
        for contestant in contestants:
            turn(contestant)
    taken: list[list[Turn]] = [[] for _ in contestants]
    for number in range(turns):
        order = list(enumerate(contestants))
        for place, contestant in reversed(order) if number % 2 else order:
            taken[place].append(turn(contestant))
    return taken


def speed_mb_s(turns: Sequence[Turn], parameters: int) -> list[float]:
    """MB of float32 parameters per second and peer."""
    return [4e-6 * parameters / turn.seconds for turn in turns]


def cpu_per_peer(turns: Sequence[Turn], peers: int) -> list[float]:
    """Seconds of processor time per peer and turn."""
    return [turn.cpu_seconds / peers for turn in turns]


def ratios(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Of neighbouring turns."""
    return [a / b for a, b in zip(first, second, strict=True)]

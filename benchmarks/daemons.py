"""Real daemons for a benchmark: configured, started, asked over HTTP, and ended by their own process numbers.

Ports are free ones (0), state directories temporary; where a node listens is read from its `status.json`. Nothing here
measures.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.record import NotMeasured
from p2pnode.client import NodeClient, find
from p2pnode.config.settings import Config, LogSettings, StatusSettings
from p2pnode.config.toml import node_toml
from p2pnode.errors import UserError
from p2pnode.overlay.settings import NodeSettings, SwarmSettings
from p2pnode.training.settings import BarrierSettings, DevicesSettings, ExchangeSettings, TrainingSettings

RUN = "benchmark"
#: Longest wait for anything a node should come to within seconds.
DEADLINE_S = 60.0
#: Between two looks at a node while a moment is timed.
LOOK_S = 0.01
#: From SIGTERM to SIGKILL at the end of a benchmark.
LEAVE_S = 20.0
#: Lines of its log that are shown when a daemon fails.
LAST_LINES = 12


class Daemon:
    """One daemon, with the number of its own process and the last answer of its API."""

    def __init__(self, name: str, command: list[str], log: Path, state_folder: Path) -> None:
        self.name = name
        self.command = command
        self.log = log
        self.state_folder = state_folder
        self.status: dict[str, Any] | None = None
        self._client: NodeClient | None = None
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    @property
    def client(self) -> NodeClient | None:
        """Its API; None until it has written the address."""
        if self._client is None and (found := find(self.state_folder)):
            self._client = NodeClient.of(found, timeout_s=2.0)
        return self._client

    @property
    def pid(self) -> int:
        """As the daemon reports; raises `NotMeasured` where it reports nothing."""
        found = find(self.state_folder)
        if found is None:
            raise NotMeasured(f"{self.name} has no status.json")
        return found.pid

    @property
    def listens_at(self) -> str:
        """`host:port` of its overlay, empty until it is known."""
        return str(((self.status or {}).get("node") or {}).get("address") or "")

    def last_lines(self) -> str:
        """The end of its output, indented."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        return "\n".join(f"    {line}" for line in lines)

    def signal(self, number: signal.Signals) -> None:
        """To the daemon itself, which the process that was started may only wait for."""
        if self.exit_code is None:
            found = find(self.state_folder)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid if found is None else found.pid, number)

    def ends_within(self, seconds: float) -> bool:
        """Wait for its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.exit_code is not None

    def terminate(self) -> None:
        """SIGTERM to the daemon alone, as `kill` and a service manager do; returns when it has left in order."""
        os.kill(self.pid, signal.SIGTERM)
        if not self.ends_within(DEADLINE_S) or self.exit_code != 0:
            raise NotMeasured(f"{self.name} did not leave with exit code 0; its last lines:\n{self.last_lines()}")


class Daemons:
    """The daemons of one benchmark, in one temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._nodes: list[Daemon] = []

    def start(
        self,
        training: TrainingSettings,
        *,
        bootstrap: str = "",
        key_file: str = "",
        command: tuple[str, ...] = ("p2pnode", "start"),
        barrier: BarrierSettings | None = None,
        exchange: ExchangeSettings | None = None,
        devices: DevicesSettings | None = None,
        port: int = 0,
    ) -> Daemon:
        """Start a daemon; returns at once. `command` is a module and its arguments before `--config`. With a
        `key_file` its swarm is closed. `port`: 0 for a free one, another at each start."""
        name = f"node-{len(self._nodes)}"
        place = self.folder / name
        place.mkdir()
        config = Config(
            node=NodeSettings(state_dir=str(place / "state"), port=port),
            swarm=SwarmSettings(run=RUN, bootstrap=[bootstrap] if bootstrap else [], key_file=key_file),
            training=training,
            barrier=barrier or BarrierSettings(),
            exchange=exchange or ExchangeSettings(),
            devices=devices or DevicesSettings(),
            status=StatusSettings(port=0),
            log=LogSettings(format="console"),
        )
        file = place / "node.toml"
        file.write_text(node_toml(config), encoding="utf-8")
        return self._launched(name, [sys.executable, "-m", *command, "--config", str(file)], config.state_folder)

    def _launched(self, name: str, command: list[str], state_folder: Path) -> Daemon:
        node = Daemon(name, command, self.folder / name / "log.txt", state_folder)
        self._nodes.append(node)
        return node

    def end(self, *nodes: Daemon) -> None:
        """End these, or all."""
        ended = nodes or self._nodes
        for node in ended:
            node.signal(signal.SIGTERM)
        for node in ended:
            if not node.ends_within(LEAVE_S):
                node.signal(signal.SIGKILL)
                node.ends_within(DEADLINE_S)


@contextlib.contextmanager
def daemons() -> Iterator[Daemons]:
    """Daemons that are gone at the end, with their files."""
    with tempfile.TemporaryDirectory(prefix="p2pnode-bench-", ignore_cleanup_errors=True) as folder:
        group = Daemons(Path(folder))
        try:
            yield group
        finally:
            group.end()


def status(node: Daemon) -> dict[str, Any] | None:
    """The node's status, None where it does not answer yet. Raises `NotMeasured` when it has ended."""
    if node.exit_code is not None:
        raise NotMeasured(f"{node.name} ended with exit code {node.exit_code}; its last lines:\n{node.last_lines()}")
    if node.client is None:
        return None
    with contextlib.suppress(UserError):
        node.status = node.client.status()
        return node.status
    return None


def acknowledged_steps(status: dict[str, Any]) -> int:
    """Steps of a node whose deltas all owners have acknowledged: it counts steps while their deltas wait for an owner.

    `status` is an answer of `/status`.
    """
    return int(status.get("step", 0)) - len((status.get("exchange") or {}).get("outstanding_steps", []))


def wait_until(
    node: Daemon,
    holds: Callable[[dict[str, Any]], bool],
    *,
    what: str,
    look_s: float = LOOK_S,
    within_s: float = DEADLINE_S,
) -> dict[str, Any]:
    """The first status of which `holds` is true. Raises `NotMeasured`."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        found = status(node)
        if found is not None and holds(found):
            return found
        time.sleep(look_s)
    raise NotMeasured(f"{node.name} was not {what} within {within_s:g} s; its last lines:\n{node.last_lines()}")

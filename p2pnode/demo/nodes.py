"""The processes of the demo: starts daemons and single trainers, polls their status, and ends all of them.

Every process is started in a session of its own, so that Ctrl-C reaches only the demo, which then ends the others in
order. A trainer ends with its daemon, also with one that is killed (`training.trainer.connection`).
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from p2pnode.client import NodeClient, find
from p2pnode.errors import UserError

#: Timeout of one status request, in seconds.
REQUEST_TIMEOUT_S = 2.0
POLL_INTERVAL_S = 0.05
#: Longest wait for a killed process to end, in seconds.
KILL_TIMEOUT_S = 5.0
#: Number of log lines shown when a process fails.
LAST_LINES = 12


class DemoProcess:
    """One child process with its output in a file."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        """Signal the process, if it still runs."""
        self._process.send_signal(number)

    def last_lines(self) -> str:
        """The end of its output, indented."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        return "\n".join(f"    {line}" for line in lines) or "    (it wrote nothing)"


class DemoNode(DemoProcess):
    """One daemon with the last answer of its API and the accuracies of all its evaluations."""

    def __init__(self, name: str, command: Sequence[str], log: Path, state_folder: Path) -> None:
        super().__init__(name, command, log)
        self.status: dict[str, Any] | None = None
        self.accuracies: list[float] = []
        self._state_folder = state_folder
        self._client: NodeClient | None = None
        self._seen = 0

    @property
    def client(self) -> NodeClient | None:
        """Its API; None until it has written the address."""
        if self._client is None and (found := find(self._state_folder)):
            self._client = NodeClient.of(found, timeout_s=REQUEST_TIMEOUT_S)
        return self._client

    def refresh(self) -> dict[str, Any] | None:
        """Request its status and new events; if it does not answer, the previous status is kept."""
        if self.client is not None:
            with contextlib.suppress(UserError):
                self.status = self.client.status()
                self._read_events(self.client.events(self._seen))
        return self.status

    def _read_events(self, page: dict[str, Any]) -> None:
        """Take evaluations from the events: the status may skip some between two requests."""
        if page["dropped"]:
            self.accuracies.clear()  # a gap: evaluations before and after it are not "in a row"
        for event in page["events"]:
            if event["event"] == "evaluated" and "accuracy" in event["fields"]:
                self.accuracies.append(float(event["fields"]["accuracy"]))
        self._seen = page["last"]

    @property
    def listens_at(self) -> str:
        """`host:port` of its overlay, empty until it is known."""
        return str(((self.status or {}).get("node") or {}).get("address") or "")

    def ask_to_leave(self) -> None:
        if self.exit_code is None and self.client is not None:
            with contextlib.suppress(UserError):
                self.client.post("/leave")


def wait_for_exit(processes: Sequence[DemoProcess], seconds: float, give_up: Callable[[], bool]) -> bool:
    """Wait until all have ended; False after `seconds`, or as soon as `give_up()` returns true."""
    deadline = time.monotonic() + seconds
    while any(process.exit_code is None for process in processes):
        if time.monotonic() > deadline or give_up():
            return False
        time.sleep(POLL_INTERVAL_S)
    return True


def end_all(
    processes: Sequence[DemoProcess], give_up: Callable[[], bool], *, leave_s: float = 15.0, term_s: float = 5.0
) -> list[str]:
    """End every process: by request, then SIGTERM, then SIGKILL. Returns the names of those that had to be killed."""
    for process in processes:
        if isinstance(process, DemoNode):
            process.ask_to_leave()
    nodes = [process for process in processes if isinstance(process, DemoNode) and process.client is not None]
    wait_for_exit(nodes, leave_s, give_up)
    for process in processes:
        if process.exit_code is None:
            process.signal(signal.SIGTERM)
    wait_for_exit(processes, term_s, give_up)
    killed = [process.name for process in processes if process.exit_code is None]
    for process in processes:
        process.signal(signal.SIGKILL)
    wait_for_exit(processes, KILL_TIMEOUT_S, lambda: False)
    return killed

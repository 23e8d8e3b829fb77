"""The processes of the demo: starting daemons and lone trainers, asking them, and leaving none behind.

Every process is started in a session of its own, so that Ctrl-C reaches the demo alone and the demo decides who ends
when. Each carries a mark in its environment that its children inherit: by it a trainer is found that outlives its
killed daemon. Nothing here knows what the demo is for.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from p2pnode.client import NodeClient, find
from p2pnode.errors import UserError

#: Longest wait for one answer while the table is drawn, in seconds.
ASK_S = 2.0
#: Between two looks at processes that are about to end, in seconds.
POLL_INTERVAL_S = 0.05
#: Longest wait for a killed process to be gone, in seconds.
KILL_S = 5.0
#: Environment variable that carries the mark of one demo; no setting, for it has no double underscore.
MARK = "P2PNODE_DEMO"
#: Last lines of a log that are shown when its process died.
LAST_LINES = 12

_COUNTER = itertools.count(time.time_ns())  # never the same again, also in another process of our number


class DemoProcess:
    """One child process with its output in a file."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        self.log = log
        self.mark = f"{MARK}={os.getpid()}-{next(_COUNTER)}"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | dict([self.mark.split("=")]),
            )

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        """Signal the process; one that has ended is no error."""
        self._process.send_signal(number)

    def last_lines(self) -> str:
        """The end of its output, indented."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        return "\n".join(f"    {line}" for line in lines) or "    (it wrote nothing)"


class DemoNode(DemoProcess):
    """One daemon: its state folder, the last answer of its API, and every evaluation of the shared model it made."""

    def __init__(self, name: str, command: Sequence[str], log: Path, state_folder: Path) -> None:
        super().__init__(name, command, log)
        self.status: dict[str, Any] | None = None
        self.accuracies: list[float] = []
        self._state_folder = state_folder
        self._client: NodeClient | None = None
        self._seen = 0

    @property
    def client(self) -> NodeClient | None:
        """Its API, as soon as it says where that is."""
        if self._client is None and (found := find(self._state_folder)):
            self._client = NodeClient.of(found, timeout_s=ASK_S)
        return self._client

    def look(self) -> dict[str, Any] | None:
        """Ask for its status and its news; what was known stays where there is no answer now."""
        if self.client is not None:
            with contextlib.suppress(UserError):
                self.status = self.client.status()
                self._read_events(self.client.events(self._seen))
        return self.status

    def _read_events(self, page: dict[str, Any]) -> None:
        """Evaluations come from the events and not from the status, which may skip some between two looks."""
        if page["dropped"]:
            self.accuracies.clear()  # "in a row" cannot be told of what was missed
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


def wait_for_exit(processes: Sequence[DemoProcess], seconds: float, hurry: Callable[[], bool]) -> bool:
    """Whether all have ended within `seconds`; gives up early when `hurry` says so."""
    deadline = time.monotonic() + seconds
    while any(process.exit_code is None for process in processes):
        if time.monotonic() > deadline or hurry():
            return False
        time.sleep(POLL_INTERVAL_S)
    return True


def end_all(
    processes: Sequence[DemoProcess], hurry: Callable[[], bool], *, leave_s: float = 15.0, term_s: float = 5.0
) -> list[str]:
    """End every process: by request, then SIGTERM, then SIGKILL. Returns the names of those that had to be killed."""
    for process in processes:
        if isinstance(process, DemoNode):
            process.ask_to_leave()
    nodes = [process for process in processes if isinstance(process, DemoNode) and process.client is not None]
    wait_for_exit(nodes, leave_s, hurry)
    for process in processes:
        if process.exit_code is None:
            process.signal(signal.SIGTERM)
    wait_for_exit(processes, term_s, hurry)
    killed = [process.name for process in processes if process.exit_code is None]
    for process in processes:
        process.signal(signal.SIGKILL)
    wait_for_exit(processes, KILL_S, lambda: False)
    _kill_leftovers(processes)
    return killed


def _leftovers(marks: Sequence[bytes]) -> list[int]:
    """Numbers of the processes that carry one of the marks; empty where there is no /proc to look in."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it ended just now, or is another user's
            carried = environment.read_bytes().split(b"\0")
            if any(mark in carried for mark in marks):
                found.append(int(environment.parent.name))
    return found


def _kill_leftovers(processes: Sequence[DemoProcess]) -> None:
    """Kill what these processes have started and left behind, and wait until it is gone."""
    marks = [process.mark.encode() for process in processes]
    deadline = time.monotonic() + KILL_S
    while (left := _leftovers(marks)) and time.monotonic() < deadline:
        for number in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(POLL_INTERVAL_S)

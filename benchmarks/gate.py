"""A starting gate for processes that take turns: all of one group start together, and each reports when it is done.

The harness listens on a Unix socket. A peer connects, sends `pid N`, and then `ready` whenever it waits. The harness
sends `go`; the peer sends `done` or `failed ...`. Daemons of this project, hivemind in its own environment, gloo and
plain sockets use the same protocol, so all are timed alike: from the first `go` to the last `done`, with the processor
time of all processes of the group.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from benchmarks.record import NotMeasured

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of one group."""

    seconds: float
    #: Of all processes of the group, including children.
    cpu_seconds: float


class Gate:
    """The harness's end, for one group of peers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._peers: list[_Peer] = []

    def admit(self, count: int, deadline_s: float) -> None:
        """Wait until `count` peers are connected. Raises `NotMeasured`."""
        deadline = time.monotonic() + deadline_s
        while len(self._peers) < count:
            self._listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                raise NotMeasured(f"{len(self._peers)} of {count} connected to the gate {self.path.name}") from None
            self._peers.append(_Peer(connection))
        for peer in self._peers:
            peer.pid = int(peer.expect("pid", deadline).split()[1])

    def wait_ready(self, deadline_s: float) -> None:
        """Wait until every peer is ready. Raises `NotMeasured`."""
        deadline = time.monotonic() + deadline_s
        for peer in self._peers:
            if not peer.is_ready:
                peer.expect("ready", deadline)
                peer.is_ready = True

    def turn(self, deadline_s: float) -> Turn:
        """Start all peers and wait until the last one is done. Raises `NotMeasured` if one fails."""
        self.wait_ready(deadline_s)
        pids = [peer.pid for peer in self._peers]
        cpu_before = tree_cpu_seconds(pids)
        began = time.perf_counter()
        for peer in self._peers:
            peer.is_ready = False
            peer.connection.sendall(b"go\n")
        deadline = time.monotonic() + deadline_s
        # Reading them one after the other is correct in any order: only the last one counts.
        for peer in self._peers:
            peer.expect("done", deadline)
        return Turn(time.perf_counter() - began, tree_cpu_seconds(pids) - cpu_before)

    @property
    def pids(self) -> list[int]:
        return [peer.pid for peer in self._peers]

    def close(self) -> None:
        for peer in self._peers:
            peer.connection.close()
        self._listener.close()
        self.path.unlink(missing_ok=True)


class _Peer:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.pid = 0
        self.is_ready = False
        self._received = b""

    def expect(self, word: str, deadline: float) -> str:
        """The next line, which must start with this word."""
        while b"\n" not in self._received:
            readable, _, _ = select.select([self.connection], [], [], max(0.0, deadline - time.monotonic()))
            data = self.connection.recv(4096) if readable else b""
            if not data:
                why = "ended" if readable else f"did not send {word!r} in time"
                raise NotMeasured(f"process {self.pid} {why}")
            self._received += data
        line, self._received = self._received.split(b"\n", 1)
        text = line.decode()
        if not text.startswith(word):
            raise NotMeasured(f"process {self.pid} sent {text!r} instead of {word!r}")
        return text


def tree_cpu_seconds(pids: list[int]) -> float:
    """Processor time of these processes and all their running descendants. Linux only."""
    children: dict[int, list[int]] = defaultdict(list)
    ticks: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            pid = int(folder.name)
            children[int(fields[1])].append(pid)
            ticks[pid] = int(fields[11]) + int(fields[12])
    total, left = 0, list(pids)
    while left:
        pid = left.pop()
        total += ticks.get(pid, 0)
        left += children[pid]
    return total / CLOCK_TICKS


def peak_bytes(pid: int) -> int:
    """VmHWM of a process. Linux only."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise NotMeasured(f"process {pid} has ended")

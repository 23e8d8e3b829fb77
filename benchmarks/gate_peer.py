"""The peer's end of `benchmarks.gate`. Imports only the standard library: hivemind's environment runs it too."""

from __future__ import annotations

import os
import socket


class Peer:
    """A connection to the gate. `ready` waits for the start of a turn, `done` ends it."""

    def __init__(self, path: str) -> None:
        self._gate = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._gate.connect(path)
        self._send(f"pid {os.getpid()}")

    def ready(self) -> bool:
        """Wait for the next turn; False if the harness has ended."""
        self._send("ready")
        return bool(self._gate.recv(64))

    def done(self) -> None:
        self._send("done")

    def failed(self, reason: str) -> None:
        self._send(f"failed {reason}".replace("\n", " "))

    def _send(self, line: str) -> None:
        self._gate.sendall(line.encode() + b"\n")

"""A peer's side of `benchmarks.gate`. Nothing but the standard library: hivemind's environment runs it too."""

from __future__ import annotations

import os
import socket


class Peer:
    """Connected to the gate. `ready` waits for the turn, `done` ends it."""

    def __init__(self, path: str) -> None:
        self._gate = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._gate.connect(path)
        self._say(f"pid {os.getpid()}")

    def ready(self) -> bool:
        """False when the harness has ended."""
        self._say("ready")
        return bool(self._gate.recv(64))

    def done(self) -> None:
        self._say("done")

    def failed(self, reason: str) -> None:
        self._say(f"failed {reason}".replace("\n", " "))

    def _say(self, line: str) -> None:
        self._gate.sendall(line.encode() + b"\n")

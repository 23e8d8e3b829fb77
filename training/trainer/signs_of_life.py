"""What a script says of itself between two steps, so that its silence is no hang. `AttachedSwarm` inherits it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from p2pnode.training.trainer.connection import DaemonConnection, DaemonGone
from p2pnode.training.trainer_link import messages

#: `swarm.alive()` sends at most this often.
ALIVE_INTERVAL_S = 0.2


class SignsOfLife:
    """`connection` is None on all ranks but the first."""

    def __init__(self, connection: DaemonConnection | None) -> None:
        self._connection = connection
        self._alive_s = 0.0
        self._busy_with: list[str] = []

    def alive(self) -> None:
        """Say that all is well, in work between two steps that takes long: a silent script counts as stalled after
        `training.hang_s`. May be called as often as you like, from any thread, and on any rank."""
        now_s = time.monotonic()
        if self._connection is not None and now_s - self._alive_s >= ALIVE_INTERVAL_S:
            self._alive_s = now_s
            with contextlib.suppress(DaemonGone):
                self._connection.send(messages.SignOfLife())

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Say that the block does something else than a step, however long it takes; `/status` shows `what`."""
        self._busy_with.append(what)
        self._tell_busy()
        try:
            yield
        finally:
            self._busy_with.pop()
            self._tell_busy()

    def _tell_busy(self) -> None:
        if self._connection is not None:
            message = messages.Busy(self._busy_with[-1]) if self._busy_with else messages.Idle()
            with contextlib.suppress(DaemonGone):
                self._connection.send(message)

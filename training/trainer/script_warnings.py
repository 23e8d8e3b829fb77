"""What a script's node is to be told: warnings for its log, and findings for `/status`, sent between two turns."""

from __future__ import annotations

from collections.abc import Callable

from p2pnode.training.trainer_link import messages


class ScriptWarnings:
    """Of one trainer. Called with a constant event and a text it keeps a warning for the log; with `do`, a finding."""

    def __init__(self) -> None:
        self._pending: list[messages.Warned] = []
        self._found: dict[str, str] = {}

    def __call__(self, event: str, message: str, do: str = "") -> None:
        if do:
            self.finding(event, message, do)
        else:
            self._pending.append(messages.Warned(event, message))

    def finding(self, event: str, what: str, do: str) -> None:
        """`/status` shows `what` and what to do, until this event is found with another text; an empty one ends it."""
        if self._found.get(event, "") != what:
            self._found[event] = what
            self._pending.append(messages.Warned(event, what, do))

    def flush(self, send: Callable[[messages.FromTrainer], None]) -> None:
        """Send what is pending. Raises `DaemonGone`."""
        pending, self._pending = self._pending, []
        for warned in pending:
            send(warned)

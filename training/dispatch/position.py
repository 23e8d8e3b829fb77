"""The position of a node in its tasks, as a file of its state directory: what it holds, and how far that is trained."""

from __future__ import annotations

import msgspec

from overlay.environment import Environment
from training.dispatch.held import SavedTask

STATE_FILE = "dispatch.json"


class SavedPosition(msgspec.Struct, frozen=True, kw_only=True):
    """`dispatch.json`: the tasks that this node holds of the queue `identity`."""

    schema: int = 1
    identity: bytes
    tasks: list[SavedTask]


class PositionFile:
    """Reads and writes the file off the loop. A fault is logged and loses nothing but the position."""

    def __init__(self, environment: Environment) -> None:
        self._disk = environment.disk
        self._executor = environment.executor
        self._log = environment.log

    async def write(self, identity: bytes, tasks: list[SavedTask]) -> None:
        """Replace the file."""
        position = msgspec.json.encode(SavedPosition(identity=identity, tasks=tasks))
        try:
            await self._executor.run(self._disk.write, STATE_FILE, position)
        except OSError as error:
            self._log.warning("dispatch_position_not_written", reason=str(error))

    async def read(self, identity: bytes) -> list[SavedTask]:
        """The tasks that an earlier start held of the same queue."""
        try:
            content = await self._executor.run(self._disk.read, STATE_FILE)
            saved = None if content is None else msgspec.json.decode(content, type=SavedPosition)
        except (OSError, msgspec.DecodeError) as error:
            self._log.warning("dispatch_position_not_read", reason=str(error))
            return []
        return saved.tasks if saved is not None and saved.identity == identity else []

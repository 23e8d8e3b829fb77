"""What a node keeps about itself in its state directory: identity, incarnation, genesis of its swarm, and the record.

Each start takes a higher incarnation, so that two runs of one node never use the same id for two deltas. The record
(`p2pnode.config.directory_record`) says which run and which model the directory belongs to, whether this node founded
the swarm, and with which settings it was started. A missing or unwritable state directory is an error of the user's
set-up and is raised as `UserError`.
"""

from __future__ import annotations

from collections.abc import Mapping

from p2pnode.config.directory_record import (
    RECORD_FILE,
    DirectoryRecord,
    Given,
    check_model,
    decode,
    encode,
    kept_settings,
)
from p2pnode.errors import state_directory_unusable
from p2pnode.overlay.environment import Environment
from p2pnode.overlay.identity import UnreadableIdentity, load_identity, next_incarnation
from p2pnode.training.layout import Layout

GENESIS_FILE = "genesis"


class StateDirectory:
    """Loads identity, incarnation, genesis and record, and writes the last three, off the loop, when they change."""

    def __init__(self, path: str, environment: Environment) -> None:
        """`path` appears in messages only; all access goes through the disk of the environment."""
        self._path = path
        self._disk = disk = environment.disk
        self._executor = environment.executor
        try:
            self.identity = load_identity(disk, environment.entropy)
            self.incarnation = next_incarnation(disk, environment.clock.wall())
            self.genesis = disk.read(GENESIS_FILE)
            content = disk.read(RECORD_FILE)
        except (UnreadableIdentity, OSError) as error:
            raise state_directory_unusable(path, error) from error
        self.record = DirectoryRecord() if content is None else decode(content, path)

    def check_model(self, layout: Layout, frozen: str = "") -> None:
        """Raise `UserError` if the directory belongs to a model of another layout, or with other frozen values."""
        check_model(self.record, layout.digest(), _tensors(layout), frozen, self._path)

    async def keep_genesis(self, genesis: bytes) -> None:
        """Without it the next start would not know its swarm."""
        if genesis != self.genesis:
            await self._write(GENESIS_FILE, genesis)
            self.genesis = genesis

    async def remember(
        self,
        run: str,
        genesis: bytes,
        layout: Layout | None,
        *,
        founder: bool,
        given: Mapping[str, Given],
        shards: int = 0,
        frozen: str = "",
    ) -> None:
        """The node is in its swarm: keep whose the directory is from now on, and the settings of this start. `layout`
        None: the node has no model. `shards` 0: what was there stays."""
        before = self.record
        record = DirectoryRecord(
            run=run,
            founder=founder or before.founder is True,
            model=before.model if layout is None else layout.digest(),
            tensors=before.tensors if layout is None else _tensors(layout),
            frozen=before.frozen if layout is None else frozen,
            shards=shards or before.shards,
            settings=kept_settings(given, before.settings),
        )
        if record != before:
            # Before the genesis: with it and no record, a node counts as a founder.
            await self._write(RECORD_FILE, encode(record), private=True)
            self.record = record
        await self.keep_genesis(genesis)

    async def _write(self, name: str, content: bytes, *, private: bool = False) -> None:
        try:
            await self._executor.run(self._disk.write, name, content, private=private)
        except OSError as error:
            raise state_directory_unusable(self._path, error) from error


def _tensors(layout: Layout) -> dict[str, str]:
    return {entry.name: " x ".join(map(str, entry.shape)) or "one value" for entry in layout.entries}

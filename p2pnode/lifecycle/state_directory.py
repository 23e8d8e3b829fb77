"""What a node keeps about itself in its state directory: its identity, its incarnation, and the genesis of its swarm.

Each start takes the next incarnation, so that two runs of one node never use the same id for two deltas. A missing or
unwritable state directory is an error of the user's set-up and is raised as `UserError`.
"""

from __future__ import annotations

from overlay.environment import Disk, Entropy
from overlay.identity import UnreadableIdentity, keep_incarnation, load_identity, next_incarnation
from p2pnode.errors import state_directory_unusable

GENESIS_FILE = "genesis"


class StateDirectory:
    """Loads identity, incarnation and genesis, and writes the last two when they change."""

    def __init__(self, path: str, disk: Disk, entropy: Entropy) -> None:
        """`path` appears in messages only; all access goes through `disk`."""
        self._path = path
        self._disk = disk
        try:
            self.identity = load_identity(disk, entropy)
            self.incarnation = next_incarnation(disk)
            self.genesis = disk.read(GENESIS_FILE)
        except (UnreadableIdentity, OSError) as error:
            raise state_directory_unusable(path, error) from error

    def keep_genesis(self, genesis: bytes) -> None:
        """Without it the next start would not know its swarm."""
        try:
            self._disk.write(GENESIS_FILE, genesis)
        except OSError as error:
            raise state_directory_unusable(self._path, error) from error
        self.genesis = genesis

    def raise_incarnation(self, above: int) -> None:
        """Use an incarnation higher than `above` from now on."""
        try:
            self.incarnation = keep_incarnation(self._disk, above + 1)
        except OSError as error:
            raise state_directory_unusable(self._path, error) from error

"""The data set that a script shares with the other nodes: one sampler or shard, and what `swarm.step` counts of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from training.trainer.connection import DaemonConnection
from training.trainer.ranks import Ranks
from training.trainer.sampling.link import DataLink, packed_state, unpacked_state
from training.trainer.sampling.sampler import SwarmSampler
from training.trainer.sampling.shard import SwarmShard
from training.trainer_link.data_messages import DataShape

#: Seeds travel between ranks as int64.
MAX_SEED = 1 << 62


class SharedData:
    """Belongs to one script. `warn` is called with an event and a text."""

    def __init__(self, ranks: Ranks, connection: DaemonConnection | None, warn: Callable[[str, str], None]) -> None:
        self.seed = 0
        self._ranks = ranks
        self._connection = connection
        self._warn = warn
        self._warned: set[str] = set()
        self._saved: str | None = None
        self._link: DataLink | None = None
        self._reader: SwarmSampler | SwarmShard | None = None

    @property
    def stopped(self) -> bool:
        """Whether the node stopped while the script waited for data."""
        return self._link is not None and self._link.stopped

    def sampler(self, size: int, *, shuffle: bool, nodes: float) -> SwarmSampler:
        """See `AttachedSwarm.sampler`."""
        if size < 1:
            raise ValueError("the data set is empty: swarm.sampler needs a data set with at least one sample")
        link = self._open(DataShape("samples", size, self._run_seed()))
        self._reader = sampler = SwarmSampler(link, size, shuffle=shuffle, nodes=nodes)
        return sampler

    def shard(self, source: Iterable[Any], block: int) -> SwarmShard:
        """See `AttachedSwarm.shard`."""
        if block < 1:
            raise ValueError(f"block = {block}: a block of a stream has at least one sample")
        link = self._open(DataShape("stream", block, self._run_seed()))
        self._reader = shard = SwarmShard(link, source)
        return shard

    def _run_seed(self) -> int:
        return self._ranks.share_numbers([self.seed % MAX_SEED])[0]

    def _open(self, shape: DataShape) -> DataLink:
        if self._link is not None:
            raise ValueError(
                "this script shares a data set already: call swarm.sampler or swarm.shard once, with a "
                "torch.utils.data.ConcatDataset of several, because swarm.step counts the samples of one"
            )
        state = None
        if self._saved is not None:
            try:
                state = unpacked_state(self._saved, shape)
            except ValueError as error:
                self._warn("data_position_not_restored", str(error))
        self._link = link = DataLink(self._connection, self._ranks, shape)
        link.open(state)
        return link

    # -- progress ------------------------------------------------------------------------------------------------

    def count(self, samples: int) -> None:
        """`swarm.step` was called with so many samples on this rank."""
        if self._reader is not None and samples > 0 and self._reader.count(samples * self._ranks.count):
            self._warn_once(
                "data_counted_twice",
                "swarm.step counted more samples than swarm.sampler or swarm.shard gave: it needs the number of "
                "samples of the data set since the last call, on this rank",
            )

    def report(self, turn: int, samples: int) -> None:
        """A turn with so many samples is about to be reported. Raises `DaemonGone`."""
        if self._reader is None or self._link is None:
            return
        if samples <= 0:
            self._warn_once(
                "data_not_counted",
                "swarm.step(samples=…) says how many samples are trained; without it all that a loader has fetched "
                "counts as trained, and what it fetched ahead is lost when this node ends",
            )
            self._reader.count(MAX_SEED)
        self._link.report(turn, self._reader.report())

    def _warn_once(self, event: str, text: str) -> None:
        if event not in self._warned:
            self._warned.add(event)
            self._warn(event, text)

    # -- saved state ---------------------------------------------------------------------------------------------

    def state(self) -> str | None:
        """The position for the script's saved state; None without a data set."""
        return self._saved if self._link is None else packed_state(self._link.shape, self._link.state())

    def restore(self, state: str | None) -> None:
        """The position that was saved, for the data set that the script will open."""
        self._saved = state

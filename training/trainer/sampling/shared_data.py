"""The data set that a script shares with the other nodes: one sampler or shard, and what `swarm.step` counts of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.data import IterableDataset

from p2pnode.training.trainer.connection import DaemonConnection
from p2pnode.training.trainer.ranks import Ranks
from p2pnode.training.trainer.records.dataset import RecordFileStream, SwarmRecords
from p2pnode.training.trainer.records.record_draws import Decode, RecordDraws
from p2pnode.training.trainer.records.task_source import open_files, open_tasks
from p2pnode.training.trainer.sampling.link import DataLink, unpacked_state
from p2pnode.training.trainer.sampling.sampler import SwarmSampler
from p2pnode.training.trainer.sampling.shard import SwarmShard
from p2pnode.training.trainer_link.data_messages import DataShape
from p2pnode.training.trainer_link.interface import TrainerFailed
from p2pnode.training.trainer_link.messages import Start
from p2pnode.training.trainer_link.record_messages import RecordSource

#: More samples than any data set has.
ALL = 1 << 62
#: Records that `swarm.records` shares without a master are divided in blocks of so many.
BLOCK = 64

NOT_COUNTED = (
    "swarm.step(samples=…) says how many samples are trained; without it all that a loader has fetched "
    "counts as trained, and what it fetched ahead is lost when this node ends"
)


class SharedData:
    """Belongs to one script. `warn` is called with an event and a text."""

    def __init__(self, ranks: Ranks, connection: DaemonConnection | None, warn: Callable[[str, str], None]) -> None:
        self.seed = 0
        self._ranks = ranks
        self._connection = connection
        self._warn = warn
        self._warned: set[str] = set()
        self._saved: str | None = None
        self._reader: SwarmSampler | SwarmShard | SwarmRecords | None = None
        self._source: RecordSource | None = None
        self._node_seed = 0
        self._begins_anew = False

    def begin(self, start: Start) -> None:
        """What the daemon says of the run's data; on rank 0."""
        self.seed, self._node_seed, self._source = start.seed, start.node_seed, start.records

    def begin_anew(self) -> None:
        """The script has attached once more, in the same process: it may ask for its sampler once more."""
        self._begins_anew = True

    @property
    def stopped(self) -> bool:
        """Whether the node stopped while the script waited for data."""
        return self._reader is not None and self._reader.stopped

    def sampler(self, size: int, *, shuffle: bool, nodes: float) -> SwarmSampler:
        """See `AttachedSwarm.sampler`."""
        if size < 1:
            raise ValueError("the data set is empty: swarm.sampler needs a data set with at least one sample")
        begins_anew, self._begins_anew = self._begins_anew, False
        if begins_anew and isinstance(self._reader, SwarmSampler) and self._reader.is_of(size, shuffle=shuffle):
            return self._reader
        link = self._open(DataShape("samples", size, self.seed))
        self._reader = sampler = SwarmSampler(link, size, shuffle=shuffle, nodes=nodes)
        return sampler

    def shard(self, source: Iterable[Any], block: int) -> SwarmShard:
        """See `AttachedSwarm.shard`."""
        if block < 1:
            raise ValueError(f"block = {block}: a block of a stream has at least one sample")
        link = self._open(DataShape("stream", block, self.seed))
        self._reader = shard = SwarmShard(link, source)
        return shard

    def records(self, decode: Decode | None, flush: Callable[[], bool]) -> IterableDataset[Any]:
        """See `AttachedSwarm.records`."""
        if self._ranks.count > 1:
            raise ValueError(
                "swarm.records is not possible under torchrun: use swarm.sampler or swarm.shard, or a node per rank"
            )
        self._need_no_other()
        source, connection = self._source, self._connection
        if source is None or connection is None:
            raise ValueError(
                'swarm.records: no records are set; set dispatch.records = ["train-*.recordio"] and dispatch.source'
            )
        try:
            if source.source == "shared":
                return self.shard(RecordFileStream(open_files(source), decode), BLOCK)
            tasks = open_tasks(source, self._node_seed, connection)
        except TrainerFailed as failure:
            raise ValueError(f"swarm.records: {failure.reason}; {failure.hint}") from failure
        if self._saved is not None:
            try:
                tasks.restore(self._saved)
            except ValueError as error:
                self._warn("data_position_not_restored", str(error))
        self._reader = records = SwarmRecords(RecordDraws(tasks, decode), flush)
        return records

    def _need_no_other(self) -> None:
        if self._reader is not None:
            raise ValueError(
                "this script shares a data set already: call swarm.sampler, swarm.shard or swarm.records once, with a "
                "torch.utils.data.ConcatDataset of several, because swarm.step counts the samples of one"
            )

    def _open(self, shape: DataShape) -> DataLink:
        self._need_no_other()
        state = None
        if self._saved is not None:
            try:
                state = unpacked_state(self._saved, shape)
            except ValueError as error:
                self._warn("data_position_not_restored", str(error))
        link = DataLink(self._connection, self._ranks, shape)
        link.open(state)
        return link

    # -- progress ------------------------------------------------------------------------------------------------

    def count(self, samples: int) -> None:
        """`swarm.step` was called with so many samples on this rank."""
        if self._reader is not None and samples > 0 and self._reader.count(samples * self._ranks.count):
            self._warn_once(
                "data_counted_twice",
                "swarm.step counted more samples than swarm.sampler, swarm.shard or swarm.records gave: it needs the "
                "number of samples of the data set since the last call, on this rank",
            )

    def report(self, turn: int, step: int, samples: int, *, has_delta: bool = True) -> None:
        """A turn with so many samples, which trains `step`, is about to be reported. Raises `DaemonGone`."""
        if self._reader is None:
            return
        if samples <= 0:
            self._warn_once("data_not_counted", NOT_COUNTED)
            self._reader.count(ALL)  # all that is drawn
        self._reader.report(turn, step, has_delta=has_delta)

    def report_rest(self, turn: int) -> None:
        """A delta is about to be reported that has all that was trained until now. Raises `DaemonGone`."""
        if self._reader is not None:
            self._reader.report(turn, None, has_delta=True)

    def _warn_once(self, event: str, text: str) -> None:
        if event not in self._warned:
            self._warned.add(event)
            self._warn(event, text)

    # -- saved state ---------------------------------------------------------------------------------------------

    def state(self) -> str | None:
        """The position for the script's saved state; None without a data set."""
        return self._saved if self._reader is None else self._reader.state()

    def restore(self, state: str | None) -> None:
        """The position that was saved, for the data set that the script will open."""
        self._saved = state

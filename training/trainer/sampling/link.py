"""Asks the daemon for partitions and tells it what is trained; the same on every rank of a node.

Rank 0 is connected, and its answers go to all ranks, which ask at the same points of their programs. With a daemon that
ends or stops this node an answer is None: the iteration ends, and so does the script's loop.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec

from p2pnode.training.sharing.ledger import Ledger
from p2pnode.training.trainer.connection import DaemonConnection, DaemonGone
from p2pnode.training.trainer.ranks import Ranks
from p2pnode.training.trainer_link.data_messages import (
    UNKNOWN,
    DataGranted,
    DataOpened,
    DataShape,
    DataState,
    DataTrained,
    DataWanted,
    PartitionTrained,
)


class DataLink:
    """One data set of one script. `stopped` is true on every rank once an answer was None."""

    def __init__(self, connection: DaemonConnection | None, ranks: Ranks, shape: DataShape) -> None:
        self.shape = shape
        self.ranks = ranks
        self.stopped = False
        self._connection = connection
        self._number = 0
        #: The number of blocks of a stream, or `UNKNOWN`.
        self.partitions = UNKNOWN
        #: Reports that the daemon's last `DataKnown` does not contain yet: turn → what was reported.
        self._reported: dict[int, list[PartitionTrained]] = {}
        self._restored: DataState | None = None
        self._asking = threading.Lock()

    # -- the daemon ----------------------------------------------------------------------------------------------

    def open(self, state: DataState | None) -> None:
        """Describe the data set, and what an earlier start had trained of it."""
        self._restored = state
        if state is not None:
            self.learn_partitions(state.partitions)
        if self._connection is not None:
            with contextlib.suppress(DaemonGone):
                self._connection.send(DataOpened(self.shape, state))

    def ask(self, *, begins: bool, finished: bool, position: int, count: int, has_claims: bool) -> DataGranted | None:
        """At most `count` claims; see `DataWanted`. On all ranks, or in any thread of a single one."""
        granted = None
        with self._asking:
            if self._connection is not None:
                self._number += 1
                with contextlib.suppress(DaemonGone):
                    self._connection.send(DataWanted(self._number, begins, finished, position, count, has_claims))
                    granted = self._connection.answer(DataGranted, self._number)
            granted = self.ranks.share(granted)
        self.stopped = self.stopped or granted is None
        return granted

    def report(self, turn: int, trained: Sequence[PartitionTrained]) -> None:
        """The delta of this turn is about to be reported. Raises `DaemonGone`."""
        if self._connection is None:
            return
        self._reported[turn] = list(trained)
        self._connection.send(DataTrained(turn, list(trained), self.partitions))

    # -- state ---------------------------------------------------------------------------------------------------

    def learn_partitions(self, partitions: int) -> None:
        """The end of the stream was seen."""
        if partitions != UNKNOWN:
            self.partitions = partitions

    def state(self) -> DataState:
        """What the swarm is known to have trained, with all that was reported here."""
        known = self._connection.known if self._connection is not None else None
        state = self._restored if known is None else known.state
        turn = 0 if known is None else known.turn
        self._reported = {number: trained for number, trained in self._reported.items() if number > turn}
        ledger = Ledger(self.shape.partitions)
        if state is not None:
            ledger.merge(state.partitions, state.first, state.trained, state.offsets)
        ledger.learn_partitions(self.partitions)
        for trained in self._reported.values():
            for one in trained:
                ledger.note((one.epoch, one.partition), one.offset, finished=one.finished)
        return ledger.state(0 if state is None else state.epoch)


def packed_state(shape: DataShape, state: DataState) -> str:
    """A state as text, which every reader of a checkpoint can load."""
    return msgspec.json.encode((shape, state)).decode()


def unpacked_state(text: str, shape: DataShape) -> DataState:
    """The state that `packed_state` wrote. Raises `ValueError` if it is not one of this data set."""
    try:
        saved, state = msgspec.json.decode(text, type=tuple[DataShape, DataState])
    except (msgspec.MsgspecError, TypeError) as error:
        raise ValueError(f"this is no state of swarm.sampler or swarm.shard: {error}") from error
    if saved != shape:
        raise ValueError(
            f"the saved position is of other data ({saved.kind} {saved.size}, seed {saved.seed}) than the present "
            f"({shape.kind} {shape.size}, seed {shape.seed}); leave it out to begin with a first epoch"
        )
    return state


class LinkedReader(ABC):
    """A sampler or a shard, whose data set has a link; without one it is a copy in a worker of a loader."""

    _link: DataLink | None

    @abstractmethod
    def take_trained(self) -> list[PartitionTrained]:
        """What has been trained since the last call."""

    @property
    def stopped(self) -> bool:
        """Whether the node stopped while the script waited for data."""
        return self._link is not None and self._link.stopped

    def report(self, turn: int, step: int | None, *, has_delta: bool) -> None:  # noqa: ARG002 - as `SwarmRecords` has it
        """A turn is about to be reported. What is in no delta yet is trained again where this process fails before
        there is one, so it waits. Raises `DaemonGone`."""
        if has_delta and self._link is not None:
            self._link.report(turn, self.take_trained())

    def state(self) -> str:
        """Which samples of which epochs are trained, as of the last report to the swarm."""
        assert self._link is not None
        return packed_state(self._link.shape, self._link.state())

    def state_dict(self) -> dict[str, str]:
        """The position, as of the last report to the swarm."""
        return {"position": self.state()}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Take over what was trained before. Raises `ValueError` for a state of other data."""
        assert self._link is not None
        self._link.open(unpacked_state(state["position"], self._link.shape))

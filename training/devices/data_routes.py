"""The data of a node's trainers: they appear to the rest of the daemon as one, and each gets what it asked for.

The node is one member of those that share a data set (`training.sharing`). Its trainers ask for claims one after the
other, so no two have the same one. What a trainer had when it failed is given to it again when it comes back, from
where its last report stood. If it is given up, another one gets it. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from p2pnode.training.trainer_link.data_messages import (
    Claim,
    DataFromTrainer,
    DataGranted,
    DataKnown,
    DataOpened,
    DataShape,
    DataTrained,
    DataWanted,
)
from p2pnode.training.trainer_link.engine_messages import EngineFromDaemon
from p2pnode.training.trainer_link.record_messages import (
    RecordsFromTrainer,
    RecordsGranted,
    RecordsWanted,
)

ToTrainer = DataGranted | DataKnown | RecordsGranted | EngineFromDaemon
FromTrainer = DataFromTrainer | RecordsFromTrainer
Place = tuple[int, int]


@dataclass(slots=True)
class _Reader:
    """What one trainer has of the shared data."""

    epoch: int = 0
    #: Claims that are not trained to their end.
    claims: dict[Place, Claim] = field(default_factory=dict)
    #: Those that it had before it was started again.
    again: list[Claim] = field(default_factory=list)
    #: The last turn that it reported.
    turn: int = 0
    is_open: bool = False


class DataRoutes:
    """Routes the messages about data between the trainers of a node and their daemon; `send` reaches each trainer."""

    def __init__(self, send: Sequence[Callable[[ToTrainer], None]]) -> None:
        self._send = send
        self._readers = [_Reader() for _ in send]
        self._shape: DataShape | None = None
        self._epoch = 0
        self._waiting: deque[tuple[int, DataWanted]] = deque()
        #: Who asked what is asked now, and under which number.
        self._asked: tuple[int, DataWanted] | None = None
        self._number = 0
        self._orphans: list[Claim] = []
        self._handler: Callable[[FromTrainer], None] = lambda _: None

    def on_data(self, handler: Callable[[FromTrainer], None]) -> None:
        """Where messages of the trainers go."""
        self._handler = handler

    # -- from the trainers ---------------------------------------------------------------------------------------

    def from_trainer(self, index: int, message: FromTrainer) -> None:
        """A trainer has sent a message."""
        match message:
            case DataOpened():
                self._open(index, message)
            case DataWanted():
                self._waiting.append((index, message))
                self._ask()
            case DataTrained():
                self._trained(index, message)
            case RecordsWanted():
                # A master dispatches to single trainers only (`p2pnode.config.rules`).
                self._send[index](RecordsGranted(message.number, None, is_over=True))
            case _:
                self._handler(message)

    def _open(self, index: int, message: DataOpened) -> None:
        reader = self._readers[index]
        # A trainer that is started again asks anew, and waits for no earlier answer.
        self._waiting = deque(one for one in self._waiting if one[0] != index)
        if message.shape != self._shape:
            self._shape = message.shape
            self._readers = [_Reader() for _ in self._send]
            self._orphans.clear()
            reader = self._readers[index]
            self._handler(message)
        elif reader.is_open:
            reader.again = list(reader.claims.values())
        reader.is_open = True

    def _trained(self, index: int, message: DataTrained) -> None:
        reader = self._readers[index]
        reader.turn = message.turn
        for one in message.trained:
            place = one.epoch, one.partition
            if one.finished:
                reader.claims.pop(place, None)
            elif place in reader.claims:
                reader.claims[place] = msgspec.structs.replace(reader.claims[place], offset=one.offset)
        self._handler(message)

    def gone(self, index: int) -> None:
        """A trainer is given up: what it had not trained goes to the next that asks."""
        reader = self._readers[index]
        self._orphans += reader.claims.values()
        self._readers[index] = _Reader()
        self._waiting = deque(one for one in self._waiting if one[0] != index)

    # -- asking for them -----------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Pass on the oldest request, one at a time, or answer it from what was granted before."""
        while self._waiting and self._asked is None:
            index, wanted = self._waiting.popleft()
            reader = self._readers[index]
            kept, reader.again = reader.again[: wanted.count], reader.again[wanted.count :]
            if not kept and not wanted.has_claims:
                kept, self._orphans = self._orphans[: wanted.count], self._orphans[wanted.count :]
            if kept:
                self._grant(index, wanted, kept[0].epoch, kept)
                continue
            self._number += 1
            self._asked = index, wanted
            # Another trainer of this node may have begun the next epoch already: this one follows it.
            finished = wanted.finished and reader.epoch >= self._epoch
            self._handler(msgspec.structs.replace(wanted, number=self._number, finished=finished))

    def _grant(self, index: int, wanted: DataWanted, epoch: int, claims: list[Claim]) -> None:
        reader = self._readers[index]
        reader.epoch = epoch
        reader.claims |= {(claim.epoch, claim.partition): claim for claim in claims if claim.counted}
        self._send[index](DataGranted(wanted.number, epoch, claims))

    # -- from the daemon -----------------------------------------------------------------------------------------

    def to_trainers(self, message: ToTrainer) -> None:
        """The daemon has sent a message to its trainer: it goes to the one that it concerns."""
        match message:
            case DataGranted(number, epoch, claims):
                if self._asked is None or number != self._number:
                    return
                (index, wanted), self._asked = self._asked, None
                self._epoch = max(self._epoch, epoch)
                if self._readers[index].is_open:
                    self._grant(index, wanted, epoch, claims)
                else:
                    self._orphans += [claim for claim in claims if claim.counted]
                self._ask()
            case DataKnown(_, state):
                for reader, send in zip(self._readers, self._send, strict=True):
                    if reader.is_open:
                        send(DataKnown(reader.turn, state))
            case _:
                self._send[0](message)

"""A script's end of shared data without processes: a connection whose daemon is a `DataMember` of its own."""

from __future__ import annotations

from collections import deque
from typing import Any, cast

from p2pnode.training.sharing.member import DataMember
from p2pnode.training.trainer.connection import DaemonConnection
from p2pnode.training.trainer.ranks import Ranks
from p2pnode.training.trainer.sampling.shared_data import SharedData
from p2pnode.training.trainer_link.data_messages import DataGranted, DataKnown, DataOpened, DataTrained, DataWanted


class DirectConnection:
    """What `DataLink` uses of a `DaemonConnection`; messages are answered at once, in memory.

    `member` may exchange statements with others. `opened` counts the openings; `trained` has every report.
    """

    def __init__(self, node_id: bytes = b"n" * 20) -> None:
        self.member: DataMember | None = None
        self.known: DataKnown | None = None
        self.stopping = self.lost = False
        self.sent: list[Any] = []
        self._node_id = node_id
        self._granted: deque[DataGranted] = deque()

    def send(self, message: Any) -> None:
        self.sent.append(message)
        match message:
            case DataOpened(shape, state):
                if self.member is None:
                    self.member = DataMember(self._node_id, 1, shape, 0.0)
                else:
                    self.member.grant_again()
                if state is not None:
                    self.member.restore(state)
            case DataWanted():
                assert self.member is not None
                assert self.member.is_admitted(1000.0)
                if message.begins:
                    self.member.begin(1000.0, finished=message.finished, has_claims=message.has_claims)
                claims = self.member.claim(message.position, message.count)
                if not claims and message.begins and not message.has_claims:
                    claims = [self.member.claim_copy()]
                self._granted.append(DataGranted(message.number, self.member.epoch, claims))
            case DataTrained():
                assert self.member is not None
                self.member.on_trained(message.trained, message.partitions)

    def tell_known(self) -> None:
        """As the daemon does once a second: the state that the next checkpoint holds."""
        assert self.member is not None
        turns = [message.turn for message in self.sent if isinstance(message, DataTrained)]
        self.known = DataKnown(max(turns, default=0), self.member.state())

    def answer(self, *_: Any) -> DataGranted | None:
        return self._granted.popleft() if self._granted and not self.stopping else None


class Script:
    """A script with shared data: `step` is what `swarm.step` does of it, and every call ends a turn."""

    def __init__(self, connection: DirectConnection | None = None, *, seed: int = 7, saved: str | None = None) -> None:
        self.connection = connection or DirectConnection()
        self.warned: list[str] = []
        self.data = SharedData(
            Ranks(),
            cast(DaemonConnection, self.connection),
            lambda event, _text: self.warned.append(event),
        )
        self.data.seed = seed
        self.data.restore(saved)
        self._turn = 0

    @property
    def member(self) -> DataMember:
        assert self.connection.member is not None
        return self.connection.member

    def step(self, samples: int) -> None:
        self._turn += 1
        self.data.count(samples)
        self.data.report(self._turn, self._turn, samples)

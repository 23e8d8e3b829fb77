"""The link of a data set to the daemon: answers that are equal on every rank, and the state for a checkpoint."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from p2pnode.training.trainer.connection import DaemonGone
from p2pnode.training.trainer.ranks import Ranks
from p2pnode.training.trainer.sampling.link import DataLink, packed_state, unpacked_state
from p2pnode.training.trainer_link.data_messages import (
    Claim,
    DataGranted,
    DataKnown,
    DataOpened,
    DataShape,
    DataState,
    PartitionTrained,
)

SHAPE = DataShape("samples", 100, 7)
STREAM = DataShape("stream", 10, 7)
WANTED: dict[str, Any] = {"begins": True, "finished": False, "position": 0, "count": 2, "has_claims": False}


class Connection:
    """A daemon whose answers are in `answers`; without one it ends."""

    def __init__(self, *answers: DataGranted) -> None:
        self.answers = deque(answers)
        self.stopping = self.lost = False
        self.known: DataKnown | None = None
        self.sent: list[Any] = []
        self.is_gone = False

    def send(self, message: Any) -> None:
        if self.is_gone:
            raise DaemonGone
        self.sent.append(message)

    def answer(self, *_: Any) -> DataGranted | None:
        return self.answers.popleft() if self.answers else None


def link_of(connection: Connection | None, shape: DataShape = SHAPE, ranks: Any = None) -> DataLink:
    return DataLink(connection, ranks or Ranks(0, 1, "cpu"), shape)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_daemon_that_ends_ends_the_iteration(is_gone: bool) -> None:
    """Before the request, or while its answer is waited for; without a connection there is none."""
    connection = Connection()
    connection.is_gone = is_gone
    for link in (link_of(connection), link_of(None)):
        assert link.ask(**WANTED) is None
        assert link.stopped


def test_every_rank_has_the_answer_of_the_first() -> None:
    """An end passes too."""
    passed: list[Any] = []

    def share(found: Any) -> Any:
        passed.append(found)
        return passed[0]

    for granted in (DataGranted(1, 3, [Claim(1, 5, 7, False), Claim(2, 6, 0)]), DataGranted(1, 4, []), None):
        passed.clear()
        connection = Connection() if granted is None else Connection(DataGranted(1, granted.epoch, granted.claims))
        ranks = SimpleNamespace(count=2, share=share)
        first, second = link_of(connection, ranks=ranks), link_of(None, ranks=ranks)
        assert first.ask(**WANTED) == granted
        assert second.ask(**WANTED) == granted
        assert first.stopped == second.stopped == (granted is None)


def test_the_state_has_what_is_known_and_what_was_reported_since() -> None:
    """Reports that the daemon's statement has already are dropped; those after it count."""
    connection = Connection()
    link = link_of(connection)
    link.open(None)
    empty = link.state()
    link.report(1, [PartitionTrained(0, 1, 1, True)])
    link.report(2, [PartitionTrained(0, 2, 1, True)])
    both = link.state()
    other = link_of(Connection())
    other.report(1, [PartitionTrained(0, 1, 1, True)])
    connection.known = DataKnown(1, other.state())

    assert connection.sent[0] == DataOpened(SHAPE, None)
    assert empty.trained == []
    assert link.state() == both
    assert list(link._reported) == [2]
    connection.known = DataKnown(2, empty)
    assert link.state() == empty


def test_a_restored_state_is_told_to_the_daemon_and_is_the_state_until_more_is_known() -> None:
    """Also where the daemon has gone."""
    state = DataState(3, 12, (2, 0), [], [(2, 4, 5)])
    connection = Connection()
    connection.is_gone = True
    for link in (link_of(Connection(), STREAM), link_of(connection, STREAM)):
        link.open(state)
        assert link.partitions == 12
        found = link.state()
        assert (found.epoch, found.partitions, found.first, found.offsets) == (3, 12, (2, 0), [(2, 4, 5)])


def test_a_state_is_of_its_own_data_set() -> None:
    """Another size, another kind, and what is no state at all are refused, with what to do."""
    state = DataState(0, 100, (0, 0), [], [])
    text = packed_state(SHAPE, state)

    assert unpacked_state(text, SHAPE) == state
    with pytest.raises(ValueError, match=r"other data \(samples 100, seed 7\) than the present \(stream 10, seed 7\)"):
        unpacked_state(text, STREAM)
    for wrong in ("", "[]", "{}", text[:-1]):
        with pytest.raises(ValueError, match=r"no state of swarm\.sampler or swarm\.shard"):
            unpacked_state(wrong, SHAPE)

"""What the next server does about the commit that a dead one had under way."""

import pytest

from training.engines.server.acceptance import Contribution, EachAtOnce
from training.engines.server.core import Pending, ServerRecord, WorkerProgress
from training.engines.server.takeover import Takeover

A, B = b"a", b"b"
RECORD = ServerRecord(
    epoch=3,
    version=10,
    workers=[WorkerProgress(A, 5), WorkerProgress(B, 5, [(1, 1)]), WorkerProgress(b"idle", 4)],
    pending=[Pending(A, 6, (7, 1)), Pending(B, 6, (8, 2))],
    pending_version=12,
)


def again(worker: bytes, name: tuple[int, int]) -> Contribution:
    return Contribution(worker, *name, 6, 10, [("w", 1.0)])


def test_without_a_commit_under_way_nothing_is_waited_for():
    """An empty record, or one between two commits, is settled."""
    takeover = Takeover(ServerRecord())
    assert takeover.is_settled
    assert takeover.commit(EachAtOnce()) is None
    assert takeover.settled() == ServerRecord()


def test_when_nobody_was_told_the_commit_is_made_again():
    """All workers repeat their reports; the commit has the same contributions and timestamps."""
    takeover = Takeover(RECORD)
    takeover.heard(A, [again(A, (7, 1))])
    assert takeover.awaited == [B]
    takeover.heard(b"idle", [])
    takeover.heard(B, [again(B, (8, 2))])
    commit = takeover.commit(EachAtOnce())
    assert takeover.is_settled
    assert ([one.worker for one in commit.contributions], commit.stamps, commit.version) == ([A, B], (11, 12), 12)
    settled = takeover.settled()
    assert (settled.version, settled.pending) == (12, [])
    assert settled.workers == [
        WorkerProgress(A, 6, [(7, 1)]),
        WorkerProgress(B, 6, [(1, 1), (8, 2)]),
        WorkerProgress(b"idle", 4),
    ]


def test_one_worker_that_was_told_proves_the_whole_commit():
    """Whoever repeats its report then learns that it counts."""
    takeover = Takeover(RECORD)
    takeover.heard(A, [])
    assert takeover.is_settled
    assert takeover.awaited == []
    assert takeover.commit(EachAtOnce()) is None
    assert takeover.settled().workers[1] == WorkerProgress(B, 6, [(1, 1), (8, 2)])


def test_a_task_that_is_still_computed_proves_nothing():
    """A worker that holds the very task has not reported it yet."""
    takeover = Takeover(RECORD)
    takeover.heard(A, [], known=[(7, 1)])
    assert takeover.awaited == [B]


@pytest.mark.parametrize("dead", [A, B])
def test_what_died_with_its_worker_is_reported_as_lost(dead):
    """The rest of the commit is made again, at its places; nobody is told that the lost one counts."""
    living = B if dead == A else A
    takeover = Takeover(RECORD)
    takeover.heard(living, [again(living, (7, 1) if living == A else (8, 2))])
    takeover.gone(dead)
    commit = takeover.commit(EachAtOnce())
    assert [one.worker for one in commit.contributions] == [living]
    assert commit.stamps == ((11,) if living == A else (12,))
    assert [one.worker for one in takeover.lost] == [dead]
    steps = {one.worker: one.step for one in takeover.settled().workers}
    assert (steps[living], steps[dead]) == (6, 5)


def test_all_may_have_died():
    """Then there is nothing to make again."""
    takeover = Takeover(RECORD)
    takeover.gone(A)
    takeover.gone(B)
    assert takeover.is_settled
    assert takeover.commit(EachAtOnce()) is None
    assert takeover.settled().version == 12

"""What the next server does about the commit that a dead one had under way."""

import msgspec
import pytest

from p2pnode.training.engines.server.acceptance import Contribution, EachAtOnce
from p2pnode.training.engines.server.record import Pending, ServerRecord, Takeover, WorkerProgress

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
    takeover.heard(A, [again(A, (7, 1))], 10)
    assert takeover.awaited == [B]
    takeover.heard(b"idle", [], 10)
    takeover.heard(B, [again(B, (8, 2))], 9)
    commit = takeover.commit(EachAtOnce())
    assert takeover.is_settled
    assert ([one.worker for one in commit.contributions], commit.stamps, commit.version) == ([A, B], (11, 12), 12)
    settled = takeover.settled()
    assert (settled.version, settled.pending, settled.lost) == (12, [], 0)
    assert settled.workers == [
        WorkerProgress(A, 6, [(7, 1)]),
        WorkerProgress(B, 6, [(1, 1), (8, 2)]),
        WorkerProgress(b"idle", 4),
    ]


@pytest.mark.parametrize("told", [A, b"idle", b"new"])
def test_one_worker_that_was_told_proves_the_whole_commit(told):
    """Whoever repeats its report then learns that it counts. The worker need not have been part of the commit."""
    takeover = Takeover(RECORD)
    takeover.gone(A)
    takeover.heard(told, [], 12)
    assert takeover.is_settled
    assert (takeover.awaited, takeover.lost) == ([], [])
    assert takeover.commit(EachAtOnce()) is None
    assert takeover.settled().workers[1] == WorkerProgress(B, 6, [(1, 1), (8, 2)])


def test_a_server_that_stood_by_may_know_that_the_commit_was_made():
    """It asked the one before, and was told; of an earlier version it proves nothing."""
    assert Takeover(RECORD, 12).is_settled
    assert Takeover(RECORD, 12).settled().workers[0] == WorkerProgress(A, 6, [(7, 1)])
    assert not Takeover(RECORD, 11).is_settled


def test_a_worker_that_begins_anew_proves_nothing():
    """It repeats no report because it knows of none. What its former start computed is lost, and the rest of the commit
    is made again."""
    takeover = Takeover(RECORD)
    takeover.heard(A, [], 0)
    assert takeover.awaited == [B]
    takeover.heard(B, [again(B, (8, 2))], 10)
    assert [one.worker for one in takeover.commit(EachAtOnce()).contributions] == [B]
    assert takeover.lost == [RECORD.pending[0]]
    settled = takeover.settled()
    assert settled.workers[0] == WorkerProgress(A, 5)
    assert settled.lost == 1


@pytest.mark.parametrize("dead", [A, B])
def test_what_died_with_its_worker_is_reported_as_lost(dead):
    """The rest of the commit is made again, at its places; nobody is told that the lost one counts."""
    living = B if dead == A else A
    takeover = Takeover(RECORD)
    takeover.heard(living, [again(living, (7, 1) if living == A else (8, 2))], 10)
    takeover.gone(dead)
    commit = takeover.commit(EachAtOnce())
    assert [one.worker for one in commit.contributions] == [living]
    assert commit.stamps == ((11,) if living == A else (12,))
    assert [one.worker for one in takeover.lost] == [dead]
    steps = {one.worker: one.step for one in takeover.settled().workers}
    assert (steps[living], steps[dead]) == (6, 5)


def test_all_may_have_died():
    """Then there is nothing to make again. The record counts what was lost earlier too."""
    takeover = Takeover(msgspec.structs.replace(RECORD, lost=400))
    takeover.gone(A)
    takeover.gone(B)
    assert takeover.is_settled
    assert takeover.commit(EachAtOnce()) is None
    settled = takeover.settled()
    assert (settled.version, settled.lost) == (12, 402)

"""Parts of `/status`: the records of a master or a worker, work that takes long, and the peers, also those lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import msgspec
import pytest

from p2pnode import __version__
from p2pnode.overlay.addresses import Address
from p2pnode.overlay.peers import Activity, Contact, Peer, PeerChange
from p2pnode.status.findings import dispatch_findings
from p2pnode.status.schema import DispatchStatus, Finding, Ongoing
from p2pnode.status.sections import KEPT_S, MAX_KEPT, LostPeers, dispatch_status
from p2pnode.training.dispatch.answers import End, QueueStatus
from p2pnode.training.dispatch.client import TROUBLE_S, Trouble
from p2pnode.training.dispatch.master import MasterFacts
from p2pnode.training.dispatch.messages import QueueCounts
from p2pnode.training.dispatch.worker import RecordsFacts
from tests.harness.runner.stories import played_by
from tests.harness.swarms.status_swarm import report, simulate
from tests.harness.swarms.swarm import Host, Swarm

COUNTS = QueueCounts(QueueStatus(1, 3, 10, todo=4, leased=3, done=2, failed=1, end=End.NO), discarded=5, store="etcd")
RECORDS = RecordsFacts(
    counts=COUNTS,
    master=b"m" * 20,
    trouble=None,
    refused=None,
    held=2,
    trained=640,
    finished=7,
    superseded=1,
    ended=False,
)
MASTER = MasterFacts(store="sqlite", serves_since=90.0, epoch=4, queue=None, discarded=0, reason="")


def status(master: MasterFacts | None, records: RecordsFacts | None, now: float = 100.0) -> DispatchStatus:
    found = dispatch_status("master", master, records, now)
    assert found is not None
    return found


def findings(master: MasterFacts | None, records: RecordsFacts | None, now: float = 100.0) -> list[Finding]:
    return dispatch_findings(dispatch_status("master", master, records, now), master, records)


def test_a_node_without_records_has_no_status() -> None:
    """It neither serves nor draws any."""
    assert dispatch_status("", None, None, 1.0) is None
    assert dispatch_findings(None, None, None) == []


def test_a_master_shows_its_own_queue_before_what_it_was_told() -> None:
    """A master that also draws records has both; its own numbers are the newer ones."""
    queue = QueueStatus(1, 3, 10, todo=9, leased=0, done=0, failed=1, end=End.NO)
    found = status(replace(MASTER, queue=queue, discarded=0), RECORDS)
    assert (found.todo, found.done, found.tasks) == (9, 0, 10)
    assert (found.store, found.discarded, found.epoch) == ("sqlite", 0, 4)
    assert (found.serves, found.serves_seconds) == (True, 10.0)


def test_a_master_that_does_not_serve_shows_what_it_was_told() -> None:
    """It has no queue of its own, and its store is still the one that it would serve from."""
    standby = replace(MASTER, serves_since=None, reason="another master holds the lock")
    found = status(standby, RECORDS)
    assert (found.serves, found.serves_seconds, found.todo, found.store) == (False, None, 4, "sqlite")
    assert found.last_error == "another master holds the lock"


def test_the_last_error_is_the_most_useful_one() -> None:
    """Why this node gets no tasks, before why the master does not answer, before what the master lacks."""
    refused, trouble = ("other files", "copy them"), Trouble(97.0, "was silent")
    failing = replace(MASTER, reason="disk full")
    assert status(failing, replace(RECORDS, refused=refused, trouble=trouble)).last_error == "other files"
    assert status(failing, replace(RECORDS, trouble=trouble)).last_error == "was silent"
    assert status(failing, RECORDS).last_error == "disk full"
    assert status(None, RECORDS).last_error == ""


def test_a_master_that_does_not_answer_is_an_error_after_a_while() -> None:
    """The time is shown at once, never negative; the finding comes after the time that the log waits, too."""
    silent = replace(RECORDS, counts=msgspec.structs.replace(COUNTS, discarded=0), trouble=Trouble(100.0, "was silent"))
    assert status(None, silent, 99.0).unanswered_seconds == 0.0
    assert status(None, silent, 101.5).unanswered_seconds == 1.5
    assert findings(None, silent, 100.0 + TROUBLE_S - 0.1) == []
    (finding,) = findings(None, silent, 100.0 + TROUBLE_S)
    assert (finding.level, finding.what) == ("error", "no master of the records has answered for 5 s: was silent")


def test_what_is_wrong_is_said_with_what_to_do() -> None:
    """A refusal has the master's own words; a master in waiting is a warning; discarded tasks are an error."""
    standby = replace(MASTER, serves_since=None, reason="another master holds the lock")
    found = findings(standby, replace(RECORDS, refused=("other files", "copy them")))
    assert [(one.level, one.what) for one in found] == [
        ("error", "other files"),
        ("warning", "this node is a master and does not serve: another master holds the lock"),
    ]
    assert found[0].do == "copy them"
    assert findings(replace(standby, reason=""), replace(RECORDS, counts=None)) == []
    assert findings(replace(MASTER, reason="a slow disk"), replace(RECORDS, counts=None)) == [], "it serves"
    (discarded,) = findings(None, RECORDS)
    assert (discarded.level, discarded.what) == (
        "error",
        "5 tasks were discarded: their records are left out of a pass",
    )


def test_what_takes_long_says_how_far_it_is_and_the_time_to_go() -> None:
    """The join, the nodes that are missing, the download of the state, the steps and the last checkpoint."""
    seen: dict[str, list[Ongoing]] = {}

    async def scenario(swarm: Swarm) -> None:
        host = swarm.start("n0", training__max_steps=200)

        def watch(of: Host) -> bool:
            for each in report(swarm, of).status().progress:
                seen.setdefault(each.what, []).append(each)
            return False

        async def observed(of: Host, until: Callable[[], bool], what: str) -> None:
            await swarm.until(lambda: watch(of) or until(), within_s=90, what=what, every_s=0.01)

        await observed(host, lambda: host.living.phase == "waiting_for_nodes", "it waits")
        await asyncio.sleep(0.1)
        watch(host)
        other = swarm.start("n1", bootstrap="n0", training__max_steps=200)
        await observed(other, lambda: other.living.progress.step >= 5, "it trains")
        other.living.leave()
        node = other.living
        await observed(other, lambda: node.phase == "leaving", "it leaves")
        await swarm.until(lambda: watch(other) or node.checkpoints is None or node.checkpoints._work is None,
                          within_s=30, what="it has saved", every_s=0.001)  # fmt: skip

    simulate(scenario, training__min_nodes=2, training__checkpoint_s=60.0)

    assert (seen["nodes"][0].done, seen["nodes"][0].total, seen["nodes"][0].unit) == (1, 2, "nodes")
    steps = seen["max_steps"][-1]
    assert (steps.total, steps.unit) == (200, "steps")
    assert steps.left_seconds is not None
    assert steps.left_seconds > 0
    download = seen["download of the state"][-1]
    assert (download.unit, download.total % 4) == ("bytes", 0)
    assert 0 <= download.done <= download.total
    assert {"join the swarm", "start the trainer", "join"} & set(seen)
    assert all(each.done <= each.total or not each.total for rows in seen.values() for each in rows)
    print(sorted(seen))


@pytest.mark.parametrize(
    ("is_script", "what", "summary"),
    [
        (True, "wait until the script calls p2pnode.attach", "has not called p2pnode.attach"),
        (False, "start the trainer", "starting the trainer"),
    ],
)
@played_by(simulate)
async def test_a_node_says_that_it_waits_for_the_script_to_attach(
    swarm: Swarm, *, is_script: bool, what: str, summary: str
) -> None:
    """A script may read data for minutes before it attaches, or forget to; the trainer of a task is p2pnode's own."""
    host = swarm.start("n0")
    assert host.trainer is not None
    host.trainer.is_script = is_script
    host.trainer._start_s = 100.0
    await swarm.until(lambda: host.living.overlay.genesis is not None, within_s=30, what="it is in the swarm")
    await asyncio.sleep(5.0)
    [row] = report(swarm, host).status().progress
    assert row.what == what
    assert summary in report(swarm, host).status().summary

    host.trainer._start_s = 0.0
    await swarm.until(lambda: host.living.progress.step >= 1, within_s=120, what="it trains")
    assert "attach" not in report(swarm, host).status().summary


@played_by(simulate, barrier__method="asp")
async def test_peers_are_listed_furthest_ahead_first(swarm: Swarm) -> None:
    """Each peer has its lag behind this node; those ahead come first."""
    hosts = swarm.start_many(3)
    await swarm.until(lambda: all(host.living.progress.step >= 3 for host in hosts), within_s=90, what="all train")
    own = report(swarm, hosts[0])
    peers = own.peers()

    assert len(peers) == 2
    assert [peer.step for peer in peers] == sorted((peer.step for peer in peers), reverse=True)
    assert all(peer.lag == own.status().step - peer.step for peer in peers)
    assert [peer.version for peer in peers] == [__version__] * 2


@played_by(simulate, barrier__method="asp")
async def test_peers_have_their_shards_their_samples_and_the_age_of_their_progress(swarm: Swarm) -> None:
    """All shards together are the swarm's; a peer whose trainer hangs makes no progress, and its age rises."""
    hosts = swarm.start_many(3)
    await swarm.until(lambda: all(host.living.progress.step >= 3 for host in hosts), within_s=90, what="all train")
    own = report(swarm, hosts[0])

    def owned() -> int:
        return own.status().exchange.shards_owned + sum(peer.shards or 0 for peer in own.peers())

    await swarm.until(lambda: owned() == own.status().exchange.shards, within_s=60, what="every owner is known")
    assert all(peer.samples > 0 for peer in own.peers())
    hung = hosts[1]
    assert hung.trainer is not None
    hung.trainer.hang()
    await asyncio.sleep(20.0)
    ages = {peer.id: peer.progress_seconds for peer in own.peers()}
    assert ages.pop(hung.living.identity.node_id.hex()) > 15.0
    assert all(age < 10.0 for age in ages.values())


def peer(number: int) -> Peer:
    node_id = number.to_bytes(20, "big")
    contact = Contact(node_id, Address("10.0.0.1", 8000 + number))
    return Peer(contact, 1, 1, Activity.TRAINING, 10 * number, 0.1, 0, True, 0.0, 0.0, 0.0)


def change(number: int, kind: Literal["dead", "left", "up", "returned", "restarted"]) -> PeerChange:
    gone = kind in ("dead", "left")
    return PeerChange(peer(number).node_id, kind, "no answer", peer(number) if gone else None)


def test_the_newest_loss_comes_first_and_says_when_how_and_at_which_step() -> None:
    """With the address that the peer had, and the reason."""
    now = [100.0]
    lost = LostPeers(lambda: now[0])
    lost.note(change(1, "dead"))
    now[0] = 107.5
    lost.note(change(2, "left"))
    now[0] = 110.0
    rows = lost.rows()
    assert [(row.id[-2:], row.how, row.seconds_ago, row.step) for row in rows] == [
        ("02", "left", 2.5, 20),
        ("01", "dead", 10.0, 10),
    ]
    assert (rows[1].address, rows[1].reason) == ("10.0.0.1:8001", "no answer")


def test_a_peer_that_is_back_is_not_missing() -> None:
    """Neither one that returns nor one that starts again; what was never known is not missed either."""
    lost = LostPeers(lambda: 0.0)
    for number, kind in ((1, "returned"), (2, "up"), (3, "restarted")):
        lost.note(change(number, "dead"))
        lost.note(change(number, kind))  # type: ignore[arg-type]
    lost.note(PeerChange(peer(4).node_id, "dead", "never answered"))
    assert lost.rows() == []


def test_old_losses_go_and_the_newest_are_kept() -> None:
    """An hour later it is no news; of many losses the newest stay, and one that dies twice is there once."""
    now = [0.0]
    lost = LostPeers(lambda: now[0])
    for number in range(1, MAX_KEPT + 6):
        lost.note(change(number, "dead"))
    lost.note(change(10, "dead"))
    numbers = [int(row.id, 16) for row in lost.rows()]
    assert len(numbers) == len(set(numbers)) == MAX_KEPT
    assert numbers[:2] == [10, MAX_KEPT + 5]
    assert min(numbers) == 6
    now[0] = KEPT_S + 1
    assert lost.rows() == []

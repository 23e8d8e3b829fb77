"""The end of a node: the script's own end, lingering, handing over, leaving."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from p2pnode.errors import ExitCode
from tests.harness.runner.stories import played_by
from tests.harness.swarms.status_swarm import simulate
from tests.harness.swarms.swarm import Host, Swarm
from tests.harness.trainers.stub_trainer import StubTrainer


@played_by(simulate, training__linger_s=3.0)
async def test_a_finished_node_lingers_while_others_train_and_no_longer_than_allowed(swarm: Swarm) -> None:
    """Alone it ends at once; beside a training node it ends after `linger_s`."""
    alone = swarm.start("n0", training__max_steps=2)
    await swarm.until(lambda: alone.task is not None and alone.task.done(), within_s=15, what="it ends alone")
    assert not [record for record in swarm.records if record.event == "linger_over"]

    other = swarm.start("n1")
    await swarm.until(lambda: other.living.progress.step >= 1, within_s=30, what="another trains")
    brief = swarm.start("n2", bootstrap="n1", training__max_seconds=2.0)
    await swarm.until(lambda: brief.task is not None and brief.task.done(), within_s=60, what="it ends")
    over = [record for record in swarm.records if record.event == "linger_over"]
    assert [record.fields["seconds"] for record in over] == [3.0]


@played_by(simulate)
async def test_a_leaving_node_hands_its_shards_over(swarm: Swarm) -> None:
    """After one of two nodes has left, the other owns every shard and nothing was left behind."""
    first, second = swarm.start_many(2)
    await swarm.until(
        lambda: all(host.living.progress.step >= 5 for host in (first, second)), within_s=90, what="both train"
    )
    second.living.leave()
    assert second.task is not None
    assert await second.task == "leave"

    exchange = first.living.exchange
    assert exchange is not None
    assert len(exchange.store.owned) == len(exchange.store)
    assert not [record for record in swarm.records if record.event == "left_behind"]


@pytest.mark.parametrize("dead", [0, 1, 2])
@played_by(simulate)
async def test_a_node_has_left_the_swarm_within_five_seconds(swarm: Swarm, *, dead: int) -> None:
    """From `leave` to its end, also where one peer or all of them have just died: they owe it acknowledgements, and
    were to take its shards over. The neighbour that lives knows of it."""
    hosts = swarm.start_many(3)
    await swarm.until(lambda: all(host.living.progress.step >= 5 for host in hosts), within_s=90, what="all train")
    leaver, name = hosts[0], hosts[0].living.overlay.node_id
    for number in range(dead):
        await swarm.kill(f"n{2 - number}", refused=False)
    await asyncio.sleep(1.0)  # a step in which they answer nothing
    began = swarm.clock.monotonic()
    leaver.living.leave()
    await swarm.until(lambda: ended(leaver), within_s=60, what="it ends")
    for host in hosts[1 : 3 - dead]:
        peers = host.living.overlay
        await swarm.until(lambda peers=peers: not peers.is_alive(name), within_s=60, what="the neighbour knows")  # type: ignore[misc]

    took_s = swarm.clock.monotonic() - began
    print(f"{took_s:.2f} s")
    assert took_s <= 5.0
    assert leaver.task is not None
    assert leaver.task.result() == "leave"


def ended(host: Host) -> bool:
    return host.task is not None and host.task.done()


def stub(host: Host) -> StubTrainer:
    assert host.trainer is not None
    return host.trainer


@played_by(simulate, training__linger_s=3.0)
async def test_a_script_has_its_time_after_the_run_while_the_node_lingers(swarm: Swarm) -> None:
    """Twenty seconds of evaluation and saving after `max_steps` complete beside a linger of three, the status has the
    deadline, the node owns its shards, and its last checkpoint has the state that the script saved before."""
    swarm.state_path = Path("/state")
    host = swarm.start("n0", training__max_steps=2, training__checkpoint_s=1000.0)
    stub(host).finish_in(20.0)
    node = host.living
    await swarm.until(lambda: node.progress.finishing is not None, within_s=15, what="the run ends")
    began = swarm.clock.monotonic()
    finishing = node.progress.finishing
    assert finishing is not None
    assert (finishing.what, node.state) == ("the run has ended: max_steps", "finished")
    assert finishing.deadline - finishing.since == 600.0
    assert len(stub(host).saved) == 1
    await swarm.until(lambda: not swarm.running(), within_s=60, what="it ends")

    assert 20.0 <= swarm.clock.monotonic() - began <= 22.0
    assert stub(host).told == ["max_steps"]
    assert node.exit_code == ExitCode.OK
    assert node.progress.finishing is None
    assert len(swarm.of("checkpoint_written")) == len(stub(host).saved) == 1
    assert not swarm.of("trainer_state_not_saved")


@played_by(simulate, training__linger_s=30.0, barrier__method="asp")
async def test_the_linger_and_the_script_s_end_take_place_at_the_same_time(swarm: Swarm) -> None:
    """Beside a node that trains on: after 30 s of linger a script that takes 15 s has ended, though it has waited a few
    seconds first for the last steps of the other."""
    other = swarm.start("n0")
    await swarm.until(lambda: other.living.progress.step >= 3, within_s=60, what="another trains")
    brief = swarm.start("n1", bootstrap="n0", training__max_seconds=3.0)
    stub(brief).finish_in(15.0)
    node = brief.living
    await swarm.until(lambda: node.phase == "finished", within_s=60, what="its run ends")
    began = swarm.clock.monotonic()
    await swarm.until(lambda: node.progress.finishing is not None, within_s=12, what="the script sees the end")
    exchange = node.exchange
    assert exchange is not None
    await swarm.until(lambda: bool(exchange.store.owned), within_s=30, what="it owns shards while it lingers")
    await swarm.until(lambda: bool(swarm.of("linger_over")), within_s=60, what="the linger is over")

    assert 29.9 <= swarm.clock.monotonic() - began <= 31.0
    assert stub(brief).state == "stopped"


@played_by(simulate)
async def test_a_script_that_is_cut_short_gives_an_exit_code_of_its_own(swarm: Swarm) -> None:
    """After `finish_s` at the end of a run, and after `stop_s` on leaving; before, its own code is the daemon's."""
    late = swarm.start("n0", training__max_steps=1, training__finish_s=5.0)
    stub(late).finish_in(9.0)
    await swarm.until(lambda: ended(late), within_s=30, what="it ends")
    assert late.living.exit_code == ExitCode.CUT_SHORT

    own = swarm.start("n1", training__max_steps=1)
    stub(own).finish_in(9.0, exit_code=3)
    await swarm.until(lambda: ended(own), within_s=30, what="it ends")
    assert own.living.exit_code == 3

    killed = swarm.start("n2", training__max_steps=1)
    stub(killed).finish_in(1.0, exit_code=-11)
    await swarm.until(lambda: ended(killed), within_s=30, what="it ends")
    assert killed.living.exit_code == 128 + 11

    for seconds, code in ((9.0, ExitCode.OK), (11.0, ExitCode.CUT_SHORT)):
        host = swarm.start(f"stopped after {seconds}")
        stub(host).finish_in(seconds)
        await swarm.until(lambda host=host: host.living.progress.step >= 1, within_s=30, what="it trains")  # type: ignore[misc]
        host.living.leave()
        began = swarm.clock.monotonic()
        await swarm.until(lambda host=host: ended(host), within_s=30, what="it ends")  # type: ignore[misc]
        assert host.living.exit_code == code
        assert swarm.clock.monotonic() - began <= 13.0
        assert stub(host).told == ["stop"]


@played_by(simulate)
async def test_a_node_told_to_leave_while_its_script_finishes_gives_it_stop_s(swarm: Swarm) -> None:
    """SIGTERM during the final evaluation: ten more seconds, not ten minutes."""
    host = swarm.start("n0", training__max_steps=1)
    stub(host).finish_in(500.0)
    node = host.living
    await swarm.until(lambda: node.progress.finishing is not None, within_s=15, what="the run ends")
    node.leave()
    began = swarm.clock.monotonic()
    await asyncio.sleep(5.0)
    finishing = node.progress.finishing
    assert finishing is not None
    assert (finishing.what, finishing.deadline - finishing.since) == ("the node leaves", 10.0)
    await swarm.until(lambda: ended(host), within_s=30, what="it ends")

    assert swarm.clock.monotonic() - began <= 13.0
    assert stub(host).told == ["max_steps", "stop"]
    assert node.exit_code == ExitCode.CUT_SHORT


@played_by(simulate, training__linger_s=1000.0)
async def test_a_script_that_returns_early_ends_its_node_cleanly(swarm: Swarm) -> None:
    """Its shards go to the other node, which trains on; the end is no failure, and nobody lingers for it."""
    first, second = swarm.start_many(2)
    stub(second).leave_after(6)
    await swarm.until(lambda: ended(second), within_s=120, what="it ends")
    assert second.task is not None
    assert second.task.result() == "script"
    assert second.living.exit_code == ExitCode.OK

    exchange = first.living.exchange
    assert exchange is not None
    assert len(exchange.store.owned) == len(exchange.store)
    assert not [record for record in swarm.records if record.level in ("warning", "error")]
    [left] = swarm.of("script_left")
    assert (left.level, left.fields["steps"]) == ("info", stub(second).trained[-1])
    step = first.living.progress.step
    await swarm.until(lambda: first.living.progress.step > step + 3, within_s=30, what="the other trains on")


@played_by(simulate)
async def test_a_script_that_returns_without_a_step_is_warned_of(swarm: Swarm) -> None:
    """Fewer calls than `local_steps`: the node ends cleanly, and says that it gave the swarm nothing."""
    host = swarm.start("n0")
    stub(host).leave_after(0)
    await swarm.until(lambda: ended(host), within_s=30, what="it ends")

    [left] = swarm.of("script_left")
    assert (left.level, left.fields["steps"], host.living.exit_code) == ("warning", 0, ExitCode.OK)

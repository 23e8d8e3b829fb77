"""The peer-to-peer engine in whole nodes on the simulated network: real values at their owners, virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from examples.linear_regression import TRUE, Regression
from p2pnode.status.events import EventRing
from p2pnode.status.report import LoopDelay, StatusReport
from p2pnode.training.engines.program import Context, Program
from p2pnode.training.values.store import NewValue, UpdateFailed, ValueUpdate
from tests.harness.environment.virtual_loop import START_S, run
from tests.harness.runner.long_run import more
from tests.harness.runner.stories import run_by
from tests.harness.swarms.swarm import Swarm
from tests.harness.trainers.engine_script import EngineScript

SETTINGS: dict[str, Any] = {"exchange.shards": 8, "training.linger_s": 30.0}


def world(seed: int, programs: dict[str, Program], method: str, nodes: int, **more: Any) -> Swarm:
    """A swarm whose node `name` runs `programs[name]`, or that of n0."""
    scripts: dict[str, EngineScript] = {}

    def make(name: str) -> EngineScript:
        scripts[name] = EngineScript(name, programs.get(name, programs["n0"]), **more)
        return scripts[name]

    settings = {**SETTINGS, "barrier.method": method, "training.min_nodes": nodes}
    return Swarm(seed=seed, settings=settings, make_trainer=make)


def script(swarm: Swarm, name: str) -> EngineScript:
    found = swarm.hosts[name].trainer
    assert isinstance(found, EngineScript)
    return found


async def ends(swarm: Swarm, names: Sequence[str]) -> list[Any]:
    """What the nodes return, and then what their scripts do."""
    tasks = [task for name in names if (task := swarm.hosts[name].task) is not None]
    assert await asyncio.gather(*tasks) == ["script"] * len(names)
    return [script(swarm, name).result for name in names]


async def columns_of(one: EngineScript) -> float:
    """The largest error of the weights that a script sees at its end."""
    keys = [f"column {number}" for number in range(TRUE.shape[1])]
    found = await one.get_many(keys)
    return float(np.abs(np.stack([found[key].value for key in keys], axis=1) - TRUE).max())


@pytest.mark.parametrize("method", ["pssp", *more("bsp", "asp")])
@run_by(run, limit_s=600.0)
async def test_six_nodes_recover_the_weights_while_one_dies_and_one_joins(method: str) -> None:
    """Peer-to-peer linear regression ends within 1e-2 of the true weights at every node that is left."""
    swarm = world(21, {"n0": Regression(100)}, method, 6, step_s=0.2, ending=columns_of)
    swarm.start_many(6)
    await swarm.until(lambda: script(swarm, "n0").ctx.step >= 15, within_s=120.0, what="15 steps")
    await swarm.kill("n4")
    await swarm.until(lambda: script(swarm, "n0").ctx.step >= 30, within_s=120.0, what="30 steps")
    swarm.start("n6", bootstrap="n1")
    names = ["n0", "n1", "n2", "n3", "n5", "n6"]
    assert await ends(swarm, names) == [100] * 6
    assert max(script(swarm, name).after for name in names) < 1e-2
    assert sum(script(swarm, name).batches for name in names) > 0


class Exact(Program):
    """Every step adds 1 to the key of its node, and to one of all."""

    reducer = "add"

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def schedule(self, ctx: Context) -> list[str]:
        return ["all"]

    def push(self, ctx: Context, params: Any) -> list[tuple[str, int]]:
        return [("all", 1), (ctx.node_id, 1)]

    def stop(self, ctx: Context) -> bool:
        return ctx.step >= self.steps


class ByPull(Exact):
    """The same with the script's own pull."""

    reducer = "pull"

    def pull(self, ctx: Context, updates: Sequence[ValueUpdate]) -> list[NewValue]:
        found: dict[Any, NewValue] = {}
        for one in updates:
            value, stamp = found[one.key][1:] if one.key in found else ctx.get(one.key, 0)
            found[one.key] = NewValue(one.key, value + one.value, max(stamp, one.timestamp))
        return list(found.values())


@pytest.mark.parametrize("program", [Exact, ByPull])
@run_by(run, limit_s=600.0)
async def test_a_killed_node_loses_and_repeats_no_update(program: type[Exact]) -> None:
    """After a death in the middle the count of all is the sum of the counts of each, and those of the living are
    exact."""

    async def sums(one: EngineScript) -> dict[str, int]:
        keys = await one.list_keys()
        return {str(key): found.value for key, found in (await one.get_many(keys)).items()}

    swarm = world(22, {"n0": program(40)}, "asp", 4, step_s=0.3, ending=sums)
    swarm.start_many(4)
    await swarm.until(lambda: script(swarm, "n2").ctx.step >= 10, within_s=120.0, what="10 steps")
    dead = script(swarm, "n2").node_id
    await swarm.kill("n2")
    names = ["n0", "n1", "n3"]
    assert await ends(swarm, names) == [40] * 3
    for name in names:
        found = script(swarm, name).after
        total, lost = found.pop("all"), found.pop(dead)
        assert list(found.values()) == [40] * 3
        # The two updates of a step are of two keys: the last one of the dead node may be in one of them only.
        assert abs(total - sum(found.values()) - lost) <= 1
        assert lost >= 10


@run_by(run, limit_s=600.0)
async def test_a_pull_that_raises_names_key_and_node_and_the_others_go_on() -> None:
    """The sender's program ends with `UpdateFailed`; the swarm and the values of other keys are as they should be."""

    class Bad(ByPull):
        def push(self, ctx: Context, params: Any) -> list[tuple[str, Any]]:
            return [*super().push(ctx, params), *([("bad", "text")] if ctx.step == 5 else [])]

    swarm = world(23, {"n0": ByPull(20), "n1": Bad(20)}, "pssp", 3)
    swarm.start_many(3)
    ended = await ends(swarm, ["n0", "n1", "n2"])
    assert [ended[0], ended[2]] == [20, 20]
    error = ended[1]
    assert isinstance(error, UpdateFailed)
    assert error.key == "bad"
    assert any(script(swarm, name).node_id.startswith(error.node) for name in ("n0", "n1", "n2"))
    assert "TypeError" in error.reason
    assert [record.fields["key"] for record in swarm.of("pull_failed")] == ["'bad'"]


@run_by(run, limit_s=600.0)
async def test_a_node_that_is_told_to_leave_ends_its_script_and_hands_over() -> None:
    """`p2pnode leave` ends the loop of one script in the middle; the others go on with all values."""
    swarm = world(24, {"n0": Exact(30)}, "bsp", 3)
    swarm.start_many(3)
    script(swarm, "n1").work_s = 0.001  # so that it waits at a barrier when it is told
    await swarm.until(lambda: script(swarm, "n1").ctx.step >= 10, within_s=60.0, what="10 steps")
    leaving = swarm.hosts["n1"]
    leaving.living.leave()
    assert await leaving.task == "leave"
    steps = script(swarm, "n1").result
    assert isinstance(steps, int)
    assert 10 <= steps < 30

    async def total(one: EngineScript) -> int:
        found = await one.get("all")
        assert found is not None
        return int(found.value)

    for name in ("n0", "n2"):
        script(swarm, name)._ending = total
    assert await ends(swarm, ["n0", "n2"]) == [30, 30]
    assert script(swarm, "n0").after == 60 + steps, (script(swarm, "n0").after, steps)


@run_by(run, limit_s=120.0)
async def test_nodes_with_a_model_and_nodes_with_an_engine_are_two_swarms() -> None:
    """A node whose script trains a model cannot join a swarm of an engine: the error says so, at its start."""
    from p2pnode.errors import ExitCode, UserError
    from tests.harness.trainers.stub_trainer import StubTrainer

    swarm = world(25, {"n0": Exact(1000)}, "asp", 1)
    swarm.start("n0")
    await swarm.until(lambda: script(swarm, "n0").ctx.step > 1, within_s=60.0, what="a step")
    swarm._make_trainer = lambda name: StubTrainer(name)
    other = swarm.start("n1", bootstrap="n0")
    with pytest.raises(UserError) as caught:
        await other.task
    assert caught.value.exit_code == ExitCode.MISMATCH
    await swarm.stop()


@run_by(run, limit_s=600.0)
async def test_values_go_on_when_all_nodes_are_started_again() -> None:
    """Every node leaves at its script's end, and writes what no other takes over: the next run counts on from there."""

    async def own(one: EngineScript) -> Any:
        return (await one.get_many([one.node_id]))[one.node_id].value

    swarm = world(23, {"n0": Exact(10)}, "asp", 3, step_s=0.3, ending=own)
    swarm.settings["training.checkpoint_s"] = 60.0
    swarm.start_many(3)
    names = ["n0", "n1", "n2"]
    for run_number in (1, 2):
        assert await ends(swarm, names) == [10] * 3
        assert [script(swarm, name).after for name in names] == [10 * run_number] * 3
        for name in names if run_number == 1 else ():
            swarm.start(name)


@run_by(run, limit_s=120.0)
async def test_a_node_says_what_it_waits_for() -> None:
    """One that waits for `min_nodes` shows so, with have and need; one whose bootstrap has left says whom it dials."""
    swarm = world(26, {"n0": Exact(5)}, "asp", 2)
    swarm.start("n0")
    await swarm.until(lambda: swarm.hosts["n0"].living.state == "waiting_for_nodes", within_s=10.0, what="waits")
    assert [record.fields for record in swarm.of("waiting_for_nodes")] == [{"have": 1, "need": 2}]
    report = StatusReport(swarm.hosts["n0"].living, EventRing(), LoopDelay(swarm.clock), keys=list)
    assert report.status().summary == "waiting for nodes: have 1, need 2"
    swarm.start("n1", bootstrap="n0")
    assert await ends(swarm, ["n0", "n1"]) == [5, 5]
    late = swarm.start("n2", bootstrap="n0")
    await swarm.until(lambda: bool(swarm.of("waiting_for_bootstrap")), within_s=30.0, what="says whom it dials")
    assert list(swarm.of("waiting_for_bootstrap")[0].fields["tried"]) == ["10.0.0.2:8468"]
    assert late.living.state == "joining"
    late.living.leave()
    assert await late.task == "leave"


@run_by(run, limit_s=600.0)
async def test_no_node_leaves_while_a_script_that_has_finished_still_reads() -> None:
    """Half of the scripts end at once, and the others read all values a second later: nothing is missing, because nodes
    that left at one moment would hand their values to one another."""
    ended: list[float] = []

    async def reading(one: EngineScript) -> int:
        if one.name > "n2":
            await asyncio.sleep(1.0)
        ended.append(one.clock())
        return len(await one.get_many([f"{part}" for part in range(40)]))

    class Many(Exact):
        reducer = "replace"

        def push(self, ctx: Context, params: Any) -> list[tuple[str, int]]:
            return [(f"{part}", ctx.step) for part in range(40)]

    swarm = world(27, {"n0": Many(3)}, "bsp", 6, ending=reading)
    swarm.start_many(6)
    names = [f"n{number}" for number in range(6)]
    assert await ends(swarm, names) == [3] * 6
    assert [script(swarm, name).after for name in names] == [40] * 6
    assert min(record.t for record in swarm.of("leaving")) + START_S > max(ended)


@run_by(run, limit_s=120.0)
async def test_the_end_of_all_is_no_warning() -> None:
    """Nodes that all have finished leave nothing behind that another needs, and the log warns of nothing."""
    swarm = world(28, {"n0": Exact(5)}, "pssp", 3)
    swarm.start_many(3)
    assert await ends(swarm, ["n0", "n1", "n2"]) == [5] * 3
    assert [record.event for record in swarm.records if record.level == "warning"] == []

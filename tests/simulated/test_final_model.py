"""The end of a run on the simulated network: every node writes the same bytes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from p2pnode.lifecycle.run_result import RunResult
from p2pnode.training.trainer_link.interface import Evaluation
from tests.harness.runner.long_run import more
from tests.harness.runner.stories import Fixture, played_by
from tests.harness.swarms.simulated_swarm import play
from tests.harness.swarms.swarm import Host, Swarm
from tests.harness.trainers.stub_trainer import StubTrainer, exponential

#: Weights of thirds and momentum: owner and backup, which add in any order, differ in bits.
SETTINGS: dict[str, Any] = {
    "barrier.method": "asp",
    "exchange.shards": 16,
    "training.min_nodes": 3,
    "training.max_steps": 12,
    "training.linger_s": 60.0,
}


class World(Swarm):
    """A swarm that keeps the results of its nodes, also of those that have ended."""

    def results(self) -> dict[str, RunResult]:
        return {name: host.node.result for name, host in self.hosts.items() if host.node and host.node.result}

    def written(self, name: str = "model.safetensors") -> dict[str, bytes]:
        """The models on the hosts' disks."""
        return {host: found.disk.files[name] for host, found in self.hosts.items() if name in found.disk.files}

    async def ended(self, *hosts: Host, within_s: float = 300.0) -> None:
        await self.until(
            lambda: all(host.task is not None and host.task.done() for host in hosts), within_s=within_s, what="the end"
        )
        for host in hosts:
            host.task.result()


def simulate(
    scenario: Callable[[World], Awaitable[None]],
    *,
    seed: int = 21,
    delay: tuple[float, float] = (0.001, 0.01),
    step_s: Callable[[str], float] = lambda _name: 0.5,
    **settings: Any,
) -> World:
    """Run a scenario of stub trainers, whose integer buffer counts each node's own steps."""
    return play(
        scenario,
        lambda: World(
            seed=seed,
            settings={**SETTINGS, **{key.replace("__", "."): value for key, value in settings.items()}},
            make_trainer=lambda name: StubTrainer(name, 512, step_s=exponential(step_s(name)), start_s=0.2),
            delay=delay,
        ),
    )


@pytest.mark.parametrize(
    ("codec", "pull_codec", "method", "robust"),
    [
        ("float32", "float32", "asp", ""),
        ("int8", "bfloat16", "bsp", ""),
        *more(("bfloat16", "bfloat16", "pssp", "clip")),
    ],
)
@pytest.mark.promise(11)
@played_by(
    simulate,
    exchange__codec=Fixture("codec"),
    exchange__pull_codec=Fixture("pull_codec"),
    barrier__method=Fixture("method"),
    exchange__robust=Fixture("robust"),
    training__min_nodes=4,
)
async def test_all_nodes_write_the_same_bytes(world: World) -> None:
    """Whatever is rounded on the way, and though each node counts its own steps in the model's integer buffer."""
    hosts = world.start_many(4)
    await world.ended(*hosts)

    assert len(world.written()) == 4
    assert len(set(world.written().values())) == 1
    results = world.results().values()
    assert len({result.sha256 for result in results}) == 1
    assert all(result.why_differs == "" and result.step == 12 for result in results)


@played_by(simulate, step_s=lambda name: 3.0 if name == "n2" else 0.5)
async def test_nodes_wait_for_one_that_is_late(world: World) -> None:
    """One node takes six times as long: the others own shards until it has finished, and all have its last delta."""
    hosts = world.start_many(3)
    await world.ended(*hosts)

    assert len(set(world.written().values())) == 1
    assert len(world.written()) == 3
    assert all(host.trainer is not None and host.trainer.trained[-1] == 12 for host in hosts)


@played_by(simulate, step_s=lambda name: 5.0 if name == "n2" else 0.5, training__linger_s=2.0)
async def test_a_node_that_is_not_waited_for_is_told(world: World) -> None:
    """Beyond `linger_s` the others write what they have, and say that the late node's model may differ."""
    hosts = world.start_many(3)
    await world.ended(*hosts)

    results = world.results()
    assert "1 node trains on" in results["n0"].why_differs
    assert results["n2"].why_differs == ""
    assert results["n0"].sha256 != results["n2"].sha256


@played_by(simulate, seed=0, delay=(0.02, 0.2), training__min_nodes=4, exchange__pull_codec="bfloat16")
async def test_an_owner_that_dies_while_the_others_finish_changes_no_bit(world: World) -> None:
    """It is killed when the first node has its final values: the others get the same from its former backups."""
    hosts = world.start_many(4)
    await world.until(lambda: bool(world.of("exported")), within_s=300, what="the first file", every_s=0.001)
    first = world.of("exported")[0].node
    owners = [host for host in hosts if host.name != first and host.exchange.store.owned]
    died = max(owners, key=lambda host: len(host.exchange.store.owned))
    assert died.name not in world.written()
    await world.kill(died.name)
    await world.ended(*(host for host in hosts if host is not died))

    assert len(world.written()) == 3
    assert len(set(world.written().values())) == 1
    assert all(result.why_differs == "" for result in world.results().values())


@played_by(simulate, training__export="")
async def test_no_file_is_written_where_none_is_wanted(world: World) -> None:
    """`training.export = ""`: the result has no model, and nothing says how to load it."""
    hosts = world.start_many(3)
    await world.ended(*hosts)

    assert world.written() == {}
    assert {result.model for result in world.results().values()} == {""}
    assert world.results()["n0"].how_to_load == []


@played_by(simulate, training__max_steps=0, training__until="accuracy>=0.9", training__eval_steps=1000)
async def test_one_node_that_reaches_the_goal_ends_the_run_of_all(world: World) -> None:
    """Only one node's script evaluates; the others learn that `until` holds and write the same model."""
    hosts = world.start_many(3)
    await world.until(lambda: min(host.living.progress.step for host in hosts) >= 3, within_s=60, what="they train")
    trainer = hosts[1].trainer
    for step in (2, 3):
        trainer.measured.append(Evaluation(step, {"accuracy": 0.9 + step / 100}, 50))
    await world.ended(*hosts)

    assert {result.end for result in world.results().values()} == {"until"}
    assert len(set(world.written().values())) == 1
    best = world.results()["n1"].best
    assert best is not None
    assert (best.metric, best.value, best.step) == ("accuracy", pytest.approx(0.93), 3)


@played_by(simulate, barrier__method="bsp")
async def test_nodes_on_the_same_data_are_told_both(world: World) -> None:
    """Two trainers with the same batches make the same first deltas; the third does not."""
    for name, bootstrap in (("n0", None), ("n1", "n0"), ("n2", "n0")):
        host = world.start(name, bootstrap=bootstrap)
        host.trainer.batches = "same" if name != "n2" else "other"
    await world.until(lambda: len(world.of("same_data")) == 2, within_s=60, what="both warn")
    await world.ended(*world.hosts.values())

    warned = {record.node: record.fields["node"] for record in world.of("same_data")}
    ids = {name: host.living.overlay.node_id.hex()[:8] for name, host in world.hosts.items()}
    assert warned == {"n0": ids["n1"], "n1": ids["n0"]}


@played_by(simulate, seed=101, delay=(0.02, 0.2), training__min_nodes=5, exchange__pull_codec="bfloat16")
async def test_a_former_backup_does_not_take_over_with_its_own_bits(world: World) -> None:
    """An owner whose backup differed waits for the new one, and not only for a learner, before it serves final values.
    Seed 101: the owner of two shards died while their learners fetched the state."""
    hosts = world.start_many(5)
    await world.until(lambda: len(world.of("training_ended")) == 5, within_s=300, what="the end", every_s=0.001)
    generator = random.Random(101)
    await asyncio.sleep(generator.uniform(0, 2.5))
    owners = [host for host in hosts if host.exchange.store.owned]
    died = generator.choice(owners)
    await world.kill(died.name)
    await world.ended(*(host for host in hosts if host is not died))

    assert len(world.written()) == 4
    assert len(set(world.written().values())) == 1


@played_by(simulate, training__checkpoint_s=1.0)
async def test_nodes_with_nothing_left_to_train_wait_for_none(world: World) -> None:
    """All start again at the last step: one that has finished counts as ready for the others."""
    await world.ended(*world.start_many(3))
    for name in ("n0", "n1", "n2"):
        world.start(name, bootstrap=None if name == "n0" else "n0")
    await world.ended(*world.hosts.values(), within_s=60)

    assert len(set(world.written().values())) == 1


@played_by(simulate, training__min_nodes=1, training__checkpoint_s=60.0)
async def test_a_run_that_has_all_its_steps_trains_nothing_when_it_is_started_again(world: World) -> None:
    """The result of the second start has the steps of the first, and says so."""
    await world.ended(world.start("n0"))
    first = world.results()["n0"]
    await world.ended(world.start("n0"))
    again = world.results()["n0"]

    assert (first.step, first.first_step, again.step, again.first_step) == (12, 0, 12, 12)
    assert "trained nothing" in "\n".join(again.lines())
    assert "trained nothing" not in "\n".join(first.lines())

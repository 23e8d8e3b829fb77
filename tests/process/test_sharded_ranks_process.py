"""A node whose ranks hold parts of its model is to the swarm as one process that holds it all."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from p2pnode.training.supervisor.process_trainer import ProcessTrainer
from p2pnode.training.trainer.state.rank_states import rank_file
from p2pnode.training.trainer_link.interface import TrainerFailed, TrainerHello
from tests.harness.runner.long_run import more
from tests.process.harness.sharded_ranks import LOCAL_STEPS, RANKS, Node
from tests.process.harness.swarm_world import START_S, ProcessNode, until
from tests.process.harness.swarm_world import kill_all as kill_all_nodes
from tests.process.harness.trainer_world import World
from tests.process.harness.trainer_world import until as until_true

SAVED_AT, STEPS = 2, 3


class Seen(NamedTuple):
    """What the daemon of a node sees of it."""

    hello: TrainerHello
    began: np.ndarray
    deltas: list[np.ndarray]
    ended: np.ndarray
    losses: list[float]
    samples: int
    fixed: dict[str, bytes]
    results: list[dict[str, Any]]


def seen_of(folder: Path, kind: str) -> Seen:
    node = Node(folder, kind)

    async def scenario(_world: World) -> Seen:
        trainer = node.trainer()
        hello = await trainer.start()
        began = trainer.vector.copy()
        deltas, losses, samples = [], [], 0
        for step in range(1, STEPS + 1):
            report = await node.train(trainer, step)
            deltas.append(trainer.delta.copy())
            losses.append(report.loss)
            samples += report.samples
        described = await trainer.describe(str(folder / "model"), wait=True)
        assert described.layout_digest == hello.layout.digest()
        await trainer.finish("max_steps", 60.0)
        fixed = {path.name: path.read_bytes() for path in (folder / "model").iterdir()}
        return Seen(hello, began, deltas, trainer.vector.copy(), losses, samples, fixed, node.results())

    seen: Seen = node.world.run(scenario)
    return seen


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Seen]:
    """The undisturbed run of each kind: several tests compare with it."""
    return functools.cache(lambda kind: seen_of(tmp_path_factory.mktemp("undisturbed") / kind, kind))


#: Tests that compare with the same undisturbed runs are in one worker.
UNDISTURBED = pytest.mark.worker_group("undisturbed ranks")


@UNDISTURBED
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["fsdp", "ddp", *more("hsdp", "tp")])
def test_vector_and_deltas_are_those_of_one_process_on_the_joined_batch(seen: Callable[[str], Seen], kind: str) -> None:
    """Layout, initial values and fixed tensors to the bit, and what is trained to rounding; all ranks end with the
    vector. Evaluation of the shared weights sees them, and leaves nothing behind that is trained on."""
    whole, parts = seen("plain"), seen(kind)

    assert parts.hello.layout == whole.hello.layout
    assert (parts.hello.frozen_digest, parts.hello.frozen) == (whole.hello.frozen_digest, whole.hello.frozen)
    assert parts.fixed == whole.fixed
    assert len(parts.fixed) == 1
    assert np.array_equal(parts.began, whole.began)
    for mine, theirs in zip(parts.deltas, whole.deltas, strict=True):
        assert np.abs(theirs).max() > 1e-3
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-6)
    assert parts.losses == pytest.approx(whole.losses, rel=1e-4)
    mean = np.mean([result["shared"] for result in parts.results], axis=0)
    np.testing.assert_allclose(mean, whole.results[0]["shared"], rtol=1e-4)
    copies = 2 if kind == "tp" else 1
    assert parts.samples == whole.samples * copies == 8 * LOCAL_STEPS * STEPS * copies
    for result in parts.results:
        assert result["weights"] == parts.results[0]["weights"]
        assert result["weights"] == pytest.approx(whole.results[0]["weights"], rel=1e-4, abs=1e-6)
        assert result["moments"] == pytest.approx(whole.results[0]["moments"], rel=1e-3, abs=1e-6)


async def kill_rank(node: Node, trainer: ProcessTrainer) -> None:
    os.kill(node.pid(1), signal.SIGKILL)
    with pytest.raises(TrainerFailed):
        await node.train(trainer, SAVED_AT + 1)


async def kill_all(node: Node, trainer: ProcessTrainer) -> None:
    assert trainer.pid is not None
    for pid in (trainer.pid, node.pid(0), node.pid(1)):
        os.kill(pid, signal.SIGKILL)
    await until_true(lambda: trainer.state == "crashed")


async def leave(_node: Node, trainer: ProcessTrainer) -> None:
    await trainer.stop(10.0)


async def lose_a_file(node: Node, trainer: ProcessTrainer) -> None:
    await trainer.stop(10.0)
    rank_file(node.saved, 1).unlink()


End = Callable[[Node, ProcessTrainer], Awaitable[None]]


def trained(folder: Path, kind: str, end: End) -> Node:
    """A run of all steps. Behind `SAVED_AT` the state is saved, and `end` ends the processes."""
    node = Node(folder, kind)

    async def scenario(_world: World) -> None:
        trainer = node.trainer()
        await trainer.start()
        for step in range(1, SAVED_AT + 1):
            await node.train(trainer, step)
        await (await trainer.save(str(node.saved)))
        await end(node, trainer)
        await trainer.start(str(node.saved))
        for step in range(SAVED_AT + 1, STEPS + 1):
            await node.train(trainer, step)
        await trainer.finish("max_steps", 60.0)

    node.world.run(scenario)
    return node


@UNDISTURBED
@pytest.mark.timeout(300)
@pytest.mark.long
@pytest.mark.parametrize(("kind", "kill"), [("fsdp", kill_rank), ("tp", kill_all)])
def test_all_ranks_are_restored_when_one_is_killed_or_all(
    seen: Callable[[str], Seen], tmp_path: Path, kind: str, kill: End
) -> None:
    """Each with its own part of the optimiser's state, its own generators and its own `state`. What it trains next is,
    to the bit, what it would after an end in good order, and, to the rounding of a delta, without one."""
    left, killed = trained(tmp_path / "left", kind, leave).results(), trained(tmp_path / "killed", kind, kill).results()

    for again, in_order, as_before in zip(killed, left, seen(kind).results, strict=True):
        assert again == in_order
        for name in ("rate", "samples", "state", "next"):
            assert again[name] == as_before[name]
        for name in ("weights", "moments"):
            assert again[name] == pytest.approx(as_before[name], rel=1e-5, abs=1e-6)
    assert killed[0]["next"] != killed[1]["next"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_set_of_parts_that_is_not_whole_begins_with_new_optimisers(tmp_path: Path) -> None:
    """The part of rank 0 is no other rank's. All are told, and train on in step."""
    node = trained(tmp_path / "node", "fsdp", lose_a_file)

    [warned] = [
        fields["message"]
        for fields in node.world.log.fields("trainer_warned")
        if fields["about"] == "ranks_not_restored"
    ]
    assert "rank 1 is missing" in warned
    first, second = node.results()
    for name in ("weights", "moments", "rate", "samples"):
        assert first[name] == second[name]
    assert first["samples"] == 8 * LOCAL_STEPS * STEPS


def started(
    folder: Path, name: str, kind: str, settings: dict[str, Any], step_s: float = 0.0, **more: Any
) -> ProcessNode:
    """A real node: torchrun starts the ranks."""
    own = folder / f"of {name}"
    own.mkdir(exist_ok=True)
    (own / "train.py").write_text(RANKS)
    script = [str(own / "train.py"), str(own), kind, "1" if kind == "plain" else "2", str(step_s)]
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if kind != "plain" else []
    return ProcessNode(folder, name, settings, script=[sys.executable, *launch, *script], **more)


def results_of(folder: Path, name: str, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"of {name}" / f"result.{rank}").read_text()) for rank in range(ranks)]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_sharded_node_and_a_plain_one_train_one_model(tmp_path: Path) -> None:
    """Fifty steps of one swarm: they describe the same layout, and end with the same bytes, in which both have a
    part."""
    settings = {"training.max_steps": 50, "training.local_steps": 2, "training.min_nodes": 2, "barrier.method": "bsp"}
    nodes = [started(tmp_path, "sharded", "fsdp", settings)]
    try:
        until(lambda: nodes[0].address, START_S, "it has an address", nodes)
        nodes.append(started(tmp_path, "plain", "plain", settings, bootstrap=nodes[0].address))
        assert [node.process.wait(START_S) for node in nodes] == [0, 0], nodes[0].output() + nodes[1].output()
    finally:
        kill_all_nodes(nodes)

    models = [(node.state_dir / "model.safetensors").read_bytes() for node in nodes]
    assert models[0] == models[1]
    described = [json.loads((node.state_dir / "model" / "description.json").read_text()) for node in nodes]
    assert described[0]["layout_digest"] == described[1]["layout_digest"]
    ranks, [whole] = results_of(tmp_path, "sharded", 2), results_of(tmp_path, "plain", 1)
    assert ranks[0]["weights"] == ranks[1]["weights"] == whole["weights"]
    assert min(result["samples"] for result in (*ranks, whole)) == 8 * LOCAL_STEPS * 50


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_sharded_node_that_is_killed_goes_on(tmp_path: Path) -> None:
    """A real daemon and torchrun, SIGKILL to all of them at any moment behind a checkpoint: the second start ends with
    what an undisturbed node ends with, on both ranks."""
    settings = {"training.max_steps": 24, "training.local_steps": 2, "training.checkpoint_s": 0.3, "log.format": "json"}
    # A lone node's values are then its own weights, at whichever optimiser step they enter.
    settings |= {"exchange.outer_lr": 1.0, "exchange.outer_momentum": 0.0}
    nodes = [started(tmp_path, "undisturbed", "fsdp", settings)]
    try:
        assert nodes[0].process.wait(2 * START_S) == 0, nodes[0].output()
        nodes.append(killed := started(tmp_path, "killed", "fsdp", settings, 0.25))
        until(
            lambda: len(killed.events("checkpoint_written")) >= 2 and killed.step >= 8,
            2 * START_S,
            "it trains",
            nodes[1:],
        )
        killed.kill()
        nodes.append(again := started(tmp_path, "killed", "fsdp", settings))
        assert again.process.wait(2 * START_S) == 0, again.output()
    finally:
        kill_all_nodes(nodes)

    [loaded] = again.events("checkpoint_loaded")
    assert loaded["step"] >= 2
    for after, before in zip(*(results_of(tmp_path, name, 2) for name in ("killed", "undisturbed")), strict=True):
        for name in ("rate", "samples", "state", "next"):
            assert after[name] == before[name]
        for name in ("weights", "moments"):
            assert after[name] == pytest.approx(before[name], rel=1e-4, abs=1e-5)
    assert not [entry for entry in again.events("trainer_warned") if entry["about"] == "ranks_not_restored"]

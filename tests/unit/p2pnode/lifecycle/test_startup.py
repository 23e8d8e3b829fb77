"""How a node gets into training: founding, joining, and starting again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness.environment import ListLog
from tests.harness.stub_trainer import StubTrainer, initial_vector
from tests.harness.swarm import Host, Swarm
from tests.harness.virtual_loop import run
from training import checkpoint


def simulate(
    scenario: Callable[[Swarm], Awaitable[None]],
    make_trainer: Callable[[str], StubTrainer] = StubTrainer,
    **settings: Any,
) -> None:
    """Run a scenario on a simulated network with stub trainers."""

    async def main() -> None:
        keys = {key.replace("__", "."): value for key, value in settings.items()}
        swarm = Swarm(seed=5, settings=keys, make_trainer=make_trainer)
        try:
            await scenario(swarm)
        finally:
            await swarm.stop()

    run(main(), limit_s=600)


def test_only_a_node_without_bootstraps_founds() -> None:
    """The first node founds; the one with a bootstrap joins the same swarm and gets its step."""

    async def scenario(swarm: Swarm) -> None:
        first = swarm.start("n0").living
        await swarm.until(lambda: first.progress.step >= 5, within_s=60, what="the first trains")
        second = swarm.start("n1", bootstrap="n0").living
        await swarm.until(lambda: second.state == "training", within_s=60, what="the second trains")

        assert (first.founder, second.founder) == (True, False)
        assert second.overlay.genesis == first.overlay.genesis
        assert second.progress.step >= 5

    simulate(scenario)


def test_a_founder_that_starts_again_resumes_its_swarm_from_disk() -> None:
    """Genesis, identity and step are those of the last checkpoint; the incarnation is the next."""

    async def scenario(swarm: Swarm) -> None:
        host = swarm.start("n0")
        before = host.living
        await swarm.until(lambda: before.progress.step >= 5, within_s=60, what="it trains")
        before.leave()
        assert host.task is not None
        await host.task
        step = before.progress.step

        after = swarm.start("n0").living
        await swarm.until(lambda: after.state == "training", within_s=60, what="it trains again")

        assert after.founder
        assert after.identity.node_id == before.identity.node_id
        assert after.overlay.genesis == before.overlay.genesis
        assert after.incarnation == before.incarnation + 1
        assert after.progress.step >= step

    simulate(scenario, training__checkpoint_s=1.0)


async def leave(host: Host) -> None:
    host.living.leave()
    assert host.task is not None
    await host.task


def with_trainer_states(host: Host) -> list[str]:
    """Give every checkpoint on the disk a trainer's own state, as a real trainer would; returns their folders."""
    folders = checkpoint.complete_folders(host.disk)
    for folder in folders:
        host.disk.files[f"{folder}/trainer.state"] = b"optimiser"
    return folders


def test_the_trainer_continues_from_the_state_of_the_loaded_checkpoint() -> None:
    """Its file is named when the model is known; a trainer that crashes before the next checkpoint restores it too."""

    async def scenario(swarm: Swarm) -> None:
        swarm.state_path = Path("/state")
        host = swarm.start("n0")
        await swarm.until(lambda: host.living.progress.step >= 5, within_s=60, what="it trains")
        await leave(host)
        newest = with_trainer_states(host)[0]

        after = swarm.start("n0", training__checkpoint_s=60.0)
        assert after.trainer is not None
        await swarm.until(lambda: after.living.state == "training", within_s=60, what="it trains again")
        after.trainer.crash_next()
        await swarm.until(lambda: len(after.trainer.restored) == 2, within_s=60, what="the trainer has crashed")

        assert after.trainer.restored == [f"/state/{newest}/trainer.state"] * 2

    simulate(scenario, training__checkpoint_s=1.0)


def test_a_checkpoint_of_another_model_gives_nothing() -> None:
    """Neither its vector nor its optimiser; the new model keeps its own checkpoints, whatever their steps."""
    size = 256

    def make_trainer(name: str) -> StubTrainer:
        return StubTrainer(name, size)

    async def scenario(swarm: Swarm) -> None:
        nonlocal size
        swarm.state_path = Path("/state")
        host = swarm.start("n0")
        await swarm.until(lambda: host.living.progress.step >= 20, within_s=60, what="it trains")
        await leave(host)
        with_trainer_states(host)

        size = 320
        after = swarm.start("n0")
        assert after.trainer is not None
        await swarm.until(lambda: after.living.state == "training", within_s=60, what="the new model trains")
        assert after.trainer.restored == []
        passed_over = [record for record in swarm.records if record.event == "checkpoint_passed_over"]
        assert {record.fields["reason"] for record in passed_over} == {"another model or another swarm"}
        assert after.living.progress.step < 20
        await swarm.until(lambda: after.living.progress.step >= 3, within_s=60, what="three steps")
        await leave(after)
        newest = checkpoint.newest(after.disk, ListLog(swarm.records))
        assert newest is not None
        assert newest.state.step == after.living.progress.step < 20

        with_trainer_states(after)
        again = swarm.start("n0")
        await swarm.until(lambda: again.living.state == "training", within_s=60, what="it goes on")
        assert again.living.progress.step >= newest.state.step
        assert again.trainer is not None
        assert again.trainer.restored == [f"/state/{newest.folder}/trainer.state"]

    simulate(scenario, make_trainer, training__checkpoint_s=1.0)


@pytest.mark.parametrize("damage", ["cut", "gone", "unreadable"])
def test_a_damaged_vector_gives_the_whole_checkpoint_before_it(damage: str) -> None:
    """Vector, step and optimiser are those of the older one; nothing of the damaged one is used."""

    async def scenario(swarm: Swarm) -> None:
        swarm.state_path = Path("/state")
        host = swarm.start("n0")
        await swarm.until(lambda: host.living.progress.step >= 20, within_s=60, what="it trains")
        await leave(host)
        newest, before = with_trainer_states(host)
        vector = f"{newest}/vector.safetensors"
        if damage == "cut":
            host.disk.tear(vector)
        elif damage == "gone":
            host.disk.remove(vector)
        else:
            host.disk.unreadable.add(vector)

        after = swarm.start("n0")
        assert after.trainer is not None
        await swarm.until(lambda: after.living.state == "training", within_s=60, what="it trains again")
        assert after.trainer.restored == [f"/state/{before}/trainer.state"]
        loaded = [record.fields["step"] for record in swarm.records if record.event == "checkpoint_loaded"]
        assert loaded == [checkpoint.step_of(before)]
        assert "checkpoint_unreadable" in {record.event for record in swarm.records}

    simulate(scenario, training__checkpoint_s=1.0)


def test_a_vector_that_cannot_be_read_to_its_end_leaves_the_models_own_values() -> None:
    """The first half of it is in the trainer's memory when the disk fails: the model writes its own values again."""

    async def scenario(swarm: Swarm) -> None:
        host = swarm.start("n0", training__checkpoint_s=1.0, training__keep_checkpoints=1)
        await swarm.until(lambda: host.living.progress.step >= 2, within_s=60, what="it trains")
        await leave(host)
        read_at = host.disk.read_at

        def fails(name: str, offset: int, size_bytes: int) -> bytes:
            piece = read_at(name, offset, size_bytes)
            return piece[: size_bytes // 2] if size_bytes == 1024 else piece

        host.disk.read_at = fails  # type: ignore[method-assign]
        after = swarm.start("n0")
        assert after.trainer is not None
        await swarm.until(lambda: after.trainer.starts > 0, within_s=60, what="the trainer has started")
        assert np.array_equal(after.trainer.vector, initial_vector(0, 256))
        assert "checkpoint_unreadable" in {record.event for record in swarm.records}

    simulate(scenario)

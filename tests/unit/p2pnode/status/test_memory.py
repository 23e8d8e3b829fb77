"""The memory of a daemon in `/status`, before it has a model and after."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from p2pnode.own_memory import OwnMemory
from p2pnode.status.memory import memory_status
from tests.harness.environment.virtual_loop import run
from tests.harness.swarms.exchange_swarm import World
from training.exchange.exchange import Exchange
from training.exchange.held_memory import held_memory
from training.settings import ExchangeSettings

VALUES, SHARDS = 1000, 4
OWN = OwnMemory(private_bytes=50_000, free_heap_bytes=700)


def node_of(exchange: Exchange | None, *, own: OwnMemory | None = OWN, delta_on_disk: bool = False) -> Any:
    """A node of which the kernel tells `own`; before its model it has neither budget nor exchange."""
    budget = None if exchange is None else SimpleNamespace(total=90, parts=lambda: {"replica": 40, "delta": 50})
    return SimpleNamespace(
        budget=lambda: budget,
        environment=SimpleNamespace(own_memory=lambda: own, available_memory=lambda: 12345),
        exchange=exchange,
        config=SimpleNamespace(training=SimpleNamespace(delta_on_disk=delta_on_disk)),
        trainer=SimpleNamespace(delta=np.zeros(VALUES, np.float32)),
        trainer_bytes=777,
        process_bytes=9000,
    )


@pytest.fixture(scope="module")
def exchange() -> Exchange:
    """That of a founder, which owns every shard; its residual is in a file."""
    found: list[Exchange] = []

    async def main() -> None:
        settings = ExchangeSettings(codec="bfloat16", shards=SHARDS, on_disk=["residual"])
        world = World(1, settings=settings, shards=SHARDS, values=VALUES, synchronous=False)
        member = await world.start("n0", founder=True)
        assert member.exchange is not None
        found.append(member.exchange)
        world.stop()

    run(main())
    return found[0]


def test_without_a_model_there_is_only_what_the_process_has() -> None:
    """No budget and no parts; what is free and the process's own memory are known."""
    found = memory_status(node_of(None))
    assert (found.budget_bytes, found.parts, found.held, found.on_disk) == (None, {}, {}, {})
    assert (found.available_bytes, found.private_bytes, found.trainer_bytes) == (12345, 50_000, 777)
    assert found.held_bytes_per_parameter == {}


def test_with_a_model_each_part_is_shown_in_bytes_and_per_parameter(exchange: Exchange) -> None:
    """The exchange's parts, the delta that is shared with the trainer, and the process; no division of the latter."""
    found = memory_status(node_of(exchange))
    assert (found.budget_bytes, found.parts) == (90, {"replica": 40, "delta": 50})
    assert found.held == held_memory(exchange).parts() | {
        "delta_bytes": 4 * VALUES,
        "process_bytes": 9000,
        "free_heap_bytes": 700,
    }
    assert found.held["owned_bytes"] > 0
    per_parameter = found.held_bytes_per_parameter
    assert (per_parameter["replica"], per_parameter["delta"], per_parameter["private"]) == (4.0, 4.0, 50.0)
    assert "process" not in per_parameter
    assert found.on_disk == {"residual_bytes": 4 * VALUES}


def test_a_delta_in_a_file_is_no_memory(exchange: Exchange) -> None:
    """It is among what is on disk."""
    found = memory_status(node_of(exchange, delta_on_disk=True))
    assert found.on_disk == {"residual_bytes": 4 * VALUES, "delta_bytes": 4 * VALUES}
    assert "delta_bytes" not in found.held
    assert "delta" not in found.held_bytes_per_parameter


def test_where_the_kernel_tells_nothing_nothing_of_the_process_is_shown(exchange: Exchange) -> None:
    """The parts are still there: they are counted, not asked for."""
    found = memory_status(node_of(exchange, own=None))
    assert found.private_bytes is None
    assert found.held["replica_bytes"] == 4 * VALUES
    assert not {"process_bytes", "free_heap_bytes"} & found.held.keys()
    assert "private" not in found.held_bytes_per_parameter

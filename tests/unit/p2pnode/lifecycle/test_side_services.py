"""What a node does beside its training loop: only with others, and each part only where its setting asks for it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from p2pnode.lifecycle import side_services
from p2pnode.lifecycle.side_services import SideServices
from p2pnode.training.layout import Layout


class Part:
    """Stands for each of the services; all calls of all parts are in `told`."""

    told: list[Any]

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def start(self) -> None:
        self.told.append((type(self).__name__, "start"))

    async def announce(self, step: int) -> None:
        self.told.append((type(self).__name__, step))

    def after_training(self, delta: Any) -> None:
        self.told.append((type(self).__name__, float(delta[0])))

    async def stop(self) -> None:
        self.told.append((type(self).__name__, "stop"))


class Host:
    """A trainer of several devices."""

    coordination: Any = None
    cycles = positions = None

    def coordinate(self, coordination: Any) -> None:
        self.coordination = coordination


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the services were told."""
    found: list[Any] = []
    for name in ("DuplicateData", "GoalAnnouncement", "Coordination"):
        monkeypatch.setattr(side_services, name, type(name, (Part,), {"told": found}))
    monkeypatch.setattr(side_services, "HostTrainer", Host)
    return found


def services(trainer: Any, *, enabled: bool = True, until: str = "", coordination: str = "local") -> SideServices:
    config: Any = SimpleNamespace(
        exchange=SimpleNamespace(enabled=enabled),
        training=SimpleNamespace(until=until),
        devices=SimpleNamespace(coordination=coordination),
    )
    environment: Any = SimpleNamespace(log=None)
    overlay: Any = SimpleNamespace(node_id=b"n" * 20)
    found = SideServices(config, environment, overlay, trainer)
    heard: list[Any] = []
    loop: Any = SimpleNamespace(end_by_goal=None, on_trained=heard.append)
    found.start(b"g" * 16, loop, Layout(()))
    for one in heard:
        one(np.ones(1, np.float32))
    return found


def played(found: SideServices) -> None:
    async def main() -> None:
        await found.announce_goal(9)
        await found.stop()
        await found.stop()

    asyncio.run(main())


def test_a_node_that_trains_alone_has_none_of_them(told: list[Any]) -> None:
    """Whatever else is set."""
    found = services(Host(), enabled=False, until="loss<=1", coordination="global")
    played(found)

    assert told == []
    assert found.duplicates is None


def test_first_deltas_are_always_compared(told: list[Any]) -> None:
    """Nothing is announced without a goal."""
    played(services(Host()))

    assert told == [("DuplicateData", 1.0), ("DuplicateData", "stop"), ("DuplicateData", "stop")]


def test_a_goal_is_announced_to_the_others(told: list[Any]) -> None:
    """With the step at which it holds."""
    played(services(Host(), until="loss<=1"))

    assert ("GoalAnnouncement", 9) in told


@pytest.mark.parametrize(("is_host", "coordination"), [(True, "global"), (True, "local"), (False, "global")])
def test_decisions_are_shared_by_a_node_with_several_devices_that_asks_for_it(
    is_host: bool, coordination: str, told: list[Any]
) -> None:
    """A trainer of one device has no such decisions."""
    trainer = Host() if is_host else SimpleNamespace()
    found = services(trainer, coordination=coordination)
    played(found)
    is_shared = is_host and coordination == "global"

    assert (("Coordination", "start") in told) == is_shared
    assert (("Coordination", "stop") in told) == is_shared
    assert (getattr(trainer, "coordination", None) is not None) == is_shared

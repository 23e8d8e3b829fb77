"""The trial of a joiner's line: when it may own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.line.rate import MIN_WINDOWS, TRIAL_BYTES, WINDOW_S
from p2pnode.overlay.line.trial import HEARD_S, LOOK_S, TRIAL_S, LineTrial
from p2pnode.overlay.local_node import LocalNode
from p2pnode.overlay.peers import Activity
from tests.harness.environment.virtual_loop import run

OWN, OTHER = "10.0.0.1", "10.0.0.2"


def peer(host: str = OTHER, *, eligible: bool = True, activity: Activity = Activity.TRAINING) -> Any:
    return SimpleNamespace(address=Address(host, 1), eligible=eligible, activity=activity)


class World:
    """A joiner that others reach and that is willing, and its peers."""

    def __init__(self, *peers: Any, line: bool = True) -> None:
        self.local = LocalNode(b"n" * 20, 1, 1, "run", Address(OWN, 1))
        self.local.set_reached(True)
        self.peers = list(peers)
        transport: Any = SimpleNamespace(has_line_to=lambda _: line)
        clock: Any = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
        self.trial = LineTrial(self.local, transport, self.peers, clock)  # type: ignore[arg-type]

    @property
    def may_own(self) -> bool:
        return self.local.heartbeat.eligible


def play(world: World, scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        assert world.trial.begin()
        assert not world.may_own
        running = asyncio.create_task(world.trial.run())
        await asyncio.sleep(HEARD_S + LOOK_S)
        await scenario()
        await asyncio.sleep(LOOK_S)
        assert world.may_own
        running.cancel()

    run(main(), limit_s=600)


def test_a_joiner_of_a_swarm_in_training_may_not_own_before_its_line_is_known() -> None:
    """It has sent much and was not behind; or its first rate is known, and the pushes of another step have told it."""

    def kept_up(world: World) -> None:
        for _ in range(MIN_WINDOWS + 1):
            world.local.line.tried(WINDOW_S, TRIAL_BYTES, is_behind=False, has_several=False)

    def was_behind(world: World) -> None:
        for _ in range(MIN_WINDOWS):
            world.local.line.tried(WINDOW_S, 30_000, is_behind=True, has_several=True)

    for show in (kept_up, was_behind):
        world = World(peer(), peer())

        async def scenario(world: World = world, show: Callable[[World], None] = show) -> None:
            await asyncio.sleep(TRIAL_S / 2)
            assert not world.may_own
            show(world)
            if show is was_behind:
                await asyncio.sleep(1.0)
                assert not world.may_own, "the owners have not heard its class"
                world.local.announce(step=2)

        play(world, scenario)
        assert (world.local.line.capacity != 0) == (show is was_behind)


def test_a_trial_has_an_end() -> None:
    """A node that sends nothing may own after two minutes."""
    world = World(peer(), peer())

    async def scenario() -> None:
        await asyncio.sleep(TRIAL_S - HEARD_S - 2 * LOOK_S)
        assert not world.may_own
        await asyncio.sleep(2 * LOOK_S)

    play(world, scenario)


@pytest.mark.parametrize(
    "peers",
    [
        [peer()],
        [peer(), peer(eligible=False)],
        [peer(), peer(activity=Activity.READY), peer(activity=Activity.READY)],
    ],
    ids=["a swarm of one", "one that may own", "all new"],
)
def test_where_fewer_than_two_others_may_own_a_joiner_may_at_once(peers: list[Any]) -> None:
    """Once it has heard its members."""

    async def scenario() -> None:
        """Nothing has to happen."""

    play(World(*peers), scenario)


def test_a_joiner_may_own_as_soon_as_it_is_needed() -> None:
    """Of two others one dies: every shard needs an owner and a backup."""
    world = World(peer(), peer())

    async def scenario() -> None:
        assert not world.may_own
        del world.peers[0]

    play(world, scenario)


def test_no_line_no_trial() -> None:
    """A founder, a node whose capacity is stored, one whose members are all on its machine, and a second arrival."""
    founder = World(peer(), peer())
    founder.trial.skip()
    known = World(peer(), peer())
    known.local.line.begin(5, "stored")
    again = World(peer(), peer())
    assert again.trial.begin()
    for world in (founder, known, World(peer(), line=False), World(peer(OWN)), again):
        assert not world.trial.begin()
    assert known.may_own

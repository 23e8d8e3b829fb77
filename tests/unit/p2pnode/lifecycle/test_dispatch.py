"""The parts that a node has for dispatched records, and the end of a job whose records are all trained."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from p2pnode.config.settings import Config
from p2pnode.lifecycle.dispatch import STAY_S, NodeDispatch
from p2pnode.lifecycle.environment import NodeEnvironment
from p2pnode.overlay.peers import Activity
from p2pnode.overlay.settings import NodeSettings
from p2pnode.training.dispatch.messages import DISPATCH, MASTER
from p2pnode.training.settings import DispatchSettings, TrainingSettings
from p2pnode.training.trainer_link.data_messages import DataWanted
from p2pnode.training.trainer_link.record_messages import RecordsGranted, RecordsWanted
from tests.harness.environment.simulated import make_environment
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by


def on_loop(test: Callable[..., None]) -> Callable[..., None]:
    """Services take the clock of a running loop; nothing here waits for it."""

    @functools.wraps(test)
    def wrapped(**arguments: Any) -> None:
        async def main() -> None:
            test(**arguments)

        run(main())

    return wrapped


class Overlay:
    """Of a node among peers with these activities."""

    def __init__(self) -> None:
        self.activities: list[Activity] = []
        self.registered: dict[str, Any] = {}

    def register(self, name: str, handler: Any, *, waits: bool = False) -> None:
        self.registered[name] = handler

    def on_change(self, callback: Any) -> None: ...

    def members(self) -> list[Any]:
        return [SimpleNamespace(activity=one) for one in self.activities]


class Trainer:
    """Records what it is sent."""

    state = "running"

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.handler: Any = None

    def on_data(self, handler: Any) -> None:
        self.handler = handler

    def send_data(self, message: Any) -> None:
        self.sent.append(message)


class Parts:
    """A node's dispatch with everything around it replaced."""

    def __init__(self, *, role: str = "peer", source: str = "", linger_s: float = 0.0) -> None:
        config = Config(
            node=NodeSettings(role=role),  # type: ignore[arg-type]
            dispatch=DispatchSettings(source=source),  # type: ignore[arg-type]
            training=TrainingSettings(linger_s=linger_s),
        )
        self.overlay, self.trainer = Overlay(), Trainer()
        self.data: list[Any] = []
        plain = make_environment()
        environment = NodeEnvironment(
            clock=plain.clock,
            entropy=plain.entropy,
            disk=plain.disk,
            executor=plain.executor,
            log=plain.log,
            transport=None,  # type: ignore[arg-type]
            make_trainer=None,  # type: ignore[arg-type]
        )
        parts: list[Any] = [self.overlay, self.trainer, None, SimpleNamespace(on_trainer=self.data.append)]
        self.dispatch = NodeDispatch(config, environment, *parts)


@pytest.mark.parametrize(
    ("role", "source", "parts"),
    [
        ("peer", "", (False, False)),
        ("peer+master", "", (True, False)),
        ("peer", "master", (False, True)),
        ("peer+master", "master", (True, True)),
        ("master", "", (True, False)),
        ("master", "master", (True, False)),
    ],
)
@on_loop
def test_role_and_source_say_whether_a_node_serves_and_whether_it_draws(
    role: str, source: str, parts: tuple[bool, bool]
) -> None:
    """A node with the role of a master draws nothing; every node keeps the record of who serves."""
    dispatch = Parts(role=role, source=source)
    assert (dispatch.dispatch.master is not None, dispatch.dispatch.records is not None) == parts
    assert MASTER in dispatch.overlay.registered
    assert (DISPATCH in dispatch.overlay.registered) == parts[0]
    master, records = dispatch.dispatch.facts()
    assert (master is not None, records is not None) == parts


@on_loop
def test_messages_of_the_trainer_reach_the_part_that_they_are_for() -> None:
    """Shared data one, records the other; a script that wants records of a node without any hears at once that they are
    over."""
    plain = Parts()
    shared = DataWanted(1, True, False, 0, 4, False)
    plain.trainer.handler(shared)
    assert plain.data == [shared]
    plain.trainer.handler(RecordsWanted(7, True))
    assert plain.trainer.sent == [RecordsGranted(7, None, is_over=True)]

    drawing = Parts(source="master")
    heard: list[Any] = []
    assert drawing.dispatch.records is not None
    drawing.dispatch.records.on_trainer = heard.append  # type: ignore[method-assign]
    drawing.trainer.handler(RecordsWanted(7, True))
    drawing.trainer.handler(shared)
    assert (heard, drawing.data, drawing.trainer.sent) == ([RecordsWanted(7, True)], [shared], [])


@pytest.mark.parametrize(
    ("activities", "linger_s", "stays_s"),
    [
        ([], 60.0, STAY_S),
        ([Activity.FINISHED, Activity.PAUSED], 60.0, STAY_S),
        ([Activity.JOINING], 60.0, 60.0),
        ([Activity.JOINING], 1.0, STAY_S),
        ([Activity.JOINING, Activity.TRAINING], 60.0, None),
        ([Activity.READY], 60.0, None),
    ],
)
@on_loop
def test_a_master_whose_job_is_done_stays_for_those_that_have_not_heard(
    activities: list[Activity], linger_s: float, stays_s: float | None
) -> None:
    """For workers as long as they train, for a joiner as long as the node lingers, otherwise for some seconds."""
    parts = Parts(role="peer+master", linger_s=linger_s)
    parts.overlay.activities = activities
    assert parts.dispatch.stay_s() is None, "the job goes on"
    done: Any = SimpleNamespace(is_done=True)
    parts.dispatch.master = done
    assert parts.dispatch.stay_s() == stays_s
    assert Parts(source="master").dispatch.stay_s() is None, "another node is the master"


@run_by(run)
async def test_all_parts_start_and_stop_with_the_node() -> None:
    """Each under the genesis of the swarm; a node without any has nothing to do."""
    both, called = Parts(role="peer+master", source="master"), []

    def part(name: str) -> Any:
        async def ended(*given: Any) -> None:
            called.append((name, *given))

        return SimpleNamespace(start=lambda genesis: called.append((name, genesis)), leave=ended, stop=ended)

    both.dispatch.master, both.dispatch.records = part("master"), part("records")
    for dispatch in (both.dispatch, Parts().dispatch):
        dispatch.enter(b"genesis")
        await dispatch.leave(4.0)
        await dispatch.stop()
    assert called == [
        ("master", b"genesis"),
        ("records", b"genesis"),
        ("records", 4.0),
        ("records",),
        ("master",),
    ]

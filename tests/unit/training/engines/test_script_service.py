"""The daemon's side of a script with an engine: messages of a bounded size, and the end of all waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from p2pnode.errors import ExitCode, UserError
from p2pnode.lifecycle.engine_run import barrier_of
from p2pnode.training.engines.script_service import KEYS_IN_A_PART, EngineService
from p2pnode.training.settings import BarrierSettings
from p2pnode.training.trainer_link.engine_messages import (
    MESSAGE_VALUES_BYTES,
    BeginRun,
    CallNode,
    Counted,
    Done,
    EngineAsked,
    EngineOpened,
    FinishRun,
    GetValues,
    QuestionRefused,
    TaskCounts,
    ValuesFound,
    WaitAtBarrier,
)
from p2pnode.training.values.store import (
    EncodedUpdate,
    EncodedValue,
    ScriptGone,
)
from tests.harness.environment.simulated import ListLog
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by

COUNTS = TaskCounts(1, 2, 3, 4, 5, 6, 7, 8)


class Bench:
    """A service whose barrier never opens, and whose values are `table`. `said` has what the script was told."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.told: list[Any] = []
        self.table: dict[bytes, EncodedValue] = {}
        self.log = ListLog([])
        self.handler: Callable[[Any], None] = lambda _: None
        trainer: Any = SimpleNamespace(
            send_data=self.said.append, on_engine=lambda handler: setattr(self, "handler", handler)
        )
        calls: Any = SimpleNamespace(call=self._call, end=lambda: self.told.append("end"))
        self.service = EngineService(trainer, self, self, self.log, calls)  # type: ignore[arg-type]

    async def _call(self, _node: bytes, _payload: bytes) -> None:
        await asyncio.Event().wait()

    # -- the participation
    step = 7

    async def wait(self, _count: int = 0) -> int:
        await asyncio.Event().wait()
        return 5

    begin = finish = wait

    # -- the values

    async def get_encoded(self, keys: Any) -> list[EncodedValue | None]:
        return [self.table.get(key) for key in keys]

    def on_pull(self, pull: Any) -> None:
        self.pulls = pull

    def ask(self, number: int, question: Any) -> None:
        self.handler(EngineAsked(number, question))

    def answers(self) -> list[tuple[int, Any]]:
        found = [(one.number, one.reply) for one in self.said]
        self.said.clear()
        return found


async def turns() -> None:
    await asyncio.sleep(0.01)


@run_by(run)
async def test_updates_that_a_server_has_lost_are_logged_once() -> None:
    """The script says the count of the run again and again; the newest is kept for the status."""
    bench = Bench()
    for lost in (0, 2, 2, 3):
        bench.ask(9, msgspec.structs.replace(COUNTS, lost=lost))
    assert [one.fields["count"] for one in bench.log.records if one.event == "updates_lost"] == [2, 3]
    assert bench.service.tasks == msgspec.structs.replace(COUNTS, lost=3)
    await bench.service.stop()


@run_by(run)
async def test_a_node_that_leaves_ends_all_waiting_and_answers_later_questions_at_once() -> None:
    """A run begins at the present count then, so that the script can end; values are served still."""
    bench = Bench()
    questions = [BeginRun(), WaitAtBarrier(3), FinishRun(), CallNode(b"n" * 20, b"ab")]
    replies = [Counted(7), Done(), Done(), QuestionRefused("unanswered", "this node leaves")]
    for number, question in enumerate(questions):
        bench.ask(number, question)
    await turns()
    bench.service.release()
    assert bench.answers() == list(enumerate(replies))
    for number, question in enumerate(questions):
        bench.ask(number, question)
    assert bench.answers() == list(enumerate(replies))
    bench.ask(5, GetValues([b"sk"]))
    await turns()
    assert bench.answers() == [(5, ValuesFound([None]))]
    await bench.service.stop()


@run_by(run)
async def test_values_are_answered_as_many_as_fit_and_one_at_least() -> None:
    """A message has about a megabyte; keys without a value take no room."""
    bench = Bench()
    half = bytes(MESSAGE_VALUES_BYTES // 2)
    bench.table = dict.fromkeys((b"sa", b"sb", b"sc"), (half, 1))
    bench.table[b"huge"] = (bytes(2 * MESSAGE_VALUES_BYTES), 1)
    for number, keys in enumerate(
        ([], [b"sa", b"none", b"sb", b"sc"], [b"huge", b"sa"], [b"none"] * (KEYS_IN_A_PART + 1))
    ):
        bench.ask(number, GetValues(list(keys)))
        await turns()
    counts = [len(reply.values) for _, reply in bench.answers() if isinstance(reply, ValuesFound)]
    assert counts == [0, 3, 1, KEYS_IN_A_PART]
    await bench.service.stop()


@run_by(run)
async def test_a_script_that_has_ended_answers_no_batch() -> None:
    """Those that wait, and later ones; the owner learns it, and so do those that call this node."""
    bench = Bench()
    pull = bench.pulls
    pulling = asyncio.create_task(pull([EncodedUpdate(b"sk", b"u", 4, "pull")], {}))
    await turns()
    await bench.service.stop()
    await bench.service.stop()
    for attempt in (pulling, pull([], {})):
        with pytest.raises(ScriptGone):
            await attempt
    assert bench.pulls is None
    assert "end" in bench.told


SETTINGS = BarrierSettings(method="pssp", staleness=7, sample=3)


def test_the_barrier_is_that_of_the_settings_unless_the_script_names_one() -> None:
    """Then method, staleness and sample are the script's, and the rest stays."""
    assert barrier_of(SETTINGS, EngineOpened("p2p", 1)) is SETTINGS
    assert barrier_of(SETTINGS, EngineOpened("p2p", 1, "ssp", 2, 0)) == BarrierSettings(
        method="ssp", staleness=2, sample=0
    )


def test_a_barrier_that_does_not_exist_is_an_error_of_the_settings() -> None:
    """It says which."""
    with pytest.raises(UserError, match=r"the engine's barrier cannot be used: .*'xsp'") as failed:
        barrier_of(SETTINGS, EngineOpened("p2p", 1, "xsp"))
    assert failed.value.exit_code == ExitCode.CONFIGURATION

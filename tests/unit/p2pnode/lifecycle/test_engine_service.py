"""The daemon's side of a script with an engine: answers in any order, refusals, the end of all waiting, and `pull`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from p2pnode.errors import ExitCode, UserError
from p2pnode.lifecycle.engine_run import barrier_of
from p2pnode.lifecycle.engine_service import KEYS_IN_A_PART, EngineService
from p2pnode.training.errors import TrainingError
from p2pnode.training.settings import BarrierSettings
from p2pnode.training.trainer_link.engine_messages import (
    MESSAGE_VALUES_BYTES,
    AbandonRun,
    ApplyUpdates,
    AskKeys,
    BeginRun,
    CallAnswered,
    Called,
    CallNode,
    Counted,
    CountStep,
    Done,
    EngineAsked,
    EngineOpened,
    FinishRun,
    GetValues,
    KeysFound,
    ListMembers,
    ListPeers,
    MembersFound,
    NotAnswered,
    PeerSteps,
    PullAsked,
    PullDone,
    QuestionRefused,
    TaskCounts,
    ValuesFound,
    WaitAtBarrier,
)
from p2pnode.training.values.encoding import encode_key
from p2pnode.training.values.store import (
    EncodedUpdate,
    EncodedValue,
    PullFailed,
    ScriptGone,
    StoreUnavailable,
    UpdateFailed,
)
from tests.harness.environment.simulated import ListLog
from tests.harness.environment.virtual_loop import run

COUNTS = TaskCounts(1, 2, 3, 4, 5, 6, 7, 8)


class Bench:
    """A service whose barrier opens with `open`, and whose values are `table`. `said` has what the script was told."""

    def __init__(self, *, with_calls: bool = True) -> None:
        self.said: list[Any] = []
        self.told: list[Any] = []
        self.table: dict[bytes, EncodedValue] = {}
        self.open = asyncio.Event()
        self.error: Exception | None = None
        self.log = ListLog([])
        self.handler: Callable[[Any], None] = lambda _: None
        trainer: Any = SimpleNamespace(
            send_data=self.said.append, on_engine=lambda handler: setattr(self, "handler", handler)
        )
        self.calls = SimpleNamespace(
            call=self._call, members=lambda nodes: MembersFound([b"s" * 20], nodes), on_answer=self.told.append,
            end=lambda: self.told.append("end"),
        )  # fmt: skip
        self.service = EngineService(trainer, self, self, self.log, self.calls if with_calls else None)  # type: ignore[arg-type]

    # -- the participation
    step = 7

    def count(self, count: int, seconds: float) -> None:
        self.told.append((count, seconds))

    def abandon(self) -> None:
        self.told.append("abandon")

    def peers(self, sample: int) -> dict[bytes, int]:
        return {b"p": sample}

    def workers(self) -> int:
        return 3

    async def begin(self) -> int:
        await self.open.wait()
        return 5

    async def wait(self, count: int) -> None:
        await self.open.wait()

    async def finish(self) -> None:
        await self.open.wait()

    # -- the values

    async def get_encoded(self, keys: Any) -> list[EncodedValue | None]:
        self._raise()
        return [self.table.get(key) for key in keys]

    async def update_encoded(self, updates: Any) -> None:
        self._raise()
        self.told += updates

    async def list_keys(self) -> list[bytes]:
        return list(self.table)

    def on_pull(self, pull: Any) -> None:
        self.pulls = pull

    async def _call(self, node: bytes, payload: bytes) -> bytes:
        await self.open.wait()
        self._raise()
        return payload[::-1]

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error

    def ask(self, number: int, question: Any) -> None:
        self.handler(EngineAsked(number, question))

    def answers(self) -> list[tuple[int, Any]]:
        found = [(one.number, one.reply) for one in self.said]
        self.said.clear()
        return found


async def turns() -> None:
    await asyncio.sleep(0.01)


def test_what_needs_no_other_node_is_answered_at_once() -> None:
    """Before the caller goes on; counts of tasks are kept for the status."""

    async def scenario() -> None:
        bench = Bench()
        assert bench.service.tasks is None
        questions = [CountStep(3, 0.5), AbandonRun(), ListPeers(4), ListMembers([b"x" * 20]), COUNTS]
        for number, question in enumerate(questions):
            bench.ask(number, question)
        assert bench.answers() == [
            (0, Done()),
            (1, Done()),
            (2, PeerSteps({b"p": 4}, 3)),
            (3, MembersFound([b"s" * 20], [b"x" * 20])),
            (4, Done()),
        ]
        assert bench.told == [(3, 0.5), "abandon"]
        assert bench.service.tasks == COUNTS
        for lost in (0, 2, 2, 3):
            bench.ask(9, msgspec.structs.replace(COUNTS, lost=lost))
        assert [one.fields["count"] for one in bench.log.records if one.event == "updates_lost"] == [2, 3]
        await bench.service.stop()

    run(scenario())


def test_a_question_that_waits_holds_up_no_other() -> None:
    """Each has its answer when that is there."""

    async def scenario() -> None:
        bench = Bench()
        for number, question in enumerate([BeginRun(), WaitAtBarrier(3), FinishRun(), CallNode(b"n" * 20, b"ab")]):
            bench.ask(number, question)
        bench.ask(9, GetValues([b"sk"]))
        await turns()
        assert bench.answers() == [(9, ValuesFound([None]))]
        bench.open.set()
        await turns()
        assert bench.answers() == [(0, Counted(5)), (1, Done()), (2, Done()), (3, Called(b"ba"))]
        await bench.service.stop()

    run(scenario())


def test_a_node_that_leaves_ends_all_waiting_and_answers_later_questions_at_once() -> None:
    """A run begins at the present count then, so that the script can end; values are served still."""

    async def scenario() -> None:
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

    run(scenario())


@pytest.mark.parametrize(
    ("error", "refusal", "logged"),
    [
        (UpdateFailed("k", "abcd", "too old"), QuestionRefused("update", "too old", encode_key("k"), "abcd"), 0),
        (NotAnswered("gone"), QuestionRefused("unanswered", "gone"), 0),
        (StoreUnavailable("no owner"), QuestionRefused("unavailable", "no owner"), 0),
        (TrainingError("other"), QuestionRefused("unavailable", "other"), 0),
        (KeyError("bug"), QuestionRefused("unavailable", "the node failed: KeyError('bug')"), 1),
    ],
)
def test_what_fails_is_refused_with_its_reason(error: Exception, refusal: QuestionRefused, logged: int) -> None:
    """The script goes on asking; a fault of the node itself is in the log."""

    async def scenario() -> None:
        bench = Bench()
        bench.error = error
        bench.ask(1, ApplyUpdates([(b"sk", b"v", 1, "add")]))
        await turns()
        bench.error = None
        bench.ask(2, ApplyUpdates([(b"sk", b"v", 1, "add")]))
        await turns()
        assert bench.answers() == [(1, refusal), (2, Done())]
        assert len(bench.log.of("engine_question_failed")) == logged
        assert bench.told == [EncodedUpdate(b"sk", b"v", 1, "add")]
        await bench.service.stop()

    run(scenario())


def test_a_node_without_calls_refuses_them() -> None:
    """As a fault of its own: no script asks it."""

    async def scenario() -> None:
        bench = Bench(with_calls=False)
        bench.ask(1, CallNode(b"n" * 20, b""))
        bench.ask(2, ListMembers([]))
        bench.handler(CallAnswered(1, b""))
        await turns()
        assert [(number, type(reply)) for number, reply in bench.answers()] == [(2, Done), (1, QuestionRefused)]
        await bench.service.stop()

    run(scenario())


def test_values_are_answered_as_many_as_fit_and_one_at_least() -> None:
    """A message has about a megabyte; keys without a value take no room."""

    async def scenario() -> None:
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

    run(scenario())


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        (0, [(0, True)]),
        (1, [(1, True)]),
        (KEYS_IN_A_PART, [(KEYS_IN_A_PART, True)]),
        (KEYS_IN_A_PART + 1, [(KEYS_IN_A_PART, False), (1, True)]),
    ],
)
def test_keys_are_listed_in_parts_of_which_the_last_says_so(keys: int, parts: list[tuple[int, bool]]) -> None:
    """Also where there is none."""

    async def scenario() -> None:
        bench = Bench()
        bench.table = {b"s%d" % number: (b"", 0) for number in range(keys)}
        bench.ask(1, AskKeys())
        await turns()
        found = [reply for _, reply in bench.answers() if isinstance(reply, KeysFound)]
        assert [(len(reply.keys), reply.is_last) for reply in found] == parts
        await bench.service.stop()

    run(scenario())


def test_a_batch_goes_to_the_script_and_its_results_come_back() -> None:
    """With the present values; an answer to another batch is passed over."""

    async def scenario() -> None:
        bench = Bench()
        update, present = EncodedUpdate(b"sk", b"u", 4, "pull"), {b"sk": (b"old", 3)}
        pulling = asyncio.create_task(bench.pulls([update], present))
        await turns()
        (asked,) = bench.said
        assert asked == PullAsked(1, [(b"sk", b"u", 4, "pull")], {b"sk": (b"old", 3)})
        bench.handler(PullDone(99, {}))
        bench.handler(PullDone(1, {b"sk": (b"new", 5)}))
        bench.handler(PullDone(1, {}))
        assert await pulling == [(b"sk", b"new", 5)]
        bench.handler(PullDone(1, {}))
        await bench.service.stop()

    run(scenario())


@pytest.mark.parametrize(("updates", "logged"), [(1, 1), (2, 0)])
def test_a_pull_that_raised_is_logged_where_its_key_is_known(updates: int, logged: int) -> None:
    """Of several the owner asks again, for each by itself."""

    async def scenario() -> None:
        bench = Bench()
        pulling = asyncio.create_task(bench.pulls([EncodedUpdate(b"sk", b"u", 4, "pull")] * updates, {}))
        await turns()
        bench.handler(PullDone(1, {}, "ValueError: wrong", b"sk" if updates == 1 else b""))
        with pytest.raises(PullFailed, match="wrong"):
            await pulling
        assert len(bench.log.of("pull_failed")) == logged
        await bench.service.stop()

    run(scenario())


def test_a_script_that_has_ended_answers_no_batch() -> None:
    """Those that wait, and later ones; the owner learns it, and so do those that call this node."""

    async def scenario() -> None:
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

    run(scenario())


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

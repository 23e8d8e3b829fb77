"""Updates on their way to the user's `pull`: what raises is found, what has no script waits."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from p2pnode.training.shards.value_batch import MAX_BATCH_BYTES, KeyUpdate
from p2pnode.training.values.script_pulls import NO_SCRIPT, SCRIPT_RETRY_S, SCRIPT_WAIT_S, ScriptPulls, Waiting
from p2pnode.training.values.store import EncodedResult, EncodedUpdate, EncodedValue, PullFailed
from tests.harness.environment.simulated import VirtualClock
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by

NODE = b"n" * 20


def waiting(number: int, key: bytes = b"sk", value: bytes = b"1", *, since_s: float = 0.0, **flags: bool) -> Waiting:
    update = KeyUpdate(NODE, 1, number, key, "pull", value, number)
    return Waiting(update, update.identity, since_s, **flags)


class Script:
    """Returns the last update of each key, and raises for those it is told to."""

    def __init__(self, bad: Sequence[bytes] = (), names_key: bool = True) -> None:
        self.bad, self.names_key = bad, names_key
        self.calls: list[list[bytes]] = []
        self.present: list[dict[bytes, EncodedValue]] = []

    async def __call__(
        self, updates: Sequence[EncodedUpdate], present: Mapping[bytes, EncodedValue]
    ) -> list[EncodedResult]:
        self.calls.append([one.value for one in updates])
        self.present.append(dict(present))
        for one in updates:
            if one.value in self.bad:
                raise PullFailed(one.key if self.names_key else None, "bad " + one.value.decode())
        return list({one.key: (one.key, one.value, one.timestamp) for one in updates}.values())


def pulls(script: Any) -> ScriptPulls:
    made = ScriptPulls(VirtualClock())
    made.attach(script)
    return made


@run_by(run)
async def test_shards_share_one_call() -> None:
    """Each gets the results of its own keys, and `pull` the present values of the batch's keys alone."""
    script = Script()
    taken = {1: [waiting(1, b"sa"), waiting(2, b"sa", b"2")], 2: [waiting(1, b"sb", b"3")]}
    found = await pulls(script).outcome(taken, {b"sa": (b"0", 7), b"sc": (b"0", 7)})
    assert script.calls == [[b"1", b"2", b"3"]]
    assert script.present == [{b"sa": (b"0", 7)}]
    assert found[1] == (taken[1], [(b"sa", b"2", 2)], {})
    assert found[2] == (taken[2], [(b"sb", b"3", 1)], {})


@pytest.mark.parametrize("names_key", [True, False])
@run_by(run)
async def test_updates_that_may_have_raised_are_given_again_one_by_one(names_key: bool) -> None:
    """None of several is refused: they are in no outcome, and are marked. One by itself is refused."""
    script = Script([b"2"], names_key)
    taken = {1: [waiting(1), waiting(2, value=b"2"), waiting(3, b"sb", b"3")]}
    found = await pulls(script).outcome(taken, {})
    first, second, other = taken[1]
    assert (first.is_alone, second.is_alone, other.is_alone) == (True, True, not names_key)
    assert found[1].waiting == ([other] if names_key else [])
    (again,) = (await pulls(script).outcome({1: [second]}, {})).values()
    assert again == ([second], [], {0: "bad 2"})


@run_by(run)
async def test_a_result_of_another_key_is_an_error_of_the_call() -> None:
    """It names the key."""

    async def wrong(*_: object) -> list[EncodedResult]:
        return [(b"sforeign", b"1", 1)]

    (found,) = (await pulls(wrong).outcome({1: [waiting(1)]}, {})).values()
    assert "foreign" in found.failed[0]


@run_by(run)
async def test_results_that_are_too_many_for_a_batch_wait_for_the_next() -> None:
    """Their updates are in no outcome; one result goes, however large."""

    async def grow(updates: Sequence[EncodedUpdate], _: object) -> list[EncodedResult]:
        return [(one.key, b"x" * (MAX_BATCH_BYTES // 2), 1) for one in updates]

    taken = {1: [waiting(number, b"s%d" % number) for number in range(5)]}
    found = await pulls(grow).outcome(taken, {})
    assert found[1].waiting == taken[1][:2]
    assert [one[0] for one in found[1].results] == [b"s0", b"s1"]


@run_by(run)
async def test_a_key_that_pull_leaves_out_is_settled() -> None:
    """Its update is applied, and changes nothing."""

    async def nothing(*_: object) -> list[EncodedResult]:
        return []

    taken = {1: [waiting(1)]}
    assert await pulls(nothing).outcome(taken, {}) == {1: (taken[1], [], {})}


@run_by(run)
async def test_without_a_script_updates_wait_and_are_then_refused() -> None:
    """Those that have waited long enough; one that is acknowledged already waits on, and so do those behind it."""
    made = pulls(None)
    now = asyncio.get_running_loop().time()
    late = now - SCRIPT_WAIT_S
    assert await made.outcome({1: [waiting(1, since_s=now)]}, {}) == {}
    assert made.rests
    await asyncio.sleep(SCRIPT_RETRY_S)
    assert not made.rests
    taken = {
        1: [waiting(1, since_s=late), waiting(2, since_s=now)],
        2: [waiting(1, b"sz", since_s=late, is_repair=True)],
    }
    assert await made.outcome(taken, {}) == {1: (taken[1][:1], [], {0: NO_SCRIPT})}
    made.attach(Script())
    assert not made.rests
    assert set(await made.outcome(taken, {})) == {1, 2}

"""The virtual loop: time jumps, endless waits are found out, and a history depends on nothing but the program."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import weakref
from contextvars import ContextVar, copy_context

import pytest

from tests.harness.environment.virtual_loop import (
    MOST_TASKS,
    OWNER,
    Deadlock,
    TimeLimit,
    Unhandled,
    VirtualLoop,
    register_of_tasks,
    run,
)


def test_callbacks_run_in_order_in_their_context_and_never_once_cancelled() -> None:
    """Those of one moment run in the order in which they were made. What is cancelled does not run, also when it is
    cancelled as the moment has come."""
    colour: ContextVar[str] = ContextVar("colour", default="none")
    seen: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        red = copy_context()
        red.run(colour.set, "red")
        colour.set("blue")
        for number in range(5):
            loop.call_later(1.0, seen.append, f"timer {number}")
        loop.call_soon(lambda: seen.append(colour.get()))
        loop.call_soon(lambda: seen.append(colour.get()), context=red)
        loop.call_later(2.0, lambda: seen.append(colour.get()), context=red)
        loop.call_later(2.0, lambda: seen.append(colour.get()))
        loop.call_soon(seen.append, "cancelled").cancel()
        loop.call_at(loop.time() + 1.5, seen.append, "cancelled").cancel()
        loop.call_later(1.5, lambda: late.cancel())
        late = loop.call_later(1.5, seen.append, "cancelled")
        await asyncio.sleep(3.0)

    run(main())
    assert seen == ["blue", "red", *(f"timer {number}" for number in range(5)), "red", "blue"]


def test_a_cancelled_timer_is_nothing_to_wait_for() -> None:
    """A program that waits for it alone waits for ever."""

    async def main() -> None:
        asyncio.get_running_loop().call_later(1.0, print).cancel()
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run(main())


def test_deadlock_names_the_tasks() -> None:
    """A program in which nothing can ever happen is a `Deadlock` that names the waiting tasks."""

    async def forever() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.create_task(forever(), name="the-sleeper")

    with pytest.raises(Deadlock, match="the-sleeper"):
        run(main())


def test_time_limit() -> None:
    """A program that never ends is stopped at its limit."""

    async def main() -> None:
        for _ in range(1000):
            await asyncio.sleep(1)

    with pytest.raises(TimeLimit, match="100 virtual seconds"):
        run(main(), limit_s=100)


@pytest.mark.parametrize("where", ["task", "callback"])
def test_unhandled_errors_end_the_run(where: str) -> None:
    """An exception in a task that is never awaited, or in a callback, fails the run and is its cause."""

    async def fails() -> None:
        raise LookupError("lost")

    def callback() -> None:
        raise LookupError("lost")

    async def main() -> None:
        if where == "task":
            asyncio.create_task(fails())  # noqa: RUF006
        else:
            asyncio.get_running_loop().call_later(1, callback)
        await asyncio.sleep(10)

    with pytest.raises(Unhandled, match="lost") as caught:
        run(main())
    assert isinstance(caught.value.__cause__, LookupError)


def test_left_over_tasks() -> None:
    """Left over tasks are cancelled and clean up; with `strict` they fail the run."""
    cleaned: list[float] = []

    async def worker() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(1)
            cleaned.append(asyncio.get_running_loop().time())

    async def main() -> None:
        task = asyncio.create_task(worker(), name="worker")
        await asyncio.sleep(0)
        del task

    run(main())
    assert len(cleaned) == 1
    with pytest.raises(Unhandled, match="worker"):
        run(main(), strict=True)


HISTORY = """
import asyncio, random
from p2pnode.overlay.transport import Response, TransportError
from tests.harness.environment.simulated import ListLog, SeededEntropy, digest
from tests.harness.environment.virtual_loop import run
from tests.harness.network.network import Network

async def main():
    loop = asyncio.get_running_loop()
    net = Network(loop, 5, loss=0.1, duplicate=0.1)
    records = []
    async def node(number):
        log = ListLog(records, f"n{number}")
        random = SeededEntropy(f"5/{number}").random
        async def handle(incoming):
            await asyncio.sleep(random.random())
            return Response(b"", [b"x" * 1000])
        transport = net.transport(f"10.0.0.{number}")
        await transport.open(lambda data, source: log.info("heard", data=data, source=str(source)), handle)
        async def ask(turn):
            to = transport.address._replace(host=f"10.0.0.{random.randrange(12)}")
            transport.send(to, b"%d" % turn)
            try:
                async with transport.request(to, "x", b"", timeout_s=0.5) as answer:
                    log.info("answered", size=sum([len(c) async for c in answer.body]))
            except TransportError as error:
                log.info("failed", kind=error.kind)
        try:
            async with asyncio.TaskGroup() as group:
                for turn in range(20):
                    group.create_task(ask(turn))
                    await asyncio.sleep(random.random())
        except* asyncio.CancelledError:
            pass
        await transport.close()
    tasks = {asyncio.create_task(node(number)) for number in range(10)}
    done, pending = await asyncio.wait(tasks, timeout=5.0)
    for task in pending:
        task.cancel()
        records.append((loop.time(), task.number))
    await asyncio.wait(pending)
    for task in done | pending:
        records.append((task.number, task.cancelled()))
    print(len(records), loop.turns, digest(records))

run(main())
"""


def test_same_history_under_any_hash_seed() -> None:
    """Two processes with different hash seeds produce the same history, although they iterate over sets of tasks."""
    outputs = []
    for hash_seed in ("0", "1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        process = subprocess.run(
            [sys.executable, "-c", HISTORY], env=environment, capture_output=True, text=True, check=False, timeout=60
        )
        assert process.returncode == 0, process.stderr
        outputs.append(process.stdout)

    assert outputs[0] == outputs[1] == outputs[2]
    assert int(outputs[0].split()[0]) > 150


def test_a_stalled_owner_waits_and_the_others_do_not() -> None:
    """For 0.2 s nothing of the stalled one runs; then all that came up, in its order, its timers late."""

    async def story() -> list[tuple[str, float]]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        heard: list[tuple[str, float]] = []

        async def tick(name: str) -> None:
            OWNER.set(name)
            for number in range(3):
                await asyncio.sleep(0.05)
                heard.append((f"{name}{number}", round(loop.elapsed_s, 6)))

        tasks = [asyncio.create_task(tick(name)) for name in "ab"]
        await asyncio.sleep(0.06)
        loop.stall("a", 0.2)
        await asyncio.gather(*tasks)
        return heard

    heard = VirtualLoop().run(story())

    assert [one for one in heard if one[0][0] == "b"] == [("b0", 0.05), ("b1", 0.1), ("b2", 0.15)]
    assert [one for one in heard if one[0][0] == "a"] == [("a0", 0.05), ("a1", 0.26), ("a2", 0.31)]


def test_the_tasks_of_a_run_are_known_until_they_end_and_no_others() -> None:
    """`asyncio.all_tasks` lists those that wait, among thousands that have ended, of which few are kept. A task of
    another loop is known before and after the run."""
    elsewhere = asyncio.new_event_loop()
    ended: asyncio.Task[None] | None = elsewhere.create_task(asyncio.sleep(0))
    elsewhere.run_until_complete(asyncio.wait({ended}))
    other = elsewhere.create_task(asyncio.sleep(0))
    # Held, because the collector may find tasks that another test has left.
    before = [task for task in register_of_tasks() if task is not ended]
    gone = weakref.ref(ended)

    async def main() -> int:
        nonlocal ended
        ended = None
        waiting = [asyncio.create_task(asyncio.sleep(3600)) for _ in range(3)]
        for _ in range(4 * MOST_TASKS):
            await asyncio.create_task(asyncio.sleep(0))
        assert asyncio.all_tasks() == {asyncio.current_task(), *waiting}
        return len(register_of_tasks().data)

    assert run(main()) <= MOST_TASKS + 1
    assert gone() is None
    assert set(register_of_tasks()) == set(before)
    assert asyncio.all_tasks(elsewhere) == {other}
    elsewhere.run_until_complete(other)
    elsewhere.close()

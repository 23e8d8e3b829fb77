"""Work that another ends, while the task that did it goes on."""

from __future__ import annotations

import asyncio

from tests.harness.environment.virtual_loop import run
from training.exchange.interruption import Interruptible, interrupt_all


async def work(group: dict[Interruptible, None], log: list[str], name: str, cleanup_s: float = 0.0) -> None:
    """Interruptible for an hour, then a second of something else."""
    piece = Interruptible(group)
    try:
        await asyncio.sleep(3600.0)
    except asyncio.CancelledError:
        await asyncio.sleep(cleanup_s)
        if not piece.was_interrupted():
            log.append(f"{name} cancelled")
            raise
        log.append(f"{name} interrupted")
    finally:
        piece.done()
    await asyncio.sleep(1.0)
    log.append(f"{name} went on")


def test_the_task_of_interrupted_work_goes_on() -> None:
    """Its later waits are not cancelled, and the work is out of its group."""

    async def main() -> None:
        group: dict[Interruptible, None] = {}
        log: list[str] = []
        task = asyncio.create_task(work(group, log, "a"))
        await asyncio.sleep(1.0)
        (piece,) = group
        piece.interrupt()
        await task
        assert log == ["a interrupted", "a went on"]
        assert group == {}
        assert piece.ended.is_set()
        assert task.cancelling() == 0

    run(main())


def test_a_second_interruption_is_the_first() -> None:
    """Two that end one piece of work do not cancel what its task does next."""

    async def main() -> None:
        group: dict[Interruptible, None] = {}
        log: list[str] = []
        task = asyncio.create_task(work(group, log, "a", cleanup_s=2.0))
        await asyncio.sleep(1.0)
        (piece,) = group
        piece.interrupt()
        await asyncio.sleep(1.0)
        piece.interrupt()
        await task
        assert log == ["a interrupted", "a went on"]

    run(main())


def test_a_cancellation_by_another_ends_the_task() -> None:
    """Also when it arrives beside an interruption: the task is not to go on."""

    async def main() -> None:
        for also in (False, True):
            group: dict[Interruptible, None] = {}
            log: list[str] = []
            task = asyncio.create_task(work(group, log, "a"))
            await asyncio.sleep(1.0)
            (piece,) = group
            if also:
                piece.interrupt()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled()
            assert log == ["a cancelled"]
            assert group == {}

    run(main())


def test_work_within_a_task_that_is_being_cancelled_counts_from_there() -> None:
    """A task that cleans up after its own cancellation can be interrupted in that, and told from a further one."""

    async def main() -> None:
        group: dict[Interruptible, None] = {}
        log: list[str] = []

        async def cleaning() -> None:
            try:
                await asyncio.sleep(3600.0)
            except asyncio.CancelledError:
                await work(group, log, "cleanup")
                raise

        task = asyncio.create_task(cleaning())
        await asyncio.sleep(1.0)
        task.cancel()
        await asyncio.sleep(1.0)
        await interrupt_all(group)
        await asyncio.gather(task, return_exceptions=True)
        assert log == ["cleanup interrupted", "cleanup went on"]
        assert task.cancelled()

    run(main())


def test_all_of_a_group_have_ended_when_the_wait_is_over() -> None:
    """Each at its own time; work that has ended before is not waited for."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        group: dict[Interruptible, None] = {}
        log: list[str] = []
        tasks = [asyncio.create_task(work(group, log, name, after)) for name, after in (("a", 3.0), ("b", 0.5))]
        await asyncio.sleep(1.0)
        began = loop.time()
        await interrupt_all(group)
        assert loop.time() - began == 3.0
        assert [line for line in log if "interrupted" in line] == ["b interrupted", "a interrupted"]
        assert group == {}
        await interrupt_all(group)
        assert loop.time() - began == 3.0
        await asyncio.gather(*tasks)

    run(main())

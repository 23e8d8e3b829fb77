"""A service under supervision: faults are reported, and it begins again."""

from __future__ import annotations

import asyncio

import pytest

from overlay.supervision import FIRST_PAUSE_S, MAX_PAUSE_S, Rota, logged, supervised
from tests.harness.environment.simulated import ListLog
from tests.harness.environment.virtual_loop import run


class Service:
    """Fails each time it is begun, after as many seconds as `lives` has for it; then it ends by itself."""

    def __init__(self, lives: list[float]) -> None:
        self.begun: list[float] = []
        self._lives = lives

    async def run(self) -> None:
        self.begun.append(asyncio.get_running_loop().time())
        if self._lives:
            await asyncio.sleep(self._lives.pop(0))
            raise KeyError(len(self.begun))

    @property
    def pauses(self) -> list[float]:
        return [round(after - before, 3) for before, after in zip(self.begun, self.begun[1:], strict=False)]


def test_a_service_that_failed_begins_again_and_each_fault_is_logged() -> None:
    """The pauses double up to the longest; a service that ends by itself is not begun again."""

    async def scenario() -> None:
        service, log = Service([0.0] * 6), ListLog([])
        await supervised("reader", service.run, logged(log))

        assert service.pauses == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
        assert (FIRST_PAUSE_S, MAX_PAUSE_S) == (1.0, 8.0)
        assert [record.fields for record in log.of("service_failed")] == [
            {"service": "reader", "error": f"KeyError({number})"} for number in range(1, 7)
        ]

    run(scenario())


def test_a_service_that_ran_for_long_begins_again_soon() -> None:
    """Only faults in a row make the pause longer."""

    async def scenario() -> None:
        service = Service([0.0, 0.0, 20.0, 0.0])
        await supervised("reader", service.run, lambda *_: None)

        assert service.pauses == [1.0, 2.0, 21.0, 2.0]

    run(scenario())


def test_a_report_that_raises_ends_the_service() -> None:
    """So tests may ask for the fault itself."""

    def raises(_name: str, error: Exception) -> None:
        raise error

    async def scenario() -> None:
        with pytest.raises(KeyError):
            await supervised("reader", Service([0.0]).run, raises)

    run(scenario())


def test_jobs_of_a_rota_are_done_each_after_its_own_pause() -> None:
    """A job that takes long delays the others, and its pause begins when it has ended."""
    done: list[tuple[str, float]] = []

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()

        async def often() -> None:
            done.append(("often", round(loop.time() - began, 3)))

        async def seldom() -> None:
            done.append(("seldom", round(loop.time() - began, 3)))
            await asyncio.sleep(3.0)

        task = asyncio.create_task(Rota((often, lambda: 2.0), (seldom, lambda: 5.0)).run())
        await asyncio.sleep(15.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(scenario())
    assert done == [
        ("often", 2.0),
        ("often", 4.0),
        ("seldom", 5.0),
        ("often", 8.0),
        ("often", 10.0),
        ("often", 12.0),
        ("seldom", 13.0),
    ]


def test_a_job_that_fails_each_time_does_not_keep_the_others_from_being_done() -> None:
    """Under supervision: what is due later than the fault is done all the same."""
    done: list[float] = []

    async def scenario() -> None:
        async def fails() -> None:
            raise KeyError

        async def works() -> None:
            done.append(asyncio.get_running_loop().time())

        rota, log = Rota((fails, lambda: 2.0), (works, lambda: 5.0)), ListLog([])
        task = asyncio.create_task(supervised("rota", rota.run, logged(log)))
        await asyncio.sleep(60.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(scenario())
    assert len(done) >= 5

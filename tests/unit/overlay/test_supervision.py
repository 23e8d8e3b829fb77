"""A service under supervision: faults are reported, and it begins again."""

from __future__ import annotations

import asyncio

import pytest

from p2pnode.overlay.supervision import FIRST_PAUSE_S, MAX_PAUSE_S, logged, supervised
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

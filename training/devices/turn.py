"""One cycle of the trainers of a node: each trains what the queue protocol gives it, and reports.

The cycle ends when each of its trainers has reported, failed, or is hung while others are not. What a hung trainer
reports later counts in a later cycle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from p2pnode.training.devices.cycle import CycleServer, GivenAnswer
from p2pnode.training.devices.device import Device
from p2pnode.training.trainer_link.interface import StepOrder, StepReport, TrainerFailed
from p2pnode.training.trainer_link.messages import StepAnswer


class CycleRun:
    """Runs cycles on the devices of one node. `on_failure` is called with each device that failed, and why."""

    def __init__(self, period: int, on_failure: Callable[[Device, TrainerFailed], None]) -> None:
        self.period = period
        self._server = CycleServer(period)
        self._on_failure = on_failure
        self._lease: Callable[[int, int, int], None] | None = None
        #: The number of the present cycle, which is the same on all nodes; None between cycles.
        self._number: int | None = None
        self._devices: dict[int, Device] = {}
        self._moved = asyncio.Event()

    def lease_from(self, lease: Callable[[int, int, int], None]) -> None:
        """From the next cycle on local steps are leased, by calls with the cycle, its trainers here, and how many more
        steps they want; `leased` has the answer."""
        self._lease = lease
        self._server = CycleServer(self.period, is_leased=True)

    def leased(self, number: int, allowed: int, *, is_closed: bool) -> None:
        """So many local steps are allowed in a cycle in all; one of another cycle is late, and has no effect."""
        if number == self._number:
            self.deliver(self._server.grant(allowed, is_closed=is_closed))

    def notice(self) -> None:
        """The state of a trainer has changed."""
        self._moved.set()

    async def run(
        self, orders: Mapping[int, StepOrder], devices: Mapping[int, Device], number: int = 0
    ) -> dict[int, StepReport]:
        """One cycle on these devices, which are free; the reports of those that came to its end. `number` counts the
        cycles of the run, and nodes that lease have the same ones."""
        server, self._number = self._server, number
        for index in server.workers:
            if index not in orders:
                self.deliver(server.lost(index))
        self._devices = {index: devices[index] for index in orders}
        for index, device in self._devices.items():
            self.deliver(server.join(index))
            device.begin(orders[index])
        reports: dict[int, StepReport] = {}
        under_way = dict(self._devices)
        try:
            while under_way:
                await self._wait(under_way)
                for index, device in list(under_way.items()):
                    if device.task is None or not device.task.done():
                        continue
                    del under_way[index]
                    try:
                        reports[index] = device.take_report()
                    except TrainerFailed as failure:
                        self._on_failure(device, failure)
                        self.deliver(server.lost(index))
                    else:
                        self.deliver(server.sits_out(index))
                for index in self._hung(under_way):
                    del under_way[index]
                    self.deliver(server.lost(index))
        except BaseException:
            # Nobody waits for this cycle any more. The orders are cancelled by the caller.
            self.deliver(server.stop())
            self._server = CycleServer(self.period, is_leased=self._lease is not None)
            raise
        finally:
            self._devices, self._number = {}, None
        server.end_cycle()
        return reports

    def requested(self, device: Device, number: int) -> None:
        """A trainer asks what its next step is."""
        counted = device.note_request(number)
        if device.index in self._devices and device.index in self._server.workers:
            self.deliver(self._server.request(device.index, counted))
        else:
            device.answer(StepAnswer.DISTRIBUTED)  # its cycle has gone on without it: it reports what it has

    def deliver(self, answers: list[GivenAnswer]) -> None:
        """Send the answers that are due."""
        for one in answers:
            if one.worker in self._devices:
                self._devices[one.worker].answer(one.answer)
        server = self._server
        if self._lease is not None and self._number is not None and server.wants:
            self._lease(self._number, len(server.workers), server.wants)

    async def _wait(self, under_way: Mapping[int, Device]) -> None:
        """Until a report is there, a trainer has failed, or the state of one has changed."""
        self._moved.clear()
        moved = asyncio.create_task(self._moved.wait())
        try:
            tasks = [device.task for device in under_way.values() if device.task is not None]
            await asyncio.wait([moved, *tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            moved.cancel()

    def _hung(self, under_way: Mapping[int, Device]) -> list[int]:
        """Those to go on without: hung, while another is not or has reported."""
        hung = [index for index, device in under_way.items() if device.state == "hung"]
        return hung if len(hung) < len(self._devices) else []

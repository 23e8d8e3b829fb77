"""One step of the swarm on the devices of a node: its cycles, the distributed step after each, and the node's delta.

Every cycle begins where the positions say (`training.devices.positions`). A trainer keeps what it began with, so what a
hung one reports later is still its own way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np

from p2pnode.overlay.environment import Environment
from p2pnode.training.devices.device import Device
from p2pnode.training.devices.positions import LeaderPositions, Positions, combined, is_finite, weights_of
from p2pnode.training.devices.turn import CycleRun
from p2pnode.training.settings import DevicesSettings
from p2pnode.training.trainer_link.interface import (
    MergeOrder,
    StepOrder,
    StepReport,
    TrainerFailed,
    TrainerLeft,
    Vector,
)

#: A trainer whose deltas are not finite so many times in a row is started again from its last saved state.
NOT_FINITE_CYCLES = 3

#: A merge looks so often whether those that it waits for hang.
MERGE_LOOK_S = 0.5
#: After so many failed merges in a row trainers merge in shared memory: each has cost the time-out.
MOST_FAILURES = 3
#: Batches of the running loss that chooses the leader; a trainer without so many does not lead.
LOSS_WINDOW = 10

OnFailure = Callable[[Device, TrainerFailed], None]


Backend = Literal["nccl", "gloo"]


def backend_of(names: Sequence[str], *, gloo: bool) -> Backend | None:
    """How the trainers on these devices merge; None: in shared memory. NCCL wants a GPU for each. `gloo`: where NCCL
    cannot be, gloo instead of shared memory."""
    have_gpus = all(name.startswith("cuda:") for name in names) and len(set(names)) == len(names)
    if len(names) == 1 or not (have_gpus or gloo):
        return None
    return "nccl" if have_gpus else "gloo"


@dataclass(slots=True)
class DeviceGroups:
    """Which trainers merge by `torch.distributed`. A group has a number and a file by which its members find one
    another. With other members, or after a failure, there is another group.

    `place`: the beginning of the name of each group's file, in a folder that exists. `timeout_s`: the longest that a
    member waits for the others.
    """

    backend: Backend
    place: str
    timeout_s: float
    #: Merges that have failed one after another.
    failures: int = 0
    _members: tuple[int, ...] = ()
    _number: int = 0

    @property
    def are_given_up(self) -> bool:
        """Whether so many merges have failed that all further ones are made in shared memory."""
        return self.failures >= MOST_FAILURES

    def orders(self, weights: Mapping[int, float]) -> dict[int, MergeOrder]:
        """What the trainers with these weights, two at least, are told; the first writes the mean."""
        members = tuple(sorted(weights))
        if members != self._members:
            self._members = members
            self._number += 1
        return {
            index: MergeOrder(
                index=index,
                members=members,
                group=self._number,
                place=f"{self.place}.{self._number}",
                backend=self.backend,
                weight=weights[index],
                writes=index == members[0],
                timeout_s=self.timeout_s,
            )
            for index in members
        }

    def failed(self) -> None:
        """The next merge is one of a new group."""
        self.failures += 1
        self._members = ()

    def alone(self, index: int) -> MergeOrder:
        """What a trainer is told that is to write its own delta."""
        return MergeOrder(index=index, members=(index,), group=0, place="", backend=self.backend)


@dataclass(slots=True)
class NodeStep:
    """Trains step after step. Made when the model is known. `shared`: the values that the trainers load,
    `float32[total]`. `groups`: how they merge by `torch.distributed`; None: in shared memory."""

    devices: Sequence[Device]
    cycles: CycleRun
    groups: DeviceGroups | None
    positions: Positions
    shared: Vector
    settings: DevicesSettings
    environment: Environment
    on_failure: OnFailure
    #: What trainers were told, until it was seen how that ended.
    _merging: dict[int, asyncio.Task[bool]] = field(default_factory=dict)
    #: Those that were in the last merge of this step, and go on from where they stand.
    _merged: set[int] = field(default_factory=set)
    #: Deltas in a row that were not finite, by device.
    _not_finite: dict[int, int] = field(default_factory=dict)

    def forget(self, index: int) -> None:
        """A trainer has begun anew."""
        self._not_finite.pop(index, None)
        self._merged.discard(index)
        self.positions.forget(index)

    async def train(self, order: StepOrder, carried: Vector | None, way: Vector, first: int) -> StepReport:
        """Train from the shared values plus `carried`, and write how far the node came into `way`, both
        `float32[total]`. `first`: the device whose trainer is the node's first."""
        began_s = self.environment.clock.monotonic()
        run = self.environment.executor.run
        self._merged.clear()
        await run(self.positions.begin, carried, self.shared)
        cycles = max(1, order.local_steps // self.cycles.period)
        reports: list[StepReport] = []
        try:
            for cycle in range(cycles):
                orders = self._orders(order, cycle, first)
                reports += await self._cycle(order, cycles, orders, is_last=cycle + 1 == cycles)
        except BaseException:
            for task in self._merging.values():
                task.cancel()
            await asyncio.gather(
                *(device.cancel() for device in self.devices), *self._merging.values(), return_exceptions=True
            )
            self._merging.clear()
            raise
        await run(self.positions.delta, way)
        return combined(order.step, reports, self.environment.clock.monotonic() - began_s)

    def _orders(self, order: StepOrder, cycle: int, first: int) -> dict[int, StepOrder]:
        """What each device would be ordered to do in this cycle, the number of which counts from 0."""
        settings, count, positions = self.settings, len(self.devices), self.positions
        local_pull = global_pull = 0.0
        if isinstance(positions, LeaderPositions):
            local_pull = settings.pull / self.cycles.period if positions.has_local else 0.0
            global_pull = settings.pull / order.local_steps if positions.has_global else 0.0
        return {
            index: StepOrder(
                step=order.step,
                local_steps=order.local_steps,
                workers=order.workers * count,
                is_first=order.is_first and index == first,
                node_index=order.node_index * count + index,
                at_delta=positions.is_elsewhere and index not in self._merged,
                known_step=order.known_step,
                asks=True,
                done=cycle * self.cycles.period,
                local_pull=local_pull,
                global_pull=global_pull,
                loss_window=LOSS_WINDOW if isinstance(positions, LeaderPositions) else 0,
                keeps_delta=self.groups is not None,
                continues=index in self._merged,
            )
            for index in range(count)
        }

    async def _cycle(
        self,
        order: StepOrder,
        cycles: int,
        orders: dict[int, StepOrder],
        *,
        is_last: bool,
    ) -> list[StepReport]:
        positions, run = self.positions, self.environment.executor.run
        late = self._late_reports()
        if self.groups is not None:
            await self._write_own(late)
        for index, report in late.items():
            await run(positions.late, index, report, self.devices[index].trainer.delta)
        free = {device.index: device for device in self.devices if self._is_free(device)}
        if not free:
            raise self._no_device()
        for index, device in free.items():
            if orders[index].at_delta:
                await run(np.copyto, device.trainer.delta, positions.start(index))
        done = next(iter(orders.values())).done
        given = {index: orders[index] for index in free}
        reports = await self.cycles.run(given, free, (order.step - 1) * cycles + done // self.cycles.period + 1)
        finite = {index: report for index, report in reports.items() if await self._is_finite(index, report)}
        if not finite:
            if not reports:
                raise self._no_device()
            finite = reports  # The owners refuse it, and the step loop says so.
        trained = finite if self.groups is None else await self._merge(self.groups, finite)
        if not trained:
            raise self._no_device()
        deltas = {index: self.devices[index].trainer.delta for index in trained}
        await run(partial(positions.combine, trained, deltas, is_last=is_last))
        return [*trained.values(), *late.values()]

    def _is_free(self, device: Device) -> bool:
        """Whether it takes an order: it is in no other, and in no merge in which it hangs."""
        is_merging = device.index in self._merging and self._has_merged(device.index) is None
        return device.is_free and not is_merging

    async def _merge(self, groups: DeviceGroups, reports: dict[int, StepReport]) -> dict[int, StepReport]:
        """Merge what these trainers keep; the report of all, at the one that has written the mean. Where that fails
        each writes its own delta, and has its own report."""
        if await self._have_merged(groups, reports):
            return {min(reports): combined(next(iter(reports.values())).step, list(reports.values()), 0.0)}
        await self._write_own(reports)
        return reports

    async def _have_merged(self, groups: DeviceGroups, reports: dict[int, StepReport]) -> bool:
        """Whether all of these trainers, two at least, have merged what they keep."""
        self._merged.clear()
        if len(reports) == 1 or groups.are_given_up:
            return False
        done = await self._told(groups.orders(weights_of(reports)))
        if len(done) == len(reports):
            self._merged |= reports.keys()
            groups.failures = 0
            return True
        groups.failed()
        lacking = sorted(reports.keys() - done)
        effect = "from now on in shared memory" if groups.are_given_up else "this once in shared memory"
        self.environment.log.warning("devices_not_merged", lacking=lacking, effect=effect)
        return False

    async def _write_own(self, reports: dict[int, StepReport]) -> None:
        """Have these trainers write the deltas that they keep; those that cannot are removed from the reports."""
        assert self.groups is not None
        written = await self._told({index: self.groups.alone(index) for index in reports})
        for index in reports.keys() - written:
            del reports[index]

    async def _told(self, orders: dict[int, MergeOrder]) -> set[int]:
        """Those that have done what they were told. One that hangs is waited for no longer than the others."""
        for index, order in orders.items():
            if index not in self._merging:
                task = asyncio.create_task(self.devices[index].trainer.merge(order), name=f"merge-device-{index}")
                self._merging[index] = task
        asked = {index: self._merging[index] for index in orders}
        while any(self.devices[index].state != "hung" for index, task in asked.items() if not task.done()):
            left = [task for task in asked.values() if not task.done()]
            await asyncio.wait(left, timeout=MERGE_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        return {index for index in orders if self._has_merged(index)}

    def _has_merged(self, index: int) -> bool | None:
        """Whether a trainer has done what it was told last; None while it is at it."""
        task = self._merging.get(index)
        if task is not None and not task.done():
            return None
        self._merging.pop(index, None)
        try:
            return task is not None and task.result()
        except TrainerFailed as failure:
            self.on_failure(self.devices[index], failure)
            return False

    def _late_reports(self) -> dict[int, StepReport]:
        """What trainers that were hung have come to since: it counts now, and they are free again."""
        found: dict[int, StepReport] = {}
        for device in self.devices:
            if device.task is not None and device.task.done():
                try:  # only those that were hung have an order here
                    found[device.index] = device.take_report()
                except TrainerFailed as failure:
                    self.on_failure(device, failure)
        return found

    async def _is_finite(self, index: int, report: StepReport) -> bool:
        """Whether a trainer's delta may count; one that never may starts again from its last saved state."""
        device = self.devices[index]
        if report.is_finite if self.groups else await self.environment.executor.run(is_finite, device.trainer.delta):
            self._not_finite.pop(index, None)
            return True
        self._not_finite[index] = count = self._not_finite.get(index, 0) + 1
        self.environment.log.warning("device_not_finite", device=device.name, index=index, in_a_row=count)
        if count >= NOT_FINITE_CYCLES and device.is_free:
            del self._not_finite[index]
            reason = f"its deltas of {count} cycles in a row have values that are not finite"
            self.on_failure(device, TrainerFailed(reason, "lower the learning rate or clip the gradients"))
        return False

    def _no_device(self) -> TrainerFailed:
        """Why nothing can be trained: all have left, or failed."""
        gone = [device.gone for device in self.devices if device.gone is not None]
        if len(gone) == len(self.devices):
            return next((one for one in gone if not isinstance(one, TrainerLeft)), gone[0])
        return TrainerFailed("the trainers of all devices have failed", "see device_dropped in the log")

"""One step of the swarm on the devices of a node: its cycles, the distributed step after each, and the node's delta.

Every cycle begins where the positions say (`training.devices.positions`). A trainer keeps what it began with, so what a
hung one reports later is still its own way.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

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
#: Batches of the running loss that chooses the leader; a trainer without so many does not lead.
LOSS_WINDOW = 10

OnFailure = Callable[[Device, TrainerFailed], None]


Backend = Literal["nccl", "gloo"]


def backend_of(setting: str, names: Sequence[str]) -> Backend | None:
    """How the trainers on these devices merge by `devices.merge`; None: in shared memory. NCCL wants a GPU for each."""
    have_gpus = all(name.startswith("cuda:") for name in names) and len(set(names)) == len(names)
    if len(names) == 1 or setting == "memory" or (setting == "auto" and not have_gpus):
        return None
    return "nccl" if have_gpus else "gloo"


class DeviceGroups:
    """Which trainers merge by `torch.distributed`. A group has a number and a file by which its members find one
    another. With other members, or after a failure, there is another group.

    `place`: the beginning of the name of each group's file, in a folder that exists. `timeout_s`: the longest that a
    member waits for the others.
    """

    def __init__(self, backend: Backend, place: str, timeout_s: float) -> None:
        self._backend = backend
        self._place = place
        self._timeout_s = timeout_s
        self._members: tuple[int, ...] = ()
        self._numbers = itertools.count(1)
        self._number = 0

    def orders(self, weights: Mapping[int, float]) -> dict[int, MergeOrder]:
        """What the trainers with these weights, two at least, are told; the first writes the mean."""
        members = tuple(sorted(weights))
        if members != self._members:
            self._members, self._number = members, next(self._numbers)
        return {
            index: MergeOrder(
                index=index,
                members=members,
                group=self._number,
                place=f"{self._place}.{self._number}",
                backend=self._backend,
                weight=weights[index],
                writes=index == members[0],
                timeout_s=self._timeout_s,
            )
            for index in members
        }

    def failed(self) -> None:
        """The next merge is one of a new group."""
        self._members = ()

    def alone(self, index: int) -> MergeOrder:
        """What a trainer is told that is to write its own delta."""
        return MergeOrder(index=index, members=(index,), group=0, place="", backend=self._backend)


class CycleParts(NamedTuple):
    """What runs a cycle, and how trainers merge by `torch.distributed`; None: in shared memory."""

    cycles: CycleRun
    groups: DeviceGroups | None = None


class NodeStep:
    """Trains step after step. Made when the model is known."""

    def __init__(
        self,
        devices: Sequence[Device],
        parts: CycleParts,
        positions: Positions,
        shared: Vector,
        settings: DevicesSettings,
        environment: Environment,
        on_failure: OnFailure,
    ) -> None:
        self.positions = positions
        #: The shared values that the trainers load, `float32[total]`.
        self._shared = shared
        self._devices = devices
        self._cycles = parts.cycles
        self._groups = parts.groups
        #: What trainers were told, until it was seen how that ended.
        self._merging: dict[int, asyncio.Task[bool]] = {}
        #: Those that were in the last merge of this step, and go on from where they stand.
        self._merged: set[int] = set()
        self._settings = settings
        self._period = parts.cycles.period
        self._executor = environment.executor
        self._clock = environment.clock
        self._log = environment.log
        self._on_failure = on_failure
        #: Deltas in a row that were not finite, by device.
        self._not_finite: dict[int, int] = {}

    def forget(self, index: int) -> None:
        """A trainer has begun anew."""
        self._not_finite.pop(index, None)
        self._merged.discard(index)
        self.positions.forget(index)

    async def train(self, order: StepOrder, carried: Vector | None, way: Vector, first: int) -> StepReport:
        """Train from the shared values plus `carried`, and write how far the node came into `way`, both
        `float32[total]`. `first`: the device whose trainer is the node's first."""
        began_s = self._clock.monotonic()
        run = self._executor.run
        self._merged.clear()
        await run(self.positions.begin, carried, self._shared)
        cycles = max(1, order.local_steps // self._period)
        reports: list[StepReport] = []
        try:
            for cycle in range(cycles):
                orders = self._orders(order, cycle, first)
                reports += await self._cycle(order, cycles, orders, is_last=cycle + 1 == cycles)
        except BaseException:
            for task in self._merging.values():
                task.cancel()
            await asyncio.gather(
                *(device.cancel() for device in self._devices), *self._merging.values(), return_exceptions=True
            )
            self._merging.clear()
            raise
        await run(self.positions.delta, way)
        return combined(order.step, reports, self._clock.monotonic() - began_s)

    def _orders(self, order: StepOrder, cycle: int, first: int) -> dict[int, StepOrder]:
        """What each device would be ordered to do in this cycle, the number of which counts from 0."""
        settings, count, positions = self._settings, len(self._devices), self.positions
        local_pull = global_pull = 0.0
        if isinstance(positions, LeaderPositions):
            local_pull = settings.pull / self._period if positions.has_local else 0.0
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
                done=cycle * self._period,
                local_pull=local_pull,
                global_pull=global_pull,
                loss_window=LOSS_WINDOW if isinstance(positions, LeaderPositions) else 0,
                keeps_delta=self._groups is not None,
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
        positions, run = self.positions, self._executor.run
        late = self._late_reports()
        if self._groups is not None:
            await self._write_own(late)
        for index, report in late.items():
            await run(positions.late, index, report, self._devices[index].trainer.delta)
        free = {device.index: device for device in self._devices if self._is_free(device)}
        if not free:
            raise self._no_device()
        for index, device in free.items():
            if orders[index].at_delta:
                await run(np.copyto, device.trainer.delta, positions.start(index))
        done = next(iter(orders.values())).done
        given = {index: orders[index] for index in free}
        reports = await self._cycles.run(given, free, (order.step - 1) * cycles + done // self._period + 1)
        finite = {index: report for index, report in reports.items() if await self._is_finite(index, report)}
        if not finite:
            if not reports:
                raise self._no_device()
            finite = reports  # The owners refuse it, and the step loop says so.
        trained = finite if self._groups is None else await self._merge(self._groups, finite)
        if not trained:
            raise self._no_device()
        deltas = {index: self._devices[index].trainer.delta for index in trained}
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
        if len(reports) == 1:
            return False
        done = await self._told(groups.orders(weights_of(reports)))
        if len(done) == len(reports):
            self._merged |= reports.keys()
            return True
        groups.failed()
        lacking = sorted(reports.keys() - done)
        self._log.warning("devices_not_merged", lacking=lacking, effect="this once in shared memory")
        return False

    async def _write_own(self, reports: dict[int, StepReport]) -> None:
        """Have these trainers write the deltas that they keep; those that cannot are removed from the reports."""
        assert self._groups is not None
        written = await self._told({index: self._groups.alone(index) for index in reports})
        for index in reports.keys() - written:
            del reports[index]

    async def _told(self, orders: dict[int, MergeOrder]) -> set[int]:
        """Those that have done what they were told. One that hangs is waited for no longer than the others."""
        for index, order in orders.items():
            if index not in self._merging:
                task = asyncio.create_task(self._devices[index].trainer.merge(order), name=f"merge-device-{index}")
                self._merging[index] = task
        asked = {index: self._merging[index] for index in orders}
        while any(self._devices[index].state != "hung" for index, task in asked.items() if not task.done()):
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
            self._on_failure(self._devices[index], failure)
            return False

    def _late_reports(self) -> dict[int, StepReport]:
        """What trainers that were hung have come to since: it counts now, and they are free again."""
        found: dict[int, StepReport] = {}
        for device in self._devices:
            if device.task is not None and device.task.done():
                try:  # only those that were hung have an order here
                    found[device.index] = device.take_report()
                except TrainerFailed as failure:
                    self._on_failure(device, failure)
        return found

    async def _is_finite(self, index: int, report: StepReport) -> bool:
        """Whether a trainer's delta may count; one that never may starts again from its last saved state."""
        device = self._devices[index]
        if report.is_finite if self._groups else await self._executor.run(is_finite, device.trainer.delta):
            self._not_finite.pop(index, None)
            return True
        self._not_finite[index] = count = self._not_finite.get(index, 0) + 1
        self._log.warning("device_not_finite", device=device.name, index=index, in_a_row=count)
        if count >= NOT_FINITE_CYCLES and device.is_free:
            del self._not_finite[index]
            reason = f"its deltas of {count} cycles in a row have values that are not finite"
            self._on_failure(device, TrainerFailed(reason, "lower the learning rate or clip the gradients"))
        return False

    def _no_device(self) -> TrainerFailed:
        """Why nothing can be trained: all have left, or failed."""
        gone = [device.gone for device in self._devices if device.gone is not None]
        if len(gone) == len(self._devices):
            return next((one for one in gone if not isinstance(one, TrainerLeft)), gone[0])
        return TrainerFailed("the trainers of all devices have failed", "see device_dropped in the log")

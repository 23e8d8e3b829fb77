"""The base of a node with several trainers: values enter between two of its steps, and progress stays."""

from __future__ import annotations

import numpy as np
import pytest

from tests.harness.environment.virtual_loop import run
from tests.harness.trainers.stub_device import SIZE, StubDevice, host_of
from tests.unit.training.devices.test_node_step import order


def test_trainers_begin_at_the_shared_values_and_what_those_lack() -> None:
    """All begin ahead of them by a delta that is not in them yet, and by what a codec has left out."""

    async def scenario() -> None:
        devices = [StubDevice(0), StubDevice(1)]
        host = host_of(devices, local_steps=2)
        await host.start()
        base = float(host.vector[0])
        assert (await host.train(order(1, 2))).has_delta
        assert host.delta[0] == 2.0
        host.delta[:] = 1.5  # a codec leaves 0.5 out
        host.sent()
        assert not (await host.train(order(2, 2))).has_delta
        assert [device.began[1] - base for device in devices] == pytest.approx([2.0, 2.0])
        host.vector += 11.5  # the delta, and 10 of other nodes
        await host.arrived(1)
        assert (await host.train(order(3, 2))).has_delta
        assert [device.began[2] - base for device in devices] == pytest.approx([14.0, 14.0])
        assert host.delta == pytest.approx(np.full(SIZE, 4.5))

    run(scenario())


def test_what_was_returned_is_progress_and_what_is_held_stays() -> None:
    """Per range of values."""

    async def scenario() -> None:
        devices = [StubDevice(0)]
        host = host_of(devices, local_steps=2)
        await host.start()
        await host.train(order(1, 2))
        host.sent()
        host.vector += 7.0
        half = SIZE // 2
        await host.arrived(1, held=[(0, half)], returned=[(half, SIZE)])
        await host.train(order(2, 2))
        assert host.delta[:half] == pytest.approx(np.full(half, 2.0))
        assert host.delta[half:] == pytest.approx(np.full(SIZE - half, 4.0))

    run(scenario())


def test_values_that_lack_the_delta_are_begun_from_with_it() -> None:
    """Until values come that contain it."""

    async def scenario() -> None:
        devices = [StubDevice(0)]
        host = host_of(devices, local_steps=2)
        await host.start()
        base = float(host.vector[0])
        await host.train(order(1, 2))
        host.sent()
        host.vector += 10.0
        await host.arrived(1, lacking=[(0, SIZE)])
        await host.train(order(2, 2))
        assert devices[0].began[1] - base == pytest.approx(12.0)
        assert host.delta == pytest.approx(np.full(SIZE, 2.0))

    run(scenario())


def test_a_node_whose_progress_is_not_finite_takes_it_back() -> None:
    """It goes on from its base."""

    async def scenario() -> None:
        devices = [StubDevice(0, rate=float("nan"))]
        host = host_of(devices, local_steps=2)
        await host.start()
        base = float(host.vector[0])
        report = await host.train(order(1, 2))
        assert not report.is_finite
        devices[0].rate = 1.0
        report = await host.train(order(2, 2))
        assert report.is_finite
        assert devices[0].began[1] == base
        assert host.delta[0] == 2.0

    run(scenario())

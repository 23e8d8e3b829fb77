"""Where the trainers of a node stand over several cycles, who leads them, and the report of all."""

from __future__ import annotations

import numpy as np
import pytest

from p2pnode.training.devices.positions import LeaderPositions, combined, leader_of
from p2pnode.training.trainer_link.interface import StepReport, Vector
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by
from tests.harness.trainers.stub_device import SIZE, StubDevice, host_of
from tests.unit.training.devices.test_node_step import order


def report(samples: int, recent_loss: float | None = None) -> StepReport:
    return StepReport(1, 1.0, samples, 1, 1.0, {}, recent_loss)


def values(*numbers: float) -> Vector:
    return np.array(numbers, np.float32)


def test_trainers_keep_their_distances_over_an_exchange_and_shrink_them_by_each_pull() -> None:
    """The node's delta is the way of its weighted mean. Each pull leaves 1 − c1 of the distance to the leader. After an
    exchange the mean is where the swarm is."""
    leader, unused = values(0.0), values(0.0)
    positions = LeaderPositions(1, [leader, unused], c1=0.25)
    positions.begin(None, values(10.0))
    assert [positions.start(index).item() for index in (0, 1)] == [0.0, 0.0]
    positions.combine({0: report(8, 0.5), 1: report(24, 0.9)}, {0: values(4.0), 1: values(-4.0)})
    assert positions.leader == 0
    assert [positions.start(index).item() for index in (0, 1)] == [4.0, -2.0]
    assert leader.item() == 14.0
    delta = values(0.0)
    positions.delta(delta)
    assert delta.item() == 0.25 * 4.0 + 0.75 * -2.0

    positions.begin(values(0.0), values(20.0))
    assert [positions.start(index).item() for index in (0, 1)] == [4.5, -1.5]
    positions.combine({0: report(8, 0.5), 1: report(24, 0.9)}, {0: values(0.0), 1: values(0.0)})
    positions.delta(delta)
    assert positions.start(0).item() - positions.start(1).item() == 0.75 * 6.0
    assert delta.item() == pytest.approx(0.25 * 4.5 + 0.75 * (-1.5 + 0.25 * 6.0))


def test_in_the_last_cycle_of_a_step_all_are_pulled_to_the_leader_of_the_swarm() -> None:
    """After the pull in the node each goes c2 of the way to the values followed; in cycles before, and without such
    values, nobody does."""
    leaders = [values(0.0), values(0.0)]
    positions = LeaderPositions(1, leaders, c1=0.5, c2=0.25)
    delta = values(0.0)

    def cycle(*, is_last: bool) -> list[float]:
        reports = {0: report(8, 0.5), 1: report(8, 1.0)}
        positions.combine(reports, {0: values(1.0), 1: values(3.0)}, is_last=is_last)
        positions.delta(delta)
        return [float(positions.start(index)[0]) for index in range(2)]

    positions.begin(None, values(10.0))
    assert cycle(is_last=True) == [1.0, 2.0], "nobody is followed yet"
    assert leaders[0].tolist() == [11.0]
    positions.follow(values(31.0))
    assert cycle(is_last=False) == [2.0, 3.5]
    # To 3 and 6.5, in the node to 4.75, and from both a quarter of the way to 21.
    assert cycle(is_last=True) == [7.5, 8.8125]
    assert delta.tolist() == [8.15625]
    positions.follow(None)
    assert leaders[1].tolist() == leaders[0].tolist() == [13.0]


@pytest.mark.parametrize(
    ("losses", "leader"),
    [
        ({0: 0.5, 1: 0.25, 2: 0.75}, 1),
        ({0: float("nan"), 1: 0.5}, 1),
        ({0: float("-inf"), 1: 0.5}, 1),
        ({2: 0.5, 1: 0.5}, 1),
        ({0: None, 1: 0.5}, 1),
        ({0: None, 1: float("nan")}, None),
    ],
)
def test_the_lowest_finite_loss_leads(losses: dict[int, float | None], leader: int | None) -> None:
    """No loss that is missing or not finite leads, and of equal ones the first does."""
    assert leader_of(losses) == leader


def test_the_report_of_a_node_counts_all_and_weights_by_samples() -> None:
    """Samples and steps add up; a trainer without a step changes neither loss nor metrics."""
    idle = StepReport(3, float("nan"), 0, 0, 0.0, {"learning_rate": 9.0})
    first = StepReport(3, 1.0, 30, 3, 1.0, {"learning_rate": 0.1})
    second = StepReport(3, 2.0, 10, 1, 1.0, {"learning_rate": 0.1})
    whole = combined(3, [idle, first, second], 2.0)
    assert (whole.loss, whole.samples, whole.optimizer_steps, whole.seconds) == (1.25, 40, 4, 2.0)
    assert whole.metrics == {"learning_rate": pytest.approx(0.1)}


@run_by(run)
async def test_trainers_begin_at_the_shared_values_and_what_those_lack() -> None:
    """All begin ahead of them by a delta that is not in them yet, and by what a codec has left out."""
    devices = [StubDevice(0), StubDevice(1)]
    host = host_of(devices, local_steps=2)
    await host.start()
    base = float(host.vector[0])
    assert (await host.train(order(1, 2))).has_delta
    assert host.delta[0] == 2.0
    host.delta[:] = 1.5  # a codec leaves 0.5 out
    host.encoded()
    assert not (await host.train(order(2, 2))).has_delta
    assert [device.began[1] - base for device in devices] == pytest.approx([2.0, 2.0])
    host.vector += 11.5  # the delta, and 10 of other nodes
    await host.arrived(1)
    assert (await host.train(order(3, 2))).has_delta
    assert [device.began[2] - base for device in devices] == pytest.approx([14.0, 14.0])
    assert host.delta == pytest.approx(np.full(SIZE, 4.5))


@run_by(run)
async def test_what_was_returned_is_progress_and_what_is_held_stays() -> None:
    """Per range of values."""
    devices = [StubDevice(0)]
    host = host_of(devices, local_steps=2)
    await host.start()
    await host.train(order(1, 2))
    host.encoded()
    host.vector += 7.0
    half = SIZE // 2
    await host.arrived(1, keeps_base=[(0, half)], takes_back=[(half, SIZE)])
    await host.train(order(2, 2))
    assert host.delta[:half] == pytest.approx(np.full(half, 2.0))
    assert host.delta[half:] == pytest.approx(np.full(SIZE - half, 4.0))


@run_by(run)
async def test_values_that_lack_the_delta_are_begun_from_with_it() -> None:
    """Until values come that contain it."""
    devices = [StubDevice(0)]
    host = host_of(devices, local_steps=2)
    await host.start()
    base = float(host.vector[0])
    await host.train(order(1, 2))
    host.encoded()
    host.vector += 10.0
    await host.arrived(1, adds_delta=[(0, SIZE)])
    await host.train(order(2, 2))
    assert devices[0].began[1] - base == pytest.approx(12.0)
    assert host.delta == pytest.approx(np.full(SIZE, 2.0))


@run_by(run)
async def test_a_node_whose_progress_is_not_finite_takes_it_back() -> None:
    """It goes on from its base."""
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

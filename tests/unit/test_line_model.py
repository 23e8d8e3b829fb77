"""The arithmetic of `tests.process.harness.line_model`: rate, queue, delay, jitter, loss and order on given times."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.process.harness.line_model import Cable, Internet, Line
from tests.process.harness.wan_check import Measured, differences

#: 1,000 bytes take 8 ms.
MBIT = Cable(up_mbit=1.0, down_mbit=1.0, queue_bytes=10_500)


def up(cable: Cable, seed: int = 0) -> Line:
    return Line(cable, is_up=True, seed=str(seed))


def arrivals(internet: Internet, until_s: float = 1e6) -> list[tuple[float, int, Any]]:
    """When each packet arrives, at which node, and which it is."""
    found = []
    while internet.next_s is not None and internet.next_s <= until_s:
        now = internet.next_s
        found += [(now, *one) for one in internet.arrived(now)]
    return found


def test_packets_leave_one_after_the_other_at_the_rate() -> None:
    """Three packets sent at once arrive eight milliseconds apart; one sent later starts anew."""
    line = up(MBIT)

    assert [line.offer(1.0, 1000) for _ in range(3)] == pytest.approx([1.008, 1.016, 1.024])
    assert line.offer(2.0, 1000) == pytest.approx(2.008)


def test_a_full_queue_drops_what_comes_last() -> None:
    """Ten packets fit; the eleventh is dropped, and there is room again once one has left."""
    line = up(MBIT)

    at_once = [line.offer(0.0, 1000) for _ in range(12)]

    assert [at is None for at in at_once] == [False] * 10 + [True] * 2
    assert line.dropped == 2
    assert line.offer(0.003, 1000) is None
    assert line.offer(0.005, 1000) == pytest.approx(0.088)


def test_the_directions_have_their_own_rates() -> None:
    """A cable with a fast line down and a slow one up sends slowly and receives fast."""
    cable = Cable(up_mbit=1.0, down_mbit=10.0)

    assert up(cable).offer(0.0, 1000) == pytest.approx(0.008)
    assert Line(cable, is_up=False, seed="").offer(0.0, 1000) == pytest.approx(0.0008)
    assert up(Cable()).offer(0.0, 10**9) == 0.0


def test_a_path_has_the_delay_and_the_rate_of_both_cables() -> None:
    """A packet waits for the line up, its delay, the line down and that one's delay; a stream has the slower rate."""
    internet = Internet([Cable(up_mbit=2.0, delay_s=0.03), Cable(down_mbit=1.0, delay_s=0.01)], seed=1)
    for number in range(3):
        internet.send(0.0, 0, 1, number, 1000)

    found = arrivals(internet)

    assert [(node, packet) for _, node, packet in found] == [(1, 0), (1, 1), (1, 2)]
    assert [at for at, _, _ in found] == pytest.approx([0.052, 0.060, 0.068])


def test_senders_share_the_receivers_line() -> None:
    """Two nodes that send to one get together what its line carries, in the order in which their packets reach it."""
    internet = Internet([Cable(), Cable(delay_s=0.004), MBIT], seed=1)
    for number in range(2):
        internet.send(0.0, 0, 2, ("first", number), 1000)
        internet.send(0.0, 1, 2, ("second", number), 1000)

    found = arrivals(internet)

    assert [packet[0] for _, _, packet in found] == ["first", "first", "second", "second"]
    assert [at for at, _, _ in found] == pytest.approx([0.008, 0.016, 0.024, 0.032])


def test_a_late_call_makes_no_line_slower() -> None:
    """Asked only once, long after, it has the same packets that many calls in time have."""
    sent = [(0.001 * number, number % 2, 1 - number % 2) for number in range(40)]
    in_time, late = (Internet([MBIT, MBIT], seed=3) for _ in range(2))
    for internet in (in_time, late):
        for number, (at, source, target) in enumerate(sent):
            internet.send(at, source, target, number, 500)

    assert [one[1:] for one in arrivals(in_time)] == late.arrived(1e6)
    assert [line.dropped for line in in_time.down] == [line.dropped for line in late.down]


def test_loss_and_jitter_follow_the_seed() -> None:
    """A tenth is lost, jitter is between nothing and its bound, one seed gives one history and another seed another."""
    cable = Cable(delay_s=0.02, jitter_s=0.05, loss=0.1)
    first, again, other = ([up(cable, seed).offer(10.0 * n, 100) for n in range(2000)] for seed in (1, 1, 2))
    line = up(cable, 1)
    history = [line.offer(10.0 * number, 100) for number in range(2000)]

    late_s = [at - 10.0 * number for number, at in enumerate(history) if at is not None]
    assert 150 <= line.lost == history.count(None) <= 250
    assert 0.0199 <= min(late_s) < 0.021
    assert 0.069 < max(late_s) <= 0.0701
    assert first == again != other
    internet = Internet([cable, cable], seed=1)
    assert [internet.up[0].offer(0.0, 1) is None for _ in range(99)] != [
        internet.up[1].offer(0.0, 1) is None for _ in range(99)
    ]


def test_jitter_keeps_the_order_unless_asked() -> None:
    """Packets sent a millisecond apart with 50 ms of jitter arrive in their order; with `reorders` some overtake."""
    cable = Cable(jitter_s=0.05)
    ordered, free = up(cable), up(dataclasses.replace(cable, reorders=True))

    in_order = [ordered.offer(0.001 * number, 100) or 0.0 for number in range(200)]
    overtaken = [free.offer(0.001 * number, 100) or 0.0 for number in range(200)]

    assert in_order == sorted(in_order)
    assert overtaken != sorted(overtaken)


def test_a_changed_cable_holds_for_what_is_sent_then() -> None:
    """After a cut nothing arrives, what is under way does; a slower cable slows both directions."""
    internet = Internet([MBIT, Cable(delay_s=1.0)], seed=1)
    internet.send(0.0, 0, 1, "before", 1000)
    internet.change(0, dataclasses.replace(MBIT, loss=1.0))
    internet.send(0.1, 0, 1, "lost", 1000)
    internet.send(0.1, 1, 0, "lost", 1000)
    found = arrivals(internet, until_s=2.0)
    internet.change(0, Cable(up_mbit=0.1, down_mbit=0.2))
    internet.send(3.0, 0, 1, "after", 1000)
    internet.send(3.0, 1, 0, "answer", 1000)

    found += arrivals(internet)

    assert [packet for _, _, packet in found] == ["before", "answer", "after"]
    assert [at for at, _, _ in found] == pytest.approx([1.008, 4.04, 4.08])


@pytest.mark.parametrize(
    "wrong",
    [{"up_mbit": -1.0}, {"delay_s": float("nan")}, {"jitter_s": float("inf")}, {"loss": 1.5}, {"queue_bytes": 100}],
    ids=str,
)
def test_no_cable_is_like_this(wrong: dict[str, Any]) -> None:
    """Negative or endless rates and times, impossible losses, and a queue without room for a packet are refused."""
    with pytest.raises(ValueError, match="Cable"):
        Cable(**wrong)


def test_the_check_names_every_difference() -> None:
    """A measurement as claimed passes; another rate, round trip, spread or loss is named."""
    cable = Cable(20.0, 20.0, delay_s=0.015, jitter_s=0.02, loss=0.01)
    good = Measured(round_trip_s=0.065, spread_s=0.03, mbit=19.0, loss=0.02)

    assert differences(cable, cable, good) == []
    for wrong, text in (
        ({"round_trip_s": 0.055}, "round trip 55.0 ms, not 60.0"),
        ({"round_trip_s": 0.120}, "round trip 120.0 ms"),
        ({"spread_s": 0.001}, "differ by 1.0 ms"),
        ({"mbit": 12.0}, "12.00 Mbit/s, not 20"),
        ({"mbit": 40.0}, "40.00 Mbit/s, not 20"),
        ({"loss": 0.0}, "0.00% lost"),
        ({"loss": 0.1}, "10.00% lost, not 1.99%"),
    ):
        [found] = differences(cable, cable, dataclasses.replace(good, **wrong))
        assert text in found

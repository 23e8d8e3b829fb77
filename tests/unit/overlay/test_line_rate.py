"""The measured rate of a line: the largest delivery rate lately, from windows of time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.capacity import UNKNOWN, class_of, split
from p2pnode.overlay.capacity_store import CAPACITY_FILE, MAX_AGE_S, CapacityStore, StoredCapacity
from p2pnode.overlay.line_rate import (
    IDLE_S,
    MIN_FULL_WINDOWS,
    MIN_WINDOWS,
    ROUND_S,
    ROUNDS,
    TOGETHER,
    TRIAL_BYTES,
    WINDOW_S,
    LineRate,
    MeasuredLine,
)
from p2pnode.overlay.line_trial import HEARD_S, LOOK_S, TRIAL_S, LineTrial
from p2pnode.overlay.local_node import LocalNode
from p2pnode.overlay.peers import Activity
from tests.harness.environment.simulated import MemoryDisk, make_environment
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by

MBIT = 125_000.0


def send(rate: LineRate, bytes_per_s: float, seconds: float, *, is_busy: bool = True) -> None:
    for _ in range(round(seconds / WINDOW_S)):
        rate.window(WINDOW_S, round(bytes_per_s * WINDOW_S), is_busy=is_busy)


def test_a_rate_is_unknown_until_enough_was_measured() -> None:
    """Idle windows and too few busy ones show nothing; the third busy one does, also after a pause."""
    rate = LineRate()
    send(rate, 0.0, 10.0, is_busy=False)
    send(rate, 20 * MBIT, (MIN_WINDOWS - 1) * WINDOW_S)
    assert rate.bytes_per_s is None
    send(rate, 0.0, 60.0, is_busy=False)
    assert rate.bytes_per_s is None
    send(rate, 20 * MBIT, WINDOW_S)
    assert rate.bytes_per_s == pytest.approx(20 * MBIT)


def test_idle_time_and_slow_peers_do_not_lower_a_rate() -> None:
    """Of a push to fast peers and then to a slow one alone the fast part is the line's rate."""
    rate = LineRate()
    for _ in range(6):
        send(rate, 100 * MBIT, 1.0)
        send(rate, 5 * MBIT, 8.0)
        send(rate, 0.0, 20.0, is_busy=False)

    assert rate.bytes_per_s == pytest.approx(100 * MBIT)


def test_one_window_that_is_far_too_fast_does_not_count() -> None:
    """A single outlier in a round is not the second largest rate."""
    rate = LineRate()
    send(rate, 20 * MBIT, 2.0)
    rate.window(WINDOW_S, 50_000_000, is_busy=True)
    send(rate, 21 * MBIT, 2.0)

    assert rate.bytes_per_s == pytest.approx(21 * MBIT)


def test_a_slower_line_is_known_after_five_rounds_and_a_faster_one_at_once() -> None:
    """The largest of the last rounds counts, and a round that shows more."""
    rate = LineRate()
    for _ in range(8):
        send(rate, 100 * MBIT, ROUND_S)
    for _ in range(ROUNDS - 1):
        send(rate, 5 * MBIT, ROUND_S)
        assert rate.bytes_per_s == pytest.approx(100 * MBIT)
    send(rate, 5 * MBIT, ROUND_S)
    assert rate.bytes_per_s == pytest.approx(5 * MBIT, rel=1e-3)

    send(rate, 50 * MBIT, MIN_WINDOWS * WINDOW_S)
    assert rate.bytes_per_s == pytest.approx(50 * MBIT, rel=1e-3)


def test_a_faster_line_is_known_although_nothing_waits_any_more() -> None:
    """Pushes of two seconds raise a rate that was measured on a slower line, and never lower it."""
    rate = LineRate()
    send(rate, 5 * MBIT, 2.0)
    send(rate, 0.0, 2.0, is_busy=False)
    for _ in range(MIN_WINDOWS):
        send(rate, 40 * MBIT, 2 * TOGETHER * WINDOW_S, is_busy=False)
        send(rate, 1 * MBIT, IDLE_S + WINDOW_S, is_busy=False)

    assert rate.bytes_per_s == pytest.approx(40 * MBIT)


def test_acknowledgements_that_come_in_bunches_show_no_faster_line() -> None:
    """A second's bytes in one window, the download being full: the line has a quarter of that."""
    rate = LineRate()
    for _ in range(10):
        send(rate, 0.0, (TOGETHER - 1) * WINDOW_S, is_busy=False)
        send(rate, TOGETHER * 1 * MBIT, WINDOW_S, is_busy=False)

    assert rate.bytes_per_s == pytest.approx(1 * MBIT)


def test_a_noisy_line_is_measured_within_a_fifth() -> None:
    """Windows that waver by 15 % give at most that much more than the line has."""
    seed = 3
    print(f"seed {seed}")
    rng, rate = random.Random(seed), LineRate()
    for _ in range(200):
        rate.window(
            WINDOW_S * rng.uniform(0.9, 1.5), round(20 * MBIT * WINDOW_S * rng.uniform(0.85, 1.15)), is_busy=True
        )
    assert rate.bytes_per_s is not None
    assert 0.9 * 20 * MBIT < rate.bytes_per_s < 1.28 * 20 * MBIT


def test_a_line_that_is_down_keeps_its_rate() -> None:
    """Two minutes in which everything waits and nothing arrives is no measurement of the line."""
    rate = LineRate()
    send(rate, 20 * MBIT, 2.0)
    send(rate, 0.0, 120.0)

    assert rate.bytes_per_s == pytest.approx(20 * MBIT)


def test_a_window_without_a_length_is_ignored() -> None:
    """Two readings at one moment divide nothing by zero."""
    rate = LineRate()
    for _ in range(10):
        assert rate.window(0.0, 1000, is_busy=True) is False
    assert rate.bytes_per_s is None


def test_a_line_announces_its_class_after_two_rounds_of_sending() -> None:
    """Receiving changes no class; each round of sending counts once."""
    line = MeasuredLine()
    for _ in range(400):
        line.received(WINDOW_S, round(100 * MBIT * WINDOW_S), is_busy=True)
    assert (line.capacity, line.download.bytes_per_s) == (0, pytest.approx(100 * MBIT))

    for _ in range(2):
        assert line.capacity == 0
        for _ in range(round(ROUND_S / WINDOW_S)):
            line.sent(WINDOW_S, round(20 * MBIT * WINDOW_S), is_busy=True, is_full=True)
    assert line.capacity == class_of(20 * MBIT)
    assert line.upload.bytes_per_s == pytest.approx(20 * MBIT)


def test_a_line_that_waits_for_one_slow_peer_is_known_as_a_lower_bound_only() -> None:
    """What one peer takes is less than the line carries; the rate is known when two streams wait at once."""
    line = MeasuredLine()
    for _ in range(200):
        line.sent(WINDOW_S, round(5 * MBIT * WINDOW_S), is_busy=True, is_full=False)
    assert (line.upload_bytes_per_s, line.upload.bytes_per_s) == (None, pytest.approx(5 * MBIT))
    assert split(line.capacity) == (class_of(5 * MBIT), True)

    for _ in range(200):
        line.sent(WINDOW_S, round(20 * MBIT * WINDOW_S), is_busy=True, is_full=True)
    assert line.upload_bytes_per_s == pytest.approx(20 * MBIT)
    assert split(line.capacity) == (class_of(20 * MBIT), False)

    # Two slow peers, and a short burst to the others that shows what the line can do.
    for _ in range(5):
        for _ in range(40):
            line.sent(WINDOW_S, round(5 * MBIT * WINDOW_S), is_busy=True, is_full=True)
        for _ in range(MIN_WINDOWS):
            line.sent(WINDOW_S, round(20 * MBIT * WINDOW_S), is_busy=False, is_full=False)
    assert line.upload_bytes_per_s is None
    assert split(line.capacity) == (class_of(20 * MBIT), False)


def test_jitter_changes_the_rate_of_a_full_line_little() -> None:
    """A path that stalls for half a second now and then and delivers what has piled up at once: within a sixth."""
    seed = 8
    print(f"seed {seed}")
    rng, line = random.Random(seed), MeasuredLine()
    waiting = 0.0
    for _ in range(400):
        waiting += 20 * MBIT * WINDOW_S
        if rng.random() < 0.1:
            line.sent(WINDOW_S, 1, is_busy=True, is_full=True)  # stalled
            continue
        line.sent(WINDOW_S, round(waiting), is_busy=True, is_full=True)
        waiting = 0.0

    assert line.upload.bytes_per_s is not None
    assert line.upload.bytes_per_s > 1.9 * 20 * MBIT
    assert line.upload_bytes_per_s == pytest.approx(20 * MBIT, rel=1 / 6)


def test_a_line_that_was_full_once_is_no_lower_bound_in_the_rounds_after() -> None:
    """A slow node that pushes little fills its line for two seconds of a minute: with the next round of sending the
    rate that it showed is its class, and others stop counting it among the fast ones."""
    line, rate = MeasuredLine(), 300_000.0
    for _ in range(8):
        line.sent(WINDOW_S, round(rate * WINDOW_S), is_busy=True, is_full=True)
    for _ in range(2):
        for _ in range(8):
            line.sent(WINDOW_S, 0, is_busy=False, is_full=False)
        for _ in range(MIN_WINDOWS + 1):
            line.sent(WINDOW_S, round(0.9 * rate * WINDOW_S), is_busy=True, is_full=False)
    for _ in range(8):
        line.sent(WINDOW_S, 0, is_busy=False, is_full=False)

    assert line.upload_bytes_per_s == rate
    assert line.capacity == class_of(rate)


def test_a_first_estimate_is_announced_until_what_is_sent_shows_another_class() -> None:
    """The source says which one counts, each change is told once, and the rates themselves stay unmeasured."""
    line = MeasuredLine()
    told: list[tuple[int, str]] = []
    line.on_change(lambda: told.append((line.capacity, line.capacity_source)))
    assert line.capacity_source == ""
    slow, fast = class_of(5 * MBIT), class_of(100 * MBIT)

    assert line.begin(slow, "stored")
    assert not line.begin(fast, "stored")
    assert line.upload_bytes_per_s is None
    assert told == [(slow, "stored")]
    for _ in range(3):
        for _ in range(round(ROUND_S / WINDOW_S)):
            line.sent(WINDOW_S, round(100 * MBIT * WINDOW_S), is_busy=True, is_full=True)

    assert told == [(slow, "stored"), (fast, "transfers")]


def test_a_capacity_that_was_measured_is_of_the_transfers() -> None:
    """Without a first estimate, what was sent is the source."""
    line = MeasuredLine()
    for _ in range(3 * round(ROUND_S / WINDOW_S)):
        line.sent(WINDOW_S, round(100 * MBIT * WINDOW_S), is_busy=True, is_full=True)

    assert line.capacity == class_of(100 * MBIT)
    assert line.capacity_source == "transfers"


def tried(line: MeasuredLine, count: int, moved_bytes: int, *, behind: int = 0) -> None:
    """Windows of a trial, in which what had waited for so many peers was not all delivered."""
    for _ in range(count):
        line.tried(WINDOW_S, moved_bytes, is_behind=behind > 0, has_several=behind > 1)


def test_a_line_that_is_behind_in_a_trial_shows_its_class_without_confirmation() -> None:
    """Three windows are enough; what was sent before, and stalls, do not end the trial."""
    line = MeasuredLine()
    assert line.begin_trial()
    tried(line, 1, TRIAL_BYTES - 1)
    tried(line, MIN_WINDOWS - 1, round(2 * MBIT * WINDOW_S), behind=2)
    tried(line, 20, 0, behind=2)
    assert (line.capacity, line.is_on_trial) == (UNKNOWN, True)
    tried(line, 1, round(2 * MBIT * WINDOW_S), behind=3)

    assert (line.capacity, line.is_on_trial) == (class_of(2 * MBIT), False)
    assert line.capacity_source == "transfers"
    assert not line.begin_trial()


def test_a_trial_ends_where_a_line_keeps_up() -> None:
    """It was not behind in some windows after the first 256 KiB: no rate of it is known."""
    line = MeasuredLine()
    line.begin_trial()
    tried(line, 8, TRIAL_BYTES // 8 - 1)
    tried(line, MIN_WINDOWS, 1)
    assert line.is_on_trial
    tried(line, MIN_WINDOWS + 1, 10)

    assert (line.capacity, line.is_on_trial) == (UNKNOWN, False)


def test_a_line_that_was_behind_with_one_peer_stays_on_trial() -> None:
    """That peer may be the slow one: windows in which it keeps up say nothing of the line."""
    line = MeasuredLine()
    line.begin_trial()
    tried(line, 10, 1000, behind=1)
    tried(line, 100, TRIAL_BYTES)

    assert (line.capacity, line.is_on_trial) == (UNKNOWN, True)


def test_a_rate_that_is_measured_otherwise_ends_a_trial() -> None:
    """The rate of a full line counts, without its second round."""
    line = MeasuredLine()
    line.begin_trial()
    for _ in range(MIN_FULL_WINDOWS):
        line.sent(WINDOW_S, round(5 * MBIT * WINDOW_S), is_busy=True, is_full=True)
    assert line.is_on_trial
    tried(line, 1, 0)

    assert line.capacity == class_of(5 * MBIT)


NOW = 1_800_000_000.0


class WallClock:
    def monotonic(self) -> float:
        return 5.0

    def wall(self) -> float:
        return NOW


class Lines:
    """Keeps the names of logged events."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def warning(self, event: str, **_: Any) -> None:
        self.events.append(event)


def loaded(content: bytes | None) -> tuple[MeasuredLine, list[str]]:
    disk, log, line = MemoryDisk(), Lines(), MeasuredLine()
    if content is not None:
        disk.write(CAPACITY_FILE, content)
    CapacityStore(line, make_environment(clock=WallClock(), disk=disk, log=log)).load()
    return line, log.events


def stored(capacity: int, at: float) -> bytes:
    return msgspec.json.encode(StoredCapacity(capacity, at))


@pytest.mark.parametrize("age_s", [0.0, 60.0, MAX_AGE_S - 1, -60.0])
def test_a_young_capacity_is_the_first_estimate(age_s: float) -> None:
    """Up to a day old, and also if the clock was set back since."""
    line, events = loaded(stored(7, NOW - age_s))

    assert (line.capacity, line.capacity_source) == (7, "stored")
    assert events == []


@pytest.mark.parametrize("content", [None, stored(7, NOW - MAX_AGE_S - 1), stored(7, NOW + MAX_AGE_S + 1)])
def test_an_old_capacity_does_not_count(content: bytes | None) -> None:
    """The machine may be on another line: it is as if there were none."""
    line, events = loaded(content)

    assert line.capacity == UNKNOWN
    assert events == []


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"[]", b'{"capacity": "7", "at": 1}', stored(0, NOW), stored(99, NOW), b"[" * 5000]
)
def test_a_damaged_file_is_logged_and_ignored(content: bytes) -> None:
    """Whatever it holds, the node starts."""
    line, events = loaded(content)

    assert line.capacity == UNKNOWN
    assert events == ["stored_capacity_unreadable"]


@run_by(asyncio.run)
async def test_a_capacity_is_written_once_and_a_stored_one_keeps_its_age() -> None:
    """A capacity that was only read again does not become younger; another one is written with its time."""
    disk, line = MemoryDisk(), MeasuredLine()
    disk.write(CAPACITY_FILE, stored(7, NOW - 3600.0))
    store = CapacityStore(line, make_environment(clock=WallClock(), disk=disk))
    store.load()
    await store.write()
    assert disk.files[CAPACITY_FILE] == stored(7, NOW - 3600.0)

    for _ in range(200):
        line.sent(0.25, 3_000_000, is_busy=True, is_full=True)
    await store.write()
    assert disk.files[CAPACITY_FILE] == stored(line.capacity, NOW)
    assert line.capacity != 7


def test_nothing_is_written_of_a_line_that_is_not_known() -> None:
    """A node that never sent anything leaves no file."""
    disk = MemoryDisk()
    asyncio.run(CapacityStore(MeasuredLine(), make_environment(clock=WallClock(), disk=disk)).write())

    assert disk.files == {}


@run_by(asyncio.run)
async def test_a_disk_that_fails_is_logged_once() -> None:
    """The node runs without the file, and tries again at the next change."""

    class FullDisk(MemoryDisk):
        def write(self, *_: Any, **__: Any) -> None:
            raise OSError("no space left on device")

    log, line = Lines(), MeasuredLine()
    store = CapacityStore(line, make_environment(disk=FullDisk(), log=log))
    line.begin(7, "transfers")
    await store.write()
    await store.write()
    assert log.events == ["capacity_not_stored"]


OWN, OTHER = "10.0.0.1", "10.0.0.2"


def peer(host: str = OTHER, *, eligible: bool = True, activity: Activity = Activity.TRAINING) -> Any:
    return SimpleNamespace(address=Address(host, 1), eligible=eligible, activity=activity)


class World:
    """A joiner that others reach and that is willing, and its peers."""

    def __init__(self, *peers: Any, line: bool = True) -> None:
        self.local = LocalNode(b"n" * 20, 1, 1, "run", Address(OWN, 1))
        self.local.set_reached(True)
        self.peers = list(peers)
        transport: Any = SimpleNamespace(has_line_to=lambda _: line)
        clock: Any = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
        self.trial = LineTrial(self.local, transport, self.peers, clock)  # type: ignore[arg-type]

    @property
    def may_own(self) -> bool:
        return self.local.heartbeat.eligible


def play(world: World, scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        assert world.trial.begin()
        assert not world.may_own
        running = asyncio.create_task(world.trial.run())
        await asyncio.sleep(HEARD_S + LOOK_S)
        await scenario()
        await asyncio.sleep(LOOK_S)
        assert world.may_own
        running.cancel()

    run(main(), limit_s=600)


def test_a_joiner_of_a_swarm_in_training_may_not_own_before_its_line_is_known() -> None:
    """It has sent much and was not behind; or its first rate is known, and the pushes of another step have told it."""

    def kept_up(world: World) -> None:
        for _ in range(MIN_WINDOWS + 1):
            world.local.line.tried(WINDOW_S, TRIAL_BYTES, is_behind=False, has_several=False)

    def was_behind(world: World) -> None:
        for _ in range(MIN_WINDOWS):
            world.local.line.tried(WINDOW_S, 30_000, is_behind=True, has_several=True)

    for show in (kept_up, was_behind):
        world = World(peer(), peer())

        async def scenario(world: World = world, show: Callable[[World], None] = show) -> None:
            await asyncio.sleep(TRIAL_S / 2)
            assert not world.may_own
            show(world)
            if show is was_behind:
                await asyncio.sleep(1.0)
                assert not world.may_own, "the owners have not heard its class"
                world.local.announce(step=2)

        play(world, scenario)
        assert (world.local.line.capacity != 0) == (show is was_behind)


def test_a_trial_has_an_end() -> None:
    """A node that sends nothing may own after two minutes."""
    world = World(peer(), peer())

    async def scenario() -> None:
        await asyncio.sleep(TRIAL_S - HEARD_S - 2 * LOOK_S)
        assert not world.may_own
        await asyncio.sleep(2 * LOOK_S)

    play(world, scenario)


@pytest.mark.parametrize(
    "peers",
    [
        [peer()],
        [peer(), peer(eligible=False)],
        [peer(), peer(activity=Activity.READY), peer(activity=Activity.READY)],
    ],
    ids=["a swarm of one", "one that may own", "all new"],
)
def test_where_fewer_than_two_others_may_own_a_joiner_may_at_once(peers: list[Any]) -> None:
    """Once it has heard its members."""

    async def scenario() -> None:
        """Nothing has to happen."""

    play(World(*peers), scenario)


def test_a_joiner_may_own_as_soon_as_it_is_needed() -> None:
    """Of two others one dies: every shard needs an owner and a backup."""
    world = World(peer(), peer())

    async def scenario() -> None:
        assert not world.may_own
        del world.peers[0]

    play(world, scenario)


def test_no_line_no_trial() -> None:
    """A founder, a node whose capacity is stored, one whose members are all on its machine, and a second arrival."""
    founder = World(peer(), peer())
    founder.trial.skip()
    known = World(peer(), peer())
    known.local.line.begin(5, "stored")
    again = World(peer(), peer())
    assert again.trial.begin()
    for world in (founder, known, World(peer(), line=False), World(peer(OWN)), again):
        assert not world.trial.begin()
    assert known.may_own

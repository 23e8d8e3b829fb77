"""Values enter while the node trains: the exchange beside the training of what follows, over fakes that record it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest

from p2pnode.overlay.peers import Activity
from p2pnode.training.trainer_link.interface import TrainerFailed
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by
from tests.harness.stubs.step_bench import LoopBench


def bench_of(**training: Any) -> LoopBench:
    """Turns of 1 s; a push takes 0.2 s, a barrier 0.1 s, a pull 0.3 s."""
    bench = LoopBench(**training)
    bench.exchange.push_s, bench.wait_s, bench.exchange.pull_s = 0.2, 0.1, 0.3
    return bench


def handed_over(bench: LoopBench) -> Any:
    return sum(np.asarray(delta, np.float64) for delta in bench.exchange.deltas)


@run_by(run)
async def test_the_trainer_stands_still_for_its_barrier_and_for_nothing_else() -> None:
    """Values of a step enter while the next one is trained; the last ones enter before the run ends."""
    bench = bench_of(max_steps=3)
    began = bench.clock.monotonic()
    assert await bench.run() == "max_steps"

    turn = ("waited", "began", "pushed", "pulled", "entered")
    turns = [(part, step + (part == "began")) for step in (1, 2) for part in turn]
    last = [("waited", 3), ("pushed", 3), ("pulled", 3), ("entered", 3)]
    assert bench.exchange.history == [("began", 1), *turns, *last]
    assert bench.clock.monotonic() - began == pytest.approx(3 * 1.0 + 2 * 0.1 + 0.5)
    assert [round(row["idle_seconds"], 6) for row in bench.progress.steps] == [0.0, 0.1, 0.1]
    assert bench.exchange.compared == 3


@run_by(run)
async def test_under_bsp_a_step_begins_when_the_values_of_the_last_one_have_entered() -> None:
    """The same loop with another predicate: all have pushed, then the values have all deltas."""
    bench = bench_of(max_steps=2)
    bench.exchange.synchronous = True
    bench.loop = bench.make_loop()
    await bench.run()

    step = ("began", "pushed", "waited", "pulled", "entered")
    assert bench.exchange.history == [(part, number) for number in (1, 2) for part in step]


@run_by(run)
async def test_while_a_delta_is_exchanged_progress_adds_up() -> None:
    """An exchange of 2.5 s beside steps of 1 s: each third step has a delta, with all that was trained, and the rest
    goes out at the end. Each step has one row, in order. The others are told the samples of a whole delta, by which
    they weigh their own."""
    bench = LoopBench(max_steps=8)
    bench.exchange.push_s = 2.5
    began = bench.clock.monotonic()
    await bench.run()

    assert [step for step, *_ in bench.exchange.pushes] == [1, 4, 7, 8]
    assert np.array_equal(handed_over(bench), bench.trainer.expected(list(range(1, 9))))
    assert [told["samples"] for told in bench.swarm.announced if told.get("samples")] == [64, 192, 192, 64]
    assert bench.clock.monotonic() - began == pytest.approx(1.0 + 2.5 + 0.5 + 2.5 + 0.5 + 2.5 + 2.5)
    assert [row["step"] for row in bench.progress.steps] == list(range(1, 9))
    assert bench.progress.training_share == pytest.approx(1.0)


@run_by(run)
async def test_what_was_not_sent_is_progress_again_and_what_did_not_arrive_is_held() -> None:
    """The trainer is told which values lack its delta, and which part of the delta never left."""
    bench = bench_of(max_steps=3)
    bench.exchange.returned = (0,)
    running = asyncio.create_task(bench.run())
    await asyncio.sleep(1.7)
    bench.exchange.returned, bench.exchange.missing = (), [0]
    await running

    assert bench.trainer.arrivals == [(1, [], [(0, 8)]), (2, [(0, 8)], []), (3, [(0, 8)], [])]
    first, second, _ = bench.exchange.deltas
    assert np.array_equal(second, first + bench.trainer.expected([2]))


@run_by(run)
async def test_a_value_that_is_older_than_its_owners_state_lacks_the_delta() -> None:
    """Owners publish values from time to time: what is pulled may be from before the push."""
    bench = bench_of(max_steps=3)
    bench.exchange.added_version, bench.exchange.pulled_version = 5, 4
    running = asyncio.create_task(bench.run())
    await asyncio.sleep(1.7)
    bench.exchange.pulled_version = 5
    await running

    assert bench.trainer.added == [[(0, 8)], [], []]
    assert bench.trainer.arrivals == [(1, [], []), (2, [], []), (3, [], [])]


@run_by(run)
async def test_a_trainer_that_crashes_begins_with_values_that_have_its_delta() -> None:
    """The exchange under way ends first; what was trained since the last delta is trained again."""
    bench = bench_of(max_steps=3)
    bench.exchange.push_s = 5.0
    running = asyncio.create_task(bench.run())
    await asyncio.sleep(1.5)  # step 2, which has no delta
    bench.trainer.crash_next()
    await running

    history = bench.exchange.history
    assert [step for step, *_ in bench.exchange.pushes] == [1, 3]
    restarted = [place for place, one in enumerate(history) if one == ("began", 3)][1]
    assert history.index(("entered", 1)) < restarted


@run_by(run)
async def test_the_last_delta_is_pushed_as_such() -> None:
    """It is known when its training has ended; none before it is."""
    bench = bench_of(max_steps=4)
    await bench.run()
    assert bench.exchange.lasts == [4]


@run_by(run)
async def test_a_failed_trainer_leaves_no_step_uncounted() -> None:
    """The push is waited for before the run fails."""
    bench = bench_of()
    bench.exchange.push_s = 3.0
    running = asyncio.create_task(bench.run())
    await asyncio.sleep(1.5)
    bench.trainer.fail_start = TrainerFailed("its memory is broken", fatal=True)
    bench.trainer.crash_next()
    with pytest.raises(TrainerFailed):
        await running
    assert bench.exchange.steps[-1] == 1


@run_by(run)
async def test_a_delta_that_is_not_finite_is_not_pushed() -> None:
    """The trainer has taken it back; the step is counted, with the reason."""
    bench = bench_of(max_steps=2)
    train = bench.trainer.train

    async def spoilt(order: Any) -> Any:
        report = await train(order)
        return msgspec.structs.replace(report, is_finite=order.step != 1)

    bench.trainer.train = spoilt  # type: ignore[method-assign]
    await bench.run()
    assert [step for step, *_ in bench.exchange.pushes] == [2]
    assert bench.progress.steps[0]["refused"] == {"not_finite": 1}
    assert bench.exchange.steps == [0, 1, 2]
    assert Activity.STALLED not in bench.swarm.activities


@pytest.mark.parametrize("synchronous", [False, True])
@run_by(run)
async def test_a_fault_in_an_exchange_ends_the_run(synchronous: bool) -> None:
    """Beside training too: without its end no step would have a delta again, and the node would train by itself."""
    bench = bench_of(max_steps=50)
    bench.exchange.synchronous = synchronous
    bench.loop = bench.make_loop()

    async def pull(*_: object) -> Any:
        raise OSError("a fault")

    bench.exchange.pull = pull  # type: ignore[method-assign]
    with pytest.raises(OSError, match="a fault"):
        await bench.run()
    assert len(bench.trainer.orders) <= 2


@run_by(run)
async def test_a_fault_in_the_last_exchange_of_a_script_that_leaves_is_logged() -> None:
    """The run ends as the script has wanted; that the shared model may lack its last delta is said."""
    bench = bench_of()

    async def push(_step: int, *_: Any, **__: Any) -> Any:
        await asyncio.sleep(3.0)
        raise OSError("a fault")

    bench.exchange.push = push  # type: ignore[method-assign]
    bench.trainer.leave_after(1)
    assert await bench.run() == "script"
    assert ["a fault" in one.fields["error"] for one in bench.records if one.event == "last_exchange_failed"] == [True]


@run_by(run)
async def test_a_trainer_that_starts_again_is_told_nothing_of_the_delta_of_the_one_before() -> None:
    """An evaluation fails while a delta is exchanged: what was sent of it would be taken from what the new one begins
    with, and pushed as its negative. Nor does it read values that a pull is writing."""
    bench = bench_of(max_steps=4, eval_steps=1)
    bench.exchange.push_s = 0.7
    history = bench.exchange.history
    failures = [1]

    async def evaluate(_step: int) -> None:
        if failures:
            failures.pop()
            raise TrainerFailed("evaluate() raised")

    start, encoded = bench.trainer.start, bench.trainer.encoded

    async def noted(restore: str = "", **named: Any) -> Any:
        history.append(("started", len(history)))
        return await start(restore, **named)

    def told() -> None:
        history.append(("encoded", 0))
        encoded()

    bench.trainer.evaluate = evaluate  # type: ignore[method-assign]
    bench.trainer.start = noted  # type: ignore[method-assign]
    bench.trainer.encoded = told  # type: ignore[method-assign]
    await bench.run()

    parts = [part for part, _ in history if part in ("encoded", "entered", "started")]
    assert parts.count("started") == 2
    again = len(parts) - 1 - parts[::-1].index("started")
    assert parts[again - 1] == "entered"
    assert np.array_equal(handed_over(bench), bench.trainer.expected([1, 2, 3, 4]))


@run_by(run)
async def test_a_turn_that_only_waited_for_data_changes_no_loss() -> None:
    """It reports what has added up, without an optimiser step."""
    bench = bench_of(max_steps=2)
    train = bench.trainer.train

    async def waited(order: Any) -> Any:
        report = await train(order)
        is_first = order.step == 1
        return report if is_first else msgspec.structs.replace(report, optimizer_steps=0, loss=float("nan"))

    bench.trainer.train = waited  # type: ignore[method-assign]
    await bench.run()
    assert bench.progress.loss == 1.0


@run_by(run)
async def test_a_paused_node_holds_back_nothing_that_it_has_trained() -> None:
    """It may never go on: what it trained while its last delta was exchanged goes out before it rests."""
    bench = bench_of(max_steps=20)
    bench.trainer.waits, bench.exchange.push_s = False, 2.5
    running = asyncio.create_task(bench.run())
    await asyncio.sleep(1.5)
    bench.loop.pause()
    await asyncio.sleep(30.0)

    assert bench.trainer.trained == [1, 2]
    assert np.array_equal(handed_over(bench), bench.trainer.expected())
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

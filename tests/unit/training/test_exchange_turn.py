"""The exchange of a step beside the training of the next one, in the step loop over fakes that record what it calls."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from overlay.peers import Activity
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.step_bench import LoopBench
from training.settings import ExchangeSettings
from training.trainer_link.interface import Evaluation, TrainerFailed

OVERLAP = ExchangeSettings(overlap=True)


def bench_of(**training: Any) -> LoopBench:
    """Turns of 1 s; push, barrier and pull take 0.8 s together."""
    bench = LoopBench(exchange=OVERLAP, **training)
    bench.exchange.push_s, bench.wait_s, bench.exchange.pull_s = 0.2, 0.3, 0.3
    return bench


def carries(bench: LoopBench) -> list[float]:
    return [order.carry for order in bench.trainer.orders]


def test_a_step_is_trained_while_the_one_before_is_exchanged() -> None:
    """The first turn begins with the vector, each later one with what the vector lacks; the trainer never stands
    still, and the last exchange ends before the run does."""

    async def scenario() -> None:
        bench = bench_of(max_steps=4)
        began = bench.clock.monotonic()
        assert await bench.run() == "max_steps"

        parts = ("began", "pushed", "waited", "pulled")
        turns = [(part, step + (part == "began")) for step in range(1, 4) for part in parts]
        assert bench.exchange.history == [("began", 1), *turns, ("pushed", 4), ("waited", 4), ("pulled", 4)]
        assert carries(bench) == [0.0, 1.0, 1.0, 1.0]
        assert bench.clock.monotonic() - began == pytest.approx(4 * 1.0 + 0.8)
        assert bench.exchange.steps == [0, 1, 2, 3, 4]
        assert bench.progress.training_share == pytest.approx(1.0)
        assert bench.without_grace == [1, 2, 3, 4]

    run(scenario())


def test_a_turn_that_begins_with_a_delta_waits_until_it_is_prepared() -> None:
    """What sparse deltas lacked is added to a delta before the next turn begins with it and before it is pushed."""

    async def scenario() -> None:
        bench = bench_of(max_steps=3)
        bench.exchange.prepare_s = 0.1
        await bench.run()

        history, prepared = bench.exchange.history, bench.exchange.prepared
        assert len(prepared) == 3
        for step, place in enumerate(prepared, 1):
            assert history.index(("began", step)) < place <= history.index(("pushed", step))
            if step < 3:
                assert place <= history.index(("began", step + 1))

    run(scenario())


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("limits", [{"max_steps": 4}, {"max_seconds": 3.5}])
def test_the_last_step_is_pushed_as_such(overlap: bool, limits: dict[str, Any]) -> None:
    """It is known when its training has ended, after so many steps or so much time; none before it is."""

    async def scenario() -> None:
        bench = LoopBench(exchange=ExchangeSettings(overlap=overlap), **limits)
        await bench.run()

        assert [step for step, *_ in bench.exchange.pushes] == [1, 2, 3, 4]
        assert bench.exchange.lasts == [4]

    run(scenario())


def test_the_rows_of_steps_that_overlap_say_how_long_each_part_took() -> None:
    """Each part is that of its own step, although two steps are under way; the trainer did not stand still."""

    async def scenario() -> None:
        bench = bench_of(max_steps=3)
        await bench.run()

        rows = list(bench.progress.steps)
        assert [row["step"] for row in rows] == [1, 2, 3]
        for row in rows:
            parts = {part: round(row[part], 6) for part in ("train_seconds", "idle_seconds")}  # type: ignore[literal-required]
            assert parts == {"train_seconds": 1.0, "idle_seconds": 0.0}
            assert row["push_seconds"] == pytest.approx(0.2)
            assert row["pull_seconds"] == pytest.approx(0.3)

    run(scenario())


def test_by_default_a_long_exchange_is_hidden_and_a_short_one_is_not() -> None:
    """Exchanges of 2 s, then of none, beside turns of 1 s: each turn begins with what the vector lacks, or with nothing
    else, and no step is exchanged twice or out of order."""

    async def scenario() -> None:
        bench = LoopBench(exchange=ExchangeSettings(carry=0.0), max_steps=30)
        bench.exchange.push_s = 2.0
        running = asyncio.create_task(bench.run())
        while len(bench.exchange.pushes) < 6:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.5)
        bench.exchange.push_s = 0.0
        assert await running == "max_steps"

        begins = carries(bench)
        hidden = [number for number, carry in enumerate(begins) if carry]
        assert hidden == list(range(hidden[0], hidden[-1] + 1))
        assert (hidden[0], 16 <= hidden[-1] <= 18) == (3, True)
        assert [step for step, _, _ in bench.exchange.pushes] == list(range(1, 31))
        assert bench.exchange.pulls == list(range(1, 31))
        assert bench.exchange.overlaps == [False, True, False]
        assert len(bench.events("overlap_on")) == len(bench.events("overlap_off")) == 1

    run(scenario())


def test_a_node_whose_line_is_slower_than_its_turns_waits_for_it() -> None:
    """One exchange at most is in flight: three times as slow, the trainer trains a third of the time."""

    async def scenario() -> None:
        bench = bench_of(max_steps=30)
        bench.exchange.push_s = 2.4
        await bench.run()

        history = [event for event in bench.exchange.history if event[0] in ("began", "pulled")]
        for step in range(3, 31):
            assert history.index(("pulled", step - 2)) < history.index(("began", step))
        assert bench.progress.training_share == pytest.approx(1 / 3, abs=0.01)
        assert bench.progress.steps[-1]["idle_seconds"] == pytest.approx(2.0)

    run(scenario())


def test_the_barrier_of_a_step_passes_before_the_step_after_the_next_begins() -> None:
    """So a node may be one step further ahead than without overlap, and no more."""

    async def scenario() -> None:
        bench = bench_of(max_steps=6)
        bench.wait_s = 5.0
        await bench.run()

        for step in range(3, 7):
            assert bench.exchange.history.index(("waited", step - 2)) < bench.exchange.history.index(("began", step))

    run(scenario())


def test_a_pull_waits_until_the_trainer_has_loaded() -> None:
    """It would tear the values that the next step begins with: the exchange says so if anybody writes meanwhile."""

    async def scenario() -> None:
        bench = bench_of(max_steps=4)
        bench.trainer.load_s = 3.0
        await bench.run()
        assert bench.exchange.pulls == [1, 2, 3, 4]

    run(scenario())


def test_a_delta_is_pushed_with_the_base_that_its_turn_began_with() -> None:
    """The median of the swarm when that base was pulled, which is one exchange ago."""

    async def scenario() -> None:
        bench = bench_of(max_steps=4)
        bench.exchange.view.median_step = lambda: 10 + len(bench.exchange.pulls)
        bench.exchange.context.stale_limit = None
        await bench.run()

        assert bench.exchange.pushes == [(1, 0, 0.25), (2, 0, 0.25), (3, 10, 0.25), (4, 11, 0.25)]

    run(scenario())


@pytest.mark.parametrize("exchange", [OVERLAP, ExchangeSettings(overlap=True, enabled=False)])
def test_nothing_overlaps_under_bsp_or_without_an_exchange(exchange: ExchangeSettings) -> None:
    """Each step begins with the values of all, as without the setting; under bsp the log says so once."""

    async def scenario() -> None:
        bench = LoopBench(max_steps=3, exchange=exchange)
        bench.exchange.context.synchronous = exchange.enabled
        plain = LoopBench(max_steps=3, exchange=ExchangeSettings(enabled=exchange.enabled))
        bench.loop = bench.make_loop()
        for each in (bench, plain):
            await each.run()

        assert bench.exchange.history == plain.exchange.history
        assert carries(bench) == [0.0, 0.0, 0.0]
        assert len(bench.events("overlap_off")) == exchange.enabled

    run(scenario())


def test_a_paused_node_has_nothing_in_flight() -> None:
    """What it trained is delivered, and after the pause it begins with the values of the others, carrying nothing."""

    async def scenario() -> None:
        bench = bench_of(max_steps=12)
        running = asyncio.create_task(bench.run())
        await asyncio.sleep(1.5)
        bench.loop.pause()
        await asyncio.sleep(5.0)
        assert bench.trainer.trained == [1, 2]
        assert bench.exchange.pulls == [1, 2]
        bench.exchange.median = 10
        bench.loop.resume()
        await running

        assert bench.swarm.activities() == [Activity.TRAINING, Activity.PAUSED, Activity.TRAINING]
        assert bench.trainer.trained == [1, 2, 11, 12]
        assert carries(bench) == [0.0, 1.0, 0.0, 1.0]
        assert [base for _, base, _ in bench.exchange.pushes] == [0, 0, 10, 10]

    run(scenario())


def test_a_node_that_fell_behind_drops_what_it_trained_meanwhile() -> None:
    """That is as late as the delta before it: it is neither pushed nor carried, and its number stays unused."""

    async def scenario() -> None:
        bench = bench_of(max_steps=41)
        running = asyncio.create_task(bench.run(20))
        await asyncio.sleep(1.5)
        bench.exchange.median = 39
        await running

        assert bench.trainer.trained == [21, 22, 40, 41]
        assert [step for step, _, _ in bench.exchange.pushes] == [21, 40, 41]
        assert carries(bench) == [0.0, 1.0, 0.0, 1.0]
        assert bench.events("caught_up") == [{"was": 21, "step": 39}]
        assert bench.events("late_step_dropped") == [{"step": 22, "samples": 64}]
        assert {"late": 1} in bench.progress.refusals
        assert bench.progress.samples == 3 * 64
        announced = [changes["step"] for changes in bench.swarm.announced if "step" in changes]
        assert announced == sorted(announced)

    run(scenario())


def test_a_trainer_that_crashes_while_its_delta_is_under_way_begins_with_the_pulled_values() -> None:
    """The delta is in them, so the repeated step carries nothing; no step is pushed twice."""

    async def scenario() -> None:
        bench = bench_of(max_steps=4)
        bench.loop.restart_from("trainer.state")
        running = asyncio.create_task(bench.run())
        await asyncio.sleep(1.1)
        bench.trainer.crash_next(1)  # from the next order on
        await running

        assert [order.step for order in bench.trainer.orders] == [1, 2, 3, 3, 4]
        assert carries(bench) == [0.0, 1.0, 1.0, 0.0, 1.0]
        history = bench.exchange.history
        again = len(history) - 1 - history[::-1].index(("began", 3))
        assert history.index(("pulled", 2)) < again
        assert [step for step, _, _ in bench.exchange.pushes] == [1, 2, 3, 4]
        assert bench.trainer.restored == ["trainer.state"]

    run(scenario())


def test_evaluations_are_of_the_shared_values_between_two_turns() -> None:
    """The vector of step t is evaluated after turn t+1, before the next exchange writes into it."""

    async def scenario() -> None:
        bench = bench_of(max_steps=4, eval_steps=1)
        seen: list[tuple[int, float]] = []

        async def evaluate(step: int) -> Evaluation:
            before = bench.trainer.vector.copy()
            await asyncio.sleep(2.0)
            assert (bench.trainer.vector == before).all()
            seen.append((step, float(before[0])))
            return Evaluation(step, {"mean": 0.0}, 1)

        bench.trainer.evaluate = evaluate  # type: ignore[method-assign]
        await bench.run()
        assert seen == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]

    run(scenario())


def test_the_last_deltas_are_delivered_before_the_loop_is_cancelled() -> None:
    """One that waits for a long barrier is pushed now: neither barrier nor pull matter to a node that leaves. Nothing
    more is trained."""

    async def scenario() -> None:
        bench = bench_of()
        bench.wait_s = 60.0
        running = asyncio.create_task(bench.run())
        await asyncio.sleep(5.0)
        assert [step for step, _, _ in bench.exchange.pushes] == [1]
        assert bench.trainer.trained == [1, 2]
        await bench.loop.finish_push(1.0)
        assert [step for step, _, _ in bench.exchange.pushes] == [1, 2]
        assert bench.progress.step == 2
        await asyncio.sleep(5.0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert bench.trainer.trained == [1, 2]
        assert bench.exchange.pulls == []

    run(scenario())


def test_a_leaving_node_delivers_a_step_that_waits_behind_a_slow_push() -> None:
    """Both count: the step whose push has begun, and the one that is trained already."""

    async def scenario() -> None:
        bench = bench_of()
        bench.exchange.push_s = 2.0
        running = asyncio.create_task(bench.run())
        await asyncio.sleep(2.5)
        assert (bench.trainer.trained, bench.exchange.pushes) == ([1, 2], [])
        await bench.loop.finish_push(10.0)
        assert [step for step, _, _ in bench.exchange.pushes] == [1, 2]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    run(scenario())


def test_a_push_that_takes_too_long_is_cut_short() -> None:
    """The node leaves, and says so; the exchange ends with the loop."""

    async def scenario() -> None:
        bench = bench_of()
        bench.exchange.push_s = 30.0
        running = asyncio.create_task(bench.run())
        await asyncio.sleep(1.5)
        await bench.loop.finish_push(1.0)
        assert bench.events("step_cut_short") == [{"step": 1}]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

    run(scenario())


@pytest.mark.parametrize("fails", [False, True])
def test_a_trainer_that_ends_leaves_its_last_delta_to_the_swarm(fails: bool) -> None:
    """A script that returns, or a failure that no restart helps: what is in flight is pushed, and not waited for."""

    async def scenario() -> None:
        bench = bench_of()
        bench.wait_s = 60.0
        if fails:
            bench.trainer.load = lambda order: failing(order.step)  # type: ignore[method-assign]
            with pytest.raises(TrainerFailed):
                await bench.run()
        else:
            bench.trainer.leave_after(1)
            assert await bench.run() == "script"
        assert [step for step, _, _ in bench.exchange.pushes] == [1]
        assert bench.exchange.pulls == []
        assert bench.progress.step == 1

    async def failing(step: int) -> None:
        if step == 2:
            raise TrainerFailed("the data is gone", fatal=True)

    run(scenario())


def test_a_trainer_whose_deltas_stay_not_finite_starts_again_beside_an_exchange() -> None:
    """Refusals are known one turn later; three in a row start it again, as without overlap."""

    async def scenario() -> None:
        bench = bench_of(max_steps=9)
        bench.loop.restart_from("trainer.state")
        bench.exchange.not_finite = range(2, 6)
        await bench.run()

        assert bench.trainer.restored == ["trainer.state"]
        assert bench.trainer.trained == list(range(1, 10))

    run(scenario())

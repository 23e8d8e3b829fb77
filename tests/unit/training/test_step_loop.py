"""The training loop over a stub trainer and an exchange that records its calls."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from p2pnode.overlay.peers import Activity
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.step_loop import CRASH_LOOP_FAILURES
from p2pnode.training.trainer_link.interface import Evaluation, StepOrder, StepReport, TrainerFailed
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by
from tests.harness.stubs.step_bench import LoopBench


@run_by(run)
async def test_an_order_says_which_of_the_workers_this_node_is() -> None:
    """Workers with lower ids come before it; a paused peer does not count. Number 0 is the first."""
    for ids, index in [([], 0), ([b"n" * 20], 0), ([b"a" * 20, b"b" * 20, b"z" * 20], 2)]:
        bench = LoopBench(max_steps=1)
        bench.swarm.others = [
            SimpleNamespace(node_id=node_id, is_worker=lambda _: True, activity=Activity.TRAINING, samples=0, step=0)
            for node_id in ids
        ]
        paused = SimpleNamespace(node_id=b"c" * 20, is_worker=lambda _: False, activity=Activity.PAUSED)
        bench.swarm.others.append(paused)
        await bench.run()
        [order] = bench.trainer.orders
        assert (order.node_index, order.is_first) == (index, index == 0)


@run_by(run)
async def test_a_step_is_trained_pushed_counted_waited_for_and_pulled() -> None:
    """From the start step on, until `max_steps`; each step has a row."""
    bench = LoopBench(max_steps=7)
    assert await bench.run(4) == "max_steps"

    assert bench.trainer.trained == [5, 6, 7]
    assert [(step, weight) for step, _, weight in bench.exchange.pushes] == [(5, 0.25), (6, 0.25), (7, 0.25)]
    assert bench.waits == bench.exchange.pulls == [5, 6, 7]
    assert bench.exchange.steps == [4, 5, 6, 7]
    assert [row["step"] for row in bench.progress.steps] == [5, 6, 7]
    assert [row["wait_seconds"] for row in bench.progress.steps] == [0.0, 0.25, 0.25]
    assert bench.progress.merged_last_step == 1


@run_by(run)
async def test_the_share_of_training_counts_all_that_keeps_the_trainer_waiting() -> None:
    """Turns of 1 s, and barriers of 2 s between them; a pause of the user's counts for nothing."""
    bench = LoopBench(max_steps=3)
    bench.wait_s = 2.0
    running = asyncio.create_task(bench.run())
    await asyncio.sleep(1.5)
    bench.loop.pause()
    await asyncio.sleep(50.0)
    bench.loop.resume()
    await running

    assert [round(row["idle_seconds"], 6) for row in bench.progress.steps] == [0.0, 0.0, 2.0]
    assert bench.progress.training_share == pytest.approx(3.0 / 5.0)


@run_by(run)
async def test_a_run_ends_after_max_seconds() -> None:
    """The step that is running then is completed."""
    bench = LoopBench(max_seconds=2.5)
    assert await bench.run() == "max_seconds"
    assert bench.trainer.trained == [1, 2, 3]


@run_by(run)
async def test_a_goal_must_hold_in_two_evaluations_in_a_row() -> None:
    """One lucky evaluation does not end the run."""
    bench = LoopBench(until="mean>=0.5", eval_steps=1)
    means = iter([0.6, 0.1, 0.7, 0.8, 0.8])

    async def evaluate(step: int) -> Any:
        return SimpleNamespace(step=step, samples=10, metrics={"mean": next(means)})

    bench.trainer.evaluate = evaluate  # type: ignore[method-assign]
    assert await bench.run() == "until"
    # The fifth was trained while the fourth was exchanged.
    assert bench.progress.step == 5
    assert bench.progress.evaluated_metrics == {"mean": 0.8}


@run_by(run)
async def test_a_paused_node_continues_at_the_step_of_the_others() -> None:
    """It announces the pause, and pulls before it trains again."""
    bench = LoopBench(max_steps=12)
    running = asyncio.create_task(bench.run())
    await asyncio.sleep(1.5)
    bench.loop.pause()
    await asyncio.sleep(5.0)
    assert bench.trainer.trained == [1, 2]
    bench.exchange.median = 10
    bench.loop.resume()
    await running

    assert bench.swarm.activities == [Activity.TRAINING, Activity.PAUSED, Activity.TRAINING]
    assert bench.trainer.trained == [1, 2, 11, 12]
    assert [base for _, base, _ in bench.exchange.pushes] == [0, 0, 10, 10]


@run_by(run)
async def test_a_node_that_fell_behind_jumps_to_the_step_of_the_others() -> None:
    """More steps than the stale limit were made during one of its own: it does not make the others wait."""
    bench = LoopBench(max_steps=40)
    bench.exchange.median = 39
    await bench.run(20)

    assert [step for step, *_ in bench.exchange.pushes] == [21, 40]
    assert bench.events("caught_up") == [{"was": 21, "step": 39}]
    assert {"step": 39} in bench.swarm.announced


@pytest.mark.parametrize("away_s", [11.0, 9.0])
@run_by(run)
async def test_a_node_that_was_away_asks_the_others_and_goes_on_where_they_are(away_s: float) -> None:
    """They are five steps further, one more than they wait for. What they answer counts, not what was known of them.
    One that was there makes up what the barrier allows."""
    bench = LoopBench(max_steps=12)
    running = asyncio.create_task(bench.run())
    await asyncio.sleep(1.5)
    bench.exchange.push_s = bench.wait_s = away_s  # as if the process had been stopped in its second step
    bench.exchange.median, known = 7, bench.exchange.view.median_step
    bench.exchange.view.median_step = lambda: min(known(), 2)
    await asyncio.sleep(1.0)
    bench.exchange.push_s = bench.wait_s = 0.0
    await running

    is_away = away_s > 10.0
    assert [step for step, *_ in bench.exchange.pushes][:3] == ([1, 2, 8] if is_away else [1, 2, 3])
    assert bench.events("caught_up") == ([{"was": 2, "step": 7}] if is_away else [])
    assert (bench.exchange.asked_at > 0.0) is is_away


@run_by(run)
async def test_a_failed_trainer_is_restarted_with_backoff_and_the_step_repeated() -> None:
    """After repeated failures the node is announced as stalled until a step succeeds."""
    bench = LoopBench(max_steps=2)
    bench.loop.restart_from("trainer.state")
    bench.trainer.crash_next(CRASH_LOOP_FAILURES)
    began = bench.clock.monotonic()
    assert await bench.run() == "max_steps"

    assert bench.trainer.trained == [1, 2]
    assert bench.trainer.restored == ["trainer.state"] * CRASH_LOOP_FAILURES
    assert bench.progress.trainer_failures == CRASH_LOOP_FAILURES
    assert bench.progress.trainer_failure is None
    assert bench.swarm.activities == [Activity.TRAINING, Activity.STALLED, Activity.TRAINING]
    # Two halves of a step, pauses of 0.5 and 1 s, and two steps.
    assert bench.clock.monotonic() - began == pytest.approx(1.0 + 1.5 + 2.0, abs=0.1)


@run_by(run)
async def test_a_trainer_whose_deltas_stay_not_finite_starts_again() -> None:
    """A NaN in the optimiser's momentum spoils every delta: after three refusals in a row the trainer starts again from
    its last saved state, and the node is announced as stalled if that happens twice."""
    bench = LoopBench(max_steps=9)
    bench.loop.restart_from("trainer.state")
    bench.exchange.not_finite = range(2, 8)
    await bench.run()

    assert bench.trainer.restored == ["trainer.state"] * 2
    assert len(bench.events("trainer_failed")) == 2
    assert "not finite" in bench.events("trainer_failed")[0]["reason"]
    assert bench.swarm.activities == [Activity.TRAINING, Activity.STALLED, Activity.TRAINING]


@run_by(run)
async def test_single_deltas_that_are_not_finite_restart_nothing() -> None:
    """One batch may overflow: its delta is refused and the next one is finite again."""
    bench = LoopBench(max_steps=9)
    bench.exchange.not_finite = [1, 2, 4, 5, 7, 8]
    await bench.run()

    assert bench.trainer.starts == 1


@run_by(run)
async def test_a_fatal_failure_ends_the_run() -> None:
    """A restart cannot help: the error is raised."""
    bench = LoopBench()

    async def train(_order: Any) -> Any:
        raise TrainerFailed("no such task", fatal=True)

    bench.trainer.train = train  # type: ignore[method-assign]
    with pytest.raises(TrainerFailed, match="no such task"):
        await bench.run()
    assert bench.trainer.starts == 1


@pytest.mark.parametrize("steps_between", [0, 3])
@run_by(run)
async def test_a_trainer_is_restarted_a_number_of_times(steps_between: int) -> None:
    """Failures of one cause count together, whatever steps it completes between; then the failure is raised, with the
    setting's name."""
    bench = LoopBench()
    train, trained = bench.trainer.train, bench.trainer.trained

    async def fail_now_and_then(order: StepOrder) -> StepReport:
        if len(trained) >= steps_between * bench.trainer.starts:
            raise TrainerFailed(f"ValueError: step {order.step}")
        return await train(order)

    bench.trainer.train = fail_now_and_then  # type: ignore[method-assign]
    reason = rf"step {5 * steps_between + 1} \(it has failed 5 times\)"
    with pytest.raises(TrainerFailed, match=reason) as failure:
        await bench.run()
    assert failure.value.fatal
    assert bench.trainer.starts == 1 + 4


@run_by(run)
async def test_a_restart_that_fails_counts_as_a_failure() -> None:
    """A start that fails is as good as a step that does, though it says something else."""
    bench = LoopBench()
    bench.trainer.crash_next(1)
    running = asyncio.create_task(bench.run())
    await asyncio.sleep(0.2)
    bench.trainer.fail_start = TrainerFailed("the device's memory is full")
    with pytest.raises(TrainerFailed, match=r"memory is full.*failed 5 times"):
        await running
    assert bench.progress.trainer_failures == 5
    assert bench.progress.trainer_failure == ("the device's memory is full", "")


@run_by(run)
async def test_evaluations_that_fail_are_counted_though_steps_are_completed_between() -> None:
    """Good evaluations between do not take the failures back."""
    bench = LoopBench(eval_steps=1)
    good = iter([False, True, False, True, False, True, False, True, False])

    async def evaluate(_step: int) -> None:
        if not next(good):
            raise TrainerFailed("evaluate() raised")

    bench.trainer.evaluate = evaluate  # type: ignore[method-assign]
    with pytest.raises(TrainerFailed, match="failed 5 times"):
        await bench.run()
    assert bench.trainer.trained == list(range(1, 11))
    assert bench.trainer.starts == 1 + 4


@pytest.mark.parametrize(("after", "level"), [(2, "info"), (0, "warning")])
@run_by(run)
async def test_a_script_that_leaves_ends_the_run(after: int, level: str) -> None:
    """It is no failure and no restart; a script that completed no step is warned of."""
    bench = LoopBench()
    bench.trainer.leave_after(after)
    assert await bench.run() == "script"

    assert bench.progress.step == after
    assert [row["step"] for row in bench.progress.steps] == list(range(1, after + 1))
    assert bench.progress.trainer_failures == 0
    assert bench.trainer.starts == 1
    [left] = [record for record in bench.records if record.event == "script_left"]
    assert left.level == level


@pytest.mark.parametrize(
    ("weight", "theirs", "expected"),
    [
        ("sum", [64], 1.0),
        ("population", [64], 0.25),
        ("samples", [], 0.25),
        ("samples", [192], 0.25 * 0.5),
        ("samples", [100_000, 100_000], 0.25 * 0.25),
    ],
)
@run_by(run)
async def test_the_weight_of_a_delta(weight: Any, theirs: list[int], expected: float) -> None:
    """`samples` is relative to the mean of the workers, between a quarter and four; this node trained 64."""
    bench = LoopBench(max_steps=1, exchange=ExchangeSettings(weight=weight))
    bench.swarm.others = [
        SimpleNamespace(node_id=b"z" * 20, samples=samples, is_worker=lambda _now: True, activity=Activity.TRAINING)
        for samples in theirs
    ]
    await bench.run()
    assert [given for _, _, given in bench.exchange.pushes] == [pytest.approx(expected)]


@run_by(run)
async def test_the_last_steps_of_a_slow_node_weigh_what_those_of_the_others_did() -> None:
    """Two have ended their run, at steps 3 and 2, and one has left it before. Step 2 is shared by three, step 3 by two,
    and step 4 by nobody else."""
    bench = LoopBench(max_steps=4)
    bench.exchange.workers = 1.0
    ends = [(Activity.FINISHED, 3), (Activity.FINISHED, 2), (Activity.PAUSED, 9)]
    bench.swarm.others = [
        SimpleNamespace(node_id=b"z" * 20, samples=64, is_worker=lambda _now: False, activity=activity, step=step)
        for activity, step in ends
    ]
    await bench.run(1)
    assert [given for _, _, given in bench.exchange.pushes] == pytest.approx([1 / 3, 1 / 2, 1.0])


@run_by(run)
async def test_a_sparse_delta_has_a_rate_of_its_own() -> None:
    """The share of four workers times the rate of the exchange."""
    bench = LoopBench(max_steps=2, exchange=ExchangeSettings(codec="sparse"))
    bench.exchange.codec.codec, bench.exchange.rate = "sparse", 1.5
    await bench.run()

    assert [weight for _, _, weight in bench.exchange.pushes] == pytest.approx([0.375, 0.375])


@run_by(run)
async def test_a_push_is_completed_before_the_loop_is_cancelled() -> None:
    """Its step is counted then; a push that takes too long is logged and cut short."""
    bench = LoopBench()
    bench.exchange.push_s = 2.0
    running = asyncio.create_task(bench.run())
    await asyncio.sleep(1.5)
    await bench.loop.finish_push(1.0)
    assert bench.events("step_cut_short") == [{"step": 1}]
    await bench.loop.finish_push(5.0)
    assert bench.progress.step == 1
    running.cancel()


@pytest.mark.parametrize(
    ("settings", "has_end"),
    [({}, False), ({"max_steps": 1}, True), ({"max_seconds": 9.0}, True), ({"until": "a>=1", "eval_steps": 1}, True)],
)
@run_by(run)
async def test_a_run_without_an_end_says_so_at_its_start(settings: dict[str, Any], has_end: bool) -> None:
    """One line, with the settings that would end it."""
    bench = LoopBench(**settings)
    running = asyncio.create_task(bench.run())
    await asyncio.sleep(0.5)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    said = bench.events("run_has_no_end")
    assert len(said) == (not has_end)
    assert all("training.max_steps" in fields["hint"] for fields in said)


@run_by(run)
async def test_metrics_of_one_model_may_be_reported_one_by_one() -> None:
    """Each model counts once, by the goal's metric: others between do not break the row, and a repetition is none."""
    bench = LoopBench(until="accuracy>=0.9", eval_steps=1000)
    reports = [
        (1, {"accuracy": 0.95}),
        (1, {"accuracy": 0.95}),  # the same model
        (1, {"loss": 3.0}),
        (2, {"accuracy": 0.8}),
        (3, {"accuracy": 0.95}),
        (3, {"loss": 2.0}),
        (4, {"accuracy": 0.95}),
    ]

    async def report() -> None:
        if reports:
            bench.trainer.measured.append(Evaluation(reports[0][0], reports.pop(0)[1], 10))

    await bench.trainer.start()
    assert await bench.loop.run(0, report) == "until"
    assert reports == []
    assert bench.progress.evaluated_metrics == {"accuracy": 0.95, "loss": 2.0}
    assert (bench.progress.evaluated_step, bench.progress.evaluated_samples) == (4, 10)


@run_by(run)
async def test_a_goal_that_another_node_has_reached_ends_the_run_after_the_step() -> None:
    """It needs no evaluation here; without a goal of its own the node goes on."""
    for until, end in (("accuracy>=0.9", "until"), ("", "max_steps")):
        bench = LoopBench(until=until, eval_steps=1000, max_steps=5)
        bench.loop.end_by_goal()
        assert await bench.run() == end


@pytest.mark.parametrize("push_s", [0.0, 0.7])
@pytest.mark.parametrize("ends", ["max_steps", "passes"])
@run_by(run)
async def test_the_last_step_is_evaluated_however_the_run_ends(ends: str, push_s: float) -> None:
    """By its number of steps, or because no record is left: also where its delta is still being exchanged then."""
    bench = LoopBench(max_steps=3 if ends == "max_steps" else 0, eval_steps=1)
    bench.exchange.push_s = push_s
    if ends == "passes":
        bench.end_records_after(3)
    evaluated = bench.note_evaluations()

    assert await bench.run() == ends
    assert evaluated == [1, 2, 3]


@run_by(run)
async def test_a_node_evaluates_before_a_pause() -> None:
    """Later it would have the values of the step to which the others have come meanwhile."""
    bench = LoopBench(max_steps=12, eval_steps=2)
    evaluated = bench.note_evaluations()
    running = asyncio.create_task(bench.run())
    await asyncio.sleep(1.5)
    bench.loop.pause()
    await asyncio.sleep(5.0)
    assert evaluated == [2]
    bench.exchange.median = 10
    bench.loop.resume()
    await running

    assert evaluated == [2, 11, 12]  # the 10th is left out


@run_by(run)
async def test_an_evaluation_is_due_whichever_steps_have_a_delta() -> None:
    """On a slow line only each second step may have one, and never that whose number `eval_steps` divides."""
    bench = LoopBench(max_steps=7, eval_steps=2)
    bench.exchange.pull_s = 1.5
    evaluated = bench.note_evaluations()
    await bench.run()

    assert bench.trainer.parts == {1: (1,), 3: (2, 3), 5: (4, 5), 7: (6, 7)}
    assert evaluated == [3, 5, 7]


@run_by(run)
async def test_a_spoilt_trainer_that_crashes_too_is_restarted_once() -> None:
    """Its third delta in a row is refused while it crashes in the next step: the restart mends both."""
    bench = LoopBench(max_steps=5)
    bench.exchange.not_finite, bench.exchange.push_s = range(1, 4), 0.8
    train = bench.trainer.train

    async def crashing(order: StepOrder) -> StepReport:
        if order.step == 4 and bench.trainer.starts == 1:
            bench.trainer.crash_next()
        return await train(order)

    bench.trainer.train = crashing  # type: ignore[method-assign]
    await bench.run()

    assert bench.trainer.starts == 2

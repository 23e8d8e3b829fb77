"""The training loop of one node: train, push, count the step, wait at the barrier, pull, until the run ends.

The loop has the step counter and the order of the phases; barriers (`training.barriers`), shards (`training.exchange`)
and tensors (the trainer) are elsewhere. Progress, waiting and failures are logged and recorded in `Progress`, so that a
waiting node can be distinguished from a slow one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from statistics import median

from overlay.environment import Environment
from overlay.peers import Activity
from training.barriers.waiter import BarrierWaiter
from training.exchange.exchange import Exchange
from training.goal import BestMetrics, End, Goal
from training.progress import Progress, StepRow
from training.settings import ExchangeSettings, TrainingSettings
from training.swarm import Swarm
from training.trainer_link.interface import Evaluation, StepOrder, StepReport, Trainer, TrainerFailed, TrainerLeft

FIRST_RESTART_S = 0.5
MAX_RESTART_S = 30.0
#: A trainer that failed this often in a row is crash-looping: the node is announced as stalled and no longer sampled.
CRASH_LOOP_FAILURES = 2
#: One batch may give a delta that is not finite. After so many in a row the trainer itself is at fault.
NOT_FINITE_STEPS = 3
#: `until` must hold in this many consecutive evaluations.
CONFIRMATIONS = 2
#: A goal without any evaluation in so many steps is probably a mistake.
UNEVALUATED_STEPS = 50
NO_END = (
    "it trains until you stop it (`p2pnode leave`); set training.max_steps, training.max_seconds or training.until "
    "for a run that ends by itself and writes its model"
)
SAMPLE_WEIGHT_RANGE = (0.25, 4.0)


class StepLoop:
    """Drives the trainer of one node through the swarm's steps."""

    def __init__(
        self,
        *,
        swarm: Swarm,
        exchange: Exchange,
        trainer: Trainer,
        waiter: BarrierWaiter,
        training: TrainingSettings,
        settings: ExchangeSettings,
        environment: Environment,
        progress: Progress,
    ) -> None:
        self._swarm = swarm
        self._exchange = exchange
        self._trainer = trainer
        self._waiter = waiter
        self._training = training
        self._settings = settings
        self._clock = environment.clock
        self._log = environment.log
        self.progress = progress
        self._goal = Goal.parse(training.until)
        self.best = BestMetrics(self._goal)
        self._goal_reached = False
        self._goal_step: int | None = None
        self._first_step = 0
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._recent: deque[float] = deque(maxlen=20)
        self._base_step = 0
        #: When the last turn of the trainer ended; None before the first and after a pause.
        self._turn_ended: float | None = None
        self._restore_file = ""
        #: Steps in a row whose delta was refused because it is not finite.
        self._not_finite = 0
        #: Failures in a row: of steps, and of evaluations, which may fail after every step.
        self._step_failures = self._evaluation_failures = 0
        #: Clear from the end of a step's training until the step is counted.
        self._step_published = asyncio.Event()
        self._step_published.set()

    # -- control ------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Stop training after the current step; the node continues to own its shards."""
        self.progress.paused = True
        self._resumed.clear()

    def resume(self) -> None:
        self.progress.paused = False
        self._resumed.set()

    def end_by_goal(self) -> None:
        """Another node has seen `until` hold in its evaluations of the shared model: end after this step."""
        self._goal_reached = True

    def missing_evaluations(self) -> str:
        """Why `until` cannot hold, if enough steps have passed to say so: nothing, or not its metric, is evaluated."""
        if self._goal is None or self._goal_step is not None:
            return ""
        goal, steps = f"training.until = {self._training.until}", self.progress.step - self._first_step
        reported = sorted(self.progress.evaluated_metrics)
        if reported:
            return f"{goal}, but evaluations report {', '.join(reported)} only"
        patience = max(UNEVALUATED_STEPS, 3 * self._training.eval_steps)
        return f"{goal}, but nothing was evaluated in {steps} steps" if steps >= patience else ""

    def restart_from(self, file: str) -> None:
        """If the trainer has to be restarted, it restores this file."""
        self._restore_file = file

    async def finish_push(self, timeout_s: float) -> None:
        """Wait, before this loop is cancelled, until no delta is pushed whose step is not counted yet.

        After a restart that step would be trained again under the same number.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._step_published.wait()
        except TimeoutError:
            self._log.warning("step_cut_short", step=self.progress.step + 1)

    def set_stalled(self, stalled: bool) -> None:
        """Callback of the trainer's supervisor: the trainer hangs, or makes progress again."""
        if stalled != self.progress.stalled:
            self.progress.stalled = stalled
            self._announce_activity()
            if stalled:
                self._log.warning("trainer_stalled", step=self.progress.step)
            else:
                self._log.info("trainer_moving", step=self.progress.step)

    def _announce_activity(self) -> None:
        if self.progress.stalled:
            activity = Activity.STALLED
        elif self.progress.paused:
            activity = Activity.PAUSED
        else:
            activity = Activity.TRAINING
        self._swarm.announce(activity=activity)

    # -- the loop -----------------------------------------------------------------------------------------------

    async def run(self, start_step: int, after_step: Callable[[], Awaitable[None]]) -> End:
        """Train from `start_step` completed steps until the run ends; returns why. `after_step` writes checkpoints."""
        progress = self.progress
        self._advance(start_step)
        self._base_step = self._first_step = start_step
        started = self._clock.monotonic()
        self._waiter.begin()
        self._swarm.announce(step=start_step)
        self._announce_activity()
        self._log.info("training_started", step=start_step)
        if not (self._training.max_steps or self._training.max_seconds or self._goal):
            self._log.info("run_has_no_end", hint=NO_END)
        try:
            while (end := self._ended(started)) is None:
                await self._wait_while_paused()
                await self._one_step()
                await after_step()
        except TrainerLeft as left:
            end = "script"
            self._note_left(left.reason, progress.step - start_step)
        self._log.info("training_ended", step=progress.step, reason=end)
        return end

    def _note_left(self, reason: str, steps: int) -> None:
        if steps:
            self._log.info("script_left", reason=reason, steps=steps)
        else:
            hint = "a step is local_steps calls of swarm.step(); the swarm has received nothing from this node"
            self._log.warning("script_left", reason=reason, steps=steps, hint=hint)

    def _ended(self, started: float) -> End | None:
        limits = self._training
        if limits.max_steps and self.progress.step >= limits.max_steps:
            return "max_steps"
        if limits.max_seconds and self._clock.monotonic() - started >= limits.max_seconds:
            return "max_seconds"
        if self._goal is not None and (self._goal_reached or self.progress.goal_streak >= CONFIRMATIONS):
            return "until"
        return None

    async def _wait_while_paused(self) -> None:
        if self._resumed.is_set():
            return
        self._announce_activity()
        self._log.info("paused", step=self.progress.step)
        await self._resumed.wait()
        self._announce_activity()
        # The deltas of the others since the pause are the new base, and this node continues at their step.
        await self._catch_up()
        self._turn_ended = None
        self._log.info("resumed", step=self.progress.step)

    async def _catch_up(self) -> None:
        step = max(self.progress.step, self._exchange.view.median_step())
        self._advance(step)
        if self._settings.enabled:
            await self._exchange.pull(step)
        self._base_step = step

    def _advance(self, step: int) -> None:
        self.progress.step = step
        self._exchange.advance(step)

    async def _one_step(self) -> None:
        progress = self.progress
        step = progress.step + 1
        began = self._clock.monotonic()
        workers = self._exchange.view.worker_count()
        index = self._node_index()
        order = StepOrder(step, self._training.local_steps, workers, is_first=index == 0, node_index=index)
        report = await self._train(order)
        self.take_measured()
        self._step_published.clear()
        try:
            row = await self._publish(step, report, began)
        finally:
            self._step_published.set()
        row["wait_seconds"] = await self._waiter.wait(step, median(self._recent)) if self._settings.enabled else 0.0
        waited = self._clock.monotonic()
        base_step = self._exchange.view.median_step()
        if self._settings.enabled:
            pulled = await self._exchange.pull(step)
            row |= {"pulled": pulled.changed, "pull_missing": len(pulled.missing)}
        elif not self._exchange.add_alone(self._trainer.delta):
            row["refused"] = {"not_finite": 1}
        if self._fell_behind(base_step):
            # Otherwise other nodes would wait at their barriers until this node has made up all these steps.
            self._log.info("caught_up", was=step, step=base_step)
            step = base_step
            self._advance(step)
            self._swarm.announce(step=step)
        self._base_step = base_step
        merged = self._exchange.take_merged()
        progress.merged_last_step = len(merged)
        row |= {
            "pull_seconds": self._clock.monotonic() - waited,
            "merged": {node.hex(): theirs for node, theirs in merged.items()},
        }
        progress.steps.append(row)
        self._log.debug("step", **row)
        await self._restart_if_not_finite("not_finite" in row.get("refused", {}))
        if self._training.eval_steps and step % self._training.eval_steps == 0:
            await self._evaluate(step)

    def _fell_behind(self, base_step: int) -> bool:
        """Whether the others made so many steps during one step of this node that its delta counts as late.

        Then it was suspended or disconnected. It has the present vector now, so it continues at the step of the others.
        """
        limit = self._exchange.context.stale_limit
        return limit is not None and base_step - self._base_step > limit and base_step > self.progress.step

    async def _publish(self, step: int, report: StepReport, began: float) -> StepRow:
        """Push the delta and count the step; returns its row for `/steps` so far."""
        trained = self._clock.monotonic()
        idle_s = 0.0 if self._turn_ended is None else began - self._turn_ended
        self._turn_ended = trained
        self._note_training(report, trained - began + idle_s)
        row: StepRow = {
            "step": step,
            "loss": report.loss,
            "samples": report.samples,
            "train_seconds": trained - began,
            "idle_seconds": idle_s,
        }
        if self._settings.enabled:
            weight = self._weight(report.samples)
            pushed = await self._exchange.push(step, self._base_step, weight, self._trainer.delta)
            row |= {
                "weight": weight,
                "acknowledged": pushed.acknowledged,
                "refused": pushed.refused,
                "outstanding": pushed.outstanding,
                "bytes_sent": pushed.bytes_sent,
            }
            if pushed.refused:
                self._log.warning("delta_refused", step=step, reasons=pushed.refused)
        row["push_seconds"] = self._clock.monotonic() - trained
        self._advance(step)
        self._swarm.announce(
            step=step, step_seconds=median(self._recent), samples=report.samples if report.samples > 0 else None
        )
        return row

    def _node_index(self) -> int:
        """How many of the known workers have a lower id; scripts let number 0 do what one node should do."""
        now = self._clock.monotonic()
        me = self._swarm.node_id
        return sum(peer.node_id < me and peer.is_worker(now) for peer in self._swarm.members())

    def _weight(self, samples: int) -> float:
        if self._settings.weight == "sum":
            return 1.0
        share = 1.0 / max(1.0, self._exchange.view.worker_count())
        if self._settings.weight == "population" or samples <= 0:
            return share
        now = self._clock.monotonic()
        theirs = [peer.samples for peer in self._swarm.members() if peer.is_worker(now) and peer.samples > 0]
        mean = (samples + sum(theirs)) / (1 + len(theirs))
        low, high = SAMPLE_WEIGHT_RANGE
        return share * min(max(samples / mean, low), high)

    # -- the trainer --------------------------------------------------------------------------------------------

    def _note_training(self, report: StepReport, passed_s: float) -> None:
        progress = self.progress
        progress.note_turn(report.seconds, passed_s)
        progress.loss = report.loss
        progress.samples += report.samples
        progress.optimizer_steps += report.optimizer_steps
        progress.training_metrics |= report.metrics
        self._recent.append(report.seconds)
        progress.step_seconds = median(self._recent)

    async def _train(self, order: StepOrder) -> StepReport:
        while True:
            try:
                report = await self._trainer.train(order)
            except TrainerLeft:
                raise
            except TrainerFailed as error:
                self._step_failures = await self._restart(error, self._step_failures + 1)
                continue
            if self._step_failures:
                self._step_failures = 0
                self.set_stalled(False)
            return report

    async def _restart(self, error: TrainerFailed, failures: int) -> int:
        """Restart a failed trainer from the last base and its last saved state, with backoff; returns the failures in a
        row so far.

        Raises the failure if another start would fail too, or after `max_restarts` restarts in a row.
        """
        while True:
            self.progress.trainer_failures += 1
            self._log.error("trainer_failed", reason=error.reason, hint=error.hint, failures=failures)
            if error.fatal:
                raise error
            if failures > self._training.max_restarts:
                reason = f"{error.reason} (restarted {failures - 1} times in a row: training.max_restarts)"
                raise TrainerFailed(reason, error.hint, fatal=True) from error
            if failures >= CRASH_LOOP_FAILURES:
                self.set_stalled(True)
            await asyncio.sleep(min(MAX_RESTART_S, FIRST_RESTART_S * 2 ** (failures - 1)))
            try:
                await self._trainer.start(self._restore_file)
            except TrainerFailed as again:
                error, failures = again, failures + 1
                continue
            return failures

    async def _restart_if_not_finite(self, refused: bool) -> None:
        """Start the trainer again from its last saved state if its deltas are not finite, one after the other.

        The base of each step is finite, so what is not must be in the optimiser's own state, such as its momentum.
        """
        if not refused:
            if self._not_finite >= CRASH_LOOP_FAILURES * NOT_FINITE_STEPS:
                self.set_stalled(False)
            self._not_finite = 0
            return
        self._not_finite += 1
        if self._not_finite % NOT_FINITE_STEPS == 0:
            reason = f"the deltas of {self._not_finite} steps in a row have values that are not finite"
            hint = "it starts again from its last saved state; lower the learning rate or clip the gradients"
            await self._restart(TrainerFailed(reason, hint), self._not_finite // NOT_FINITE_STEPS)

    async def _evaluate(self, step: int) -> None:
        try:
            evaluation = await self._trainer.evaluate(step)
        except TrainerLeft:
            raise
        except TrainerFailed as error:
            self._evaluation_failures = await self._restart(error, self._evaluation_failures + 1)
            return
        if self._evaluation_failures:
            self._evaluation_failures = 0
            self.set_stalled(False)
        if evaluation is not None:
            self._note_evaluation(evaluation)

    def take_measured(self) -> None:
        """Note what the user's own script has evaluated since the last call."""
        for evaluation in self._trainer.take_measured():
            self._note_evaluation(evaluation)

    def _note_evaluation(self, evaluation: Evaluation) -> None:
        progress = self.progress
        progress.evaluated_metrics |= evaluation.metrics
        progress.evaluated_step = evaluation.step
        progress.evaluated_samples = evaluation.samples
        self.best.note(evaluation.step, evaluation.metrics)
        # A script may report several metrics of one model one by one: each model counts once, by the goal's metric.
        if self._goal is not None and self._goal.metric in evaluation.metrics and evaluation.step != self._goal_step:
            self._goal_step = evaluation.step
            progress.goal_streak = progress.goal_streak + 1 if self._goal.holds(evaluation.metrics) else 0
        self._log.info("evaluated", step=evaluation.step, samples=evaluation.samples, **evaluation.metrics)

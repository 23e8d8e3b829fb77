"""The training loop of one node: train a step, exchange its delta while the next one is trained, until the run ends.

The trainer decides which steps have a delta: none before the exchange of its last delta has ended. Progress adds up
meanwhile. The trainer stands still for its barrier and for nothing else. Under bsp the barrier includes that the values
of the step have entered the model. Progress, waiting and failures are logged and recorded in `Progress`, so that a
waiting node can be distinguished from a slow one.

A step has several states. It is *trained* when the trainer has reported it; the barrier asks with this number whether
the next one may begin. It is *counted* when the push of the delta that has it returns: with the answers of all owners,
or after a silence even with none. The others are told this number, and their barriers see nothing else of a node. A
delta's *base step* is the median counted step of the swarm
when its node pulled last. The *known step* is the step whose pulled values the trainer has.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from statistics import median

from p2pnode.overlay.environment import Environment
from p2pnode.training.barriers.waiter import BarrierWaiter
from p2pnode.training.evaluations import Evaluations
from p2pnode.training.exchange.exchange import Exchange
from p2pnode.training.failures import Failures
from p2pnode.training.goal import BestMetrics, End
from p2pnode.training.progress import Progress, StepRow
from p2pnode.training.record_turns import RecordsInTurns, RecordsOver, unless_over
from p2pnode.training.settings import ExchangeSettings, TrainingSettings
from p2pnode.training.step_exchange import StepExchange, TrainedStep
from p2pnode.training.step_rules import node_index
from p2pnode.training.swarm import Swarm
from p2pnode.training.trainer_link.interface import StepOrder, StepReport, Trainer, TrainerFailed, TrainerLeft, Vector

#: A trainer that failed this often is crash-looping: the node is announced as stalled and no longer sampled.
CRASH_LOOP_FAILURES = 2
#: One batch may give a delta that is not finite. After so many in a row the trainer itself is at fault.
NOT_FINITE_STEPS = 3

NO_END = (
    "it trains until you stop it (`p2pnode leave`); set training.max_steps, training.max_seconds or training.until "
    "for a run that ends by itself and writes its model"
)


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
        self._clock = environment.clock
        self._log = environment.log
        self.progress = progress
        self._evaluations = Evaluations(training, progress, environment.log)
        self.first_step = 0
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._recent: deque[float] = deque(maxlen=20)
        self._steps = StepExchange(
            swarm=swarm,
            exchange=exchange,
            trainer=trainer,
            waiter=waiter,
            settings=settings,
            environment=environment,
            progress=progress,
        )
        #: The exchange of the last delta, beside the training of what follows it.
        self._exchanging: asyncio.Task[None] | None = None
        #: Cleared when the push of a delta begins; set again when its step is counted.
        self._all_counted = asyncio.Event()
        self._all_counted.set()
        #: No further step is to be trained, because the loop is about to be cancelled.
        self._is_leaving = False
        #: The last step that was trained, counted or not, and when the run began.
        self._trained_step, self._started = 0, 0.0
        #: The last step whose delta was exchanged.
        self._exchanged_step = 0
        #: Steps since the last delta, which have none, and their samples.
        self._added_up: list[int] = []
        self._added_samples = 0
        #: Their rows, until that of the last delta is complete.
        self._rows: list[StepRow] = []
        #: A step whose shared values the trainer has, and is to evaluate; 0: none.
        self._to_evaluate = 0
        #: How long the trainer stood still for the barrier before its present step.
        self._waited_s = 0.0
        #: When the last turn of the trainer ended; None before the first and after a pause.
        self._turn_ended: float | None = None
        self._restore_file = ""
        #: Steps in a row whose delta was refused because it is not finite, and whether the trainer is to begin anew.
        self._not_finite, self._is_spoilt = 0, False
        self._records: RecordsInTurns | None = None
        self._failures = Failures()
        self._crash_loops = False
        self._on_trained: Callable[[Vector], None] = lambda _delta: None

    # -- the loop -----------------------------------------------------------------------------------------------

    async def run(self, start_step: int, after_step: Callable[[], Awaitable[None]]) -> End:
        """Train from `start_step` completed steps until the run ends; returns why. `after_step` writes checkpoints: the
        trainer has trained nothing that is in no delta."""
        self._begin(start_step)
        try:
            while (end := self._ended()) is None:
                await self._wait_while_paused()
                try:
                    trained = await self._train()
                except RecordsOver:
                    end = "passes"
                    break
                await self._exchange_beside(trained)
                await self._pass_barrier(trained.step)
                await self._between_turns()
                if trained.report.has_delta:
                    await after_step()
            await self._end_turns()
        except TrainerLeft as left:
            end = "script"
            await self._deliver()
            self._note_left(left.reason, self.progress.step - start_step)
        except TrainerFailed:
            await self._deliver()
            raise
        finally:
            if self._exchanging is not None:
                self._exchanging.cancel()
                (failure,) = await asyncio.gather(self._exchanging, return_exceptions=True)
                if isinstance(failure, Exception):
                    self._log.error("last_exchange_failed", step=self._trained_step, error=repr(failure))
        self._log.info("training_ended", step=self.progress.step, reason=end)
        return end

    async def _exchange_beside(self, trained: TrainedStep) -> None:
        """Start to exchange the delta of a step, beside the training of the next one; without a delta keep only a row.

        The trainer cuts a delta only when the values of the last exchange have entered, which is the end of that
        exchange: a report with a delta waits for it no longer than a turn of the event loop.

        Raises what the exchange before has raised: after a failed one the trainer reports no delta any more."""
        if trained.report.has_delta or (self._exchanging is not None and self._exchanging.done()):
            await self._end_exchange()
        if not trained.report.has_delta:
            self._rows.append(trained.row())
            return
        self._all_counted.clear()
        self._exchanging = asyncio.create_task(self._push_and_pull(trained), name=f"exchange-step-{trained.step}")

    async def _push_and_pull(self, trained: TrainedStep) -> None:
        try:
            row, pushed = await self._steps.push(trained)
        finally:
            self._all_counted.set()
        if self._is_leaving:
            self._note(trained, row)
            return
        if self._waiter.barrier.synchronous:
            # Then the values have all deltas.
            row["wait_seconds"] = await self._waiter.wait(trained.step, self.progress.step_seconds)
        moved_to = await self._steps.pull(row, pushed)
        if moved_to is not None:
            self._trained_step = max(self._trained_step, moved_to)
        self._note(trained, row)

    async def _pass_barrier(self, step: int) -> None:
        """The trainer stands still until this returns."""
        if self._waiter.barrier.synchronous:
            await self._end_exchange()
        else:
            self._waited_s = await self._waiter.wait(step, self.progress.step_seconds)

    async def _end_exchange(self) -> None:
        """Wait until no delta is being exchanged."""
        exchanging, self._exchanging = self._exchanging, None
        if exchanging is not None:
            try:
                await exchanging
            except asyncio.CancelledError:
                self._exchanging = exchanging
                raise

    async def _deliver(self) -> None:
        """The trainer trains no more: of the exchange only the push is wanted."""
        self._is_leaving = True
        await self._all_counted.wait()

    async def _end_turns(self) -> None:
        """Exchange what was trained while the last delta was under way, and do what is due: the trainer trains no more,
        or not soon."""
        await self._end_exchange()
        if self._added_up:
            order = StepOrder(self._trained_step, 0, 1.0, is_first=False)
            with contextlib.suppress(TrainerFailed):
                report = await self._trainer.train(order)
                await self._exchange_beside(self._as_trained_step(report, 0.0, 0.0, is_last=True))
                await self._end_exchange()
        await self._between_turns()

    def _note(self, trained: TrainedStep, row: StepRow) -> None:
        for one in (row, *self._rows):
            self.progress.add(one)
            self._log.debug("step", **one)
        self._rows.clear()
        is_refused = "not_finite" in row.get("refused", {})
        self._not_finite = self._not_finite + 1 if is_refused else 0
        self._is_spoilt = is_refused and self._not_finite % NOT_FINITE_STEPS == 0
        # A step without a delta, or one that this node has left out, may be that which `eval_steps` divides.
        every = self._training.eval_steps
        if every and trained.step // every > self._exchanged_step // every:
            self._to_evaluate = trained.step
        self._exchanged_step = trained.step

    async def _between_turns(self) -> None:
        """What the trainer has to do after an exchange, before its next turn."""
        if self._is_spoilt:
            await self._restart_spoilt()
        step, self._to_evaluate = self._to_evaluate, 0
        if step:
            await self._evaluate(step)

    def _begin(self, start_step: int) -> None:
        self._steps.begin_at(start_step)
        self._trained_step = self._exchanged_step = self.first_step = start_step
        self._started = self._clock.monotonic()
        self._waiter.begin()
        self._swarm.announce(step=start_step)
        self._announce_activity()
        self._log.info("training_started", step=start_step)
        has_limit = self._training.max_steps or self._training.max_seconds or self._evaluations.has_goal
        if not has_limit and self._records is None:
            self._log.info("run_has_no_end", hint=NO_END)

    def _note_left(self, reason: str, steps: int) -> None:
        if steps:
            self._log.info("script_left", reason=reason, steps=steps)
        else:
            hint = "a step is local_steps calls of swarm.step(); the swarm has received nothing from this node"
            self._log.warning("script_left", reason=reason, steps=steps, hint=hint)

    def _ended(self) -> End | None:
        limits = self._training
        if limits.max_steps and self._trained_step >= limits.max_steps:
            return "max_steps"
        if limits.max_seconds and self._clock.monotonic() - self._started >= limits.max_seconds:
            return "max_seconds"
        if self._evaluations.is_goal_reached:
            return "until"
        return "passes" if self._records is not None and self._records.over.is_set() else None

    async def _wait_while_paused(self) -> None:
        if self._resumed.is_set():
            return
        self._announce_activity()
        self._log.info("paused", step=self.progress.step)
        await self._end_turns()  # it may never go on
        await self._resumed.wait()
        self._announce_activity()
        # The deltas of the others since the pause are in the new values, and this node continues at their step.
        await self._steps.catch_up()
        self._trained_step = max(self._trained_step, self.progress.step)
        self._turn_ended = None
        self._log.info("resumed", step=self.progress.step)

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
        self._evaluations.end_by_goal()

    @property
    def best(self) -> BestMetrics:
        """The best metrics of the shared model so far."""
        return self._evaluations.best

    def missing_evaluations(self) -> str:
        """Why `until` cannot hold, if enough steps have passed to say so: nothing, or not its metric, is evaluated."""
        return self._evaluations.missing(self.progress.step - self.first_step)

    def restart_from(self, file: str) -> None:
        """If the trainer has to be restarted, it restores this file."""
        self._restore_file = file

    def follow(self, records: RecordsInTurns) -> None:
        """Tell these records which steps are counted, and end the run with them."""
        self._records = records
        self._steps.on_counted(records.count)

    def on_trained(self, callback: Callable[[Vector], None]) -> None:
        """Call `callback` with each delta, `float32[total]`, as the trainer has made it; replaces the previous one."""
        self._on_trained = callback

    async def finish_push(self, timeout_s: float) -> None:
        """Wait, before this loop is cancelled, until the step whose delta is being pushed is counted. Otherwise a
        restart would train that step again under the same number."""
        self._is_leaving = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_counted.wait()
        except TimeoutError:
            self._log.warning("step_cut_short", step=self.progress.step + 1)

    async def counted(self) -> None:
        """Wait until the last delta is pushed, and its step counted."""
        await self._all_counted.wait()

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
        self._swarm.announce(activity=self.progress.activity)

    # -- the trainer --------------------------------------------------------------------------------------------

    def _note_training(self, report: StepReport) -> None:
        progress = self.progress
        if not report.optimizer_steps:
            return  # it has waited for data
        progress.loss = report.loss
        progress.samples += report.samples
        progress.optimizer_steps += report.optimizer_steps
        progress.training_metrics |= report.metrics
        self._recent.append(report.seconds)
        progress.step_seconds = median(self._recent)

    async def _train(self) -> TrainedStep:
        """Train the next step; a trainer that fails is started again, and trains it from the shared values."""
        if self._is_leaving:
            await asyncio.Event().wait()  # until it is cancelled
        began = self._clock.monotonic()
        while True:
            self.progress.is_training = True
            try:
                report = await unless_over(self._records, self._trainer.train(self._order()))
            except TrainerLeft:
                raise
            except TrainerFailed as error:
                if self._records is not None:
                    self._records.abandon(self._trained_step + 1)
                await self._restart(error)
                continue
            finally:
                self.progress.is_training = False
            self._failures.completed_step()
            self.progress.trainer_failure = None
            if self._crash_loops and not self._not_finite:
                self._crash_loops = False
                self.set_stalled(False)
            break
        ended = self._clock.monotonic()
        idle_s = 0.0 if self._turn_ended is None else began - self._turn_ended
        self._turn_ended = ended
        # Another step than was ordered where this node has moved to that of the others meanwhile.
        self._trained_step += 1
        self.progress.note_turn(report.seconds, ended - began + idle_s)
        self._note_training(report)
        trained = self._as_trained_step(report, ended - began, idle_s, is_last=self._ended() is not None)
        if report.has_delta and report.is_finite:
            self._on_trained(self._trainer.delta)
        self.take_measured()
        return trained

    def _as_trained_step(self, report: StepReport, train_s: float, idle_s: float, *, is_last: bool) -> TrainedStep:
        step, samples = self._trained_step, self._added_samples + report.samples
        if report.has_delta:
            self._added_up, self._added_samples = [], 0
        else:
            self._added_up.append(step)
            self._added_samples = samples
        return TrainedStep(step, report, samples, train_s, idle_s, self._waited_s, is_last=is_last)

    def _forget_added_up(self) -> None:
        """What was trained since the last delta is gone with its trainer."""
        if self._records is not None:
            for step in self._added_up:
                self._records.drop(step)
        self._added_up, self._added_samples = [], 0

    def _order(self) -> StepOrder:
        workers, index = self._exchange.view.worker_count(), node_index(self._swarm, self._clock.monotonic())
        return StepOrder(self._trained_step + 1, self._training.local_steps, workers, index == 0, index)

    async def _restart(self, error: TrainerFailed) -> None:
        """Restart a failed trainer from the shared values and its last saved state, with backoff.

        Raises the failure if another start would fail too, or if it has failed too often (`training.failures`).
        """
        self._forget_added_up()
        # It begins with the shared values: the delta under way has to be in them, and what is said of it to be past.
        await self._end_exchange()
        self._is_spoilt = False
        while True:
            count = self._failures.note(error.cause, self._clock.monotonic())
            self.progress.trainer_failures += 1
            self.progress.trainer_failure = error.reason, error.hint
            self._log.error("trainer_failed", reason=error.reason, hint=error.hint, failures=count)
            pause_s = self._failures.pause_s(error, count)
            if count >= CRASH_LOOP_FAILURES:
                self._crash_loops = True
                self.set_stalled(True)
            await asyncio.sleep(pause_s)
            try:
                await self._trainer.start(self._restore_file)
            except TrainerFailed as again:
                error = again
                continue
            return

    async def _restart_spoilt(self) -> None:
        """Start the trainer again from its last saved state, because its deltas are not finite, one after the other.

        Its base is finite, so what is not must be in the optimiser's own state, such as its momentum.
        """
        reason = f"the deltas of {self._not_finite} steps in a row have values that are not finite"
        hint = "it starts again from its last saved state; lower the learning rate or clip the gradients"
        await self._restart(TrainerFailed(reason, hint))

    async def _evaluate(self, step: int) -> None:
        try:
            evaluation = await self._trainer.evaluate(step)
        except TrainerLeft:
            raise
        except TrainerFailed as error:
            await self._restart(error)
            return
        if evaluation is not None:
            self._evaluations.note(evaluation)

    def take_measured(self) -> None:
        """Note what the user's own script has evaluated since the last call."""
        for evaluation in self._trainer.take_measured():
            self._evaluations.note(evaluation)

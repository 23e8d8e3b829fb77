"""The training loop of one node: train a step, exchange it (`training.exchange_turn`), until the run ends.

The loop has the step counter and the order of the phases. With `exchange.overlap` a step is trained while the one
before it is exchanged; one exchange at most is in flight. Progress, waiting and failures are logged and recorded in
`Progress`, so that a waiting node can be distinguished from a slow one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from statistics import median

from overlay.environment import Environment
from training.barriers.waiter import BarrierWaiter
from training.evaluations import Evaluations
from training.exchange.exchange import Exchange
from training.exchange_turn import ExchangedStep, ExchangeInFlight, StepExchange, TrainedStep
from training.failures import Failures, pause_s
from training.goal import BestMetrics, End
from training.loop_events import note_left, note_start
from training.overlap_choice import OverlapChoice
from training.progress import Progress
from training.record_turns import NoRecords, RecordsInTurns, RecordsOver, unless_over
from training.settings import ExchangeSettings, TrainingSettings
from training.step_rules import CARRY, node_index, own_carry
from training.swarm import Swarm
from training.trainer_link.handshake import BufferHandshake
from training.trainer_link.interface import StepOrder, StepReport, Trainer, TrainerFailed, TrainerLeft, Vector

#: A trainer that failed this often is crash-looping: the node is announced as stalled and no longer sampled.
CRASH_LOOP_FAILURES = 2
#: One batch may give a delta that is not finite. After so many in a row the trainer itself is at fault.
NOT_FINITE_STEPS = 3


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
        self._overlap = OverlapChoice(settings, synchronous=exchange.context.synchronous)
        exchange.set_overlap(self._overlap.is_on)
        self.renew_with = self._steps.renew_with
        #: The exchange of the last step, while the trainer trains the next one.
        self._in_flight: ExchangeInFlight | None = None
        #: How much of the last delta, which is acknowledged, the next step begins with.
        self._own_carry = 0.0
        #: No further step is to be trained, because the loop is about to be cancelled.
        self._is_leaving = False
        #: The last step that was trained, counted or not, and when the run began.
        self._trained_step, self._started = 0, 0.0
        #: When the last turn of the trainer ended; None before the first and after a pause.
        self._turn_ended: float | None = None
        self._restore_file = ""
        #: Steps in a row whose delta was refused because it is not finite.
        self._not_finite = 0
        self._records: RecordsInTurns = NoRecords()
        self._failures = Failures(training.max_restarts)
        self._crash_loops = False
        self._on_trained: Callable[[Vector], None] = lambda _delta: None
        #: Steps whose training has ended and which are not counted yet: one at most, or two where steps overlap.
        self._uncounted = 0
        self._all_counted = asyncio.Event()
        self._all_counted.set()

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
        """Wait, before this loop is cancelled, until no delta is pushed whose step is not counted yet: after a restart
        it would be trained again under the same number."""
        self._is_leaving = self._overlap.is_on or self._in_flight is not None
        try:
            async with asyncio.timeout(timeout_s):
                if self._in_flight is not None:
                    self._in_flight.cut_short()
                await self._all_counted.wait()
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
        self._swarm.announce(activity=self.progress.activity)

    # -- the loop -----------------------------------------------------------------------------------------------

    async def run(self, start_step: int, after_step: Callable[[], Awaitable[None]]) -> End:
        """Train from `start_step` completed steps until the run ends; returns why. `after_step` writes checkpoints."""
        progress = self.progress
        self._steps.begin_at(start_step)
        self._trained_step = self.first_step = start_step
        self._started = self._clock.monotonic()
        self._waiter.begin()
        self._swarm.announce(step=start_step)
        self._announce_activity()
        has_end = self._training.max_steps or self._training.max_seconds or self._evaluations.has_goal
        has_end = has_end or not isinstance(self._records, NoRecords)
        note_start(
            self._log,
            start_step,
            overlaps_in_vain=self._settings.overlap is True and self._exchange.context.synchronous,
            has_end=bool(has_end),
        )
        try:
            while (end := self._ended()) is None or (end == "max_steps" and await self._goes_back()):
                await self._wait_while_paused()
                await self._one_step()
                await after_step()
            await self._drain()
        except RecordsOver:
            end = "passes"
            await self._deliver()
        except TrainerLeft as left:
            end = "script"
            await self._deliver()
            note_left(self._log, left.reason, progress.step - start_step)
        except TrainerFailed:
            await self._deliver()
            raise
        finally:
            if self._in_flight is not None:
                await self._in_flight.cancel()
        self._log.info("training_ended", step=progress.step, reason=end)
        return end

    async def _deliver(self) -> None:
        """The trainer trains no more: push what is in flight."""
        if self._in_flight is not None:
            self._in_flight.cut_short()
            await self._settle()

    def _ended(self) -> End | None:
        limits = self._training
        if limits.max_steps and self._trained_step >= limits.max_steps:
            return "max_steps"
        if limits.max_seconds and self._clock.monotonic() - self._started >= limits.max_seconds:
            return "max_seconds"
        if self._evaluations.is_goal_reached:
            return "until"
        return "passes" if self._records.over.is_set() else None

    async def _goes_back(self) -> bool:
        """Whether the run goes on, because the step that would end it is not true."""
        if await self._steps.go_back_before_the_end():
            self._trained_step = self.progress.step
        return self._ended() is None

    async def _wait_while_paused(self) -> None:
        if self._resumed.is_set():
            return
        self._announce_activity()
        self._log.info("paused", step=self.progress.step)
        await self._drain()
        await self._resumed.wait()
        self._announce_activity()
        # The deltas of the others since the pause are the new base, and this node continues at their step.
        await self._steps.catch_up()
        self._trained_step = self.progress.step
        self._turn_ended = None
        self._own_carry = 0.0
        self._log.info("resumed", step=self.progress.step)

    async def _one_step(self) -> None:
        """Train a step and exchange it; with `exchange.overlap` that exchange ends after the next step's training."""
        trained = await self._train()
        self._on_trained(self._trainer.delta)
        self.take_measured()
        self._hold()
        former, exchanged = await self._settle(), None
        if former is not None and former.is_caught_up:
            # Its base is as old as that of the delta before it: late, or of values that this node has left.
            self._log.warning("late_step_dropped", step=trained.step, samples=trained.report.samples)
            self._records.drop(trained.step)
            self.progress.note_dropped()
            self._release()
        else:
            self._note_training(trained.report)
            self._foresee(trained)
            await self._steps.prepare(trained)
            if self._overlap.is_on:
                self._own_carry = 0.0
                self._in_flight = ExchangeInFlight(self._steps, trained, self._release)
            else:
                exchanged = await self._exchanged(trained)
        for ended in (former, exchanged):
            if ended is not None:
                await self._follow_up(ended)

    def _foresee(self, trained: TrainedStep) -> None:
        """Let the measured line decide whether the first exchange is hidden."""
        expected_s = self._exchange.expected_s() if self._overlap.is_open else None
        if expected_s is not None and self._overlap.expect(trained.train_s, expected_s):
            self._note_overlap(train_s=trained.train_s, expected_s=expected_s)

    def _note_overlap(self, **seconds: float) -> None:
        self._exchange.set_overlap(self._overlap.is_on)
        self._log.info("overlap_on" if self._overlap.is_on else "overlap_off", **seconds)

    async def _exchanged(self, trained: TrainedStep) -> ExchangedStep:
        """Exchange a step while the trainer stands still."""
        try:
            row = await self._steps.push(trained)
        finally:
            self._release()
        exchanged = await self._steps.pull(row)
        self._own_carry = self._carry_after(exchanged)
        self._note(exchanged)
        return exchanged

    def _carry_after(self, exchanged: ExchangedStep) -> float:
        if exchanged.is_caught_up or exchanged.row.get("refused"):
            return 0.0  # the swarm does not go on from that delta
        weight = exchanged.row.get("weight", 1.0)
        together = self._exchange.context.synchronous or self._waiter.is_abreast
        return own_carry(self._settings, weight, together=together, is_apart=self._exchange.is_apart)

    async def _settle(self) -> ExchangedStep | None:
        """Wait until no exchange is in flight; returns the one that was, unless it was cut short."""
        if self._in_flight is None:
            return None
        exchanged = await self._in_flight.outcome()
        self._in_flight = None
        if exchanged is not None:
            self._note(exchanged)
        return exchanged

    async def _drain(self) -> None:
        """As `_settle`, where the trainer does not go on before."""
        if self._in_flight is not None:
            self._in_flight.handshake.loaded.set()
        if (exchanged := await self._settle()) is not None:
            await self._follow_up(exchanged)

    def _note(self, exchanged: ExchangedStep) -> None:
        if exchanged.is_caught_up:
            self._trained_step = exchanged.step
        row = exchanged.row
        self.progress.add(row)
        self._log.debug("step", **row)
        if self._overlap.note(row["train_seconds"], row["push_seconds"] + row["pull_seconds"]):
            self._note_overlap(train_s=row["train_seconds"], push_s=row["push_seconds"], pull_s=row["pull_seconds"])

    async def _follow_up(self, exchanged: ExchangedStep) -> None:
        """What the trainer has to do after an exchange, between two turns."""
        await self._restart_if_not_finite(exchanged.is_not_finite)
        if self._training.eval_steps and exchanged.step % self._training.eval_steps == 0:
            await self._evaluate(exchanged.step)

    def _hold(self) -> None:
        """A step is trained that is not counted yet."""
        self._uncounted += 1
        self._all_counted.clear()

    def _release(self) -> None:
        """It is counted now, or will not be."""
        self._uncounted -= 1
        if not self._uncounted:
            self._all_counted.set()

    # -- the trainer --------------------------------------------------------------------------------------------

    def _note_training(self, report: StepReport) -> None:
        progress = self.progress
        progress.loss = report.loss
        progress.samples += report.samples
        progress.optimizer_steps += report.optimizer_steps
        progress.training_metrics |= report.metrics
        self._recent.append(report.seconds)
        progress.step_seconds = median(self._recent)

    async def _train(self) -> TrainedStep:
        """Train the next step; a trainer that fails is started again, and trains it from the pulled values."""
        if self._is_leaving:
            await asyncio.Event().wait()  # until it is cancelled
        began = self._clock.monotonic()
        while True:
            base_step = self._steps.base_step
            self.progress.is_training = True
            try:
                report = await unless_over(self._records, self._ordered(self._order()))
            except TrainerLeft:
                raise
            except TrainerFailed as error:
                self._records.abandon(self._trained_step + 1)
                await self._restart(error)
                # It cannot go on from what it has: the delta under way counts for the next base, and is in it then.
                await self._drain()
                continue
            finally:
                self.progress.is_training = False
            self._failures.completed_step()
            if self._crash_loops and not self._not_finite:
                self._crash_loops = False
                self.set_stalled(False)
            break
        ended = self._clock.monotonic()
        idle_s = 0.0 if self._turn_ended is None else began - self._turn_ended
        self._turn_ended = ended
        self._trained_step = report.step
        self.progress.note_turn(report.seconds, ended - began + idle_s)
        return TrainedStep(report.step, base_step, report, ended - began, idle_s, is_last=self._ended() is not None)

    def _order(self) -> StepOrder:
        workers, index = self._exchange.view.worker_count(), node_index(self._swarm, self._clock.monotonic())
        step, carry = self._trained_step + 1, CARRY if self._in_flight is not None else self._own_carry
        return StepOrder(step, self._training.local_steps, workers, index == 0, index, carry)

    async def _ordered(self, order: StepOrder) -> StepReport:
        await self._steps.keep_base(None if self._overlap.is_on or order.carry == CARRY else order.carry)
        if not order.carry:
            return await self._trainer.train(order)
        handshake = BufferHandshake() if self._in_flight is None else self._in_flight.handshake
        if self._in_flight is None:
            handshake.delta_taken.set()  # it is acknowledged, or the outbox has its own copy
        try:
            return await self._trainer.train(order, handshake)
        finally:
            handshake.loaded.set()

    async def _restart(self, error: TrainerFailed) -> None:
        """Restart a failed trainer from the last base and its last saved state, with backoff.

        Raises the failure if another start would fail too, or if it has failed too often (`training.failures`).
        """
        self._own_carry = 0.0  # the trainer may have failed while it wrote a delta
        while True:
            count = self._failures.note(error.cause, self._clock.monotonic())
            self.progress.trainer_failures += 1
            self._log.error("trainer_failed", reason=error.reason, hint=error.hint, failures=count)
            if error.fatal:
                raise error
            if self._failures.are_too_many(count):
                reason = f"{error.reason} (it has failed {count} times: training.max_restarts)"
                raise TrainerFailed(reason, error.hint, fatal=True) from error
            if count >= CRASH_LOOP_FAILURES:
                self._crash_loops = True
                self.set_stalled(True)
            await asyncio.sleep(pause_s(count))
            try:
                await self._trainer.start(self._restore_file)
            except TrainerFailed as again:
                error = again
                continue
            return

    async def _restart_if_not_finite(self, refused: bool) -> None:
        """Start the trainer again from its last saved state if its deltas are not finite, one after the other.

        The base of each step is finite, so what is not must be in the optimiser's own state, such as its momentum.
        """
        self._not_finite = self._not_finite + 1 if refused else 0
        if refused and self._not_finite % NOT_FINITE_STEPS == 0:
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

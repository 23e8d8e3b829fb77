"""The exchange of one step: push the delta, count the step, wait at the barrier, pull.

The step loop runs it after the step's training, or, with `exchange.overlap`, beside the training of the next step. Then
it is an `ExchangeInFlight`: it takes the delta out of the trainer's memory first, and pulls into that memory only when
the trainer has begun its next step (`training.trainer_link.handshake`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from overlay.environment import Environment
from overlay.peers import Activity
from training.barriers.waiter import BarrierWaiter
from training.encoding.codecs import Vector
from training.exchange.exchange import Exchange
from training.progress import Progress, StepRow
from training.settings import ExchangeSettings
from training.shards.outer_rule import is_plain
from training.step_rules import base_of, correct, delta_weight, fell_behind, pushed_weight, sharers, was_away
from training.swarm import Swarm
from training.trainer_link.handshake import BufferHandshake
from training.trainer_link.interface import StepReport, Trainer

#: A step that a single other node has named ends no run before; meanwhile this node looks at the others so often.
CONFIRMED_S, MEET_POLL_S = 30.0, 0.2


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """A step whose delta is in the trainer's memory. `base_step`: the swarm's median step when its base was pulled.

    `train_s`: from the order to the report; `idle_s`: how long the trainer stood still before. `is_last`: the run ends
    with it, as far as is known.
    """

    step: int
    base_step: int
    report: StepReport
    train_s: float
    idle_s: float
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class ExchangedStep:
    """A step whose exchange has ended. `step` is the step that the node has completed then: a later one where it
    `is_caught_up`, or an earlier one where it has gone back (`StepExchange.go_back`)."""

    row: StepRow
    step: int
    is_caught_up: bool = False

    @property
    def is_not_finite(self) -> bool:
        """Whether its delta was refused because a value is not finite."""
        return "not_finite" in self.row.get("refused", {})


class StepExchange:
    """Exchanges the steps of one node, one at a time, and keeps its place among the others."""

    def __init__(
        self,
        *,
        swarm: Swarm,
        exchange: Exchange,
        trainer: Trainer,
        waiter: BarrierWaiter,
        settings: ExchangeSettings,
        environment: Environment,
        progress: Progress,
    ) -> None:
        self._swarm = swarm
        self._exchange = exchange
        self._trainer = trainer
        self._waiter = waiter
        waiter.leave_out(exchange.view.score.is_ignored)
        self._settings = settings
        self._clock = environment.clock
        self._log = environment.log
        self._progress = progress
        self._executor = environment.executor
        #: The swarm's median step when the values in the vector were pulled, and when their owners had them: earlier
        #: where other nodes have handed them down.
        self._pulled_step = self.base_step = 0
        #: The begin of the run, and of the last pull or of training, in monotonic seconds. A node may be stopped while
        #: it pulls, too.
        self._began_s = self._pulled_s = 0.0
        #: What the present step began with, and whether its delta is to be corrected by it.
        self._base: Vector | None = None
        self._corrects = False
        self._share = 0.0 if exchange.context.synchronous or not settings.enabled else settings.correct
        self._on_counted: Callable[[int], None] = _ignore
        self._renew: Callable[[], Awaitable[int]] | None = None

    def on_counted(self, callback: Callable[[int], None]) -> None:
        """Call `callback` with each step whose delta is pushed, once it is counted; replaces the previous one."""
        self._on_counted = callback

    def renew_with(self, renew: Callable[[], Awaitable[int]]) -> None:
        """`renew` gives this node a new incarnation, which is on its disk then."""
        self._renew = renew

    async def go_back(self) -> bool:
        """Go on from the step of the others where this node began with one that is not true: a single member had said
        so (`SwarmView.step_of_others`). Under a new incarnation, for within one the others believe the highest step.
        False where nothing is to be taken back."""
        step, was = self._exchange.view.step_of_others(), self._progress.step
        if step is None or self._renew is None:
            return False
        incarnation = await self._renew()
        self._exchange.context.run.return_to(step, incarnation)
        self._exchange.view.invalidate()
        self._swarm.begin_again(incarnation, step)
        self._progress.step = self._pulled_step = self.base_step = step
        self._log.warning("step_taken_back", was=was, step=step)
        return True

    async def go_back_before_the_end(self) -> bool:
        """`go_back` at the end of a run. Where a single other node has named the first step, the run ends no sooner
        than `CONFIRMED_S` after its begin: others may be met meanwhile."""
        run = self._exchange.context.run
        while not await self.go_back():
            is_doubtful = run.first_step and run.told_by_one
            if not is_doubtful or self._clock.monotonic() - self._began_s >= CONFIRMED_S:
                return False
            await asyncio.sleep(MEET_POLL_S)
        return True

    def begin_at(self, step: int) -> None:
        """This node begins with the values of this step."""
        self._began_s = self._pulled_s = self._clock.monotonic()
        self._advance(step)
        self._pulled_step = self.base_step = step

    async def catch_up(self) -> None:
        """Take the values of the others, and continue at their step if that is a later one."""
        step = max(self._progress.step, self._exchange.view.median_step())
        self._pulled_s = self._clock.monotonic()
        self._advance(step)
        if self._settings.enabled:
            await self._exchange.pull(step)
        self._pulled_step = self.base_step = step

    async def keep_base(self, carry: float | None) -> None:
        """A step is about to be ordered that begins with so much of the delta before it; None: it overlaps. For
        `exchange.correct` what it begins with is kept."""
        self._corrects = carry is not None and bool(self._share)
        if carry is not None and self._corrects:
            vector, delta = self._trainer.vector, self._trainer.delta
            self._base = await self._executor.run(partial(base_of, vector, delta, carry, self._base))

    async def prepare(self, trained: TrainedStep) -> None:
        """Before the push of a step, and before the next one's order, which begins with its delta: correct the delta,
        choose the codec, and add to the delta what sparse ones before it lacked."""
        if self._settings.enabled:
            if self._corrects and self._base is not None:
                await self._exchange.pull(trained.step - 1)
                vector, delta = self._trainer.vector, self._trainer.delta
                await self._executor.run(partial(correct, delta, self._base, vector, self._share))
            await self._exchange.prepare(self._trainer.delta, trained.report.seconds, is_last=trained.is_last)

    async def push(self, trained: TrainedStep, on_taken: Callable[[], None] | None = None) -> StepRow:
        """Push the delta and count the step; returns its row for `/steps` so far. `on_taken`: see `PushClient.push`."""
        step, report = trained.step, trained.report
        began = self._clock.monotonic()
        row: StepRow = {
            "step": step,
            "loss": report.loss,
            "samples": report.samples,
            "train_seconds": trained.train_s,
            "idle_seconds": trained.idle_s,
        }
        if self._settings.enabled:
            weight = self._weight(step, report.samples)
            pushed = await self._exchange.push(step, trained.base_step, weight, self._trainer.delta, on_taken)
            row |= {
                "weight": weight,
                "acknowledged": pushed.acknowledged,
                "refused": pushed.refused,
                "outstanding": pushed.outstanding,
                "bytes_sent": pushed.bytes_sent,
            }
            if pushed.refused:
                self._log.warning("delta_refused", step=step, reasons=pushed.refused)
        row["push_seconds"] = self._clock.monotonic() - began
        self._advance(step)
        self._swarm.announce(
            step=step,
            step_seconds=self._progress.step_seconds,
            samples=report.samples if report.samples > 0 else None,
        )
        self._on_counted(step)
        return row

    async def pull(self, row: StepRow, handshake: BufferHandshake | None = None) -> ExchangedStep:
        """Wait at the barrier of a step that is counted, and pull; with a handshake not before the buffers are loaded.

        Adds the node's own delta where nothing is exchanged.
        """
        step = row["step"]
        enabled = self._settings.enabled
        row["wait_seconds"] = 0.0
        if enabled:
            # The values lack most of each sparse delta: nodes which pull together lack those of the others still.
            has_grace = handshake is None and not is_plain(self._exchange.context.codec.codec)
            row["wait_seconds"] = await self._waiter.wait(
                step, self._progress.step_seconds, has_grace=has_grace, is_void=self._is_untrue
            )
        if handshake is not None:
            await handshake.loaded.wait()
        waited = self._clock.monotonic()
        has_gone_back = enabled and await self.go_back()
        base_step, awaited_from = await self._step_of_others()
        self._pulled_s = self._clock.monotonic()
        if enabled:
            pulled = await self._exchange.pull(self._progress.step if has_gone_back else step)
            row |= {"pulled": pulled.changed, "pull_missing": len(pulled.missing)}
        elif not self._exchange.add_alone(self._trainer.delta):
            row["refused"] = {"not_finite": 1}
        stale_limit = self._exchange.context.stale_limit
        is_caught_up = fell_behind(step, base_step, self._pulled_step, stale_limit, awaited_from)
        if has_gone_back:
            base_step = self._progress.step
        elif is_caught_up:
            # It was suspended or disconnected. It has the present vector now, so it continues at the step of the
            # others; otherwise they would wait at their barriers until this node has made up all these steps.
            self._log.info("caught_up", was=step, step=base_step)
            self._advance(base_step)
            self._swarm.announce(step=base_step)
        self._pulled_step = self.base_step = base_step
        merged = self._exchange.take_merged()
        self._progress.merged_last_step = len(merged)
        row |= {
            "pull_seconds": self._clock.monotonic() - waited,
            "merged": {node.hex(): theirs for node, theirs in merged.items()},
        }
        is_moved = is_caught_up or has_gone_back
        return ExchangedStep(row, base_step if is_moved else step, is_moved)

    async def _step_of_others(self) -> tuple[int, int | None]:
        """The median step, and, if this node was away, the step below which the others wait for it again.

        It asks them then. What it knows of them is as old as its own absence: a node that died meanwhile would count
        with its last step, and those that went on with the step they had.
        """
        view = self._exchange.view
        idle_s = self._clock.monotonic() - self._pulled_s
        if not self._settings.enabled or not was_away(idle_s, self._progress.step_seconds):
            return view.median_step(), None
        median = view.median_step_of_those_heard(await self._waiter.ask())
        return median, self._waiter.barrier.enough(median)

    def _is_untrue(self) -> bool:
        return self._exchange.view.step_of_others() is not None

    def _advance(self, step: int) -> None:
        self._progress.step = step
        self._exchange.advance(step)

    def _weight(self, step: int, samples: int) -> float:
        kind, nodes, now = self._settings.weight, self._exchange.view.worker_count(), self._clock.monotonic()
        members = self._swarm.members()
        ended = [peer for peer in members if peer.activity is Activity.FINISHED and peer.step >= step]
        working = [peer for peer in members if peer.is_worker(now)] if ended or kind == "samples" else []
        if ended:
            nodes = sharers(nodes, 1 + len(working), len(ended))
        weight = delta_weight(kind, nodes, samples, [peer.samples for peer in (*working, *ended)])
        context = self._exchange.context
        return pushed_weight(self._settings, weight, context.codec.codec, synchronous=context.synchronous)


def _ignore(_step: int) -> None:
    """Nobody asks which steps are counted."""


class ExchangeInFlight:
    """The exchange of a step while the trainer trains the next one. `on_pushed` is called when the step is counted, or
    cannot be."""

    def __init__(self, exchange: StepExchange, trained: TrainedStep, on_pushed: Callable[[], None]) -> None:
        self.handshake = BufferHandshake()
        self._exchange = exchange
        self._trained = trained
        self._on_pushed = on_pushed
        self._is_pushed = False
        self._is_cut_short = False
        self._task = asyncio.create_task(self._run(), name=f"exchange-step-{trained.step}")

    async def _run(self) -> ExchangedStep | None:
        handshake = self.handshake
        try:
            row = await self._exchange.push(self._trained, handshake.delta_taken.set)
        finally:
            handshake.delta_taken.set()
            self._is_pushed = True
            self._on_pushed()
        return None if self._is_cut_short else await self._exchange.pull(row, handshake)

    async def outcome(self) -> ExchangedStep | None:
        """Wait for the end of the exchange; None if it was cut short. It does not end before `loaded` is set."""
        await asyncio.wait([self._task])
        return None if self._task.cancelled() else self._task.result()

    def cut_short(self) -> None:
        """The push is enough, because the node leaves: neither wait at the barrier nor pull."""
        self._is_cut_short = True
        if self._is_pushed:
            self._task.cancel()

    async def cancel(self) -> None:
        """End it wherever it is."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

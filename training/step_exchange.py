"""The exchange of one delta: push it, count its step, pull the values that contain it, and let them enter the model.

It runs beside the training of the next step. The next delta is taken when it has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.peers import Activity
from p2pnode.training.barriers.waiter import BarrierWaiter
from p2pnode.training.exchange.delta import PushReport
from p2pnode.training.exchange.exchange import Exchange
from p2pnode.training.progress import Progress, StepRow
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.step_rules import delta_weight, fell_behind, pushed_weight, sharers, was_away
from p2pnode.training.swarm import Swarm
from p2pnode.training.trainer_link.interface import Ranges, StepReport, Trainer


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """A step that the trainer has trained, and whose delta is in its memory if the report says so. `samples`: those of
    the delta, with those of the steps before it that had none.

    `train_s`: from the order to the report; `idle_s`: how long the trainer stood still before, and `wait_s` of that for
    the barrier. `is_last`: the run ends with it, as far as is known.
    """

    step: int
    report: StepReport
    samples: int
    train_s: float
    idle_s: float
    wait_s: float = 0.0
    is_last: bool = False

    def row(self) -> StepRow:
        """Its row for `/steps`, so far as the training goes."""
        return {
            "step": self.step,
            "loss": self.report.loss,
            "samples": self.report.samples,
            "train_seconds": self.train_s,
            "idle_seconds": self.idle_s,
            "wait_seconds": self.wait_s,
        }


class StepExchange:
    """Exchanges the deltas of one node, one at a time, and keeps its place among the others."""

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
        waiter.exclude(exchange.view.score.is_quarantined)
        self._settings = settings
        self._clock = environment.clock
        self._log = environment.log
        self._progress = progress
        #: The swarm's median step when the values that the trainer has were pulled.
        self.base_step = 0
        #: The begin of the last pull or of training, in monotonic seconds. A node may be stopped while it pulls, too.
        self._pulled_s = 0.0
        self._on_counted: Callable[[int], None] = lambda _step: None

    def on_counted(self, callback: Callable[[int], None]) -> None:
        """Call `callback` with each step whose delta is pushed, once it is counted, which counts those before it that
        had none; replaces the previous one."""
        self._on_counted = callback

    def begin_at(self, step: int) -> None:
        """This node begins with the values of this step."""
        self._pulled_s = self._clock.monotonic()
        self._advance(step)
        self.base_step = step

    # -- one delta ------------------------------------------------------------------------------------------------

    async def push(self, trained: TrainedStep) -> tuple[StepRow, PushReport]:
        """Push the delta and count the step; returns its row for `/steps` so far, and how the push went."""
        step, report, row = trained.step, trained.report, trained.row()
        began = self._clock.monotonic()
        pushed = PushReport()
        if not report.is_finite:
            pushed = PushReport(refused={"not_finite": len(self._exchange.store.bounds)})
        else:
            weight = row["weight"] = self._weight(step, trained.samples)
            pushed = await self._exchange.push(
                step,
                self.base_step,
                weight,
                self._trainer.delta,
                on_encoded=self._trainer.encoded,
                train_s=report.seconds,
                is_last=trained.is_last,
            )
        row |= {
            "acknowledged": pushed.acknowledged,
            "refused": pushed.refused,
            "outstanding": pushed.outstanding,
            "bytes_sent": pushed.bytes_sent,
            "push_seconds": self._clock.monotonic() - began,
        }
        if pushed.refused:
            self._log.warning("delta_refused", step=step, reasons=pushed.refused)
        self._count(step, trained.samples)
        return row, pushed

    def _count(self, step: int, samples: int) -> None:
        """The step is counted. Heartbeats carry what is announced here, and the barriers of the others wait for it."""
        self._advance(step)
        self._swarm.announce(
            step=step, step_seconds=self._progress.step_seconds, samples=samples if samples > 0 else None
        )
        self._on_counted(step)

    async def pull(self, row: StepRow, pushed: PushReport) -> int | None:
        """Pull, and let the values enter the model. Returns the step from which this node goes on if it fell behind."""
        began = self._clock.monotonic()
        step = row["step"]
        base_step, awaited_from = await self._step_of_others()
        self._pulled_s = self._clock.monotonic()
        pulled = await self._exchange.pull(step, self._trainer.delta)
        row |= {"pulled": pulled.changed, "pull_missing": len(pulled.missing)}
        # No owner adds a refused or returned delta: an unchanged value is taken then.
        unchanged = set(pulled.unchanged) - pushed.refused_shards - set(pushed.returned)
        keeps_base = self._keeps_base(pulled.missing, unchanged)
        # An owner may publish a value from before it added the delta. Then the trainer adds the delta to that value.
        adds_delta = self._older_than(pushed.versions) - keeps_base
        is_caught_up = fell_behind(step, base_step, self.base_step, self._exchange.stale_limit, awaited_from)
        if is_caught_up:
            # It was suspended or disconnected. It has the present values now, so it continues at the step of the
            # others; otherwise they would wait at their barriers until this node has made up all these steps.
            self._log.info("caught_up", was=step, step=base_step)
            self._advance(base_step)
            self._swarm.announce(step=base_step)
        self.base_step = base_step
        moved_to = base_step if is_caught_up else None
        ranges = map(self._ranges, (keeps_base, pushed.returned, adds_delta))
        await self._trainer.arrived(moved_to or step, *ranges)
        merged = self._exchange.take_merged()
        self._progress.merged_last_step = len(merged)
        row |= {
            "pull_seconds": self._clock.monotonic() - began,
            "merged": {node.hex(): theirs for node, theirs in merged.items()},
        }
        return moved_to

    def _keeps_base(self, missing: Iterable[int], unchanged: Iterable[int]) -> set[int]:
        """The shards in which the trainer keeps its base, because the pulled value lacks a delta that the base has, or
        may lack it: those missing, unchanged, in the outbox, or acknowledged too late to say."""
        outbox = self._exchange.outbox
        return {*missing, *unchanged, *outbox.shards, *self._older_than(outbox.take_late())}

    def _older_than(self, versions: dict[int, int]) -> set[int]:
        """The shards whose pulled value is of an earlier version."""
        version_of = self._exchange.replica.version_of
        return {shard for shard, version in versions.items() if version_of(shard)[1] < version}

    def _ranges(self, shards: Iterable[int]) -> Ranges:
        """The values of these shards, neighbours together."""
        found: list[tuple[int, int]] = []
        bounds: Sequence[tuple[int, int]] = self._exchange.store.bounds
        for first, end in (bounds[shard] for shard in sorted(shards)):
            if found and found[-1][1] == first:
                found[-1] = found[-1][0], end
            else:
                found.append((first, end))
        return found

    # -- its place among the others -------------------------------------------------------------------------------

    async def catch_up(self) -> None:
        """Take the values of the others, and continue at their step if that is a later one."""
        step = max(self._progress.step, self._exchange.view.median_step())
        self._pulled_s = self._clock.monotonic()
        self._advance(step)
        pulled = await self._exchange.pull(step)
        await self._trainer.arrived(step, self._ranges(self._keeps_base(pulled.missing, pulled.unchanged)))
        self.base_step = step

    async def _step_of_others(self) -> tuple[int, int | None]:
        """The median step; and, if this node was away, the step below which the others wait for it again, or None.

        A node that was away asks the others first. What it knows of them is older than its absence: it would count a
        node that died meanwhile, and take the others to be where they were.
        """
        view = self._exchange.view
        idle_s = self._clock.monotonic() - self._pulled_s
        if not was_away(idle_s, self._progress.step_seconds):
            return view.median_step(), None
        median = view.median_step_of_those_heard(await self._waiter.ask())
        return median, self._waiter.barrier.enough(median)

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
        exchange = self._exchange
        return pushed_weight(weight, exchange.codec.codec, exchange.rate, synchronous=exchange.synchronous)

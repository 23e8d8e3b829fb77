"""A step loop over a trainer, a swarm and an exchange that record what it calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from p2pnode.overlay.environment import Environment
from p2pnode.training.barriers.predicates import make_barrier
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.exchange.client.pull import PullReport
from p2pnode.training.exchange.delta import PushReport
from p2pnode.training.exchange.terms import ZERO_TERM
from p2pnode.training.progress import Progress
from p2pnode.training.settings import BarrierSettings, ExchangeSettings, TrainingSettings
from p2pnode.training.step_loop import StepLoop
from p2pnode.training.trainer_link.interface import Evaluation, Ranges, StepOrder, StepReport
from tests.harness.environment.simulated import InlineExecutor, ListLog, MemoryDisk, SeededEntropy, VirtualClock
from tests.harness.stubs.scripted_swarm import ScriptedSwarm
from tests.harness.trainers.stub_trainer import StubTrainer


class RecordingExchange:
    """Records what the loop calls; the swarm's median step and number of workers are set by the test."""

    def __init__(self) -> None:
        self.median = 0
        #: When the barrier asked the others for their steps, if it did.
        self.asked_at = -1.0
        self.workers = 4.0
        self.push_s = self.pull_s = 0.0
        #: The steps that were pushed as the last ones of the run.
        self.lasts: list[int] = []
        #: What happened, in order; the trainer's turns are in it too.
        self.history: list[tuple[str, int]] = []
        self.trainer: LoadingTrainer | None = None
        #: Steps whose delta is refused as not finite.
        self.not_finite: range | list[int] = []
        self.pushes: list[tuple[int, int, float]] = []
        self.pulls: list[int] = []
        #: With how many of these pulls the trainer's delta was given, to be compared with what changes.
        self.compared = 0
        self.deltas: list[Any] = []
        #: How far others move the values between two pulls.
        self.moves = 0.0
        self.steps: list[int] = []
        #: Shards that are not sent, or do not arrive; there is one of eight values.
        self.returned: tuple[int, ...] = ()
        self.missing: list[int] = []
        self.store = SimpleNamespace(bounds=[(0, 8)])
        #: The version of the owner's state with the delta, and of what is pulled.
        self.added_version = self.pulled_version = 0
        self.replica = SimpleNamespace(version_of=lambda _shard: (ZERO_TERM, self.pulled_version))
        self.outbox = SimpleNamespace(shards=set(), take_late=dict)
        self.stale_limit, self.synchronous, self.codec = 10, False, SimpleNamespace(codec="bfloat16")
        self.rate = 1.0
        self.view = SimpleNamespace(
            median_step=lambda: self.median,
            median_step_of_those_heard=lambda since: self.median if since <= self.asked_at else 0,
            worker_count=lambda: self.workers,
            score=SimpleNamespace(is_quarantined=lambda _node: False),
        )

    def advance(self, step: int) -> None:
        self.steps.append(step)

    async def push(
        self,
        step: int,
        base_step: int,
        weight: float,
        delta: Any,
        *,
        on_encoded: Callable[[], None],
        train_s: float,
        is_last: bool,
    ) -> PushReport:
        assert train_s >= 0.0
        self.deltas.append(delta.copy())
        self.lasts += [step] if is_last else []
        on_encoded()
        await asyncio.sleep(self.push_s)
        self.pushes.append((step, base_step, weight))
        self.history.append(("pushed", step))
        refused = {"not_finite": 1} if step in self.not_finite else {}
        return PushReport(
            1, refused, {0} if refused else set(), {0: self.added_version}, bytes_sent=8, returned=self.returned
        )

    async def pull(self, step: int, sent: Vector | None = None) -> PullReport:
        trainer = self.trainer
        await asyncio.sleep(self.pull_s)
        trainer.vector[:] = len(self.pushes) + self.moves * len(self.pulls)
        self.pulls.append(step)
        self.compared += sent is trainer.delta
        self.history.append(("pulled", step))
        return PullReport(1 - len(self.missing), [], self.missing)

    def take_merged(self) -> dict[bytes, int]:
        return {b"x" * 20: 1}


class LoadingTrainer(StubTrainer):
    """Notes when its turns begin, and what enters."""

    def __init__(self, history: list[tuple[str, int]], step_s: float) -> None:
        super().__init__("stub", 8, step_s=step_s)
        self.waits = False
        self.arrivals: list[tuple[int, list[tuple[int, int]], list[tuple[int, int]]]] = []
        self.added: list[list[tuple[int, int]]] = []
        self._history = history

    async def load(self, order: StepOrder) -> None:
        self._history.append(("began", order.step))

    async def arrived(
        self, step: int, keeps_base: Ranges = (), takes_back: Ranges = (), adds_delta: Ranges = ()
    ) -> None:
        await super().arrived(step, keeps_base, takes_back, adds_delta)
        self.arrivals.append((step, list(keeps_base), list(takes_back)))
        self.added.append(list(adds_delta))
        self._history.append(("entered", step))


class LoopBench:
    """A step loop and everything around it."""

    def __init__(self, *, step_s: float = 1.0, exchange: ExchangeSettings | None = None, **training: Any) -> None:
        self.exchange, self.swarm, self.progress = RecordingExchange(), ScriptedSwarm(), Progress()
        self.trainer = self.exchange.trainer = LoadingTrainer(self.exchange.history, step_s)
        self.clock = VirtualClock()
        self.records: list[Any] = []
        self.waits: list[int] = []
        #: A barrier takes so long, whatever it says.
        self.wait_s = 0.0
        self._environment = Environment(
            clock=self.clock,
            entropy=SeededEntropy(1),
            disk=MemoryDisk(),
            executor=InlineExecutor(),
            log=ListLog(self.records, "", self.clock),
        )
        self._training = TrainingSettings(**{"local_steps": 2, "eval_steps": 0, **training})
        self.settings = exchange or ExchangeSettings()
        self.loop = self.make_loop()

    def make_loop(self) -> StepLoop:
        """A loop over what the bench has now."""
        waiter: Any = SimpleNamespace(
            begin=lambda: None,
            wait=self._wait,
            ask=self._ask,
            barrier=make_barrier(BarrierSettings(method="bsp" if self.exchange.synchronous else "pssp")),
            exclude=lambda _is_excluded: None,
        )
        fakes: Any = (self.swarm, self.exchange)
        return StepLoop(
            swarm=fakes[0],
            exchange=fakes[1],
            trainer=self.trainer,
            waiter=waiter,
            training=self._training,
            settings=self.settings,
            environment=self._environment,
            progress=self.progress,
        )

    async def _wait(self, step: int, _step_seconds: float) -> float:
        await asyncio.sleep(self.wait_s)
        self.waits.append(step)
        self.exchange.history.append(("waited", step))
        return 0.25

    async def _ask(self) -> float:
        """What the others answer, the view has; none was heard later."""
        self.exchange.asked_at = self.clock.monotonic()
        return self.exchange.asked_at

    async def run(self, start_step: int = 0) -> str:
        await self.trainer.start()
        return await self.loop.run(start_step, self._after_step)

    async def _after_step(self) -> None:
        """No checkpoints."""

    def note_evaluations(self) -> list[int]:
        """The steps that are evaluated from now on, as they come."""
        steps: list[int] = []

        async def evaluate(step: int) -> Evaluation:
            steps.append(step)
            return Evaluation(step, {"mean": 0.1}, 1)

        self.trainer.evaluate = evaluate
        return steps

    def end_records_after(self, last: int) -> None:
        """The node trains on records, and none is left after this step: the next turn waits in vain for one."""
        over, train = asyncio.Event(), self.trainer.train

        def count(step: int) -> None:
            if step == last:
                asyncio.get_running_loop().call_later(0.5, over.set)

        async def train_on_records(order: StepOrder) -> StepReport:
            if order.step > last and order.local_steps:
                await asyncio.Event().wait()
            return await train(order)

        self.trainer.train = train_on_records
        records: Any = SimpleNamespace(over=over, count=count, drop=lambda _step: None, abandon=lambda _step: None)
        self.loop.follow(records)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [record.fields for record in self.records if record.event == name]

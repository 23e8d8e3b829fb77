"""`ProcessTrainer`: implements the trainer's interface with a process, and detects when that process hangs.

Messages pass over a Unix socket (`training.trainer_link.messages`), vectors through shared memory
(`training.trainer_link.shared_memory`), so nothing here blocks the event loop or imports torch. The trainer sends a
message at each optimiser step. After `hang_s` without one, or four of its own steps if that is longer, its state is
`hung` until the next message; after ten times that it is killed. It is not restarted here: the daemon does that, with
backoff and on the same buffers.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

import numpy as np

from overlay.environment import Clock, Log
from overlay.system import ThreadExecutor
from training.settings import TrainingSettings
from training.supervisor.process import POLITE_S, OutputLog
from training.supervisor.session import START_TIMEOUT_S, TrainerSession, ignore_data
from training.trainer_link import messages
from training.trainer_link.data_messages import DataFromDaemon, DataFromTrainer
from training.trainer_link.interface import (
    Evaluation,
    ModelDescription,
    Restored,
    Resume,
    StepOrder,
    StepReport,
    TrainerFailed,
    TrainerHello,
    Vector,
)
from training.trainer_link.shared_memory import SharedVectors

Answer = TypeVar("Answer", messages.Trained, messages.Evaluated, messages.Copied, messages.Written, messages.Described)

#: A trainer is killed after this multiple of the limit for `hung`, and not before `UNKNOWN_PACE_S` while its pace is
#: unknown: the first step compiles kernels, and writing a large file takes long.
KILL_FACTOR = 10.0
UNKNOWN_PACE_S = 600.0

#: A timeout that fires this much too late means that the daemon itself was stopped: it restarts the measurement.
OVERSLEPT_S = 1.0

#: Settings for glibc's malloc. By default it returns the gradients' pages to the kernel at each optimiser step and
#: requests them again at the next, which halved the speed of small models on the CPU.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 * 1024 * 1024), "MALLOC_TRIM_THRESHOLD_": str(4 * 1024**3)}

#: Durations kept for the median.
PACE_STEPS = 21


class NodeStart(NamedTuple):
    """One start of a node; `incarnation` counts them."""

    node_id: bytes
    incarnation: int


class ProcessTrainer:
    """One trainer process; implements `training.trainer_link.interface.Trainer`.

    `command` is the user's own (`p2pnode run -- …`), or None for the task class of the settings. `on_state` is called
    with every new state, `on_output` with the process's output.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        *,
        command: list[str] | None,
        node: NodeStart,
        state_dir: Path,
        log: Log,
        clock: Clock,
        on_state: Callable[[str], None] | None = None,
        on_output: Callable[[bytes], None] | None = None,
    ) -> None:
        self.vector: Vector = np.zeros(0, np.float32)
        self.delta: Vector = np.zeros(0, np.float32)
        self.on_state = on_state
        self._settings = settings
        self._command = command
        self._node = node
        self._starts = 0
        self._state_dir = state_dir
        self._log = log
        self._clock = clock
        self._output = OutputLog(state_dir / "trainer.log", on_output)
        self._state = "stopped"
        self._hello: TrainerHello | None = None
        self._memory: SharedVectors | None = None
        self._session: TrainerSession | None = None
        self._failure: TrainerFailed | None = None
        self._on_data: Callable[[DataFromTrainer], None] = ignore_data
        self._one_order = asyncio.Lock()
        self._turn = 0
        self._step_s: deque[float] = deque(maxlen=PACE_STEPS)
        self._evaluation_s: deque[float] = deque(maxlen=PACE_STEPS)
        self._measured: list[Evaluation] = []

    @property
    def state(self) -> str:
        return self._state

    @property
    def pid(self) -> int | None:
        """The process, while there is one."""
        return self._session.process.pid if self._session is not None else None

    # --- life cycle ---------------------------------------------------------------------------------------------

    async def start(self, restore: str = "", *, resume: Resume | None = None) -> TrainerHello:
        """See `Trainer.start`."""
        await self._end_session(polite_s=0.0)
        self._failure = None
        self._set_state("starting")
        try:
            hello = await self._start(restore, resume)
        except TrainerFailed as failure:
            self._failure = failure
            self._log.error("trainer_failed", reason=failure.reason, hint=failure.hint, fatal=failure.fatal)
            await self._end_session(polite_s=0.0)
            self._set_state("crashed")
            raise
        except BaseException:
            await self._end_session(polite_s=0.0)
            self._set_state("stopped")
            raise
        self._set_state("running")
        self._log.info("trainer_started", pid=hello.pid, task=hello.task, device=hello.device, values=len(self.vector))
        return hello

    async def _start(self, restore: str, resume: Resume | None) -> TrainerHello:
        self._state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        session, hello = await self._open_session()
        first = self._hello is None
        if self._hello is not None and self._hello.layout != hello.layout:
            raise TrainerFailed(
                "the restarted trainer built another model than before",
                "the model's code changed while the node ran: stop the node and start it again",
                fatal=True,
            )
        if self._memory is None:
            self._memory = await _allocate(hello.layout.total)
            self.vector, self.delta = self._memory.vector, self._memory.delta
        restored = Restored(has_vector=not first, file=restore)
        if first and resume is not None:
            restored = await resume(hello, self.vector)
        memory = messages.Memory(
            hello.layout.total, initialise=not restored.has_vector, restore=_absolute(restored.file)
        )
        session.send(memory, self._memory.descriptors)
        await session.expect(messages.Ready, START_TIMEOUT_S)
        self._hello = hello
        return hello

    async def _open_session(self) -> tuple[TrainerSession, TrainerHello]:
        """Start a process and wait for its `Hello`."""
        try:
            session = self._session = await TrainerSession.open(
                self._argv(),
                self._environment(),
                self._state_dir,
                self._output,
                self._log,
                self._on_heard,
                self._on_lost,
            )
            session.on_data(self._on_data)
            session.send(self._start_message())
            return session, (await session.expect(messages.Hello, START_TIMEOUT_S)).hello
        except TrainerFailed as failure:
            if self._hello is None:
                raise
            # It has started before with the same code and data, so the fault may pass: a device's memory was full.
            raise TrainerFailed(failure.reason, failure.hint) from failure

    def _argv(self) -> list[str]:
        # -P keeps the working directory off the start of sys.path, where a folder could hide our own packages.
        return self._command or [sys.executable, "-P", "-m", "training.trainer"]

    def _environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        environment[messages.DAEMON_VARIABLE] = str(os.getpid())
        if self._settings.threads:
            environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = str(self._settings.threads)
        if self._command is None:
            root = Path(__file__).resolve().parent.parent.parent
            # For a checkout that is not installed; site-packages must not come before the standard library.
            if root.name not in ("site-packages", "dist-packages"):
                environment["PYTHONPATH"] = os.pathsep.join(
                    part for part in (str(root), environment.get("PYTHONPATH", "")) if part
                )
        environment["PYTHONUNBUFFERED"] = "1"
        if not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in environment):
            environment |= KEEP_MEMORY
        return environment

    def _start_message(self) -> messages.Start:
        settings = self._settings
        self._starts += 1
        return messages.Start(
            task=settings.task,
            data_dir=str(Path(settings.data_dir).expanduser().absolute()) if settings.data_dir else "",
            options=settings.options,
            device=settings.device,
            threads=settings.threads,
            seed=settings.seed,
            node_seed=messages.derive_node_seed(settings.seed, self._node.node_id),
            local_steps=settings.local_steps,
            start_seed=messages.derive_start_seed(settings.seed, *self._node, self._starts),
        )

    async def stop(self) -> None:
        """See `Trainer.stop`; takes at most four seconds."""
        await self._end_session(polite_s=POLITE_S)
        self._set_state("stopped")

    async def _end_session(self, *, polite_s: float) -> None:
        session, self._session = self._session, None
        if session is not None:
            self._measured += session.take_measured()
            await session.close(polite_s=0.0 if self._state == "hung" else polite_s)

    # --- shared data --------------------------------------------------------------------------------------------

    def on_data(self, handler: Callable[[DataFromTrainer], None]) -> None:
        """See `Trainer.on_data`."""
        self._on_data = handler
        if self._session is not None:
            self._session.on_data(handler)

    def send_data(self, message: DataFromDaemon) -> None:
        """See `Trainer.send_data`."""
        if self._session is not None:
            self._session.send(message)

    # --- orders -------------------------------------------------------------------------------------------------

    async def train(self, order: StepOrder) -> StepReport:
        """See `Trainer.train`."""
        answer = await self._ask(lambda turn: messages.Train(turn, order), messages.Trained, self._step_s)
        return answer.report

    async def evaluate(self, step: int) -> Evaluation | None:
        """See `Trainer.evaluate`."""
        answer = await self._ask(lambda turn: messages.Evaluate(turn, step), messages.Evaluated, self._evaluation_s)
        return answer.evaluation

    async def save(self, path: str) -> Awaitable[None]:
        """See `Trainer.save`."""
        copied = await self._ask(lambda turn: messages.Save(turn, str(Path(path).absolute())), messages.Copied)
        if self._session is None:
            raise TrainerFailed("the trainer was stopped")
        return self._session.file(copied.turn)

    async def describe(self, folder: str, *, wait: bool = False) -> ModelDescription:
        """See `Trainer.describe`."""
        answer = await self._ask(lambda turn: messages.Describe(turn, folder, wait), messages.Described)
        return answer.description

    def take_measured(self) -> list[Evaluation]:
        """See `Trainer.take_measured`."""
        measured, self._measured = self._measured, []
        return measured + (self._session.take_measured() if self._session is not None else [])

    async def _ask(
        self, order: Callable[[int], messages.Order], answer: type[Answer], durations_s: deque[float] | None = None
    ) -> Answer:
        async with self._one_order:
            session = self._session
            if session is None or session.failure is not None:
                raise self._failure or TrainerFailed("the trainer is not running", "it has to be started first")
            self._turn += 1
            message = order(self._turn)
            began_s = self._clock.monotonic()
            reply = session.ask(message)
            try:
                await self._watch(session, reply, known_pace=bool(durations_s))
            except asyncio.CancelledError:
                session.send(messages.Cancel(message.turn))
                raise
            finally:
                session.forget()
            got = reply.result()
            if isinstance(got, messages.NotWritten):
                raise TrainerFailed(got.reason, got.hint)
            if not isinstance(got, answer):
                raise TrainerFailed(f"the trainer answered {type(message).__name__} with {type(got).__name__}")
            if durations_s is not None:
                durations_s.append(self._clock.monotonic() - began_s)
            return got

    # --- watching -----------------------------------------------------------------------------------------------

    def _silence_limit_s(self) -> float:
        durations = [statistics.median(known) for known in (self._step_s, self._evaluation_s) if known]
        return max(self._settings.hang_s, 4 * max(durations, default=0.0))

    async def _watch(
        self, session: TrainerSession, reply: asyncio.Future[messages.FromTrainer], *, known_pace: bool
    ) -> None:
        """Wait for the reply or a failure; mark a trainer that is silent too long as hung, and later kill it."""
        session.note_heard(self._clock.monotonic())
        while not reply.done():
            limit_s = self._silence_limit_s()
            kill_s = KILL_FACTOR * limit_s
            if not known_pace and not session.has_progressed:
                kill_s = max(kill_s, UNKNOWN_PACE_S)
            before_s = self._clock.monotonic()
            wait_s = session.heard_s + (kill_s if self._state == "hung" else limit_s) - before_s
            await asyncio.wait([reply], timeout=max(wait_s, 0.001))
            now_s = self._clock.monotonic()
            if reply.done():
                break
            if now_s - before_s > max(wait_s, 0.0) + OVERSLEPT_S:
                session.note_heard(now_s)
            elif now_s - session.heard_s >= kill_s:
                await session.kill(f"the trainer was silent for {now_s - session.heard_s:.0f} s and was killed")
            elif now_s - session.heard_s >= limit_s and self._state == "running":
                self._log.warning("trainer_hung", silent_s=round(now_s - session.heard_s, 1), limit_s=limit_s)
                self._set_state("hung")

    def _on_heard(self, session: TrainerSession) -> None:
        if session is not self._session:
            return
        session.note_heard(self._clock.monotonic())
        if self._state == "hung":
            self._log.info("trainer_moves_again")
            self._set_state("running")

    def _on_lost(self, session: TrainerSession, failure: TrainerFailed) -> None:
        """The process has ended by itself; the pending order fails with the same failure."""
        if session is self._session and self._state in ("running", "hung"):
            self._failure = failure
            self._log.error("trainer_died", reason=failure.reason, hint=failure.hint)
            self._set_state("crashed")

    def _set_state(self, state: str) -> None:
        if state != self._state:
            self._state = state
            if self.on_state is not None:
                self.on_state(state)


def _absolute(file: str) -> str:
    return str(Path(file).absolute()) if file else ""


async def _allocate(total: int) -> SharedVectors:
    if total < 1:
        raise TrainerFailed("the model has no trainable parameter", "see requires_grad of its parameters", fatal=True)
    executor = ThreadExecutor(1)  # Allocating gigabytes takes seconds, and happens once.
    try:
        return cast(SharedVectors, await executor.run(SharedVectors, total))
    finally:
        executor.close()

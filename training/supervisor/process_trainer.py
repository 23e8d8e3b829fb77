"""`ProcessTrainer`: implements the trainer's interface with a process, and detects when that process hangs.

Messages pass over a Unix socket (`training.trainer_link.messages`), vectors through shared memory
(`training.trainer_link.shared_memory`), so nothing here blocks the event loop or imports torch. The trainer sends a
message at each optimiser step. One that is silent for too long is `hung` until its next message, and later killed
(`training.supervisor.silence`). It is not restarted here: the daemon does that, with backoff and on the same buffers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from p2pnode.overlay.environment import Clock, Log
from p2pnode.training.devices.gpus import SEE_DRIVER
from p2pnode.training.settings import TrainingSettings
from p2pnode.training.supervisor.launch import Launch, NodeStart, start_message
from p2pnode.training.supervisor.process import POLITE_S, TERMINATE_S, OutputLog
from p2pnode.training.supervisor.session import TrainerSession, allocate, hello_of
from p2pnode.training.supervisor.silence import Limits, OrderPace, SilenceVerdict, TrainerSilence
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.data_messages import (
    DataFromDaemon,
    DataFromTrainer,
    DataOpened,
    DataTrained,
    DataWanted,
)
from p2pnode.training.trainer_link.engine_messages import (
    CallAnswered,
    EngineAsked,
    EngineFromDaemon,
    EngineOpened,
    EngineSaid,
    PullDone,
)
from p2pnode.training.trainer_link.interface import (
    SAME_VALUES,
    BusyWith,
    Evaluation,
    ModelDescription,
    Ranges,
    Restored,
    Resume,
    StepOrder,
    StepReport,
    TrainerEnd,
    TrainerFailed,
    TrainerHello,
    TrainerLeft,
    Vector,
)
from p2pnode.training.trainer_link.record_messages import (
    RecordsFromTrainer,
    RecordsGranted,
    RecordsOpened,
    RecordsTrained,
    RecordsUnreadable,
    RecordsWanted,
)
from p2pnode.training.trainer_link.shared_memory import SharedVectors, TrainerMemory

Answer = TypeVar(
    "Answer",
    messages.Trained,
    messages.Merged,
    messages.Evaluated,
    messages.Copied,
    messages.Written,
    messages.Described,
)

#: A timeout that fires this much too late means that the daemon itself was stopped: it restarts the measurement.
OVERSLEPT_S = 1.0

#: A script that has ended waits this long for its state to be written.
FILE_S = 60.0

LEAVE_CALLED = "the script has called swarm.leave()"
HANG_HINT = (
    "in a long pass between two steps call swarm.alive() now and then, or put it into `with swarm.busy(...)`; "
    "or raise training.hang_s"
)


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
        self._memory: SharedVectors | TrainerMemory | None = None
        self._session: TrainerSession | None = None
        self._failure: TrainerFailed | None = None
        self._on_data: Callable[[DataFromTrainer | RecordsFromTrainer], None] = lambda _: None
        self._on_engine: Callable[[EngineSaid], None] = lambda _: None
        self._has_ended = asyncio.Event()
        self._end = TrainerEnd()
        self._one_order = asyncio.Lock()
        self._turn = 0
        #: Done when the model has moved to the values that arrived last, or its process has ended.
        self._entered: asyncio.Future[None] | None = None
        self._silence = TrainerSilence(clock.monotonic())
        self._has_left = False
        self._pace = OrderPace(settings.hang_s)
        self._measured: list[Evaluation] = []
        self._findings: dict[str, tuple[str, str]] = {}

    @property
    def state(self) -> str:
        return self._state

    @property
    def is_script(self) -> bool:
        return self._command is not None

    @property
    def busy(self) -> BusyWith | None:
        return self._silence.busy

    @property
    def findings(self) -> list[tuple[str, str]]:
        return list(self._findings.values())

    @property
    def pid(self) -> int | None:
        """The process, while there is one."""
        return self._session.process.pid if self._session is not None else None

    # --- life cycle ---------------------------------------------------------------------------------------------

    async def start(self, restore: str = "", *, resume: Resume | None = None) -> TrainerHello:
        """See `Trainer.start`."""
        await self._end_session(polite_s=0.0)
        self._failure = None
        self._end = TrainerEnd()
        self._silence = TrainerSilence(self._clock.monotonic())
        self._has_left = False
        self._findings.clear()
        self._has_ended.clear()
        self._pace.new_process()
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
        if self._hello is not None and (name := self._hello.differing(hello)):
            raise TrainerFailed(
                f"the tensor {name}, which is not exchanged, is another in the restarted trainer than before",
                SAME_VALUES,
                fatal=True,
            )
        if self._hello is not None and is_on_gpu(self._hello) and not is_on_gpu(hello):
            raise TrainerFailed(
                f"the restarted trainer is on {hello.device}, and the one before was on {self._hello.device}: its GPU "
                "does not answer any more",
                SEE_DRIVER,
            )
        if hello.engine is not None:  # named values are not in shared memory
            self._hello = hello
            return hello
        if self._memory is None:
            self._memory = await self._allocate(hello.layout.total)
            self.vector, self.delta = self._memory.vector, self._memory.delta
        restored = Restored(has_vector=not first, file=restore)
        if first and resume is not None:
            restored = await resume(hello, self.vector)
        memory = messages.Memory(
            hello.layout.total, initialise=not restored.has_vector, restore=_absolute(self._restorable(restored.file))
        )
        session.send(memory, self._memory.descriptors)
        await session.expect("Ready", messages.Ready)
        self._hello = hello
        return hello

    async def _allocate(self, total: int) -> SharedVectors | TrainerMemory:
        return await allocate(total)

    async def _open_session(self) -> tuple[TrainerSession, TrainerHello]:
        """Start a process and wait for its `Hello`."""
        try:
            launch = Launch.of(self._settings, self._command, self._state_dir, is_proven=self._pace.has_trained)
            session = self._session = await TrainerSession.open(
                launch, self._output, self._log, self._on_message, self._on_lost
            )
            self._starts += 1
            session.send(start_message(self._settings, self._node, self._starts))
            return session, hello_of(await session.expect("Hello", messages.Hello, EngineOpened))
        except TrainerFailed as failure:
            if self._hello is None:
                raise
            # It has started before with the same code and data, so the fault may pass: a device's memory was full.
            raise TrainerFailed(failure.reason, failure.hint, cause=failure.cause) from failure

    def _restorable(self, path: str) -> str:
        """The path, if the file is still there: its checkpoint may have been replaced by newer ones."""
        if path and not Path(path).exists():
            self._log.warning("trainer_state_gone", path=path, effect="the trainer starts with a fresh optimiser")
            return ""
        return path

    async def finish(self, reason: str, finish_s: float) -> TrainerEnd:
        """See `Trainer.finish`."""
        return await self._dismiss(messages.RunEnded(reason, finish_s), finish_s)

    async def stop(self, stop_s: float = 0.0) -> TrainerEnd:
        """See `Trainer.stop`. A task class is ended after `POLITE_S`, whatever `stop_s` says."""
        return await self._dismiss(messages.Stop(stop_s), stop_s)

    async def _dismiss(self, message: messages.RunEnded | messages.Stop, grace_s: float) -> TrainerEnd:
        """Let the process end by itself. A caller that is cancelled leaves it running, for a later `stop`."""
        session = self._session
        if session is not None:
            if self.is_script and session.process.returncode is None:
                await self._let_finish(session, message, grace_s)
            else:
                session.dismiss(message)
                await self._end_session(polite_s=0.0 if self._state == "hung" else POLITE_S)
        self._set_state("stopped")
        return self._end

    async def _let_finish(
        self, session: TrainerSession, message: messages.RunEnded | messages.Stop, grace_s: float
    ) -> None:
        """Wait for a script; its exit code is the user's."""
        self._set_state("finishing")
        session.dismiss(message)
        by_itself = await session.process.ends_within(grace_s)
        if not by_itself and await session.files_written(FILE_S):
            # Its process could not end before a thread of ours had written its state to a slow disk.
            by_itself = await session.process.ends_within(TERMINATE_S)
        if not by_itself:
            await session.process.terminate()
        await self._end_session(polite_s=0.0)
        self._end = TrainerEnd(session.process.returncode or 0, cut_short=not by_itself)
        if not by_itself:
            self._log.warning("script_cut_short", after_s=grace_s, ended_with=session.process.how_it_ended())
        elif self._end.exit_code:
            self._log.warning("script_ended", ended_with=session.process.how_it_ended())
        else:
            self._log.info("script_ended", ended_with=session.process.how_it_ended())

    async def _end_session(self, *, polite_s: float) -> None:
        session, self._session = self._session, None
        self._note_entered()
        if session is not None:
            await session.close(polite_s=polite_s)

    # --- shared data --------------------------------------------------------------------------------------------

    def on_data(self, handler: Callable[[DataFromTrainer | RecordsFromTrainer], None]) -> None:
        """See `Trainer.on_data`."""
        self._on_data = handler

    def send_data(self, message: DataFromDaemon | RecordsGranted | EngineFromDaemon) -> None:
        """See `Trainer.send_data`."""
        self._send(message)

    def on_engine(self, handler: Callable[[EngineSaid], None]) -> None:
        """See `Trainer.on_engine`."""
        self._on_engine = handler

    async def ended(self) -> TrainerFailed:
        """See `Trainer.ended`."""
        await self._has_ended.wait()
        assert self._failure is not None
        return self._failure

    def _send(self, message: messages.FromDaemon) -> None:
        if self._session is not None:
            self._session.send(message)

    # --- orders -------------------------------------------------------------------------------------------------

    async def train(self, order: StepOrder) -> StepReport:
        """See `Trainer.train`."""
        return (await self._ask(lambda turn: messages.Train(turn, order), messages.Trained)).report

    def encoded(self) -> None:
        """See `Trainer.encoded`."""
        self._send(messages.DeltaEncoded())

    async def arrived(
        self, step: int, keeps_base: Ranges = (), takes_back: Ranges = (), adds_delta: Ranges = ()
    ) -> None:
        """See `Trainer.arrived`."""
        session = self._session
        if session is None or session.failure is not None:
            return
        self._entered = asyncio.get_running_loop().create_future()
        session.send(messages.ValuesArrived(step, list(keeps_base), list(takes_back), list(adds_delta)))
        # Under bsp no order is under way, and nobody else finds out that it hangs.
        await self._watch(session, self._entered, self._pace.limits(None))

    def _note_entered(self) -> None:
        if self._entered is not None and not self._entered.done():
            self._entered.set_result(None)

    async def evaluate(self, step: int) -> Evaluation | None:
        """See `Trainer.evaluate`."""
        answer = await self._ask(lambda turn: messages.Evaluate(turn, step), messages.Evaluated)
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
        return measured

    async def _ask(self, order: Callable[[int], messages.Order], answer: type[Answer]) -> Answer:
        async with self._one_order:
            session = self._session
            if session is None or session.failure is not None:
                raise self._failure or TrainerFailed("the trainer is not running", "it has to be started first")
            self._turn += 1
            message = order(self._turn)
            if self._has_left and isinstance(message, messages.Train | messages.Evaluate):
                raise TrainerLeft(LEAVE_CALLED)
            began_s = self._clock.monotonic()
            reply = session.ask(message)
            try:
                await self._watch(session, reply, self._pace.limits(message))
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
            self._pace.note(message, self._clock.monotonic() - began_s)
            return got

    # --- watching -----------------------------------------------------------------------------------------------

    async def _watch(self, session: TrainerSession, reply: asyncio.Future[Any], limits: Limits) -> None:
        """Wait for the reply or a failure; mark a trainer that is silent too long as hung, and later kill it."""
        silence = self._silence
        silence.heard(self._clock.monotonic())
        while not reply.done():
            before_s = self._clock.monotonic()
            wait_s = silence.next_check_s(before_s, limits)
            await asyncio.wait([reply], timeout=wait_s)
            now_s = self._clock.monotonic()
            if reply.done():
                break
            if now_s - before_s > wait_s + OVERSLEPT_S:
                silence.heard(now_s)
                continue
            if silence.wants_sample(now_s, limits):
                silence.note_processor_time(now_s, await session.process.work_seconds())
            await self._judge(session, silence.verdict(now_s, limits), now_s)

    async def _judge(self, session: TrainerSession, verdict: SilenceVerdict, now_s: float) -> None:
        silent_s, hang_s = self._silence.silent_s(now_s), self._settings.hang_s
        match verdict:
            case SilenceVerdict.IDLE_TOO_LONG | SilenceVerdict.SILENT_TOO_LONG:
                idle = " and used no processor time" if verdict is SilenceVerdict.IDLE_TOO_LONG else ""
                reason = f"the trainer was silent for {silent_s:.0f} s{idle} (training.hang_s = {hang_s:g})"
                await session.kill(f"{reason}, so it was killed", HANG_HINT)
            case SilenceVerdict.STALLED if self._state == "running":
                self._log.warning("trainer_hung", silent_s=round(silent_s, 1), hang_s=hang_s, hint=HANG_HINT)
                self._set_state("hung")
            case SilenceVerdict.WELL:
                self._moves()  # in its first turn it was idle for a while, and works again

    def _moves(self) -> None:
        if self._state == "hung":
            self._log.info("trainer_moves_again")
            self._set_state("running")

    def _on_message(self, session: TrainerSession, message: messages.FromTrainer) -> None:
        """Every message is a sign of life; some say what the script does between steps."""
        if session is not self._session:
            return
        now_s = self._clock.monotonic()
        self._silence.heard(now_s)
        self._moves()
        match message:
            case messages.Busy(what):
                self._silence.busy = BusyWith(what, now_s)
            case messages.Idle():
                self._silence.busy = None
            case messages.Warned(event, what, do) if do or not what:
                self._findings.pop(event, None)
                if what:
                    self._findings[event] = (what, do)
            case messages.ValuesEntered():
                self._note_entered()
            case messages.Measurement(step, metrics, samples):
                self._measured.append(Evaluation(step, metrics, samples))
            case DataOpened() | DataWanted() | RecordsOpened() | RecordsWanted() | RecordsUnreadable():
                self._on_data(message)
            case DataTrained() | RecordsTrained() if session.awaits(message.turn):
                # What a cancelled turn trained does not reach the model.
                self._on_data(message)
            case EngineAsked() | PullDone() | CallAnswered():
                self._on_engine(message)
            case messages.LeaveRequested():
                self._has_left = True
                session.fail_order(TrainerLeft(LEAVE_CALLED))

    def _on_lost(self, session: TrainerSession, failure: TrainerFailed) -> None:
        """The process has ended by itself; the pending order fails with the same failure."""
        if session is not self._session:
            return
        self._failure = failure
        self._has_ended.set()
        self._note_entered()
        if self._state not in ("running", "hung"):
            return
        self._silence.busy = None
        if isinstance(failure, TrainerLeft):
            self._log.info("trainer_left", reason=failure.reason)
            self._set_state("left")
        else:
            self._log.error("trainer_died", reason=failure.reason, hint=failure.hint)
            self._set_state("crashed")

    def _set_state(self, state: str) -> None:
        if state != self._state:
            self._state = state
            if self.on_state is not None:
                self.on_state(state)


def is_on_gpu(hello: TrainerHello) -> bool:
    """Whether the model, or a part of it, is on a CUDA device."""
    return "cuda" in hello.device


def _absolute(file: str) -> str:
    return str(Path(file).absolute()) if file else ""

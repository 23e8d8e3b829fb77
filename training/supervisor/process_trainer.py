"""`ProcessTrainer`: implements the trainer's interface with a process, and detects when that process hangs.

Messages pass over a Unix socket (`training.trainer_link.messages`), vectors through shared memory
(`training.trainer_link.shared_memory`), so nothing here blocks the event loop or imports torch. The trainer sends a
message at each optimiser step. One that is silent for too long is `hung` until its next message, and later killed
(`training.supervisor.silence`). It is not restarted here: the daemon does that, with backoff and on the same buffers.
If the process ends without a `Failed` message, the reason is derived from its exit code and its last lines.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from p2pnode.overlay.environment import Clock, Log
from p2pnode.training.settings import TrainingSettings
from p2pnode.training.supervisor.gpu_errors import explained
from p2pnode.training.supervisor.launch import NodeStart, environment_of, hello_of, refuse_another_model, start_message
from p2pnode.training.supervisor.orders import PendingOrders
from p2pnode.training.supervisor.process import (
    OUTPUT_END_S,
    POLITE_S,
    TERMINATE_S,
    OutputLog,
    TrainerProcess,
    unexpected_end,
)
from p2pnode.training.supervisor.silence import HANG_S, Limits, OrderPace, SilenceVerdict, TrainerSilence
from p2pnode.training.supervisor.trainer_socket import START_TIMEOUT_S, start_connected
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.data_messages import DataFromDaemon, DataFromTrainer, DataTrained
from p2pnode.training.trainer_link.engine_messages import EngineFromDaemon, EngineOpened, EngineSaid
from p2pnode.training.trainer_link.interface import (
    BusyWith,
    Evaluation,
    MergeOrder,
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
from p2pnode.training.trainer_link.record_messages import RecordsFromTrainer, RecordsGranted, RecordsTrained
from p2pnode.training.trainer_link.shared_memory import NodeMemory

Answer = TypeVar(
    "Answer",
    TrainerHello,
    messages.Ready,
    messages.Trained,
    messages.Merged,
    messages.Evaluated,
    messages.Copied,
    messages.Described,
)

#: A timeout that fires this much too late means that the daemon itself was stopped: it restarts the measurement.
OVERSLEPT_S = 1.0

#: A script that has ended waits this long for its state to be written.
FILE_S = 60.0

LEAVE_CALLED = "the script has called swarm.leave()"
HANG_HINT = "in a long pass between two steps call swarm.alive() now and then, or put it into `with swarm.busy(...)`"


class ProcessTrainer:
    """One trainer process; implements `training.devices.device.DeviceTrainer`.

    `command` is the user's own (`p2pnode run -- …`), or None for the task class of the settings. `memory` is that of
    all trainers of the node; None: this one is alone. `on_state` is called with every new state, `on_output` with the
    process's output.
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
        memory: NodeMemory | None = None,
        on_state: Callable[[str], None] | None = None,
        on_output: Callable[[bytes], None] | None = None,
        hang_s: float = HANG_S,
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
        self._memory = memory or NodeMemory()
        self._output = OutputLog(state_dir / "trainer.log", on_output)
        self._state = "stopped"
        #: What the last process that has started said of itself, and whether one has completed a turn.
        self._hello: TrainerHello | None = None
        self._has_trained = False
        self._end = TrainerEnd()
        self._pace = OrderPace(hang_s)
        self._measured: list[Evaluation] = []
        self._on_data: Callable[[DataFromTrainer | RecordsFromTrainer], None] = lambda _: None
        self._on_engine: Callable[[EngineSaid], None] = lambda _: None
        self._on_step: Callable[[int], None] = lambda _: None
        self._one_order = asyncio.Lock()
        self._orders = PendingOrders()
        self._has_ended = asyncio.Event()
        self._process: TrainerProcess | None = None
        self._begin()

    def _begin(self) -> None:
        """Forget what was known of the last process."""
        self._failure: TrainerFailed | None = None
        self._is_dismissed = self._has_left = False
        #: What the present process has said of itself.
        self._present: TrainerHello | None = None
        self._silence = TrainerSilence(self._clock.monotonic())
        self._findings: dict[str, tuple[str, str]] = {}
        self._has_ended.clear()
        self._pace.new_process()

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
        return self._process.pid if self._process is not None else None

    # --- life cycle ---------------------------------------------------------------------------------------------

    async def start(self, restore: str = "", *, resume: Resume | None = None) -> TrainerHello:
        """See `Trainer.start`."""
        await self._end_process(polite_s=0.0)
        self._begin()
        self._end = TrainerEnd()
        self._set_state("starting")
        try:
            hello = await self._start(restore, resume)
        except TrainerFailed as failure:
            self._failure = failure
            self._log.error("trainer_failed", reason=failure.reason, hint=failure.hint, fatal=failure.fatal)
            await self._end_process(polite_s=0.0)
            self._set_state("crashed")
            raise
        except BaseException:
            await self._end_process(polite_s=0.0)
            self._set_state("stopped")
            raise
        self._set_state("running")
        self._log.info("trainer_started", pid=hello.pid, task=hello.task, device=hello.device, values=len(self.vector))
        return hello

    async def _start(self, restore: str, resume: Resume | None) -> TrainerHello:
        self._state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        hello, known, total = await self._open(), self._hello, 0
        if known is not None:
            refuse_another_model(known, hello)
        if hello.engine is None:  # named values are not in shared memory
            total = hello.layout.total
            self.vector, self.delta, descriptors = await self._memory.of(self._node.device, total)
            restored = Restored(has_vector=known is not None, file=restore)
            if known is None and resume is not None:
                restored = await resume(hello, self.vector)
            file = self._restorable(restored.file)
            memory = messages.Memory(total, initialise=not restored.has_vector, restore=file)
            await self._expect(messages.Ready, memory, descriptors)
        self._hello = hello
        return hello

    async def _open(self) -> TrainerHello:
        """Start a process and wait until it says what it is."""
        # -P keeps the working directory off the start of sys.path, where a folder could hide our own packages.
        command = self._command or [sys.executable, "-P", "-m", "p2pnode.training.trainer"]
        environment = environment_of(self._settings, is_script=self.is_script)
        try:
            self._process, self._socket = await start_connected(
                command, environment, self._state_dir, self._output, nice=self._settings.nice
            )
            self._reader = asyncio.create_task(self._read(self._process))
            self._starts += 1
            return await self._expect(TrainerHello, start_message(self._settings, self._node, self._starts))
        except TrainerFailed as failure:
            if self._hello is None:
                raise
            # It has started before with the same code and data, so the fault may pass: a device's memory was full.
            raise TrainerFailed(failure.reason, failure.hint, cause=failure.cause) from failure

    async def _expect(
        self, kind: type[Answer], message: messages.Start | messages.Memory, descriptors: tuple[int, ...] = ()
    ) -> Answer:
        """What the trainer answers during its start. Raises `TrainerFailed`."""
        reply = self._orders.expect()
        self._socket.send(message, descriptors)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                got = await reply
        except TimeoutError:
            raise TrainerFailed(
                f"the trainer did not answer {type(message).__name__} within {START_TIMEOUT_S:.0f} s of its start",
                f"what it printed is in {self._output.path}",
            ) from None
        if not isinstance(got, kind):
            raise _unexpected(message, got)
        return got

    def _restorable(self, path: str) -> str:
        """The absolute path, if the file is still there: its checkpoint may have been replaced by newer ones."""
        if path and not Path(path).exists():
            self._log.warning("trainer_state_gone", path=path, effect="the trainer starts with a fresh optimiser")
            return ""
        return str(Path(path).absolute()) if path else ""

    async def finish(self, reason: str, finish_s: float) -> TrainerEnd:
        """See `Trainer.finish`."""
        return await self._dismiss(messages.RunEnded(reason, finish_s), finish_s)

    async def stop(self, stop_s: float = 0.0) -> TrainerEnd:
        """See `Trainer.stop`. A task class is ended after `POLITE_S`, whatever `stop_s` says."""
        return await self._dismiss(messages.Stop(stop_s), stop_s)

    async def _dismiss(self, message: messages.RunEnded | messages.Stop, grace_s: float) -> TrainerEnd:
        """Let the process end by itself: from now on its end is no failure. Messages keep their order, so an order to
        save that is still pending is answered before. A caller that is cancelled leaves it running, for a later
        `stop`."""
        process = self._process
        if process is not None:
            self._is_dismissed = True
            self._socket.send(message)
            if self.is_script and process.returncode is None:
                await self._let_finish(process, grace_s)
            else:
                await self._end_process(polite_s=0.0 if self._state == "hung" else POLITE_S)
        self._set_state("stopped")
        return self._end

    async def _let_finish(self, process: TrainerProcess, grace_s: float) -> None:
        """Wait for a script; its exit code is the user's."""
        self._set_state("finishing")
        by_itself = await process.ends_within(grace_s)
        if not by_itself and (unwritten := self._orders.unwritten()):
            # Its process could not end before a thread of ours had written its state to a slow disk.
            await asyncio.wait(unwritten, timeout=FILE_S)
            by_itself = await process.ends_within(TERMINATE_S)
        if not by_itself:
            await process.terminate()
        await self._end_process(polite_s=0.0)
        self._end = TrainerEnd(process.returncode or 0, cut_short=not by_itself)
        if not by_itself:
            self._log.warning("script_cut_short", after_s=grace_s, ended_with=process.how_it_ended())
        elif self._end.exit_code:
            self._log.warning("script_ended", ended_with=process.how_it_ended())
        else:
            self._log.info("script_ended", ended_with=process.how_it_ended())

    async def _end_process(self, *, polite_s: float) -> None:
        """End the process and close its socket; idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            await process.end(polite_s=polite_s)
            # Its last messages are still to be read: one may say that a file is written.
            await asyncio.wait([self._reader], timeout=OUTPUT_END_S)
        finally:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            await self._socket.close()
            self._orders.fail(self._failure or TrainerFailed("the trainer was stopped"))

    async def ended(self) -> TrainerFailed:
        """See `Trainer.ended`."""
        await self._has_ended.wait()
        assert self._failure is not None
        return self._failure

    # --- shared data, and engines -------------------------------------------------------------------------------

    def on_data(self, handler: Callable[[DataFromTrainer | RecordsFromTrainer], None]) -> None:
        """See `Trainer.on_data`."""
        self._on_data = handler

    def send_data(self, message: DataFromDaemon | RecordsGranted | EngineFromDaemon) -> None:
        """See `Trainer.send_data`."""
        self._send(message)

    def on_engine(self, handler: Callable[[EngineSaid], None]) -> None:
        """See `Trainer.on_engine`."""
        self._on_engine = handler

    def _send(self, message: messages.FromDaemon) -> None:
        if self._process is not None:
            self._socket.send(message)

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
        if not self._takes_orders:
            return
        self._socket.send(messages.ValuesArrived(step, list(keeps_base), list(takes_back), list(adds_delta)))
        # Under bsp no order is under way, and nobody else finds out that it hangs.
        await self._watch(self._orders.enter(), self._pace.limits(None))

    async def evaluate(self, step: int) -> Evaluation | None:
        """See `Trainer.evaluate`."""
        answer = await self._ask(lambda turn: messages.Evaluate(turn, step), messages.Evaluated)
        return answer.evaluation

    async def save(self, path: str) -> Awaitable[None]:
        """See `Trainer.save`."""
        copied = await self._ask(lambda turn: messages.Save(turn, str(Path(path).absolute())), messages.Copied)
        return self._orders.file(copied.turn)

    async def describe(self, folder: str, *, wait: bool = False) -> ModelDescription:
        """See `Trainer.describe`."""
        answer = await self._ask(lambda turn: messages.Describe(turn, folder, wait), messages.Described)
        return answer.description

    async def merge(self, order: MergeOrder) -> bool:
        """See `DeviceTrainer.merge`."""
        return (await self._ask(lambda turn: messages.Merge(turn, order), messages.Merged)).is_done

    def take_measured(self) -> list[Evaluation]:
        """See `Trainer.take_measured`."""
        measured, self._measured = self._measured, []
        return measured

    def on_step(self, handler: Callable[[int], None]) -> None:
        """See `DeviceTrainer.on_step`."""
        self._on_step = handler

    def answer_step(self, number: int, answer: messages.StepAnswer) -> None:
        """See `DeviceTrainer.answer_step`."""
        self._send(messages.StepAnswered(self._orders.turn, number, answer))

    @property
    def _takes_orders(self) -> bool:
        return self._process is not None and self._failure is None and not self._is_dismissed

    async def _ask(self, order: Callable[[int], messages.Order], kind: type[Answer]) -> Answer:
        async with self._one_order:
            if not self._takes_orders:
                raise self._failure or TrainerFailed("the trainer is not running", "it has to be started first")
            began_s = self._clock.monotonic()
            message, reply = self._orders.begin(order)
            try:
                if self._has_left and isinstance(message, messages.Train | messages.Evaluate):
                    raise TrainerLeft(LEAVE_CALLED)
                self._socket.send(message)
                await self._watch(reply, self._pace.limits(message))
            except asyncio.CancelledError:
                self._send(messages.Cancel(message.turn))
                raise
            finally:
                self._orders.forget()
            got = reply.result()
            if not isinstance(got, kind):
                raise _unexpected(message, got)
            self._pace.note(message, self._clock.monotonic() - began_s)
            return got

    # --- watching -----------------------------------------------------------------------------------------------

    async def _watch(self, reply: asyncio.Future[Any], limits: Limits) -> None:
        """Wait for the reply or a failure; mark a trainer that is silent too long as hung, and later kill it."""
        silence = self._silence
        silence.heard(self._clock.monotonic())
        while not reply.done():
            before_s = self._clock.monotonic()
            wait_s = silence.next_check_s(before_s, limits)
            await asyncio.wait([reply], timeout=wait_s)
            now_s = self._clock.monotonic()
            process = self._process
            if reply.done() or process is None:
                continue
            if now_s - before_s > wait_s + OVERSLEPT_S:
                silence.heard(now_s)
                continue
            if silence.wants_sample(now_s, limits):
                silence.note_processor_time(now_s, await process.work_seconds())
            await self._judge(process, silence.verdict(now_s, limits), now_s)

    async def _judge(self, process: TrainerProcess, verdict: SilenceVerdict, now_s: float) -> None:
        silent_s = self._silence.silent_s(now_s)
        match verdict:
            case SilenceVerdict.IDLE_TOO_LONG | SilenceVerdict.SILENT_TOO_LONG:
                idle = " and used no processor time" if verdict is SilenceVerdict.IDLE_TOO_LONG else ""
                reason = f"the trainer was silent for {silent_s:.0f} s{idle}, so it was killed"
                self._failure = TrainerFailed(reason, HANG_HINT)
                await process.end()
            case SilenceVerdict.STALLED if self._state == "running":
                self._log.warning("trainer_hung", silent_s=round(silent_s, 1), hint=HANG_HINT)
                self._set_state("hung")
            case SilenceVerdict.WELL:
                self._moves()  # in its first turn it was idle for a while, and works again

    def _moves(self) -> None:
        if self._state == "hung" and not self._is_dismissed:
            self._log.info("trainer_moves_again")
            self._set_state("running")

    # --- messages -----------------------------------------------------------------------------------------------

    async def _read(self, process: TrainerProcess) -> None:
        """Take messages until the socket closes, and see how the process ends."""
        try:
            async for message in self._socket.received():
                self._on_message(message)
        except messages.LinkBroken as error:
            self._failure = self._failure or TrainerFailed(f"the trainer's link is broken: {error}")
        except Exception as error:  # without a reader of the link the trainer would wait for ever
            self._log.error("service_failed", service="trainer-link", error=repr(error))
            self._failure = self._failure or TrainerFailed(f"its node could not handle a message: {error!r}")
        if self._is_dismissed or (self.is_script and self._failure is None):
            await asyncio.shield(process.exited)
        else:
            await process.end(polite_s=POLITE_S)
        if process is self._process:  # not ended by this side
            self._lost(self._failure or self._own_end(process))

    def _on_message(self, message: messages.FromTrainer) -> None:
        """Every message is a sign of life; some say what the script does between steps."""
        now_s, orders = self._clock.monotonic(), self._orders
        self._silence.heard(now_s)
        self._moves()
        match message:
            case messages.Busy(what):
                self._silence.busy = BusyWith(what, now_s)
            case messages.Idle():
                self._silence.busy = None
            case messages.Warned():
                self._warned(message)
            case messages.Measurement(step, metrics, samples):
                self._measured.append(Evaluation(step, metrics, samples))
            case messages.StepWanted(turn, number) if turn == orders.turn:
                self._on_step(number)
            case messages.LeaveRequested():
                self._has_left = True
                orders.fail_order(TrainerLeft(LEAVE_CALLED))
            case messages.Failed(reason, hint, fatal):
                failed = TrainerFailed(reason, hint, fatal=fatal or not self._has_trained)
                self._failure = self._failure or explained(failed, own_bytes=self._own_bytes)
            case messages.Hello() | EngineOpened():
                self._present = hello_of(message)
                orders.answer(self._present)
            case messages.Ready():
                orders.answer(message)
            case (
                messages.Trained() | messages.Merged() | messages.Evaluated() | messages.Copied() | messages.Described()
            ):
                self._has_trained = self._has_trained or isinstance(message, messages.Trained)
                if orders.awaits(message.turn):
                    orders.answer(message)
            case messages.ValuesEntered():
                orders.entered()
            case messages.Written(turn):
                orders.written(turn)
            case messages.NotWritten(turn, reason, hint):
                orders.not_written(turn, TrainerFailed(reason, hint))
            case _:
                self._hand_on(message)

    def _hand_on(self, message: messages.FromTrainer) -> None:
        """What is for others: engines, and the data that nodes share."""
        if isinstance(message, EngineSaid):
            self._on_engine(message)
        # What a cancelled turn trained does not reach the model.
        elif isinstance(message, DataTrained | RecordsTrained) and not self._orders.awaits(message.turn):
            return
        elif isinstance(message, DataFromTrainer | RecordsFromTrainer):
            self._on_data(message)

    def _warned(self, message: messages.Warned) -> None:
        if message.message:
            hint = {"hint": message.do} if message.do else {}
            self._log.warning("trainer_warned", about=message.event, message=message.message, **hint)
        if message.do or not message.message:
            self._findings.pop(message.event, None)
        if message.do and message.message:
            self._findings[message.event] = (message.message, message.do)

    @property
    def _own_bytes(self) -> int:
        """What p2pnode has of the memory of the trainer's GPU."""
        return 0 if self._present is None else self._present.device_bytes

    def _own_end(self, process: TrainerProcess) -> TrainerFailed:
        """The failure to report for a process that ended without an order to end."""
        if self._is_dismissed:
            return TrainerFailed("the trainer was stopped")
        hello = self._present
        if self.is_script and process.returncode == 0 and hello is not None:
            what = "returned before the run was over" if hello.engine is None else "ended"
            return TrainerLeft(f"the script has {what}")
        ended = unexpected_end(process, self._output, is_fatal=hello is None or not self._has_trained)
        return explained(ended, self._output.last_lines, self._own_bytes)

    def _lost(self, failure: TrainerFailed) -> None:
        """The process has ended by itself; the pending order fails with the same failure."""
        self._failure = failure
        self._has_ended.set()
        self._orders.fail(failure)
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


def _unexpected(asked: messages.FromDaemon, got: object) -> TrainerFailed:
    return TrainerFailed(f"the trainer answered {type(asked).__name__} with {type(got).__name__}")

"""The turns of a trainer: what lies between the optimiser steps of a script and the orders of its daemon.

After every `local_steps` optimiser steps a turn is reported with its delta, and the next order waited for. Between two
calls the script has the processor; orders that come meanwhile wait for the next one.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from p2pnode.training.trainer.connection import (
    DaemonConnection,
    DaemonGone,
    ScriptWarnings,
    StopAsked,
    SwarmLost,
    report_failure,
)
from p2pnode.training.trainer.device_turns import DeviceTurns
from p2pnode.training.trainer.model.contract import ModelChanged, ModelContract
from p2pnode.training.trainer.model.model_description import ModelDescriber
from p2pnode.training.trainer.model.value_entry import News, ValueEntry
from p2pnode.training.trainer.model.vector import ModelVector
from p2pnode.training.trainer.model.weight_loads import WeightLoads
from p2pnode.training.trainer.optimizers.step_count import MetricMeans, StepCount
from p2pnode.training.trainer.ranks import APART_HINT, RankAgreement, Ranks, Signal, difference
from p2pnode.training.trainer.sampling.shared_data import SharedData
from p2pnode.training.trainer.script_arguments import ScriptArguments
from p2pnode.training.trainer.state.rank_states import RankStates
from p2pnode.training.trainer.state.script_state import ScriptState
from p2pnode.training.trainer.state.snapshot import CannotWrite
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.interface import Evaluation, StepOrder, StepReport, TrainerFailed
from p2pnode.training.trainer_link.messages import StepAnswer

#: Rank 0 contacts waiting ranks this often, so that no collective times out during a long barrier.
RANKS_WAIT_S = 30.0

#: Several ranks look so often in a turn whether shared values have come.
LOOKS = 5

_NOT_STARTED = messages.Start("", "", {}, "cpu", 0, 0, 0, 0)


class Turns:
    """Of one process. `start` is the daemon's first message, `order` that of the turn under way, and `turn_steps`
    counts the optimiser steps of that turn."""

    def __init__(
        self,
        model: nn.Module,
        given: ScriptArguments,
        ranks: Ranks,
        connection: DaemonConnection | None,
        warnings: ScriptWarnings,
        *,
        include_frozen: bool = False,
        task: str = "attached",  # the manifest compares the layouts of scripts, not the names of their files
        version: str = "",
        evaluate: Callable[[int], Evaluation | None] | None = None,
    ) -> None:
        """`connection` is None on all ranks but the first. `task` and `version` say what is trained, as other nodes
        compare it. `evaluate` measures the model for a step, where the daemon may order it; None when interrupted.
        Raises `TrainerFailed` for a model that cannot be shared, and for optimisers of another one."""
        self.samples_seen = self.turn_steps = 0
        self.start, self.order, self.device = _NOT_STARTED, StepOrder(0, 0, 1.0, is_first=False), "cpu"
        self.warn = warnings
        self.connection = connection
        self.ranks = ranks
        self.task, self.version, self.evaluate = task, version, evaluate
        self._is_done = self._has_loaded = False
        vector = self.model_vector = ModelVector(
            model, include_frozen=include_frozen, rank=ranks.rank, ranks=ranks.count
        )
        send = connection.send if connection is not None else None
        self.rank_states = RankStates(ranks, send, warnings, vector.spread)
        self._agreement = RankAgreement(vector.replicated if ranks.count > 1 else None)
        has_own_copies = given.on_load is not None
        self._contract = ModelContract(model, vector, given.optimizers, warnings, own_copies=has_own_copies)
        self.describer = ModelDescriber(model, vector, warnings, ranks)
        self.data = SharedData(ranks, connection, warnings)
        self._follow(given)
        #: What ranks that wait for a turn do together with rank 0.
        self._together: dict[Signal, Callable[[], object]] = {
            Signal.SAVE: self._save,
            Signal.VALUES: self.apply,
            Signal.DESCRIBE: self._described,
        }
        self._order_number = 0
        self.entry = ValueEntry(vector, ranks)
        self.devices = DeviceTurns(vector, connection)
        self._began_s = 0.0
        self._means = MetricMeans()
        self._samples = 0

    @property
    def done(self) -> bool:
        """See `AttachedSwarm.done`."""
        if self.data.stopped and not self._is_done:
            # The node stopped while the script waited for data: it takes the last weights as after a turn.
            with self.raising_lost():
                self.take_order()
        return self._is_done

    @contextlib.contextmanager
    def raising_lost(self) -> Iterator[None]:
        """Raises `SwarmLost`, for the script, where the daemon has ended."""
        try:
            yield
        except DaemonGone as gone:
            self._is_done = True
            raise SwarmLost(str(gone) or "the p2pnode daemon that started this script has ended") from gone

    # --- called by the script -----------------------------------------------------------------------------------

    def step(self, samples: int, values: Mapping[str, float | Tensor]) -> None:
        """See `AttachedSwarm.step`. `values`: the loss and other metrics by their names."""
        if self.done:
            self._count.after_end()
            return
        self._samples += samples
        self.data.count(samples)
        for name, value in values.items():
            self._means.add(name, value)
        steps = self._count.call()
        self.turn_steps += steps
        if steps:
            self.loads.stepped(steps, self.order.workers)
            with self.loads.pull() if self.devices.moves else contextlib.nullcontext():
                self.devices.stepped(values["loss"])
        with self.raising_lost():
            if steps and not self._goes_on():
                self.take_order()
                return
            if steps:
                self._apply_news()
            self._report_progress()

    def _goes_on(self) -> bool:
        """Whether an optimiser step is next. False: the turn has ended, and is reported where it counts."""
        answer = self.devices.next_step(is_due=self.turn_steps >= self.order.local_steps)
        if answer is StepAnswer.DISTRIBUTED:
            self._report_turn()
        return answer is StepAnswer.LOCAL

    def _report_turn(self) -> None:
        self._check_model()
        self._count.end_turn(may_skip=self.given.scaler is not None)
        self.given.end_turn(self.turn_steps, self.warn)
        rate = float(self.given.optimizers[0].param_groups[0]["lr"])
        statement = self._agreement.statement(self.turn_steps, self.given.scaler, rate)
        loss, metrics, samples, statements = self.ranks.combine(self._means.means(), self._samples, statement)
        self.warn("ranks_apart", difference(statements), APART_HINT)
        self.samples_seen += samples
        is_finite, has_delta = self._cut()
        with contextlib.suppress(DaemonGone):  # The wait for the next turn reports it on all ranks.
            self.data.report(self._order_number, self.order.step, samples, has_delta=has_delta)
        if self.connection is None:
            return
        if not math.isfinite(loss) and "loss" in self._means:
            self.warn("loss_not_finite", f"the mean loss of step {self.order.step} is {loss}")
        metrics["learning_rate"] = rate
        seconds = time.perf_counter() - self._began_s
        recent = self.devices.recent_loss()
        report = StepReport(
            self.order.step, loss, samples, self.turn_steps, seconds, metrics, recent, is_finite, has_delta
        )
        self._tell(messages.Trained(self._order_number, report))

    def leave_out(self, since_s: float) -> None:
        """What passed since this moment of `time.perf_counter` was no training of this step."""
        self._began_s += time.perf_counter() - max(since_s, self._began_s)

    def _cut(self) -> tuple[bool, bool]:
        """On all ranks: take the delta, unless the exchange of the last one has not ended. Returns whether it is finite
        and whether there is one."""
        if self.devices.order.asks:
            return self.devices.report(self.entry.delta), True
        self._apply_all()
        return self.entry.cut(self.loads)

    def leave(self) -> None:
        """See `AttachedSwarm.leave`."""
        if self.done:
            return
        with self.raising_lost():
            if self.connection is not None:
                self.connection.send(messages.LeaveRequested())
            self.take_order()

    def end_turn_early(self) -> bool:
        """Report the optimiser steps since the last turn, if there are any, without waiting for `local_steps`; and take
        the next order, if the daemon waits for this turn no more. Returns whether some of what is reported is in no
        delta yet."""
        if self._is_done:
            return False
        if self.turn_steps:
            self._report_turn()
            self.take_order()
        elif self.connection is not None and self.connection.interrupted():
            self.take_order()
        else:
            self._apply_news()
            if self.entry.has_rest and not self.entry.is_exchanging:
                self._report_rest(self.order.step)
                self.take_order()
        return self.entry.has_rest

    def take(self, given: ScriptArguments) -> None:
        """The script has attached once more, perhaps with other optimisers. Raises `TrainerFailed`."""
        self._contract.take(given.optimizers, own_copies=given.on_load is not None)
        self._count.forget()
        self.data.begin_anew()
        self._follow(given)
        self._seek((self.order.step - 1) * self.order.local_steps + self.order.done + self.turn_steps)

    def _follow(self, given: ScriptArguments) -> None:
        vector = self.model_vector
        self.given = given
        self.loads = WeightLoads(vector, given.optimizers, given.on_load)
        self._count = StepCount(given.optimizers, vector.tensors, self.warn)
        self.script_state = ScriptState(given, vector.unshared, self.data, self.loads, self.warn)

    # --- opening ------------------------------------------------------------------------------------------------

    def restore(self, saved: dict[str, Any], path: Path) -> None:
        """Take over the script's state that the file `path` has. Raises `TrainerFailed`."""
        self.samples_seen = self.script_state.restore(saved, path, self.start.local_steps)

    def begin_anew(self) -> None:
        """The next turn, or evaluation, loads the vector: what was trained since the last delta is gone."""
        self._has_loaded = self.entry.is_exchanging = self.entry.has_rest = False

    # --- the next order -----------------------------------------------------------------------------------------

    def take_order(self) -> None:
        """Take the next order, and as one of several trainers the next in which there is something to train."""
        self._take_one_order()
        while not self._is_done and not self._goes_on():
            self._take_one_order()

    def _take_one_order(self) -> None:
        """Rank 0 waits for the daemon's next order. All ranks load the weights of the first one, and those of the
        end."""
        order = self._lead() if self.ranks.is_first else self.ranks.follow(self._together)
        if order is not None:
            self.devices.order = order
        if order is None or not self._has_loaded or self.devices.order.asks:
            with self.loads.load(ends=order is None):
                self.devices.load(self.entry.vector, self.entry.delta)
        self._count.loaded()
        if order is None:
            self._is_done = True
            return
        if not self._has_loaded:
            self._has_loaded, self.entry.known_step = True, order.step - 1
        if not order.local_steps:
            self._report_rest(order.step)
            self._take_one_order()
            return
        self.order = order
        self._seek((order.step - 1) * order.local_steps + order.done)
        self.devices.begin()
        self._agreement.begin()
        self.turn_steps = self._samples = 0
        self._means = MetricMeans()
        self._began_s = time.perf_counter()

    def _seek(self, position: int) -> None:
        self.given.seek(position)
        self.loads.seek(position)

    def _lead(self) -> StepOrder | None:
        try:
            order = self._receive_order()
        except DaemonGone:
            self.ranks.signal(Signal.LOST)
            raise
        self.ranks.lead(order)
        return order

    def _receive_order(self) -> StepOrder | None:
        connection = self.connection
        assert connection is not None
        self.warn.flush(connection.send)
        while True:
            try:
                message = connection.receive(RANKS_WAIT_S if self.ranks.count > 1 else None)
            except StopAsked:
                return None
            match message:
                case None:
                    self.ranks.signal(Signal.STILL_WAITING)
                case messages.Train(number, order):
                    self._order_number = number
                    return order
                case messages.DeltaEncoded() | messages.ValuesArrived():
                    self.ranks.signal(Signal.VALUES)
                    self.apply(message)
                case messages.Merge(turn, merge):
                    connection.send(messages.Merged(turn, self.devices.merge(merge, self.entry.delta)))
                case messages.Evaluate(turn, step):
                    connection.send(messages.Evaluated(turn, self.evaluation(step)))
                case messages.Save(turn, path):
                    self.ranks.signal(Signal.SAVE)
                    self._save(turn, path)
                case messages.Describe(turn, folder, wait):
                    if self.describer.is_collective:
                        self.ranks.signal(Signal.DESCRIBE)
                    described = self._described(turn, folder, wait=wait)
                    self.warn.flush(connection.send)
                    connection.send(described)

    def evaluation(self, step: int) -> Evaluation | None:
        """Of the shared values that this trainer knows; the model is as before. None if it has no evaluation."""
        if self.evaluate is None:
            return None
        if not self._has_loaded or self.devices.order.asks:
            with self.loads.load():
                self.model_vector.load(self.entry.vector)
        with self.loads.shared(lambda: True):
            return self.evaluate(step)

    def _save(self, turn: int = 0, path: str = "") -> None:
        """On all ranks: save the state between two turns; rank 0 has the order."""
        with self.loads.saving():
            self.rank_states.save(turn, path, self.script_state.content(self.samples_seen, self.order.local_steps))

    def _described(
        self, turn: int = 0, folder: str = "", *, wait: bool = False
    ) -> messages.Described | messages.NotWritten:
        def alive() -> None:
            assert self.connection is not None
            self.connection.send(messages.SignOfLife())

        try:
            return messages.Described(turn, self.describer.describe(folder, wait=wait, alive=alive))
        except CannotWrite as error:
            return messages.NotWritten(turn, error.reason, error.hint)

    # --- shared values ------------------------------------------------------------------------------------------

    def _apply_news(self) -> None:
        """Between two optimiser steps: move the model by what has come of the last exchange. Several ranks look at
        every `LOOKS`th part of a turn, by a small collective."""
        if self.ranks.count == 1 or not self.turn_steps % max(1, self.order.local_steps // LOOKS):
            self._apply_all()

    def _apply_all(self) -> None:
        while self.apply(self.connection.news() if self.connection is not None else None):
            pass

    def apply(self, news: News | None = None) -> bool:
        """Move the model by what the daemon has said of the last delta. On all ranks; False if there was nothing."""
        if news is None and self.ranks.count == 1:
            return False
        found = self.entry.apply(news, self.loads)
        if isinstance(news, messages.ValuesArrived):
            self._tell(messages.ValuesEntered())
        if found:
            self._count.loaded()
        return found

    # --- reports ------------------------------------------------------------------------------------------------

    def _report_rest(self, step: int) -> None:
        """Report the delta of what has added up, and train nothing."""
        is_finite, has_delta = self._cut()
        if self.connection is not None:
            report = StepReport(step, math.nan, 0, 0, 0.0, {}, None, is_finite, has_delta)
            with contextlib.suppress(DaemonGone):
                self.data.report_rest(self._order_number)
            self._tell(messages.Trained(self._order_number, report))

    def _check_model(self) -> None:
        """Raises `ModelChanged`, and tells the daemon."""
        try:
            self._contract.check()
            self.loads.check()
        except TrainerFailed as failure:
            if self.connection is not None:
                report_failure(self.connection, failure)
            raise ModelChanged(f"{failure.reason}: {failure.hint}") from failure

    def _tell(self, message: messages.FromTrainer) -> None:
        """Send from rank 0. The wait for the next turn reports on all ranks that the daemon has ended."""
        if self.connection is not None:
            with contextlib.suppress(DaemonGone):
                self.connection.send(message)

    def _report_progress(self) -> None:
        connection = self.connection
        if connection is None:
            return
        with contextlib.suppress(StopAsked, DaemonGone):  # The end of the turn reports it on all ranks.
            self.warn.flush(connection.send)
            connection.progress()
        if connection.interrupted() and self.ranks.count == 1:
            # The daemon no longer waits for this turn. With several ranks all finish it, to stay in step.
            self.take_order()

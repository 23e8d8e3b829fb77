"""What a training script calls after `p2pnode.attach`, and the turns between them.

`swarm.step` counts optimiser steps; after every `local_steps` of them it reports the delta and waits for the next turn.
Between two calls the script has the processor; orders of the daemon that come meanwhile wait for the next turn.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from p2pnode.training.errors import TrainingError
from p2pnode.training.trainer.connection import DaemonConnection, DaemonGone, StopAsked, report_failure
from p2pnode.training.trainer.device_turns import DeviceTurns, refuse_ranks
from p2pnode.training.trainer.model.contract import ModelContract
from p2pnode.training.trainer.model.memory_estimate import host_bytes
from p2pnode.training.trainer.model.model_description import ModelDescriber
from p2pnode.training.trainer.model.value_entry import News, ValueEntry
from p2pnode.training.trainer.model.vector import ModelVector
from p2pnode.training.trainer.model.weight_loads import WeightLoads
from p2pnode.training.trainer.optimizers.step_count import MetricMeans, StepCount
from p2pnode.training.trainer.rank_agreement import APART_HINT, RankAgreement, difference
from p2pnode.training.trainer.ranks import Ranks, Turn
from p2pnode.training.trainer.sampling.shared_data import SharedData
from p2pnode.training.trainer.script_arguments import ScriptArguments
from p2pnode.training.trainer.script_surface import NodeKnowledge, ScriptSettings, SignsOfLife, SwarmData
from p2pnode.training.trainer.script_warnings import ScriptWarnings
from p2pnode.training.trainer.state.rank_states import RankStates
from p2pnode.training.trainer.state.script_state import ScriptState
from p2pnode.training.trainer.state.snapshot import CannotWrite
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.interface import Evaluation, StepReport, TrainerFailed, TrainerHello, Vector
from p2pnode.training.trainer_link.shared_memory import map_vectors
from p2pnode.training.trainer_link.step_messages import StepAnswer

#: Rank 0 contacts waiting ranks this often, so that no collective times out during a long barrier.
RANKS_WAIT_S = 30.0

LOST = "the p2pnode daemon that started this script has ended"

#: Several ranks look so often in a turn whether shared values have come.
LOOKS = 5


class TaskIdentity(NamedTuple):
    """What is trained, as other nodes compare it: of all scripts the same, because the manifest compares layouts, not
    file names. `evaluate` measures the model for a step, where the daemon may order it; None when interrupted."""

    name: str = "attached"
    version: str = ""
    evaluate: Callable[[int], Evaluation | None] | None = None


SCRIPT = TaskIdentity()


class SwarmLost(TrainingError, RuntimeError):
    """The daemon has ended; the model holds what this node trained last."""


class ModelChanged(TrainingError, RuntimeError):
    """This node would train alone: its model or its optimisers are not those that the script attached, or undo what is
    loaded."""


class AttachedSwarm(SwarmData, NodeKnowledge, SignsOfLife):
    """The running node, for a training script. When `done` is true the model holds the shared weights: end the loop.

    `step_number` is the current step of the swarm, from 1; `samples_seen` counts the samples this node has trained on;
    `workers` is the number of nodes that train. `is_first` is true on one node of the swarm, for work to be done once;
    `node_index` is this node's place among those that train, in the order of their ids: 0 is the first. All three may
    change with every turn. `local_steps` is the number of optimiser steps in a turn. `seed`, `device`, `data_dir` and
    `options` are the node's settings (`training.trainer.script_surface`).
    """

    def __init__(
        self,
        model: nn.Module,
        given: ScriptArguments,
        ranks: Ranks,
        connection: DaemonConnection | None,
        warnings: ScriptWarnings,
        *,
        include_frozen: bool = False,
        identity: TaskIdentity = SCRIPT,
    ) -> None:
        """`connection` is None on all ranks but the first. Raises `TrainerFailed` for a model that cannot be shared,
        and for optimisers of another one."""
        self._done = False
        self.step_number = 0
        self.samples_seen = 0
        self.is_first = False
        self.node_index = 0
        self.local_steps = 0
        self._settings = ScriptSettings()
        self._holds_shared = False
        self._has_warned_of_own_weights = False
        self._given = given
        self._identity = identity
        self._ranks = ranks
        self._warn = warnings
        self._rank_states = RankStates(ranks, connection.send if connection is not None else None, warnings)
        vector = self._model_vector = ModelVector(model, include_frozen=include_frozen)
        self._agreement = RankAgreement(vector.parameters if ranks.count > 1 else [])
        has_own_copies = given.on_load is not None
        self._contract = ModelContract(model, vector, given.optimizers, warnings, own_copies=has_own_copies)
        self._loads = WeightLoads(vector, given.optimizers, given.on_load)
        self._count = StepCount(given.optimizers, vector.tensors, warnings)
        self._describer = ModelDescriber(model, vector, warnings)
        SwarmData.__init__(self, SharedData(ranks, connection, warnings), self._end_turn)
        SignsOfLife.__init__(self, connection)
        self._script_state = ScriptState(given, vector.unshared, self._data, self._loads, warnings)
        self._vector: Vector = np.zeros(0, np.float32)
        self._delta: Vector = np.zeros(0, np.float32)
        self._turn = 0
        self._entry = ValueEntry(vector, ranks)
        self._has_loaded = False
        self._devices = DeviceTurns(self._model_vector, connection)
        self._turn_steps = 0
        self._began_s = 0.0
        self._means = MetricMeans()
        self._samples = 0

    @property
    def done(self) -> bool:
        """Whether the script is to end its loop; the model holds the shared weights then. Raises `SwarmLost`."""
        if self._data.stopped and not self._done:
            # The node stopped while the script waited for data: it takes the last weights as after a turn.
            with self._raising_lost():
                self._next_turn()
        return self._done

    @contextlib.contextmanager
    def _raising_lost(self) -> Iterator[None]:
        """Raises `SwarmLost`, for the script, where the daemon has ended."""
        try:
            yield
        except DaemonGone as gone:
            self._done = True
            raise SwarmLost(str(gone) or LOST) from gone

    # --- called by the script -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def shared_weights(self) -> Iterator[None]:
        """Inside the block the model holds the swarm's weights as this node knows them, without what it has trained
        since; after it this node's own again. For evaluation at any time; costs a copy of the model."""
        turn = (self.step_number, self.done)
        with self._loads.shared(is_current=lambda: turn == (self.step_number, self.done)):
            self._holds_shared = True
            try:
                yield
            finally:
                self._holds_shared = False

    def evaluate(self, samples: int = 0, **metrics: float | Tensor) -> None:
        """Report metrics of the shared model, measured over `samples` samples, as `swarm.evaluate(accuracy=0.93)`.

        `training.until` looks at them, and `/status` shows them. Call it where the model holds the shared weights:
        inside `shared_weights()`, or, under bsp, when `step` has begun a new turn. Under torchrun those of rank 0
        count. Raises `ValueError` without a metric and for one that is no number, and `SwarmLost`.
        """
        if not metrics:
            raise ValueError("swarm.evaluate() needs at least one metric, as swarm.evaluate(accuracy=0.93)")
        values = {name: _number(name, value) for name, value in metrics.items()}
        if self._connection is None:
            return
        has_own = self._turn_steps or self._model_vector.is_ahead
        if has_own and not (self.done or self._holds_shared or self._has_warned_of_own_weights):
            self._has_warned_of_own_weights = True
            steps = f"{self._turn_steps} optimiser steps after the shared ones"
            if self._model_vector.is_ahead:
                steps += " and with its last delta"
            message = f"the metrics are of this node's own weights, {steps}: evaluate inside swarm.shared_weights()"
            self._warn("own_weights_evaluated", message)
        step = self.step_number if self.done else self._devices.known_step or self._entry.known_step
        with self._raising_lost():
            self._connection.send(messages.Measurement(step, values, int(samples)))

    def step(self, samples: int = 0, loss: float | Tensor = math.nan, **metrics: float | Tensor) -> None:
        """Call after each optimiser step, with the number of `samples` on this rank and their mean `loss`.

        After `local_steps` optimiser steps it reports the delta, and returns with the next weights loaded or `done`
        set. The steps of the optimisers themselves count: a step that the scaler has skipped is none. Raises
        `SwarmLost`, and `ModelChanged` where the model or its optimisers are not those of the start.
        """
        if self.done:
            self._count.after_end()
            return
        self._samples += int(samples)
        self._data.count(int(samples))
        for name, value in {"loss": loss, **metrics}.items():
            self._means.add(name, value)
        steps = self._count.call()
        self._turn_steps += steps
        if steps:
            self._loads.stepped(steps, self.workers)
            with self._loads.pull() if self._devices.moves else contextlib.nullcontext():
                self._devices.stepped(loss)
        with self._raising_lost():
            if not steps:
                self._report_idle()
            elif self._devices.asks:
                if not self._goes_on():
                    self._next_turn()
            elif self._turn_steps < self.local_steps:
                self._apply_news()
                self._report_progress()
            else:
                self._report_turn()
                self._next_turn()

    def leave(self) -> None:
        """Let this node leave the swarm. Returns with `done` set and the swarm's weights in the model, without the
        steps since the last turn; the script may evaluate and save then, as at the end of a run.

        Every rank has to call it. Raises `SwarmLost`.
        """
        if self.done:
            return
        with self._raising_lost():
            if self._connection is not None:
                self._connection.send(messages.LeaveRequested())
            self._next_turn()

    def _take(self, given: ScriptArguments) -> None:
        """The script has attached once more, perhaps with other optimisers. Raises `TrainerFailed`."""
        self._contract.take(given.optimizers, own_copies=given.on_load is not None)
        self._loads = WeightLoads(self._model_vector, given.optimizers, given.on_load)
        self._count.forget()
        self._count = StepCount(given.optimizers, self._model_vector.tensors, self._warn)
        self._given = given
        self._data.begin_anew()
        self._script_state = ScriptState(given, self._model_vector.unshared, self._data, self._loads, self._warn)
        self._seek((self.step_number - 1) * self.local_steps + self._devices.done + self._turn_steps)

    # --- opening ------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Describe the model to the daemon and take its first order. Raises as the connection does."""
        self._join(None if self._connection is None else self._connection.receive_start())
        self._next_turn()

    def _join(self, start: messages.Start | None) -> None:
        """Describe the model to the daemon, whose first message rank 0 has."""
        vector, connection = self._model_vector, self._connection
        self._ranks.require_equal(vector.layout.digest(), vector.frozen)
        restore = self._greet(connection, start) if connection is not None and start is not None else ""
        start, restore = self._ranks.share((start, restore))
        assert start is not None
        self._settings = ScriptSettings.of(start)
        if start.threads:
            torch.set_num_threads(start.threads)
        if restore:
            self._restore(self._rank_states.load(Path(restore)), Path(restore), start.local_steps)
        if connection is not None:
            connection.send(messages.Ready())

    def _restore(self, saved: dict[str, Any], path: Path, local_steps: int) -> None:
        self.samples_seen = self._script_state.restore(saved, path, local_steps)

    def _greet(self, connection: DaemonConnection, start: messages.Start) -> str:
        """Exchange descriptions and memory; returns the file of the saved state, or none."""
        refuse_ranks(start, self._ranks.count)
        self._data.begin(start)
        vector = self._model_vector
        connection.send(
            messages.Hello(
                TrainerHello(
                    layout=vector.layout,
                    task=self._identity.name,
                    task_version=self._identity.version,
                    frozen_digest=vector.frozen_digest,
                    device=str(vector.base.device),
                    evaluates=self._identity.evaluate is not None,
                    pid=os.getpid(),
                    host_bytes=sum(map(host_bytes, self._given.optimizers)),
                    frozen=vector.frozen,
                )
            )
        )
        memory, descriptors = connection.receive_memory()
        shared, delta, *leaders = map_vectors(descriptors, memory.total)
        self._use(shared, delta)
        self._devices.follow(tuple(leaders))
        if memory.initialise:
            with self._loads.exchanging():
                vector.read(self._vector)
        return memory.restore

    def _use(self, vector: Vector, delta: Vector) -> None:
        """The buffers that are shared with the daemon."""
        self._vector, self._delta = vector, delta
        self._entry.use(vector, delta)

    # --- turns --------------------------------------------------------------------------------------------------

    def _goes_on(self) -> bool:
        """As one of several trainers: ask what is next. False: the turn has ended, and is reported where it counts."""
        answer = self._devices.next_step()
        if answer is StepAnswer.DISTRIBUTED:
            self._report_turn()
        return answer is StepAnswer.LOCAL

    def _next_turn(self) -> None:
        """Take the next order, and as one of several trainers the next in which there is something to train."""
        self._take_turn()
        while self._devices.asks and not self._done and not self._goes_on():
            self._take_turn()

    def _take_turn(self) -> None:
        """Rank 0 waits for the daemon's next order. All ranks load the weights of the first one, and those of the
        end."""
        turn = self._wait() if self._ranks.is_first else self._ranks.follow(self._save, self._apply)
        if turn is None or not self._has_loaded or self._devices.asks:
            with self._loads.load(ends=turn is None):
                if self._ranks.is_first:
                    self._devices.load(self._vector, self._delta)
                self._ranks.share_weights(self._model_vector)
        self._count.loaded()
        if turn is None:
            self._done = True
            return
        if not self._has_loaded:
            self._has_loaded, self._entry.known_step = True, turn.step - 1
        if not turn.local_steps and not self._devices.asks:
            self._report_rest(turn.step)
            self._take_turn()
            return
        self.step_number, self.local_steps = turn.step, turn.local_steps
        self.workers, self.is_first, self.node_index = turn.workers, turn.is_first, turn.node_index
        self._seek((turn.step - 1) * turn.local_steps + self._devices.done)
        self._devices.begin()
        self._agreement.begin()
        self._turn_steps = self._samples = 0
        self._means = MetricMeans()
        self._began_s = time.perf_counter()

    def _seek(self, position: int) -> None:
        self._given.seek(position)
        self._loads.seek(position)

    def _end_turn(self) -> bool:
        """Report the optimiser steps since the last turn, if there are any, without waiting for `local_steps`; and take
        the next order, if the daemon waits for this turn no more. Returns whether some of what is reported is in no
        delta yet."""
        if self._done:
            return False
        if self._turn_steps:
            self._report_turn()
            self._next_turn()
        elif self._connection is not None and self._connection.interrupted():
            self._next_turn()
        else:
            self._apply_news()
            if self._entry.has_rest and not self._entry.is_exchanging:
                self._report_rest(self.step_number)
                self._next_turn()
        return self._entry.has_rest

    def _apply_news(self) -> None:
        """Between two optimiser steps: move the model by what has come of the last exchange. Several ranks look at
        every `LOOKS`th part of a turn, by a small collective."""
        if self._ranks.count > 1 and self._turn_steps % max(1, self.local_steps // LOOKS):
            return
        while self._apply(self._connection.news() if self._connection is not None else None):
            pass

    def _apply(self, news: News | None = None) -> bool:
        """On all ranks; False if there was nothing."""
        if news is None and self._ranks.count == 1:
            return False
        found = self._entry.apply(news, self._loads)
        if isinstance(news, messages.ValuesArrived):
            self._tell(messages.ValuesEntered())
        if found:
            self._count.loaded()
        return found

    def _wait(self) -> Turn | None:
        try:
            turn = self._receive_turn()
        except DaemonGone:
            self._ranks.lead_lost()
            raise
        self._ranks.lead(turn)
        return turn

    def _receive_turn(self) -> Turn | None:
        assert self._connection is not None
        self._warn.flush(self._connection.send)
        while True:
            try:
                message = self._connection.receive(RANKS_WAIT_S if self._ranks.count > 1 else None)
            except StopAsked:
                return None
            match message:
                case None:
                    self._ranks.still_waiting()
                case messages.Train(turn, order):
                    self._turn = turn
                    self._devices.ordered(order)
                    return Turn(order.step, order.local_steps, order.workers, order.is_first, order.node_index)
                case messages.DeltaSent() | messages.ValuesArrived():
                    self._ranks.lead_values()
                    self._apply(message)
                case messages.Merge(turn, merge):
                    self._connection.send(messages.Merged(turn, self._devices.merge(merge, self._delta)))
                case messages.Evaluate(turn, step):
                    self._connection.send(messages.Evaluated(turn, self._evaluation(step)))
                case messages.Save(turn, path):
                    self._ranks.lead_save()
                    self._save(turn, path)
                case messages.Describe(turn, folder, wait):
                    described = self._described(turn, folder, wait=wait)
                    self._warn.flush(self._connection.send)
                    self._connection.send(described)

    def _evaluation(self, step: int) -> Evaluation | None:
        """Of the shared values that this trainer knows; the model is as before. None if it has no evaluation."""
        if self._identity.evaluate is None:
            return None
        if not self._has_loaded or self._devices.asks:
            with self._loads.load():
                self._model_vector.load(self._vector)
        with self._loads.shared(lambda: True):
            return self._identity.evaluate(step)

    def _save(self, turn: int = 0, path: str = "") -> None:
        """On all ranks: save the state between two turns; rank 0 has the order."""
        with self._loads.saving():
            self._rank_states.save(turn, path, self._script_state.content(self.samples_seen, self.local_steps))

    def _report_turn(self) -> None:
        self._check_model()
        self._count.end_turn(may_skip=self._given.scaler is not None)
        self._given.end_turn(self._turn_steps, self._warn)
        statement = self._agreement.statement(self._turn_steps, self._given)
        loss, metrics, samples, statements = self._ranks.combine(self._means.means(), self._samples, statement)
        self._warn.finding("ranks_apart", difference(statements), APART_HINT)
        self.samples_seen += samples
        is_finite, has_delta = self._cut()
        with contextlib.suppress(DaemonGone):  # The wait for the next turn reports it on all ranks.
            self._data.report(self._turn, self.step_number, samples, has_delta=has_delta)
        if self._connection is None:
            return
        if not math.isfinite(loss) and "loss" in self._means:
            self._warn("loss_not_finite", f"the mean loss of step {self.step_number} is {loss}")
        metrics["learning_rate"] = float(self._given.optimizers[0].param_groups[0]["lr"])
        seconds = time.perf_counter() - self._began_s
        recent = self._devices.recent_loss()
        report = StepReport(
            self.step_number, loss, samples, self._turn_steps, seconds, metrics, recent, is_finite, has_delta
        )
        self._tell(messages.Trained(self._turn, report))

    def _tell(self, message: messages.FromTrainer) -> None:
        """Send from rank 0. The wait for the next turn reports on all ranks that the daemon has ended."""
        if self._connection is not None:
            with contextlib.suppress(DaemonGone):
                self._connection.send(message)

    def _report_rest(self, step: int) -> None:
        """Report the delta of what has added up, and train nothing."""
        is_finite, has_delta = self._cut()
        if self._connection is not None:
            report = StepReport(step, math.nan, 0, 0, 0.0, {}, None, is_finite, has_delta)
            with contextlib.suppress(DaemonGone):
                self._data.report_rest(self._turn)
            self._tell(messages.Trained(self._turn, report))

    def _cut(self) -> tuple[bool, bool]:
        """On all ranks: take the delta, unless the exchange of the last one has not ended. Returns whether it is finite
        and whether there is one."""
        if self._devices.asks:
            return self._devices.report(self._delta), True
        while self._apply(self._connection.news() if self._connection is not None else None):
            pass
        return self._entry.cut(self._loads)

    def _report_progress(self) -> None:
        connection = self._connection
        if connection is None:
            return
        with contextlib.suppress(StopAsked, DaemonGone):
            connection.progress(self._turn_steps)
        if connection.interrupted() and self._ranks.count == 1:
            # The daemon no longer waits for this turn. With several ranks all finish it, to stay in step.
            self._next_turn()

    # --- the contract -------------------------------------------------------------------------------------------

    def _check_model(self) -> None:
        """Raises `ModelChanged`, and tells the daemon."""
        try:
            self._contract.check()
            self._loads.check()
        except TrainerFailed as failure:
            if self._connection is not None:
                report_failure(self._connection, failure)
            raise ModelChanged(f"{failure.reason}: {failure.hint}") from failure

    def _report_idle(self) -> None:
        """A call without an optimiser step."""
        self._report_progress()
        if self._connection is not None:
            with contextlib.suppress(DaemonGone):  # The end of the turn reports it on all ranks.
                self._warn.flush(self._connection.send)

    # --- files --------------------------------------------------------------------------------------------------

    def _alive(self) -> None:
        assert self._connection is not None
        self._connection.send(messages.TrainerProgress(self._turn_steps))

    def _described(self, turn: int, folder: str, *, wait: bool) -> messages.Described | messages.NotWritten:
        try:
            return messages.Described(turn, self._describer.describe(folder, wait=wait, alive=self._alive))
        except CannotWrite as error:
            return messages.NotWritten(turn, error.reason, error.hint)


def _number(name: str, value: float | Tensor) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"swarm.evaluate({name}=…): {value!r} is not one number") from error

"""What a training script calls after `p2pnode.attach`.

`p2pnode run` builds no model and loads no data, so the node's settings have no effect of their own: the script uses
them. What happens between the calls is in `training.trainer.turns`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset

from p2pnode.training.trainer.connection import DaemonGone
from p2pnode.training.trainer.records.record_draws import Decode
from p2pnode.training.trainer.sampling.sampler import SwarmSampler
from p2pnode.training.trainer.sampling.shard import SwarmShard
from p2pnode.training.trainer.turns import Turns
from p2pnode.training.trainer_link import messages

#: `swarm.alive()` sends at most this often.
ALIVE_INTERVAL_S = 0.2


class AttachedSwarm:
    """The running node, for a training script. When `done` is true the model holds the shared weights: end the loop.

    `step_number`, `workers`, `is_first` and `node_index` may change with every turn.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._holds_shared = False
        self._has_warned_of_own_weights = False
        self._alive_s = 0.0
        self._busy_with: list[str] = []

    @property
    def done(self) -> bool:
        """Whether the script is to end its loop; the model holds the shared weights then. Raises `SwarmLost`."""
        return self._turns.done

    @property
    def step_number(self) -> int:
        """The current step of the swarm, from 1."""
        return self._turns.order.step

    @property
    def samples_seen(self) -> int:
        """The samples that this node has trained on."""
        return self._turns.samples_seen

    @property
    def workers(self) -> float:
        """The number of nodes that train."""
        return self._turns.order.workers

    @property
    def is_first(self) -> bool:
        """Whether this is the one node of the swarm for work to be done once."""
        return self._turns.order.is_first

    @property
    def node_index(self) -> int:
        """This node's place among those that train, in the order of their ids: 0 is the first."""
        return self._turns.order.node_index

    @property
    def local_steps(self) -> int:
        """The number of optimiser steps in a turn."""
        return self._turns.order.local_steps

    # --- training -----------------------------------------------------------------------------------------------

    def step(self, samples: int = 0, loss: float | Tensor = math.nan, **metrics: float | Tensor) -> None:
        """Call after each optimiser step, with the number of `samples` on this rank and their mean `loss`.

        After `local_steps` optimiser steps it reports the delta, and returns with the next weights loaded or `done`
        set. The steps of the optimisers themselves count: a step that the scaler has skipped is none. Raises
        `SwarmLost`, and `ModelChanged` where the model or its optimisers are not those of the start.
        """
        self._turns.step(int(samples), {"loss": loss, **metrics})

    def leave(self) -> None:
        """Let this node leave the swarm. Returns with `done` set and the swarm's weights in the model, without the
        steps since the last turn; the script may evaluate and save then, as at the end of a run.

        Every rank has to call it. Raises `SwarmLost`.
        """
        self._turns.leave()

    @contextlib.contextmanager
    def shared_weights(self) -> Iterator[None]:
        """Inside the block the model holds the swarm's weights as this node knows them, without what it has trained
        since; after it this node's own again. For evaluation at any time; costs a copy of the model."""
        turn = (self.step_number, self.done)
        with self._turns.loads.shared(is_current=lambda: turn == (self.step_number, self.done)):
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
        turns = self._turns
        if turns.connection is None:
            return
        is_ahead = turns.model_vector.is_ahead
        has_own = turns.turn_steps or is_ahead
        if has_own and not (self.done or self._holds_shared or self._has_warned_of_own_weights):
            self._has_warned_of_own_weights = True
            steps = f"{turns.turn_steps} optimiser steps after the shared ones"
            if is_ahead:
                steps += " and with its last delta"
            message = f"the metrics are of this node's own weights, {steps}: evaluate inside swarm.shared_weights()"
            turns.warn("own_weights_evaluated", message)
        step = self.step_number if self.done else turns.devices.order.known_step or turns.entry.known_step
        with turns.raising_lost():
            turns.connection.send(messages.Measurement(step, values, int(samples)))

    # --- data ---------------------------------------------------------------------------------------------------

    def sampler(self, dataset: Sized, *, shuffle: bool = True) -> SwarmSampler:
        """A sampler for `torch.utils.data.DataLoader` that shares `dataset` with the other nodes (docs/data.md).

        One iteration gives this node's part of an epoch: every sample of an epoch is trained by one node, also when
        nodes join, leave or crash in the middle of it. `swarm.step(samples=…)` counts what is trained. The position is
        saved with the script's state. `dataset` is anything with a length that is equal on all nodes. Raises
        `ValueError` if it is empty, or if this script shares data already.
        """
        return self._turns.data.sampler(len(dataset), shuffle=shuffle, nodes=self.workers)

    def shard(self, iterable: Iterable[Any], *, block: int = 64) -> SwarmShard:
        """An iterable data set that gives this node's part of `iterable`, in blocks of `block` samples (docs/data.md).

        As `sampler`, for data that can only be read in order: each iteration has to give the same samples in the same
        order on all nodes. Raises `ValueError` if this script shares data already.
        """
        return self._turns.data.shard(iterable, block)

    def records(self, decode: Decode | None = None) -> IterableDataset[Any]:
        """An iterable data set of the records of `[dispatch]` that this node is to train (docs/dispatch.md).

        `decode` makes a sample of the bytes of a record; without it a sample is the bytes. A record for which it raises
        fails its task. Give it to a `DataLoader` with `num_workers=0` and `drop_last=False`; `swarm.step(samples=…)`
        counts what is trained. Raises `ValueError` where no records are set, where this script shares data already, and
        under torchrun; and for files that cannot be read.
        """
        return self._turns.data.records(decode, self._turns.end_turn_early)

    # --- signs of life ------------------------------------------------------------------------------------------

    def alive(self) -> None:
        """Say that all is well, in work between two steps that takes long: a silent script counts as stalled after
        10 s and four of its steps. May be called as often as you like, from any thread, and on any rank."""
        now_s = time.monotonic()
        if now_s - self._alive_s >= ALIVE_INTERVAL_S:
            self._alive_s = now_s
            self._tell(messages.SignOfLife())

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Say that the block does something else than a step, however long it takes; `/status` shows `what`,
        and a step's time in training is without it."""
        began_s = time.perf_counter()
        self._busy_with.append(what)
        self._tell(messages.Busy(what))
        try:
            yield
        finally:
            self._busy_with.pop()
            if not self._busy_with:
                self._turns.leave_out(began_s)
            self._tell(messages.Busy(self._busy_with[-1]) if self._busy_with else messages.Idle())

    def _tell(self, message: messages.FromTrainer) -> None:
        if self._turns.connection is not None:
            with contextlib.suppress(DaemonGone):
                self._turns.connection.send(message)

    # --- the node's settings ------------------------------------------------------------------------------------

    @property
    def seed(self) -> int:
        """A seed for this script's own shuffling and dropout: it differs on every node and at every start."""
        return self._turns.start.start_seed

    @property
    def device(self) -> str:
        """`training.device` as torch takes it, such as "cuda:0"."""
        return self._turns.device

    @property
    def device_index(self) -> int:
        """This process's place among the trainers of its node (`training.device`); 0 with a single one."""
        return self._turns.start.device_index

    @property
    def device_count(self) -> int:
        """The trainers of this node; `workers` and `node_index` count trainers, not nodes, where there are several."""
        return self._turns.start.device_count

    @property
    def data_dir(self) -> str:
        """`training.data_dir`, absolute; empty if it is not set."""
        return self._turns.start.data_dir

    @property
    def options(self) -> dict[str, Any]:
        """`[training.options]`."""
        return self._turns.start.options


def _number(name: str, value: float | Tensor) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"swarm.evaluate({name}=…): {value!r} is not one number") from error

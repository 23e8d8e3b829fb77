"""The part that trainer processes without torch share: the link, the shared memory, and every order but to train.

Importing torch costs two seconds of processor time per process, and no test of a daemon needs it.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from p2pnode.training.layout import Layout, LayoutEntry
from p2pnode.training.trainer.connection import DaemonConnection, DaemonGone, StopAsked, end_with_daemon
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.interface import (
    ModelDescription,
    StepOrder,
    StepReport,
    TensorSource,
    TrainerHello,
    Vector,
)
from p2pnode.training.trainer_link.shared_memory import map_vectors


class TorchlessTrainer:
    """Answers the orders of one daemon for a model of one tensor. Subclasses train."""

    def __init__(self, connection: DaemonConnection, name: str, values: int) -> None:
        entry = LayoutEntry("weight", (values,), "float32", "parameter", 0, values)
        self.layout = Layout((entry,))
        self.connection = connection
        hello = TrainerHello(self.layout, name, "1", "", "cpu", pid=os.getpid())
        connection.send(messages.Hello(hello))
        memory, descriptors = connection.receive_memory()
        self.vector, self.delta = map_vectors(descriptors, memory.total)
        if memory.initialise:
            self.vector[:] = self.initial(memory.total)
        #: What it has trained and not handed over, and what its present step trains.
        self._progress = np.zeros_like(self.vector)
        self.own = np.zeros_like(self.vector)
        self.is_exchanging = False
        #: Whether some of what is reported is in no delta yet.
        self.has_rest = False
        connection.send(messages.Ready())

    def initial(self, total: int) -> Vector | float:
        """What a founder begins with."""
        return 0.0

    def train(self, turn: int, order: StepOrder) -> StepReport | None:
        """Write what is trained into `own`, and return the report; None where the turn is cancelled, or reported."""
        raise NotImplementedError

    def apply(self, news: messages.DeltaEncoded | messages.ValuesArrived) -> None:
        """What the daemon says of the last delta. Its values are not looked at."""
        if isinstance(news, messages.DeltaEncoded):
            self._progress -= self.delta
            return
        for first, end in news.takes_back:
            self._progress[first:end] += self.delta[first:end]
        self.is_exchanging = False
        self.connection.send(messages.ValuesEntered())

    def look(self) -> None:
        """Between two optimiser steps, and at the end of a turn: apply what the daemon has said."""
        while (news := self.connection.news()) is not None:
            self.apply(news)

    def _cut(self, report: StepReport, *, asks: bool) -> StepReport:
        """As a real trainer: the progress, unless the last delta is being exchanged; one of several trainers of a node
        writes what it has trained in its turn."""
        if asks:
            self.delta[:] = self.own
            return report
        self._progress += self.own
        self.own[:] = 0.0
        self.has_rest = self.is_exchanging
        if self.is_exchanging:
            return msgspec.structs.replace(report, has_delta=False)
        self.delta[:] = self._progress
        self.is_exchanging = True
        return report

    def serve(self) -> None:
        """One order."""
        self.answer(self.connection.receive())

    def answer(self, order: messages.FromDaemon | None) -> None:
        """Do what was ordered, and say so."""
        connection = self.connection
        match order:
            case messages.DeltaEncoded() | messages.ValuesArrived():
                self.apply(order)
            case messages.Train(turn, order):
                report = self.train(turn, order) if order.local_steps else StepReport(order.step, 0.0, 0, 0, 0.0, {})
                self.look()
                if report is not None:
                    connection.send(messages.Trained(turn, self._cut(report, asks=order.asks)))
            case messages.Evaluate(turn, _):
                connection.send(messages.Evaluated(turn, None))
            case messages.Save(turn, path):
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                Path(path).write_text(json.dumps({}))
                connection.send(messages.Copied(turn))
                connection.send(messages.Written(turn))
            case messages.Describe(turn, _, _):
                tensor = TensorSource("weight", "float32", (len(self.vector),), "vector", "weight")
                description = ModelDescription(self.layout.digest(), "", (tensor,), {})
                connection.send(messages.Described(turn, description))


def serve_daemon(make: Callable[[DaemonConnection], TorchlessTrainer]) -> int:
    """Serve the daemon that has started this process, until it asks to stop; returns the exit code."""
    connection = DaemonConnection.connect(os.environ[messages.SOCKET_VARIABLE], on_lost=lambda: os._exit(0))
    end_with_daemon(signal.SIGKILL)
    try:
        connection.receive_start()
        trainer = make(connection)
        while True:
            trainer.serve()
    except (StopAsked, DaemonGone):
        return 0

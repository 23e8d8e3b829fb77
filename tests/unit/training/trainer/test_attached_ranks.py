"""Two ranks of a script, as threads over collectives that compare what both call, and a daemon in memory."""

from __future__ import annotations

import queue
import random
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from p2pnode.training.trainer import turns
from p2pnode.training.trainer.attached_swarm import AttachedSwarm
from p2pnode.training.trainer.connection import DaemonConnection, ScriptWarnings, SwarmLost
from p2pnode.training.trainer.joining import join
from p2pnode.training.trainer.model.vector import ModelVector
from p2pnode.training.trainer.ranks import Ranks
from p2pnode.training.trainer.script_arguments import ScriptArguments
from p2pnode.training.trainer.turns import Turns
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.interface import StepOrder, TrainerFailed, Vector
from p2pnode.training.trainer_link.shared_memory import SharedVectors
from tests.process.harness.trainer_world import wait_until

Link = tuple["queue.Queue[Any]", "queue.Queue[Any]"]


class Paired(Ranks):
    """One of two ranks. Raises `AssertionError` where the other one calls another collective, or one of another size:
    gloo would give it whatever comes."""

    def __init__(self, rank: int, link: Link) -> None:
        super().__init__(rank, 2, "cpu")
        self._to, self._from = link if rank == 0 else link[::-1]

    def _pair(self, what: Any, value: Any) -> Any:
        self._to.put((what, value))
        theirs, found = self._from.get(timeout=30)
        assert theirs == what, f"rank {self.rank} calls {what}, and the other one {theirs}"
        return found

    def _first(self, what: Any, value: Any) -> Any:
        found = self._pair(what, value)
        return value if self.is_first else found

    def share_number(self, number: int) -> int:
        return int(self._first("number", number))

    def share(self, settings: Any) -> Any:
        return self._first("object", settings)

    def gather(self, value: Any) -> list[Any]:
        found = self._pair("gather", value)
        return [value, found] if self.is_first else [found, value]

    def _gather_numbers(self, values: list[float]) -> list[list[float]]:
        found = self._pair(("gathered", len(values)), values)
        return [values, found] if self.is_first else [found, values]


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


class Node:
    """Two ranks that train alike; the test is their daemon."""

    def __init__(self, train: Callable[[AttachedSwarm, Callable[[], None]], None]) -> None:
        self.socket, self._theirs = socket.socketpair()
        self.socket.settimeout(30)
        self._decoder = messages.Decoder()
        self._received: list[messages.FromTrainer] = []
        self._turn = 0
        self.models = [network() for _ in range(2)]
        total = ModelVector(self.models[0]).layout.total
        self._memory = SharedVectors(total)
        self.vector: Vector = self._memory.vector
        self.delta: Vector = self._memory.delta
        self.failures: list[BaseException] = []
        link: Link = (queue.Queue(), queue.Queue())
        connections = (DaemonConnection(self._theirs), None)
        self._threads = [
            threading.Thread(target=self._run, args=(Paired(rank, link), connections[rank], train), daemon=True)
            for rank in range(2)
        ]
        self.send(messages.Start("", "", {}, "cpu", 0, 0, 1, 5))
        for thread in self._threads:
            thread.start()
        self.next(messages.Hello)
        data = messages.encode(messages.Memory(total, initialise=True))
        socket.send_fds(self.socket, [data], list(self._memory.descriptors))
        self.next(messages.Ready)

    def _run(
        self,
        ranks: Paired,
        connection: DaemonConnection | None,
        train: Callable[[AttachedSwarm, Callable[[], None]], None],
    ) -> None:
        model = self.models[ranks.rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        generator = torch.Generator().manual_seed(1)

        def step(between: Callable[[], None] | None = None) -> None:
            """One of the optimiser; with `between` the batch is accumulated in two parts."""
            optimizer.zero_grad()
            for inputs in torch.randn(8, 4, generator=generator).split(8 if between is None else 4):
                nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).backward()
                if between is not None:
                    between()
            optimizer.step()

        try:
            given = ScriptArguments.of(optimizer, None, None, ScriptWarnings())
            turns_of = Turns(model, given, ranks, connection, ScriptWarnings())
            join(turns_of)
            turns_of.take_order()
            train(AttachedSwarm(turns_of), step)
        except BaseException as error:
            self.failures.append(error)
            if connection is not None:
                connection.close()

    def send(self, *given: messages.FromDaemon) -> None:
        self.socket.sendall(b"".join(messages.encode(message) for message in given))

    def next(self, kind: type[Any]) -> Any:
        """The next message of this kind; others stay for later."""
        while True:
            for message in self._received:
                if isinstance(message, kind):
                    self._received.remove(message)
                    return message
            data = self.socket.recv(1 << 16)
            assert data, self.failures
            self._received += self._decoder.from_trainer(data)

    def order(self, step: int, local_steps: int = 5) -> None:
        self._turn += 1
        self.send(messages.Train(self._turn, StepOrder(step, local_steps, 1.0, is_first=True)))

    def end(self) -> list[np.ndarray]:
        """What both models have when both ranks have ended."""
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()
        self.socket.close()
        self._theirs.close()
        assert self.failures == []
        return [np.concatenate([one.detach().numpy().ravel() for one in model.parameters()]) for model in self.models]


def until_done(swarm: AttachedSwarm, step: Callable[[], None]) -> None:
    while not swarm.done:
        step()
        swarm.step(samples=8)


@pytest.mark.parametrize("seed", range(4))
def test_two_ranks_call_the_same_collectives_whenever_the_daemon_speaks(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, in and after a turn, and between two waits of rank 0, which tells the other one that it still waits. All
    deltas are in the vector once, and both ranks end with it."""
    monkeypatch.setattr(turns, "RANKS_WAIT_S", 0.002)
    draw = random.Random(seed)
    node = Node(until_done)
    began, expected = node.vector.copy(), node.vector.copy()
    news: list[messages.FromDaemon] = []
    late = np.zeros_like(expected)  # what the owners publish with the next values

    def speak() -> None:
        time.sleep(draw.choice([0.0, 0.0, 0.004, 0.02]))
        if news and draw.random() < 0.7:
            node.send(news.pop(0))
            if not news:
                node.next(messages.ValuesEntered)

    def note(report: Any, step: int) -> None:
        if report.has_delta:
            assert not news
            expected[:] += node.delta
            node.vector += node.delta + late
            late[:] = 0.0
            lacking = [(8, 16)] if draw.random() < 0.3 else []
            for first, end in lacking:
                late[first:end] = node.delta[first:end]
            node.vector -= late
            part = [(0, 8)] if draw.random() < 0.3 else []
            for first, end in part:
                node.vector[first:end] -= node.delta[first:end]
                expected[first:end] -= node.delta[first:end]
            news.extend([messages.DeltaEncoded(), messages.ValuesArrived(step, [], part, lacking)])

    for step in range(1, 13):
        speak()
        node.order(step)
        speak()
        note(node.next(messages.Trained).report, step)
        speak()
    while news:
        speak()
    node.order(12, 0)
    report = node.next(messages.Trained).report
    assert report.has_delta
    node.vector += node.delta + late
    expected += node.delta
    node.send(messages.RunEnded("max_steps", 10.0))

    first, second = node.end()
    assert np.array_equal(first, second)
    np.testing.assert_allclose(node.vector, expected, atol=1e-5)
    assert not np.allclose(node.vector, began, atol=1e-3)


def test_values_that_arrive_while_gradients_accumulate_enter_after_the_optimiser_step() -> None:
    """Both parts of a batch have the gradients of the same weights, also where the script calls `step` after each."""
    has_arrived = threading.Event()
    seen: list[tuple[Tensor, Tensor]] = []

    def accumulating(swarm: AttachedSwarm, step: Callable[..., None]) -> None:
        model = swarm._turns.model_vector

        def between() -> None:
            if swarm.step_number == 2:
                assert has_arrived.wait(30)
                before = torch.cat([one.detach().flatten() for one in model.tensors])
                swarm.step(samples=4)
                seen.append((before, torch.cat([one.detach().flatten() for one in model.tensors])))

        while not swarm.done:
            step(between)
            swarm.step(samples=8)

    node = Node(accumulating)
    node.order(1)
    assert node.next(messages.Trained).report.has_delta
    node.vector += node.delta + 1.0  # that of others
    node.order(2)
    node.send(messages.DeltaEncoded(), messages.ValuesArrived(1))
    has_arrived.set()
    node.next(messages.ValuesEntered)
    assert node.next(messages.Trained).report.has_delta
    node.vector += node.delta
    node.send(messages.RunEnded("max_steps", 10.0))

    first, second = node.end()
    assert np.array_equal(first, second)
    assert len(seen) >= 4
    for before, after in seen:
        assert torch.equal(before, after)
    assert max(float(weights.mean()) for weights, _ in seen) > 0.8  # they have entered in that turn


def test_both_ranks_leave_in_the_middle_of_a_turn_and_of_an_exchange() -> None:
    """What the daemon had said before is applied on both; they end with the shared weights."""

    def leaving(swarm: AttachedSwarm, step: Callable[[], None]) -> None:
        for _ in range(7):
            step()
            swarm.step(samples=8)
        swarm.leave()
        assert swarm.done

    node = Node(leaving)
    node.order(1)
    assert node.next(messages.Trained).report.has_delta
    node.vector += node.delta
    node.order(2)
    node.send(messages.DeltaEncoded())
    node.next(messages.LeaveRequested)
    node.send(messages.ValuesArrived(1))
    node.next(messages.ValuesEntered)
    node.send(messages.RunEnded("script", 10.0))

    first, second = node.end()
    assert np.array_equal(first, second)


def test_both_ranks_lose_a_daemon_that_ends_while_values_are_to_enter() -> None:
    """Neither waits for the other."""

    def losing(swarm: AttachedSwarm, step: Callable[[], None]) -> None:
        with pytest.raises(SwarmLost):
            until_done(swarm, step)

    node = Node(losing)
    node.order(1)
    node.next(messages.Trained)
    node.send(messages.DeltaEncoded(), messages.ValuesArrived(1))
    node.socket.shutdown(socket.SHUT_RDWR)
    node.end()


def test_a_script_that_waits_for_data_hands_over_what_has_added_up() -> None:
    """What it waits for may wait for the delta that has it (`SwarmRecords`)."""
    rests: list[bool] = []

    def waiting(swarm: AttachedSwarm, step: Callable[[], None]) -> None:
        for _ in range(10):
            step()
            swarm.step(samples=8)
        while rest := swarm._turns.end_turn_early():
            rests.append(rest)
            time.sleep(0.01)
        assert swarm.done

    node = Node(waiting)
    began = node.vector.copy()
    node.order(1)
    assert node.next(messages.Trained).report.has_delta
    node.vector += node.delta
    node.order(2)
    assert not node.next(messages.Trained).report.has_delta
    node.order(3)
    assert wait_until(lambda: bool(rests), 30)
    node.send(messages.DeltaEncoded(), messages.ValuesArrived(1))
    node.next(messages.ValuesEntered)
    report = node.next(messages.Trained).report
    assert (report.step, report.optimizer_steps, report.has_delta) == (3, 0, True)
    assert node.delta.any()
    node.vector += node.delta
    node.send(messages.RunEnded("passes", 10.0))

    first, second = node.end()
    assert np.array_equal(first, second)
    assert not np.allclose(node.vector, began, atol=1e-3)


class Elsewhere(Paired):
    """A rank that cannot see the files of the other one's host."""

    def share(self, settings: Any) -> Any:
        found = super().share(settings)
        return found if self.is_first else f"{found}/elsewhere"


def test_ranks_on_two_hosts_are_refused_on_all_of_them() -> None:
    """They share memory with the daemon; none of them waits for the other."""
    link: Link = (queue.Queue(), queue.Queue())
    reasons: list[str] = []

    def join_as(rank: int) -> None:
        with pytest.raises(TrainerFailed) as failure:
            Elsewhere(rank, link).share_descriptors([0] if rank == 0 else [])
        reasons.append(failure.value.reason)

    threads = [threading.Thread(target=join_as, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert reasons == ["rank 1 runs on another host than rank 0, and the ranks of a node share memory"] * 2

"""A swarm of real daemons: a fourth joins, one is killed, one leaves, the killed node returns."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.harness.swarm_world import (
    DETECTION_BOUND_S,
    SHORT_STEPS,
    START_S,
    TRAINER,
    ProcessNode,
    kill_all,
    until,
)

#: Events of a peer's end: by a crash, and by a word of its own.
GONE = ("peer_dead", "peer_left")
#: Values are pulled as changes, over real sockets and threads; other tests of processes use the defaults.
SETTINGS = {**SHORT_STEPS, "exchange.codec": "int4", "exchange.shards": 8, "training.checkpoint_s": 2}


class Watch:
    """How long nodes complete no step. `late_s`: the longest time between two looks, in which the machine, and not the
    swarm, held this process up."""

    def __init__(self, nodes: list[ProcessNode]) -> None:
        self._nodes = nodes
        self._steps = [node.step for node in nodes]
        self._moved = [time.monotonic()] * len(nodes)
        self._looked = time.monotonic()
        self.longest_s = self.late_s = 0.0

    def look(self) -> list[dict[str, Any]]:
        """Ask each once; returns the answers."""
        self.late_s = max(self.late_s, time.monotonic() - self._looked)
        answers = [node.status() for node in self._nodes]
        now = time.monotonic()
        for place, answer in enumerate(answers):
            if answer["step"] > self._steps[place]:
                self._steps[place], self._moved[place] = answer["step"], now
            self.longest_s = max(self.longest_s, now - self._moved[place])
        self._looked = time.monotonic()
        return answers


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Callable[..., ProcessNode]]:
    started: list[ProcessNode] = []

    def start(name: str, bootstrap: str = "", *, forks: bool = False) -> ProcessNode:
        started.append(ProcessNode(tmp_path, name, SETTINGS, bootstrap=bootstrap, script=TRAINER, forks=forks))
        return started[-1]

    yield start
    kill_all(started)


@pytest.mark.timeout(600)
def test_the_life_of_a_swarm(daemons: Callable[..., ProcessNode]) -> None:
    """Three nodes, and a fourth joins through any. After a kill the others continue within the detection bound and
    count three. After SIGTERM a node exits 0, and its neighbours have heard it from the node itself. The killed node
    catches up. All the time they follow the changes of each other's shards, and never hold other bits."""
    first = daemons("first")
    until(lambda: first.trains, START_S, "the founder trains")
    second, third = daemons("second", first.address), daemons("third", first.address, forks=True)
    until(lambda: second.trains and third.trains, START_S, "three train")
    fourth = daemons("fourth", third.address, forks=True)
    until(lambda: fourth.trains, START_S, "the fourth, joined through the third, trains")
    everybody = [first, second, third, fourth]
    until(lambda: all(node.status()["population"]["estimate"] == 4 for node in everybody), 90, "all count four")

    victim, survivors = second, [first, third, fourth]
    before, incarnation = victim.step, victim.status()["node"]["incarnation"]
    victim.kill()
    killed, watch = time.monotonic(), Watch(survivors)

    def look() -> bool:
        counts = [status["population"]["estimate"] for status in watch.look()]
        return time.monotonic() - killed > 8 and counts == [3, 3, 3]

    until(look, 90, "the survivors count three")
    assert watch.longest_s <= DETECTION_BOUND_S + watch.late_s

    leaver, left = third, [first, fourth]
    name = leaver.status()["node"]["id"]
    leaver.process.send_signal(signal.SIGTERM)
    assert leaver.process.wait(timeout=90) == 0
    until(lambda: all(node.status()["population"]["estimate"] == 2 for node in left), 90, "neighbours know")
    for node in left:
        until(lambda at=node: bool(ends(at, name)), 90, "its log has the end")
        assert ends(node, name) == ["peer_left"]

    again = daemons("second", first.address, forks=True)
    until(lambda: again.trains, START_S, "the killed node trains again")
    assert again.status()["node"]["incarnation"] > incarnation
    assert again.step >= before
    until(lambda: abs(again.step - first.step) <= 50, 90, "it has caught up")

    def followed() -> list[int]:
        return [node.status()["exchange"]["shards_followed"] for node in (first, fourth, again)]

    until(lambda: all(followed()), 90, "each follows the shards of others")
    exchanges = [node.status()["exchange"] for node in (first, fourth, again)]
    assert [exchange["publication_mismatches"] for exchange in exchanges] == [0, 0, 0]


def ends(node: ProcessNode, name: str) -> list[str]:
    """How the peer of this id has ended, by the log of a node. The log is written by a thread: later than /status."""
    entries = [one for event in GONE for one in node.events(event)]
    return [one["event"] for one in entries if name.startswith(one["peer"])]


def longest_stand(nodes: list[ProcessNode], seconds: float) -> float:
    """The longest time that any of the nodes completed no step, over so many seconds; without what this process came
    too late to look."""
    watch, began = Watch(nodes), time.monotonic()
    while time.monotonic() - began < seconds:
        watch.look()
        time.sleep(0.25)
    return watch.longest_s - watch.late_s


@pytest.mark.timeout(600)
def test_a_stopped_daemon_blocks_no_other_and_rejoins(daemons: Callable[..., ProcessNode]) -> None:
    """SIGSTOP for eight seconds: the other continues within the detection bound; after SIGCONT both continue within
    it."""
    first = daemons("first", forks=True)
    until(lambda: first.trains, START_S, "the founder trains")
    second = daemons("second", first.address, forks=True)
    until(lambda: second.trains and second.step > first.step - 50, START_S, "both train")

    second.process.send_signal(signal.SIGSTOP)
    assert longest_stand([first], 8.0) <= DETECTION_BOUND_S
    second.process.send_signal(signal.SIGCONT)
    until(lambda: second.trains, 90, "it answers again")
    assert longest_stand([first, second], 14.0) <= DETECTION_BOUND_S

"""process_faults: six real daemons under rounds of SIGKILL, SIGSTOP, SIGCONT, SIGTERM and restarts at random moments.

Each node has a sixth of the digits and lacks three of the ten classes, so that none learns them alone. One fault a
round, drawn from the seed: `kill`, `stop` (continued one to twelve seconds later, before or after it is declared dead),
`leave`, or `restart` of a node that is down, on its old state directory. Watched is the longest time that any node went
without a step, other than one that was just signalled or is starting. After as many steps all must reach the accuracy
of six undisturbed nodes.

`--minutes` plays rounds for so long, and leaves the undisturbed run out; `--busy 2` has two processes use a core each
meanwhile. A node that stands for more than half the bound is told of with its summary; `--keep DIR` leaves the logs of
the nodes there.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.daemons import acknowledged_steps
from benchmarks.record import NotMeasured, Outcome, Series
from tests.process.harness.swarm_world import START_S, ProcessNode, kill_all

NODES, ROUNDS, ROUND_S = 6, 20, 15.0
#: Fewer than this many are never left running: a swarm of two has no third copy of anything.
LEAST = 4
STOPPED_S = (1.0, 12.0)
LOOK_S = 0.2
#: The detection bound (docs/architecture.md).
BOUND_S = 10.0
#: A node that answers no sooner is asked again: the others are to be looked at too.
ANSWER_S = 2.0
#: A longer time without a step is told of.
TOLD_S = BOUND_S / 2
#: After the last round, so that the last ones back have trained too.
CALM_S = 20.0
SETTINGS: dict[str, Any] = {
    "training.task": "benchmarks.tasks:PacedDigits",
    "training.eval_steps": 5,
    "training.checkpoint_s": 10.0,
    "training.min_nodes": 1,
    "log.format": "json",
}


@dataclass
class Watched:
    """A node, and since when it stands: without a step whose delta is acknowledged, and no other in its outbox.
    `moved_s` is None while no step of it can be expected."""

    node: ProcessNode
    step: int = -1
    moved_s: float | None = None
    started_s: float = field(default_factory=time.monotonic)
    wake_s: float | None = None
    told_s: float = 0.0
    accuracies: list[float] = field(default_factory=list)

    @property
    def stopped(self) -> bool:
        return self.wake_s is not None


@dataclass
class Result:
    """What came of it: the longest stands by node, the steps reached, the accuracies at the end."""

    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    longest_of: str = ""
    #: How late this process itself came to look: what the machine, and not the swarm, held up.
    own_lag_s: float = 0.0
    steps: int = 0
    accuracies: list[float] = field(default_factory=list)
    slowest_start_s: float = 0.0

    @property
    def accuracy(self) -> float:
        return statistics.mean(self.accuracies)


class Story:
    """The daemons of one run, and what is done to them."""

    def __init__(self, folder: Path, seed: int, say: Callable[[str], None], nodes: int = NODES) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.say = say
        self.result = Result()
        self.nodes: list[Watched | None] = [None] * nodes
        self._began_s = time.monotonic()
        self._looked_s = self._began_s

    def start(self, place: int) -> None:
        """Start a node, again on its own state directory; through any that runs."""
        others = [one.node.address for one in self.nodes if one is not None and not one.stopped]
        options = {"part": place, "parts": len(self.nodes), "lacking": 3}
        settings = SETTINGS | {"training.options": options, "training.seed": 5}
        bootstrap = next((address for address in others if address), "")
        node = ProcessNode(self.folder, f"node-{place}", settings, bootstrap=bootstrap, answer_s=ANSWER_S)
        self.nodes[place] = Watched(node)

    def up(self) -> list[int]:
        """Places of the nodes that run and can be expected to answer."""
        return [place for place, one in enumerate(self.nodes) if one is not None and not one.stopped]

    def training(self) -> list[Watched]:
        return [one for one in self.nodes if one is not None and one.moved_s is not None]

    def run_for(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Observe all nodes for so long; True as soon as `until` holds."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.look()
            if until():
                return True
            time.sleep(LOOK_S)
        return False

    def look(self) -> None:
        """Ask every node for its step. Raises `NotMeasured` where one has ended, or does not come to train."""
        now = time.monotonic()
        self.result.own_lag_s = max(self.result.own_lag_s, now - self._looked_s)
        for one in self.nodes:
            if one is None:
                continue
            if one.wake_s is not None:
                if now >= one.wake_s:
                    one.node.cont()
                    one.wake_s, one.moved_s = None, time.monotonic()
                continue
            self._look_at(one)
        self._looked_s = time.monotonic()

    def _look_at(self, one: Watched) -> None:
        status = one.node.status()
        now = time.monotonic()
        if not status and one.node.ended:
            raise NotMeasured(f"{one.node.name} ended with {one.node.process.returncode}:\n{one.node.output()[-3000:]}")
        step = acknowledged_steps(status) if status else -1
        accuracy = (status.get("training") or {}).get("metrics", {}).get("accuracy")
        if accuracy is not None:
            one.accuracies.append(float(accuracy))
        if one.moved_s is None:
            if status.get("state") in ("training", "waiting") and one.step not in (-1, step):
                one.moved_s = now
                self.result.slowest_start_s = max(self.result.slowest_start_s, now - one.started_s)
            elif now - one.started_s > START_S:
                what = status.get("summary", "it does not answer")
                raise NotMeasured(f"{one.node.name} does not come to train: {what}\n{one.node.output()[-3000:]}")
            one.step = step
            return
        stands_s = now - one.moved_s
        if stands_s > self.result.longest_s:
            self.result.longest_s, self.result.longest_of = stands_s, one.node.name
        if stands_s > TOLD_S and step > one.step:
            self.say(f"{one.node.name} stood for {stands_s:.1f} s until {now - self._began_s:.1f} s")
        elif stands_s > TOLD_S and now - one.told_s > TOLD_S:
            one.told_s = now
            self.say(
                f"{one.node.name} stands at {step} since {one.moved_s - self._began_s:.1f} s: {status.get('summary')}"
            )
        if step > one.step:
            one.step, one.moved_s = step, now
        elif now - one.moved_s > 6 * BOUND_S:
            raise NotMeasured(f"{one.node.name} hangs: {status.get('summary')}\n{one.node.output()[-3000:]}")

    # -- faults -------------------------------------------------------------------------------------------------

    def able(self) -> list[int]:
        """Places of the nodes that train."""
        return [place for place in self.up() if self.nodes[place].moved_s is not None]  # type: ignore[union-attr]

    def kinds(self) -> list[str]:
        """What may happen now, as often as it is likely."""
        down = self.nodes.count(None)
        kinds = ["restart"] * (1 + down) if down else []
        return kinds + (["kill", "stop", "leave"] if len(self.able()) > LEAST else [])

    def round(self) -> None:
        """One fault, at once. Raises `NotMeasured` where none becomes possible."""
        if not self.run_for(START_S, lambda: bool(self.kinds())):
            raise NotMeasured("too few train")
        down, able = [place for place, one in enumerate(self.nodes) if one is None], self.able()
        kind = self.random.choice(self.kinds())
        place = self.random.choice(down if kind == "restart" else able)
        seconds = self.random.uniform(*STOPPED_S) if kind == "stop" else 0.0
        self.say(f"{kind} node-{place}" + (f" for {seconds:.1f} s" if seconds else ""))
        self.result.faults[kind] += 1
        if kind == "restart":
            self.start(place)
            return
        one = self.nodes[place]
        assert one is not None
        if kind == "stop":
            one.node.stop()
            one.wake_s, one.moved_s = time.monotonic() + seconds, None
        elif kind == "kill":
            one.node.kill()
            self.nodes[place] = None
        else:
            self._leave(place, one)

    def _leave(self, place: int, one: Watched) -> None:
        one.node.terminate()
        one.moved_s, one.wake_s = None, float("inf")  # nothing is expected of it
        if not self.run_for(20.0, lambda: one.node.ended) or one.node.process.returncode != 0:
            raise NotMeasured(f"{one.node.name} did not leave:\n{one.node.output()[-3000:]}")
        self.nodes[place] = None

    # -- the whole ----------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """All nodes, new or back, training."""
        for place, one in enumerate(self.nodes):
            if one is None:
                self.start(place)
                founder = self.nodes[place]
                assert founder is not None
                if not self.run_for(START_S, lambda: bool(founder.node.address)):  # noqa: B023
                    raise NotMeasured(f"{founder.node.name} does not start:\n{founder.node.output()[-3000:]}")
        if not self.run_for(START_S, lambda: len(self.training()) == len(self.nodes)):
            raise NotMeasured("not all nodes train")

    def play(
        self, rounds: int, round_s: float, calm_s: float, seconds: float = 0.0, goal: float = float("inf")
    ) -> Result:
        """All of it: gather, the rounds at random moments, gather again, and a while without faults, which ends where
        all have the accuracy `goal`. With `seconds` as many rounds as fit into them."""
        self.gather()
        began_s = time.monotonic()
        number = 0
        while time.monotonic() - began_s < seconds if seconds else number < rounds:
            self.run_for(self.random.uniform(0.5, 1.5) * round_s)
            number += 1
            self.say(f"round {number}, {time.monotonic() - self._began_s:.0f} s, {self.summary()}")
            self.round()
        self.run_for(round_s)
        self.gather()
        self.run_for(calm_s, lambda: min(self.accuracies(), default=0.0) >= goal)
        return self._finish(began_s)

    def calm(self, steps: int, most_s: float) -> Result:
        """Without faults, until every node has made so many steps."""
        self.gather()
        began_s = time.monotonic()
        if not self.run_for(most_s, lambda: min(one.step for one in self.training()) >= steps):
            raise NotMeasured(f"not {steps} steps within {most_s:.0f} s")
        return self._finish(began_s)

    def _finish(self, began_s: float) -> Result:
        self.result.seconds = time.monotonic() - began_s
        self.result.steps = min(one.step for one in self.training())
        self.result.accuracies = self.accuracies()
        return self.result

    def accuracies(self) -> list[float]:
        """Of each node that trains, over its last three evaluations; 0 before its first."""
        return [statistics.mean(one.accuracies[-3:] or [0.0]) for one in self.training()]

    def summary(self) -> str:
        """One line with the step of each node."""
        return "steps " + " ".join("-" if one is None else str(one.step) for one in self.nodes)

    def end(self) -> None:
        """Kill what is left."""
        kill_all(one.node for one in self.nodes if one is not None)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """So many processes that do nothing but use a core each."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _of_minutes(arguments: argparse.Namespace, faults: Result) -> Outcome:
    """The longest stand of a history of minutes."""
    rounds = faults.faults.total()
    conditions = (
        f"6 daemons on loopback, digits in six parts that lack three classes each, steps of 0.2 s, pssp; {rounds} "
        f"faults in {arguments.minutes:g} minutes, seed {arguments.seed}, beside {arguments.busy} busy loops"
    )
    details = {
        "faults": dict(faults.faults),
        "seconds": round(faults.seconds, 1),
        "steps": faults.steps,
        "longest_of": faults.longest_of,
        "own_lag_s": round(faults.own_lag_s, 2),
        "slowest_start_s": round(faults.slowest_start_s, 1),
    }
    what = "minutes of faults: longest time of a survivor without a step"
    return Outcome("process_faults", conditions, [Series(what, "s", [faults.longest_s], f"≤ {BOUND_S:g}", details)])


def measure(arguments: argparse.Namespace) -> Outcome:
    rounds, seed, minutes = arguments.repetitions or ROUNDS, arguments.seed, arguments.minutes
    with (
        busy_loops(arguments.busy),
        tempfile.TemporaryDirectory(prefix="p2pnode-faults-", ignore_cleanup_errors=True) as name,
    ):
        folder = Path(name)
        (folder / "faults").mkdir()
        (folder / "calm").mkdir()
        story = Story(folder / "faults", seed, say)
        try:
            faults = story.play(rounds, ROUND_S, CALM_S, 60.0 * minutes)
        finally:
            story.end()
            if arguments.keep is not None:
                arguments.keep.mkdir(parents=True, exist_ok=True)
                for log in story.folder.glob("*.log"):
                    shutil.copy(log, arguments.keep)
        if minutes:
            return _of_minutes(arguments, faults)
        story = Story(folder / "calm", seed, lambda _: None)
        try:
            calm = story.calm(faults.steps, 2 * faults.seconds)
        finally:
            story.end()
    conditions = (
        f"6 daemons on loopback, digits in six parts that lack three classes each, steps of 0.2 s, pssp; {rounds} "
        f"faults at random moments about {ROUND_S:.0f} s apart, seed {seed}; undisturbed: six others, as many steps"
    )
    details = {
        "seed": seed,
        "faults": dict(faults.faults),
        "seconds": round(faults.seconds, 1),
        "steps": faults.steps,
        "longest_of": faults.longest_of,
        "own_lag_s": round(faults.own_lag_s, 2),
        "slowest_start_s": round(faults.slowest_start_s, 1),
        "undisturbed_longest_s": round(calm.longest_s, 2),
    }
    return Outcome(
        "process_faults",
        conditions,
        [
            Series(
                "faults: longest time of a survivor without a step", "s", [faults.longest_s], f"≤ {BOUND_S:g}", details
            ),
            Series(
                "faults: accuracy minus that of an undisturbed run",
                "points",
                [100 * (faults.accuracy - calm.accuracy)],
                "≥ -1",
                {"faults": faults.accuracies, "undisturbed": calm.accuracies},
            ),
        ],
    )

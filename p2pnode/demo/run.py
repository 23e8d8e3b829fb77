"""The demo: a swarm of real daemons on this machine that learns together what none of them could learn alone.

Each node gets a part of the data that lacks some classes. The demo succeeds when the shared model is good enough in
three evaluations in a row at every node; then each part is trained alone for as many steps, for comparison. It starts
and asks processes and draws a table; how they train is theirs. It leaves no process and no file behind.
"""

from __future__ import annotations

import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from overlay.settings import NodeSettings, SwarmSettings
from p2pnode import tables
from p2pnode.config import documentation
from p2pnode.config.settings import Config, LogSettings, StatusSettings
from p2pnode.demo.nodes import DemoNode, DemoProcess, end_all
from p2pnode.errors import ExitCode
from training.settings import BarrierMethod, BarrierSettings, ExchangeSettings, TrainingSettings

#: Evaluations in a row that must reach the goal at every node.
EVALUATIONS = 3
#: Classes each node's part of the data lacks: enough that a node alone cannot pass 0.7 of ten classes.
LACKING = 3
#: Between two looks at the nodes, in seconds; and between two printed lines where there is no terminal.
POLL_INTERVAL_S, LINE_S = 0.25, 2.0
#: Lone trainings at a time: one per core of the smallest machine the demo is meant for.
MAX_CONCURRENT_BASELINES = 2
#: A node forgotten by a demo that was itself killed ends by itself this many seconds after the time limit.
ORPHAN_S = 60.0


#: What a built-in task needs to be shown on two cores. The convolutional network gets plain SGD, which bears classes
#: that a node never sees better than AdamW does, and is evaluated on the first 2,000 test images: all 10,000 at every
#: node would take longer than the training between.
PRESETS: dict[str, dict[str, Any]] = {
    "mnist": {"optimizer": "sgd", "learning_rate": 0.1, "batch_size": 32, "eval_samples": 2000},
}
TIME_LIMIT_S = {"mnist": 900.0}
USUAL_TIME_LIMIT_S = 180.0


@dataclass(frozen=True)
class DemoPlan:
    """What to show. `until` is an accuracy from 0 to 1."""

    nodes: int = 4
    task: str = "digits"
    data_dir: str = ""
    until: float = 0.95
    barrier: BarrierMethod = "pssp"
    time_limit_s: float = USUAL_TIME_LIMIT_S
    seed: int = 0
    exchange: bool = True
    keep: Path | None = None
    #: How a daemon is started, given its configuration file; tests put a stand-in here.
    start_command: tuple[str, ...] = (sys.executable, "-m", "p2pnode", "start", "--config")
    alone_command: tuple[str, ...] = (sys.executable, "-m", "training.trainer.standalone")


@dataclass(frozen=True)
class Reached:
    """How it ended: `reason` is empty on success, `accuracies` are the last ones, None where there was none."""

    success: bool
    reason: str
    seconds: float
    statuses: tuple[dict[str, Any], ...]
    accuracies: tuple[float | None, ...]


def options(plan: DemoPlan, part: int) -> dict[str, Any]:
    """The task options that give a node its part of the data."""
    # A single node has nobody to hold what it would lack.
    share = {"part": part, "parts": plan.nodes, "lacking": LACKING if plan.nodes > 1 else 0}
    return PRESETS.get(plan.task, {}) | share


def node_config(plan: DemoPlan, part: int, folder: Path, bootstrap: Sequence[str]) -> Config:
    """The configuration of one node; pure."""
    return Config(
        node=NodeSettings(state_dir=str(folder / "state"), host="127.0.0.1", port=0),
        swarm=SwarmSettings(run=f"demo-{plan.task}"[:64], bootstrap=list(bootstrap)),
        training=TrainingSettings(
            task=plan.task,
            data_dir=plan.data_dir,
            min_nodes=plan.nodes,
            threads=1,
            seed=plan.seed,
            eval_steps=5,
            max_seconds=plan.time_limit_s + ORPHAN_S,
            linger_s=5.0,
            checkpoint_s=0.0,
            options=options(plan, part),
        ),
        barrier=BarrierSettings(method=plan.barrier),
        exchange=ExchangeSettings(enabled=plan.exchange),
        status=StatusSettings(port=0),
        log=LogSettings(format="console"),
    )


def goal_held(accuracies: Sequence[Sequence[float]], goal: float) -> bool:
    """Whether the latest evaluations, three in a row at every node, all reached the goal. Pure."""
    return all(
        len(seen) >= EVALUATIONS and all(accuracy >= goal for accuracy in seen[-EVALUATIONS:]) for seen in accuracies
    )


def summary(plan: DemoPlan, reached: Reached, alone: Sequence[float]) -> dict[str, Any]:
    """The figures of a demo as its one JSON object; what could not be measured is null. Pure."""
    statuses = reached.statuses
    steps = [int(status.get("step") or 0) for status in statuses]
    accuracies = [value for value in reached.accuracies if value is not None]
    estimates = [(status.get("population") or {}).get("estimate") for status in statuses]
    known = [float(estimate) for estimate in estimates if estimate is not None]
    sent = [int((status.get("exchange") or {}).get("bytes_sent") or 0) for status in statuses]
    return {
        "schema": 1,
        "success": reached.success,
        "reason": reached.reason,
        "task": plan.task,
        "barrier": plan.barrier,
        "nodes": plan.nodes,
        "seconds": round(reached.seconds, 2),
        "steps_per_node": steps,
        # The worst node's: the goal is that every node has the good model.
        "accuracy": min(accuracies) if len(accuracies) == plan.nodes else None,
        "alone": round(statistics.mean(alone), 4) if alone else None,
        "alone_each": [round(value, 4) for value in alone],
        "population_estimate": round(statistics.mean(known), 2) if known else None,
        "bytes_sent_per_node_and_step": round(sum(sent) / sum(steps)) if sum(steps) else None,
    }


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP instead of letting them end us: what we started must end first."""

    _NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.count = 0

    def _count(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1

    @contextmanager
    def caught(self) -> Iterator[None]:
        former = {number: signal.signal(number, self._count) for number in self._NUMBERS}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def any(self) -> bool:
        return self.count > 0

    def again(self) -> bool:
        return self.count > 1


class View:
    """Where progress is drawn: a table in place on a terminal, otherwise a few lines every two seconds."""

    def __init__(self, title: str, stream: Any) -> None:
        self._title = title
        self._stream = stream
        self._live: Any = None
        self._next_line = 0.0

    @contextmanager
    def open(self) -> Iterator[View]:
        if not self._stream.isatty():
            self.say(self._title)
            yield self
            return
        from rich.console import Console
        from rich.live import Live

        with Live(console=Console(file=self._stream), auto_refresh=False) as self._live:
            yield self
        self._live = None

    def draw(self, rows: Sequence[Sequence[str]], seconds: float) -> None:
        if self._live is not None:
            self._live.update(tables.demo_table(rows, f"{self._title}  {seconds:.0f} s"), refresh=True)
        elif seconds >= self._next_line:
            self._next_line = seconds + LINE_S
            header = (f"{seconds:.0f} s", *tables.DEMO_COLUMNS[1:])
            self.say(tables.columns(header, rows))

    def say(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()


def run(plan: DemoPlan, *, as_json: bool = False) -> int:
    """Run the demo; returns 0 on success and 10 otherwise. With `as_json` progress goes to standard error."""
    interrupts = Interrupts()
    stream = sys.stderr if as_json else sys.stdout
    goal = f"until accuracy {plan.until:g} holds in {EVALUATIONS} evaluations in a row at every node"
    exchange = "" if plan.exchange else ", exchange switched off"
    view = View(f"{plan.nodes} nodes train {plan.task}{exchange}, {goal}", stream)
    with interrupts.caught(), _folder(plan.keep) as folder:
        with view.open():
            reached = _swarm(plan, folder, interrupts, view)
        alone = _alone(plan, reached, folder, interrupts, view) if reached.success else []
    answer = summary(plan, reached, alone)
    _conclude(plan, answer, view)
    if plan.keep is not None:
        view.say(f"the nodes' files are in {folder}")
    if as_json:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    return ExitCode.OK if reached.success else ExitCode.DEMO_FAILED


def _swarm(plan: DemoPlan, folder: Path, interrupts: Interrupts, view: View) -> Reached:
    """Start the nodes, watch them until the goal, the limit, a death or a signal, and end them all."""
    began = time.monotonic()
    nodes: list[DemoNode] = []

    def over() -> str | None:
        """Why to stop now: empty for success, None to go on."""
        for node in nodes:
            if node.exit_code is not None:
                return f"{node.name} ended early with exit code {node.exit_code}; its last lines:\n{node.last_lines()}"
            node.look()
        seconds = time.monotonic() - began
        view.draw([tables.demo_row(node.name, node.status) for node in nodes], seconds)
        if len(nodes) == plan.nodes and goal_held([node.accuracies for node in nodes], plan.until):
            return ""
        if interrupts.any():
            return "it was interrupted"
        return f"the goal was not reached within {plan.time_limit_s:g} s" if seconds > plan.time_limit_s else None

    try:
        nodes.append(_start(plan, 0, folder, []))
        reason = _until(lambda: "" if nodes[0].listens_at else over())
        if not reason:
            address = nodes[0].listens_at
            nodes.extend(_start(plan, part, folder, [address]) for part in range(1, plan.nodes))
            reason = _until(over)
        seconds = time.monotonic() - began
    finally:
        killed = end_all(nodes, interrupts.again)
    if killed:
        view.say(f"had to be killed: {', '.join(killed)}")
    statuses = tuple(node.status or {} for node in nodes)
    last = tuple(node.accuracies[-1] if node.accuracies else None for node in nodes)
    return Reached(not reason, reason, seconds, statuses, last)


def _start(plan: DemoPlan, part: int, folder: Path, bootstrap: Sequence[str]) -> DemoNode:
    name = f"node-{part}"
    place = folder / name
    place.mkdir()
    config = place / "node.toml"
    settings = node_config(plan, part, place, bootstrap)
    config.write_text(documentation.node_toml(settings, explain=False), encoding="utf-8")
    return DemoNode(name, [*plan.start_command, str(config)], place / "log.txt", settings.state_folder)


def _until(over: Callable[[], str | None]) -> str:
    while (reason := over()) is None:
        time.sleep(POLL_INTERVAL_S)
    return reason


def _alone(plan: DemoPlan, reached: Reached, folder: Path, interrupts: Interrupts, view: View) -> list[float]:
    """Accuracy of each part trained alone for the median steps of the swarm; empty where it cannot be had."""
    steps = int(statistics.median(status["step"] for status in reached.statuses))
    view.say(f"now each part alone, for {steps} steps")
    waiting = list(range(plan.nodes))
    processes: list[DemoProcess] = []
    try:
        while (waiting or any(process.exit_code is None for process in processes)) and not interrupts.any():
            running = sum(process.exit_code is None for process in processes)
            if waiting and running < MAX_CONCURRENT_BASELINES:
                part = waiting.pop(0)
                command = [*plan.alone_command, *_alone_arguments(plan, part, steps)]
                processes.append(DemoProcess(f"alone-{part}", command, folder / f"alone-{part}.txt"))
            else:
                time.sleep(POLL_INTERVAL_S)
    finally:
        end_all(processes, interrupts.again)
    accuracies = []
    for process in processes:
        accuracy = _alone_accuracy(process)
        if accuracy is None:
            if not interrupts.any():
                view.say(f"{process.name} failed with exit code {process.exit_code}:\n{process.last_lines()}")
            return []
        accuracies.append(accuracy)
    return accuracies


def _alone_arguments(plan: DemoPlan, part: int, steps: int) -> list[str]:
    arguments = {
        "--task": plan.task,
        "--options": json.dumps(options(plan, part)),
        "--local-steps": str(TrainingSettings().local_steps),
        "--steps": str(steps),
        "--data-dir": plan.data_dir,
        "--seed": str(plan.seed),
        "--threads": "1",
    }
    return [*(part for pair in arguments.items() if pair[1] for part in pair), "--json"]


def _alone_accuracy(process: DemoProcess) -> float | None:
    """The accuracy in the JSON object that a lone training printed last."""
    if process.exit_code != 0:
        return None
    for line in reversed(process.log.read_text(encoding="utf-8", errors="replace").splitlines()):
        try:
            answer = json.loads(line)
            return float((answer.get("metrics") or answer)["accuracy"])
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return None


def _conclude(plan: DemoPlan, answer: dict[str, Any], view: View) -> None:
    """The summary for people."""
    together = tables.number(answer["accuracy"], 2)
    alone = f"alone {tables.number(answer['alone'], 2)}, " if answer["alone"] is not None else ""
    view.say(f"{alone}together {together}")
    view.say(
        f"{plan.nodes} nodes, {answer['seconds']:.0f} s, steps {answer['steps_per_node']}, "
        f"population estimate {tables.number(answer['population_estimate'], 1)}, "
        f"{tables.size(answer['bytes_sent_per_node_and_step'])} sent per node and step"
    )
    view.say("the demo reached its goal" if answer["success"] else f"the demo failed: {answer['reason']}")


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """A folder for the nodes' files: gone at the end, unless it is to be kept."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield Path(tempfile.mkdtemp(prefix="demo-", dir=keep.resolve()))
        return
    folder = Path(tempfile.mkdtemp(prefix="p2pnode-demo-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

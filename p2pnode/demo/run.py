"""Runs the demo: a swarm of real daemons on this machine, each with a part of the data, that train one model.

The demo succeeds when the shared model reaches the goal in three evaluations in a row at every node. Then each part is
trained alone for as many steps, for comparison. The daemons are started and asked as a user would. No process and no
file is left behind.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from p2pnode.config.toml import node_toml
from p2pnode.demo.nodes import DemoNode, DemoProcess, end_all
from p2pnode.demo.plan import EVALUATIONS, DemoPlan, DemoResult, goal_held, node_config, options, summary
from p2pnode.demo.view import DemoMoment, View, demo_row
from p2pnode.errors import ExitCode
from p2pnode.local_run import Interrupts
from p2pnode.screen import ProgressBar, progress_bar
from p2pnode.terminal.numbers import number, size, whole
from p2pnode.training.settings import TrainingSettings

POLL_INTERVAL_S = 0.25
#: Parts trained alone at a time: one per core of the smallest machine the demo runs on.
MAX_CONCURRENT_BASELINES = 2


def run(plan: DemoPlan, *, as_json: bool = False) -> int:
    """Run the demo; returns 0 on success and 10 otherwise. With `as_json` progress goes to standard error."""
    interrupts = Interrupts()
    stream = sys.stderr if as_json else sys.stdout
    goal = f"until accuracy {plan.until:g} holds in {EVALUATIONS} evaluations in a row at every node"
    exchange = "" if plan.exchange else ", exchange switched off"
    title = f"{plan.nodes} nodes train {plan.task}{exchange}, {goal}"
    view = View(title, stream, goal=plan.until, limit_s=plan.time_limit_s)
    with interrupts.caught(), _folder(plan.keep) as folder:
        with view.open():
            reached = _run_swarm(plan, folder, interrupts, view)
        alone: list[float] = []
        if reached.success:
            with progress_bar("each part alone", sys.stderr) as shown:
                alone = _train_alone(plan, reached, folder, interrupts, view, shown)
    answer = summary(plan, reached, alone)
    _print_summary(plan, answer, view)
    if plan.keep is not None:
        view.print(f"the nodes' files are in {folder}")
    if as_json:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    return ExitCode.OK if reached.success else ExitCode.DEMO_FAILED


def _run_swarm(plan: DemoPlan, folder: Path, interrupts: Interrupts, view: View) -> DemoResult:
    """Start the nodes, watch them until the goal, the time limit, a crash or a signal, and end them all."""
    began = time.monotonic()
    nodes: list[DemoNode] = []
    history: list[float] = []

    def draw(seconds: float) -> None:
        names = {str(((node.status or {}).get("node") or {}).get("id")): node.name for node in nodes}
        last = [node.accuracies[-1] for node in nodes if node.accuracies]
        lowest = min(last) if len(last) == plan.nodes else None
        if lowest is not None and history[-1:] != [lowest]:
            history.append(lowest)
        view.draw(DemoMoment([demo_row(node.name, node.status, names) for node in nodes], lowest, history, seconds))

    def outcome() -> str | None:
        """Why to stop now: empty on success, None to continue."""
        for node in nodes:
            if node.exit_code is not None:
                return f"{node.name} ended early with exit code {node.exit_code}; its last lines:\n{node.last_lines()}"
            node.refresh()
        seconds = time.monotonic() - began
        draw(seconds)
        if len(nodes) == plan.nodes and goal_held([node.accuracies for node in nodes], plan.until):
            return ""
        if interrupts.count:
            return "it was interrupted"
        return f"the goal was not reached within {plan.time_limit_s:g} s" if seconds > plan.time_limit_s else None

    try:
        nodes.append(_start_node(plan, 0, folder, []))
        reason = _wait_for(lambda: "" if nodes[0].listens_at else outcome())
        if not reason:
            address = nodes[0].listens_at
            nodes.extend(_start_node(plan, part, folder, [address]) for part in range(1, plan.nodes))
            reason = _wait_for(outcome)
        seconds = time.monotonic() - began
    finally:
        killed = end_all(nodes, lambda: interrupts.count > 1)
    if killed:
        view.print(f"had to be killed: {', '.join(killed)}")
    statuses = tuple(node.status or {} for node in nodes)
    last = tuple(node.accuracies[-1] if node.accuracies else None for node in nodes)
    return DemoResult(not reason, reason, seconds, statuses, last)


def _start_node(plan: DemoPlan, part: int, folder: Path, bootstrap: Sequence[str]) -> DemoNode:
    name = f"node-{part}"
    place = folder / name
    place.mkdir()
    config = place / "node.toml"
    settings = node_config(plan, part, place, bootstrap)
    config.write_text(node_toml(settings), encoding="utf-8")
    return DemoNode(name, [*plan.start_command, str(config)], place / "log.txt", settings.state_folder)


def _wait_for(outcome: Callable[[], str | None]) -> str:
    while (reason := outcome()) is None:
        time.sleep(POLL_INTERVAL_S)
    return reason


def _train_alone(
    plan: DemoPlan, reached: DemoResult, folder: Path, interrupts: Interrupts, view: View, shown: ProgressBar
) -> list[float]:
    """Accuracy of each part trained alone for the swarm's median number of steps; empty if one of them fails."""
    steps = int(statistics.median(status["step"] for status in reached.statuses))
    view.print(f"training each part alone, for {steps} steps")
    waiting = list(range(plan.nodes))
    processes: list[DemoProcess] = []
    try:
        while (waiting or any(process.exit_code is None for process in processes)) and not interrupts.count:
            running = sum(process.exit_code is None for process in processes)
            shown.show(len(processes) - running, plan.nodes, "parts")
            if waiting and running < MAX_CONCURRENT_BASELINES:
                part = waiting.pop(0)
                command = [*plan.alone_command, *_alone_arguments(plan, part, steps)]
                processes.append(DemoProcess(f"alone-{part}", command, folder / f"alone-{part}.txt"))
            else:
                time.sleep(POLL_INTERVAL_S)
    finally:
        end_all(processes, lambda: interrupts.count > 1)
    accuracies = []
    for process in processes:
        accuracy = _alone_accuracy(process)
        if accuracy is None:
            if not interrupts.count:
                view.print(f"{process.name} failed with exit code {process.exit_code}:\n{process.last_lines()}")
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
    """The accuracy in the last JSON object that the process printed."""
    if process.exit_code != 0:
        return None
    for line in reversed(process.log.read_text(encoding="utf-8", errors="replace").splitlines()):
        try:
            answer = json.loads(line)
            return float((answer.get("metrics") or answer)["accuracy"])
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return None


def _print_summary(plan: DemoPlan, answer: dict[str, Any], view: View) -> None:
    """The summary for people."""
    together = number(answer["accuracy"])
    alone = f"alone {number(answer['alone'])}, " if answer["alone"] is not None else ""
    view.print(f"{alone}together {together}")
    view.print(
        f"{plan.nodes} nodes, {answer['seconds']:.0f} s, steps {answer['steps_per_node']}, "
        f"population estimate {number(whole(answer['population_estimate']))}, "
        f"{size(answer['bytes_sent_per_node_and_step'])} sent per node and step"
    )
    view.print("the demo reached its goal" if answer["success"] else f"the demo failed: {answer['reason']}")


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """A folder for the nodes' files, removed at the end unless it is to be kept."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield Path(tempfile.mkdtemp(prefix="demo-", dir=keep.resolve()))
        return
    folder = Path(tempfile.mkdtemp(prefix="p2pnode-demo-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

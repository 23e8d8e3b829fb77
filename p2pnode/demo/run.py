"""Runs the demo: a swarm of real daemons on this machine, each with a part of the data, that train one model.

The demo succeeds when the shared model reaches the goal in three evaluations in a row at every node. Then each part is
trained alone for as many steps, for comparison. The daemons are started and asked as a user would. No process and no
file is left behind.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from p2pnode.client import NodeClient, find
from p2pnode.config.load import Loaded
from p2pnode.config.settings import KEYS
from p2pnode.config.toml import node_toml
from p2pnode.demo.plan import EVALUATIONS, DemoPlan, DemoResult, goal_held, node_config, options, summary
from p2pnode.demo.view import DemoMoment, View, demo_row
from p2pnode.errors import ExitCode, UserError
from p2pnode.local_run import Interrupts, LocalNode, LocalStart, run_local
from p2pnode.log_file import LOG_FILE
from p2pnode.screen import ProgressBar, progress_bar
from p2pnode.terminal.numbers import number, size, whole
from p2pnode.training.settings import TrainingSettings

POLL_INTERVAL_S = 0.25
#: Timeout of one status request.
REQUEST_TIMEOUT_S = 2.0
#: The nodes have this long to leave, and then to end.
LEAVE_S, TERM_S = 15.0, 5.0
#: Lines shown when a process fails.
LAST_LINES = 12
#: Parts trained alone at a time: one per core of the smallest machine the demo runs on.
MAX_CONCURRENT_BASELINES = 2


def run(plan: DemoPlan, *, as_json: bool = False) -> int:
    """Run the demo; returns 0 on success and 10 otherwise. With `as_json` progress goes to standard error."""
    interrupts = Interrupts()
    stream = sys.stderr if as_json else sys.stdout
    goal = f"until accuracy {plan.until:g} holds in {EVALUATIONS} evaluations in a row at every node"
    title = f"{plan.nodes} nodes train {plan.task}, {goal}"
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


class _Swarm:
    """The nodes of the demo: reads what they say, draws it, and decides when they end (`p2pnode.local_run.Watch`)."""

    def __init__(self, plan: DemoPlan, interrupts: Interrupts, view: View) -> None:
        self.statuses: dict[int, dict[str, Any]] = {}
        self.accuracies: dict[int, list[float]] = {number: [] for number in range(1, plan.nodes + 1)}
        #: Why it ends: empty on success, None while it goes on.
        self.reason: str | None = None
        self._plan = plan
        self._interrupts = interrupts
        self._view = view
        self._seen: dict[int, int] = {}
        self._history: list[float] = []
        self._began = self._looked_at = time.monotonic()
        self.seconds = 0.0

    def watch(self, nodes: Sequence[LocalNode]) -> int:
        """How often the nodes have been asked to end by now: they have `LEAVE_S` to leave, and `TERM_S` to end."""
        now = time.monotonic()
        if self.reason is None:
            if now - self._looked_at < POLL_INTERVAL_S and all(node.runs for node in nodes):
                return 0
            self._looked_at = now
            self.seconds = now - self._began
            self.reason = self._outcome(nodes)
            return self.reason is not None
        passed_s = now - self._began - self.seconds
        return 1 + (passed_s > LEAVE_S) + (passed_s > LEAVE_S + TERM_S)

    def _outcome(self, nodes: Sequence[LocalNode]) -> str | None:
        if self._interrupts.count:
            return "it was interrupted"  # before nodes that it has ended count as failed
        for node in nodes:
            if not node.runs:
                lines = _last_lines(node.folder / LOG_FILE)
                return f"node-{node.number} ended early with exit code {node.exit_code}; its last lines:\n{lines}"
            self._ask(node)
        self._draw(nodes)
        if goal_held(list(self.accuracies.values()), self._plan.until):
            return ""
        limit_s = self._plan.time_limit_s
        return f"the goal was not reached within {limit_s:g} s" if self.seconds > limit_s else None

    def _ask(self, node: LocalNode) -> None:
        """Take its status and new events; where it does not answer, the previous status is kept."""
        found = find(node.folder)
        if found is None:
            return
        client = NodeClient.of(found, timeout_s=REQUEST_TIMEOUT_S)
        with contextlib.suppress(UserError):
            self.statuses[node.number] = client.status()
            page = client.events(self._seen.get(node.number, 0))
            self.read_events(node.number, page)

    def read_events(self, number: int, page: dict[str, Any]) -> None:
        """Take evaluations from the events: the status may skip some between two requests."""
        accuracies = self.accuracies[number]
        if page["dropped"]:
            accuracies.clear()  # a gap: evaluations before and after it are not "in a row"
        for event in page["events"]:
            if event["event"] == "evaluated" and "accuracy" in event["fields"]:
                accuracies.append(float(event["fields"]["accuracy"]))
        self._seen[number] = page["last"]

    def _draw(self, nodes: Sequence[LocalNode]) -> None:
        statuses = {node.number: self.statuses.get(node.number) for node in nodes}
        names = {str(status["node"]["id"]): f"node-{number}" for number, status in self.statuses.items()}
        last = [accuracies[-1] for accuracies in self.accuracies.values() if accuracies]
        lowest = min(last) if len(last) == self._plan.nodes else None
        if lowest is not None and self._history[-1:] != [lowest]:
            self._history.append(lowest)
        rows = [demo_row(f"node-{number}", status, names) for number, status in statuses.items()]
        self._view.draw(DemoMoment(rows, lowest, self._history, self.seconds))


def _run_swarm(plan: DemoPlan, folder: Path, interrupts: Interrupts, view: View) -> DemoResult:
    """Run the nodes until the goal, the time limit, a crash or a signal."""
    config = node_config(plan, folder)
    file = folder / "node.toml"
    file.write_text(node_toml(config), encoding="utf-8")
    swarm = _Swarm(plan, interrupts, view)
    start = LocalStart(
        Loaded(config, chosen=frozenset(KEYS)),
        plan.nodes,
        ["--config", str(file)],
        program=plan.program,
        each=lambda number: {"training.options": options(plan, number - 1)},
        watch=swarm.watch,
    )
    if run_local(start, interrupts) == 128 + signal.SIGKILL:
        view.print("a node had to be killed")
    numbers = range(1, plan.nodes + 1)
    last = tuple(next(reversed(swarm.accuracies[number]), None) for number in numbers)
    statuses = tuple(swarm.statuses.get(number, {}) for number in numbers)
    return DemoResult(not swarm.reason, swarm.reason or "", swarm.seconds, statuses, last)


def _last_lines(log: Path) -> str:
    """The end of what a process has printed, indented."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
    return "\n".join(f"    {line}" for line in lines) or "    (it wrote nothing)"


def _train_alone(
    plan: DemoPlan, reached: DemoResult, folder: Path, interrupts: Interrupts, view: View, shown: ProgressBar
) -> list[float]:
    """Accuracy of each part trained alone for the swarm's median number of steps; empty if one of them fails."""
    steps = int(statistics.median(status["step"] for status in reached.statuses))
    view.print(f"training each part alone, for {steps} steps")
    logs = [folder / f"alone-{part}.txt" for part in range(plan.nodes)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        while not interrupts.count:
            running = sum(process.poll() is None for process in processes)
            shown.show(len(processes) - running, plan.nodes, "parts")
            if len(processes) < plan.nodes and running < MAX_CONCURRENT_BASELINES:
                command = [*plan.alone_command, *_alone_arguments(plan, len(processes), steps)]
                with logs[len(processes)].open("wb") as output:
                    # A session of its own: Ctrl-C reaches only the demo, which ends it.
                    options: dict[str, Any] = {"stdout": output, "stderr": output, "start_new_session": True}
                    processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, **options))
            elif not running:
                break
            else:
                time.sleep(POLL_INTERVAL_S)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    accuracies = []
    for log, process in zip(logs, processes, strict=False):
        accuracy = _alone_accuracy(log) if process.returncode == 0 else None
        if accuracy is None:
            if not interrupts.count:
                view.print(f"{log.stem} failed with exit code {process.returncode}:\n{_last_lines(log)}")
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


def _alone_accuracy(log: Path) -> float | None:
    """The accuracy in the last JSON object that a process has printed."""
    for line in reversed(log.read_text(encoding="utf-8", errors="replace").splitlines()):
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

"""One run of one contestant: the world, the processes of its nodes, the common start, a kill, and what came of it.

Each machine is a network namespace behind a cable (`tests.process.harness.wan_world`). All contestants have the same
clock, the same congestion control of TCP and one thread per process.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.record import ROOT, NotMeasured
from benchmarks.time_to_loss.results import KILLED, Line, Result
from tests.process.harness.lan_world import LanNode, NotPermitted
from tests.process.harness.line_model import Cable
from tests.process.harness.wan_check import NotAsClaimed, check
from tests.process.harness.wan_world import Wan, wan

READY_S = 240.0
#: Of the run: when node 3 is killed, and when it is started again.
KILLED_AT, BACK_AT = 1 / 3, 1 / 2
NICENESS = -10
#: Settings of our daemons that are not defaults. Ten optimiser steps of half a second are a step of five.
OURS = {"training.local_steps": 10, "swarm.run": "time-to-loss", "log.format": "json"}
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")


@dataclass(frozen=True, slots=True)
class Order:
    """A run to be made. `snapshot_s`: the seconds between two losses; `python` has the contestant's packages."""

    contestant: str
    line: Line
    wall_s: float
    text_file: Path
    snapshot_s: float = 60.0
    settings: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    python: Path = Path(sys.executable)

    @property
    def nodes(self) -> int:
        return len(self.line.rates_mbit)

    @property
    def has_network(self) -> bool:
        return any(self.line.rates_mbit)


def run(order: Order, keep: Path | None = None) -> Result:
    """Raises `NotMeasured`. `keep`: a folder for what the nodes wrote."""
    with contextlib.ExitStack() as stack:
        if keep is None:
            keep = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="p2pnode-loss-", ignore_cleanup_errors=True))
            )
        keep.mkdir(parents=True, exist_ok=True)
        found = _over_lines(order, keep) if order.has_network else {}
        way = "snapshots" if order.has_network else order.contestant
        losses = _losses(order, keep, way)
    return Result(
        contestant=order.contestant,
        line=order.line,
        wall_s=order.wall_s,
        losses=losses.get(0, {}),
        losses_1=losses.get(1, {}),
        settings=list(order.settings),
        options=order.options,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        **found,
    )


def _losses(order: Order, folder: Path, way: str) -> dict[int, dict[int, float]]:
    """By node and second, judged after the run: it would take processor time from the nodes."""
    command = [sys.executable, "-m", "benchmarks.time_to_loss.judge", way, str(_given(order, folder, 0, "", ""))]
    done = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotMeasured(f"the snapshots could not be judged: {done.stderr[-2000:]}")
    return msgspec.json.decode(done.stdout, type=dict[int, dict[int, float]])


def _given(order: Order, folder: Path, rank: int, address: str, founder: str, life: int = 0) -> Path:
    """The file that tells a node what to do: `learning.Given`, which needs torch to be imported."""
    given = {
        "rank": rank,
        "nodes": order.nodes,
        "seed": order.line.seed,
        "step_s": order.line.step_s,
        "wall_s": order.wall_s,
        "snapshot_s": order.snapshot_s,
        "folder": str(folder),
        "text": str(order.text_file),
        "address": address,
        "founder": founder,
        "life": life,
        "options": order.options,
    }
    file = folder / f"given-{rank}-{life}.json"
    file.write_text(json.dumps(given))
    return file


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


# -- the nodes ----------------------------------------------------------------------------------------------------


class Nodes:
    """The processes of one contestant, each on its machine."""

    def __init__(self, order: Order, world: Wan, folder: Path) -> None:
        self._order, self._world, self._folder = order, world, folder
        self._processes: list[subprocess.Popen[Any]] = []
        self._bootstrap = ""
        names = [f"{machine.address} node{rank}\n" for rank, machine in enumerate(world.machines)]
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(names))

    def start(self, rank: int, life: int = 0) -> None:
        """Raises `NotMeasured` where the first node of ours does not listen."""
        order, machine = self._order, self._world.machines[rank]
        given = _given(order, self._folder, rank, machine.address, self._world.machines[0].address, life)
        script = [str(order.python), "-m", f"benchmarks.time_to_loss.{order.contestant}_node", str(given)]
        if order.contestant != "p2p":
            self.run_on(rank, script, f"node-{rank}.log")
            return
        chosen: dict[str, Any] = {**OURS, **dict(setting.split("=", 1) for setting in order.settings)}
        node = LanNode(self._folder, f"n{rank}", chosen, machine=machine, bootstrap=self._bootstrap, script=script)
        self._began(node.process)
        if not self._bootstrap:
            # The founder first: the others must not found a swarm of their own.
            self.wait_ready([rank])
            self._bootstrap = node.address

    def run_on(self, rank: int, command: list[str], log: str) -> None:
        """Start a program on a machine that has a name of its own, which torchft tells the others."""
        machine = self._world.machines[rank]
        names = self._folder / "hosts"
        named = f'hostname node{rank} && mount --bind {names} /etc/hosts && exec "$@"'
        command = [*machine.prefix, "unshare", "--uts", "--mount", "sh", "-c", named, "sh", *command]
        with (self._folder / log).open("ab") as output:
            self._began(
                subprocess.Popen(
                    command,
                    cwd=self._folder,
                    env={**_environment(), "GLOO_SOCKET_IFNAME": "wan0", "TMPDIR": str(self._folder)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _began(self, process: subprocess.Popen[Any]) -> None:
        """Where other work shares the cores, a node comes first: an optimiser step must end by the clock."""
        self._processes.append(process)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
            Path(f"/proc/{process.pid}/autogroup").write_text(str(NICENESS))

    def wait_ready(self, ranks: list[int]) -> None:
        deadline = time.monotonic() + READY_S
        while not all((self._folder / f"ready-{rank}-0").exists() for rank in ranks):
            ended = [process.returncode for process in self._processes if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                logs = "\n".join(file.read_text(errors="replace")[-1500:] for file in self._folder.glob("*.log"))
                raise NotMeasured(f"{self._order.contestant}: not all nodes are ready (ended: {ended}):\n{logs}")
            time.sleep(0.1)

    def kill(self, rank: int) -> None:
        """SIGKILL to all that runs on this machine."""
        listed = ["ip", "netns", "pids", self._world.machines[rank].name]
        for pid in subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def end(self) -> None:
        for rank in range(self._order.nodes):
            self.kill(rank)
        for process in self._processes:
            process.wait()


@contextlib.contextmanager
def _nodes(order: Order, world: Wan, folder: Path) -> Iterator[Nodes]:
    nodes = Nodes(order, world, folder)
    try:
        yield nodes
    finally:
        nodes.end()


def _over_lines(order: Order, folder: Path) -> dict[str, Any]:
    """Train over slow lines; what the result has beside the losses."""
    line = order.line
    # Half of a path's delay is each end's.
    cables = [Cable(rate, rate, line.delay_ms / 2000) for rate in line.rates_mbit]
    try:
        with wan(cables, congestion=CONGESTION.read_text().strip()) as world:
            check(world)
            with _nodes(order, world, folder) as nodes:
                return _trained(order, world, folder, nodes)
    except NotPermitted as error:
        raise NotMeasured(f"slow cables between namespaces cannot be made here: {error}") from error
    except NotAsClaimed as error:
        raise NotMeasured(f"the world is not what it claims: {error}") from error


def _trained(order: Order, world: Wan, folder: Path, nodes: Nodes) -> dict[str, Any]:
    ranks = list(range(order.nodes))
    began = time.monotonic()
    if order.contestant == "torchft":
        lighthouse = [str(order.python.with_name("torchft_lighthouse")), "--min_replicas", "1"]
        lighthouse += ["--bind", "0.0.0.0:29510", "--join_timeout_ms", "60000"]
        nodes.run_on(0, lighthouse, "lighthouse.log")
        time.sleep(1)
    for rank in ranks:
        nodes.start(rank)
    nodes.wait_ready(ranks)
    ready_s = time.monotonic() - began
    start_at = time.time() + 1
    (folder / "start.part").write_text(str(start_at))
    (folder / "start.part").rename(folder / "start")
    time.sleep(max(0.0, start_at - time.time()))
    sent = [world.sent_bytes(rank) for rank in ranks]
    loads = []
    to_come = [(KILLED_AT, lambda: nodes.kill(KILLED)), (BACK_AT, lambda: nodes.start(KILLED, life=1))]
    to_come = to_come if order.line.kill else []
    while (passed_s := time.time() - start_at) < order.wall_s + 1.5:
        if to_come and passed_s >= to_come[0][0] * order.wall_s:
            to_come.pop(0)[1]()
        loads.append(os.getloadavg()[0])
        time.sleep(0.05)
    sent = [world.sent_bytes(rank) - before for rank, before in enumerate(sent)]
    notes = [steps_of(folder / f"steps-{rank}", order.wall_s) for rank in ranks]
    step_s = order.line.step_s
    return {
        "ready_s": round(ready_s, 1),
        "steps": [len(of) for of in notes],
        "shares": [round(len(of) * step_s / order.wall_s, 3) for of in notes],
        "sent_mb": [round(count / 1e6, 1) for count in sent],
        "pauses_s": [round(longest_pause(of, step_s, order.wall_s), 2) for of in notes],
        "late_steps": sum(compute_s > step_s for of in notes for _, compute_s in of),
        "load": round(max(loads), 1),
    }


def steps_of(file: Path, wall_s: float) -> list[tuple[float, float]]:
    """When each optimiser step within the run ended, and how long it computed; the last line may be torn."""
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    steps = [(float(end), float(compute)) for end, compute in (line.split() for line in lines)]
    return [step for step in steps if step[0] <= wall_s]


def longest_pause(steps: list[tuple[float, float]], step_s: float, wall_s: float) -> float:
    """The longest time between two steps beyond a step, and to the end of the run."""
    ends = [0.0, *(end for end, _ in steps), wall_s]
    return max(0.0, *(after - before - step_s for before, after in pairwise(ends)))

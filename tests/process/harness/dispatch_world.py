"""Daemons that train dispatched records, SIGKILLs at random moments, and what became of every record.

A worker is a real daemon with a torch-free trainer (`record_trainer`), a master one with `node.role = "master"`. Killed
ones start again on their own state directories, soon or after their death was found.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from p2pnode.training.dispatch.chunks import USUAL_TASKS
from tests.harness.builders.record_files import write_records
from tests.process.harness.swarm_world import START_S, ProcessNode, kill_all, until

#: A worker that starts again within the first is not noticed to be dead; after the second it is.
SOON_S, LATE_S = (0.1, 1.0), (8.0, 12.0)
MASTER_S = (0.3, 3.0)
#: A worker exchanges a delta for so many turns at most, on a machine that has more processes than cores.
TURNS_PER_EXCHANGE = 3


@dataclass
class ChaosPlan:
    """What is trained, and how often what is killed. `store` is that of `[dispatch]`, `{folder}` the run's own. With
    `forks` all processes are forks of one that has imported the daemon."""

    records: int
    records_per_chunk: int
    passes: int
    workers: int = 5
    masters: int = 1
    worker_kills: int = 10
    master_kills: int = 2
    between_s: tuple[float, float] = (1.0, 4.0)
    batch: int = 5
    step_s: float = 0.01
    local_steps: int = 2
    store: str = "sqlite"
    limit_s: float = 300.0
    forks: bool = False

    @property
    def records_per_task(self) -> int:
        return self.records_per_chunk * max(1, self.records // self.records_per_chunk // USUAL_TASKS)


@dataclass
class ChaosResult:
    """`repeated`: trainings beyond the first of each record of each pass; `missing` and `invented` are places that
    should or should not be there. `moments`: who was killed when, in seconds."""

    plan: ChaosPlan
    seconds: float = 0.0
    kills: Counter[str] = field(default_factory=Counter)
    counts: Counter[tuple[int, int]] = field(default_factory=Counter)
    superseded: int = 0
    resumed: int = 0
    moments: list[tuple[float, str]] = field(default_factory=list)

    @property
    def places(self) -> int:
        return self.plan.records * self.plan.passes

    @property
    def missing(self) -> list[tuple[int, int]]:
        """(pass, record)"""
        expected = ((number + 1, record) for number in range(self.plan.passes) for record in range(self.plan.records))
        return [place for place in expected if self.counts[place] == 0]

    @property
    def invented(self) -> int:
        return sum(
            not (1 <= number <= self.plan.passes and 0 <= record < self.plan.records) for number, record in self.counts
        )

    @property
    def repeated(self) -> int:
        return sum(count - 1 for count in self.counts.values() if count > 1)

    @property
    def once_share(self) -> float:
        return sum(count == 1 for count in self.counts.values()) / self.places

    @property
    def bound(self) -> float:
        """The share that is trained exactly once at worst: a killed worker repeats what it has begun and not reported.
        That is the delta under way and what has added up since, each of the turns that an exchange lasts, the task
        under way, and one that is reported just then."""
        turn = self.plan.batch * self.plan.local_steps
        tasks = -(-2 * TURNS_PER_EXCHANGE * turn // self.plan.records_per_task) + 2
        return 1.0 - self.kills["worker"] * tasks * self.plan.records_per_task / self.places

    def line(self) -> str:
        return (
            f"{self.plan.store.partition(':')[0]}: {self.plan.records} records × {self.plan.passes} passes, "
            f"{self.plan.workers} workers; killed {self.kills['worker']} workers and {self.kills['master']} masters in "
            f"{self.seconds:.0f} s; missing {len(self.missing)}, invented {self.invented}, repeated {self.repeated}; "
            f"exactly once {self.once_share:.4%} (at worst {self.bound:.2%}); resumed {self.resumed} tasks, "
            f"superseded {self.superseded}"
        )


class Chaos:
    """One run of a plan."""

    def __init__(self, folder: Path, plan: ChaosPlan, seed: int, say: Callable[[str], None] = print) -> None:
        self.folder, self.plan, self.say = folder, plan, say
        self.random = random.Random(seed)
        self.result = ChaosResult(plan)
        self.nodes: dict[str, ProcessNode] = {}
        self._restarts: list[tuple[float, str]] = []
        self._began = time.monotonic()
        write_records(
            folder / "train.recordio", [b"%d" % number for number in range(plan.records)], plan.records_per_chunk
        )
        say(f"seed {seed}")

    def start(self, name: str) -> None:
        """Start a node, or start it again."""
        plan = self.plan
        settings: dict[str, Any] = {
            "training.seed": 3,
            "training.local_steps": plan.local_steps,
            "training.checkpoint_s": 2.0,
            "training.linger_s": 20.0,
            "training.data_dir": str(self.folder),
            "barrier.method": "asp",
            "exchange.shards": 4,
            "dispatch.source": "master",
            "dispatch.records": ["train.recordio"],
            "dispatch.passes": plan.passes,
            "dispatch.store": plan.store,
            "log.format": "json",
        }
        is_master = name.startswith("master")
        others = [node.address for other, node in self.nodes.items() if other != name and not node.ended]
        bootstrap = next((address for address in others if address), "")
        script: list[str] = []
        if is_master:
            settings |= {"node.role": "master"}
        else:
            log = str(self.folder / f"{name}.trained")
            script = ["-m", "tests.process.harness.record_trainer", log, str(plan.step_s), str(plan.batch)]
            script = [sys.executable, *script]
        self.nodes[name] = ProcessNode(
            self.folder, name, settings, bootstrap=bootstrap, script=script, forks=self.plan.forks
        )

    def run(self) -> ChaosResult:
        """Train all passes under the kills of the plan, to the end of the job."""
        plan = self.plan
        try:
            self.start("worker-0")
            first = self.nodes["worker-0"]
            until(lambda: first.address != "", START_S, "an address of the first node", [first])
            for number in range(plan.masters):
                self.start(f"master-{number}")
            for number in range(1, plan.workers):
                self.start(f"worker-{number}")
            self._until_trained(0.02)
            self._kill_some()
            while self._restarts:
                self._restart_due()
                time.sleep(0.1)
            workers = self._workers()
            until(self._is_over, plan.limit_s, "the end of the job", workers)
            codes = {node.name: node.process.returncode for node in workers if node.ended}
            assert set(codes.values()) <= {0, -signal.SIGKILL}, codes
        finally:
            kill_all(self.nodes.values())
        self.result.seconds = time.monotonic() - self._began
        self._collect()
        return self.result

    def _workers(self) -> list[ProcessNode]:
        return [node for name, node in self.nodes.items() if name.startswith("worker")]

    def _is_over(self) -> bool:
        """Every worker has ended; or it started so late that no node with the model is left to join."""
        left = [node for node in self._workers() if not node.ended]
        return not left or (self._has_ended and all(node.state in ("joining", "") for node in left))

    @property
    def _has_ended(self) -> bool:
        return any(node.process.poll() == 0 for node in self._workers())

    def _kill_some(self) -> None:
        """Kills at random moments, while enough is left to train."""
        plan = self.plan
        names = ["worker"] * plan.worker_kills + ["master"] * plan.master_kills
        self.random.shuffle(names)
        while names:
            wake = time.monotonic() + self.random.uniform(*plan.between_s)
            while time.monotonic() < wake:
                self._restart_due()
                time.sleep(0.05)
            if self._share_trained() > 0.9:
                self.say(f"all but a tenth is trained: no further kills after {dict(self.result.kills)}")
                return
            kind = names.pop()
            name = self._victim(kind)
            if name is None:
                names.insert(0, kind)
                continue
            self.nodes[name].kill()
            self.result.kills[kind] += 1
            self.result.moments.append((round(time.monotonic() - self._began, 3), name))
            between = MASTER_S if kind == "master" else self.random.choice((SOON_S, LATE_S))
            self._restarts.append((time.monotonic() + self.random.uniform(*between), name))

    def _victim(self, kind: str) -> str | None:
        """A node to kill; None where it is too early. One worker at a time is down or starting: the model itself
        survives the crash of one node, and of the next when that is replaced (docs/faults.md)."""
        running = [name for name, node in self.nodes.items() if name.startswith(kind) and not node.ended]
        if kind == "worker" and not all(node.trains for node in self._workers()):
            return None
        return self.random.choice(running) if running else None

    def _restart_due(self) -> None:
        now = time.monotonic()
        for due, name in [one for one in self._restarts if one[0] <= now]:
            self._restarts.remove((due, name))
            if name.startswith("master") or not self._has_ended:
                self.start(name)

    def _share_trained(self) -> float:
        lines = sum(file.read_bytes().count(b"\n") for file in self.folder.glob("*.trained"))
        return lines / self.result.places

    def _until_trained(self, share: float) -> None:
        nodes = list(self.nodes.values())
        until(lambda: self._share_trained() >= share, START_S, f"{share:.0%} of the training", nodes)

    def _collect(self) -> None:
        for file in self.folder.glob("*.trained"):
            lines = file.read_text().splitlines(keepends=True)
            for line in lines if not lines or lines[-1].endswith("\n") else lines[:-1]:  # the last one may be torn
                number, record = line.split()
                self.result.counts[int(number), int(record)] += 1
        for log in self.folder.glob("worker-*.log"):
            text = log.read_text(errors="replace")
            self.result.superseded += text.count('"dispatch_superseded"') + text.count('"dispatch_lease_lost"')
            self.result.resumed += text.count('"dispatch_resumed"')

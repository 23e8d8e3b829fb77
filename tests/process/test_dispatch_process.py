"""Daemons that train dispatched records: SIGKILL of workers and masters, on SQLite and etcd; a script with torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2pnode.training.trainer.records.record_draws import RecordDraws
from p2pnode.training.trainer.records.task_source import DispatchedTasks
from p2pnode.training.trainer_link.interface import StepOrder
from p2pnode.training.trainer_link.messages import Train, Trained
from p2pnode.training.trainer_link.record_messages import (
    RecordsGranted,
    RecordsTrained,
    RecordsWanted,
    RecordTask,
)
from tests.harness.builders.record_files import tasks_of, write_records
from tests.harness.project.repository import ROOT
from tests.process.harness.dispatch_world import Chaos, ChaosPlan, ChaosResult
from tests.process.harness.etcd_server import EtcdServer, etcd_binary
from tests.process.harness.record_trainer import RecordTrainer, end_torn_line
from tests.process.harness.swarm_world import ProcessNode, until


@contextmanager
def store_of(kind: str, folder: Path) -> Iterator[str]:
    """The setting of a store, with an etcd of its own where it needs one."""
    if kind == "sqlite":
        yield kind
        return
    if etcd_binary() is None:
        pytest.skip("no etcd here: install Debian's etcd-server, or name the binary in P2PNODE_ETCD")
    (folder / "etcd").mkdir()
    server = EtcdServer(folder / "etcd")
    try:
        server.start()
        yield f"etcd://127.0.0.1:{server.port}/p2pnode/test?ttl_s=3"
    finally:
        server.close()


def played(plan: ChaosPlan, folder: Path, seed: int) -> ChaosResult:
    result = Chaos(folder, plan, seed).run()
    print(result.line())
    assert result.missing == [], f"(pass, record); killed: {result.moments}"
    assert result.invented == 0
    assert result.once_share >= result.bound
    return result


class ReportReader:
    """A connection that reads what the trainer has written down when it reports, and sends one task."""

    stopping = lost = False

    def __init__(self, log: Path, task: RecordTask) -> None:
        self.log, self.task = log, task
        self.asked = 0
        self.written_at: list[tuple[str, int]] = []

    def send(self, message: object) -> None:
        self.asked = message.number if isinstance(message, RecordsWanted) else self.asked
        if isinstance(message, RecordsTrained | Trained):
            lines = self.log.read_bytes().count(b"\n") if self.log.exists() else 0
            self.written_at.append((type(message).__name__, lines))

    def answer(self, *_: object) -> RecordsGranted | None:
        return RecordsGranted(self.asked, self.task if self.asked == 1 else None, is_over=self.asked > 1)

    def interrupted(self) -> bool:
        return False

    def news(self) -> None:
        """No delta is exchanged."""

    def progress(self) -> None:
        """Nobody watches."""


def test_a_trainer_of_these_tests_writes_records_down_before_it_reports_them(tmp_path: Path) -> None:
    """Killed at any moment, it has trained what its daemon may report as finished; a torn line of before is cut off.

    Written after the report, a task was finished once in a long run whose ten records no file had: the trainer was
    killed in between.
    """
    log = tmp_path / "trained"
    log.write_bytes(b"1 7\n1 1")
    path = write_records(tmp_path / "some.recordio", [b"%d" % number for number in range(10)], 10)
    (task,) = tasks_of(path, 1)
    connection: Any = ReportReader(log, task)
    end_torn_line(log)
    trainer = RecordTrainer.__new__(RecordTrainer)
    trainer.connection, trainer.delta = connection, np.zeros(1, np.float32)
    trainer.own, trainer._progress = np.zeros(1, np.float32), np.zeros(1, np.float32)
    trainer.is_exchanging = trainer.has_rest = False
    trainer._draws = RecordDraws(DispatchedTasks(connection))
    trainer._log, trainer._step_s, trainer._batch = log, 0.0, 5

    trainer.answer(Train(1, StepOrder(1, 2, 1.0, True)))

    assert connection.written_at == [("RecordsTrained", 11), ("Trained", 11)]
    assert log.read_text().split() == ["1", "7", *(word for number in range(10) for word in ("1", str(number)))]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_few_kills_lose_no_record(tmp_path: Path) -> None:
    """A worker and the master are killed in one pass: every record is trained, and only tasks of that worker twice."""
    # Five seconds of training: the kills come in the first one and a half, on a loaded machine before the last tenth.
    plan = ChaosPlan(
        1500, 10, 1, workers=3, worker_kills=1, master_kills=1, between_s=(0.2, 0.6), step_s=0.05, forks=True
    )

    result = played(plan, tmp_path, 1)

    assert result.kills["master"] == 1


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "masters"), [("sqlite", 1), ("etcd", 2)])
def test_every_record_survives_random_kills(kind: str, masters: int, tmp_path: Path) -> None:
    """10,000 records, five workers, SIGKILL of workers and masters: each record once at least in every pass, 98 %
    exactly once, all passes to their end."""
    with store_of(kind, tmp_path) as store:
        plan = ChaosPlan(
            10_000,
            10,
            2,
            masters=masters,
            worker_kills=12,
            master_kills=4,
            step_s=0.05,
            store=store,
            limit_s=600.0,
            forks=True,
        )
        result = played(plan, tmp_path, 7)

    assert result.once_share >= 0.98
    assert result.kills["master"] >= 2
    assert result.kills["worker"] >= 4


@pytest.mark.timeout(600)
def test_a_script_with_torch_trains_all_passes_and_ends(tmp_path: Path) -> None:
    """The example as one node that serves itself: it makes its files, trains every record of two passes, and ends by
    itself with 0."""
    settings = {
        "training.local_steps": 4,
        "training.linger_s": 1.0,
        "dispatch.source": "master",
        "node.role": "peer+master",
        "dispatch.records": ["squares-*.recordio"],
        "dispatch.passes": 2,
    }
    script = [sys.executable, str(ROOT / "examples" / "records.py"), "--make"]
    node = ProcessNode(tmp_path, "node", settings, script=script, forks=True, needs_torch=True)
    try:
        until(lambda: node.ended, 90, "the end of the run", [node])
    finally:
        node.kill()

    assert node.process.returncode == 0
    assert "this node trained 4096 of the records" in node.output()
    assert "(passes)" in node.output()

"""Map-reduce on a real Dask cluster of this machine, and in processes, while one of them is killed."""

from __future__ import annotations

import operator
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from p2pnode.training.engines.mapreduce.engine import MapReduce
from p2pnode.training.engines.mapreduce.errors import BadRequest, FunctionFailed, WorkersLost
from tests.harness.project.repository import ROOT

WORDS = [f"word-{number * number % 97}" for number in range(4000)]


def test_a_killed_worker_costs_nothing_on_a_cluster(tmp_path: Path) -> None:
    """One of two workers is killed in the middle of a task; Dask runs what it had again, and the counts are right."""
    from distributed import LocalCluster  # a second that the collection by every worker would take

    struck = tmp_path / "struck"

    def strike(pair: tuple[str, int]) -> tuple[str, int]:
        if pair[0] == "word-1" and not struck.exists():
            struck.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return pair

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        MapReduce(address=cluster.scheduler_address) as engine,
    ):
        assert engine.workers == 2
        pairs = engine.from_items(WORDS, 8).map(lambda word: (word, 1)).map(strike)
        counts = pairs.reduce_by_key(operator.add).collect()
        with pytest.raises(FunctionFailed, match="map 1"):
            engine.from_items([0]).map(lambda x: 1 // x).collect()
        still = engine.from_items(range(10), 4).map(lambda x: (x % 2, x)).join(engine.from_items([(1, "odd")])).count()

    assert struck.exists()
    assert dict(counts) == Counter(WORDS)
    assert still == 5


def test_an_address_where_nobody_listens_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says which scheduler was asked."""
    monkeypatch.setattr("p2pnode.training.engines.mapreduce.backends.CONNECT_S", 0.5)
    with pytest.raises(BadRequest, match=r"no Dask scheduler answers at tcp://127.0.0.1:1"):
        MapReduce(address="tcp://127.0.0.1:1")


def test_a_killed_process_is_an_error_and_the_next_action_works() -> None:
    """Without a cluster nothing is run again: the error says what happened, and the engine has new processes."""
    with MapReduce(processes=2) as engine:
        data = engine.from_items(range(8), 4)
        with pytest.raises(WorkersLost, match="ended in the middle of a task"):
            data.map(lambda x: os.kill(os.getpid(), signal.SIGKILL) if x == 5 else x).collect()
        assert data.reduce(operator.add) == 28


def test_the_word_count_example_counts_as_the_standard_library_does(tmp_path: Path) -> None:
    """As a script without a main guard for its processes, with its own functions, on two files."""
    texts = ["The cat and the dog.\nThe bird!\n" * 50, "A cat; it sleeps.\r\n" * 30]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    began = time.monotonic()
    found = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "word_count.py"), "--processes", "2", f"{tmp_path}/*.txt"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    print(f"{time.monotonic() - began:.1f} s")

    assert [line.split() for line in found.stdout.splitlines()] == [
        ["80", "cat"],
        ["50", "bird"],
        ["50", "dog"],
        ["30", "sleeps"],
    ]

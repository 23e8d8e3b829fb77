"""Sixty real nodes, twenty steps, a tenth of them killed: twice, under different hash seeds, one history."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.harness.project.repository import ROOT

SEED = 7
STEPS = 20


def history(hash_seed: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "tests.harness.histories.swarm_history",
        "--nodes",
        "60",
        "--steps",
        str(STEPS),
        "--crash",
        "0.1",
    ]
    return subprocess.Popen(
        [*command, "--seed", str(SEED)],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.long
def test_the_same_seed_gives_the_same_history() -> None:
    """The survivors of 60 nodes finish their steps, and the event log is the same under another PYTHONHASHSEED."""
    print(f"seed {SEED}")
    runs = [history("1"), history("2")]

    first, second = (json.loads(run.communicate(timeout=280)[0]) for run in runs)

    print(first, second)
    assert first["crashed"] == 6
    assert first["steps"] >= 54 * STEPS
    assert first["digest"] == second["digest"]

"""A daemon whose standard output and error are not read, as in a terminal stopped by Ctrl-S: it trains and answers."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from p2pnode.client import NodeClient, find
from p2pnode.errors import UserError
from tests.harness.project.repository import ROOT
from tests.process.harness.forked_python import start_p2pnode
from tests.process.harness.swarm_world import ANSWER_S
from tests.process.test_swarm_process import START_S, until

SCRIPT = """\
import torch
from torch import nn
import p2pnode
from p2pnode.training.trainer.lazy_dynamo import import_later

import_later()
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
swarm = p2pnode.attach(model, optimizer)
while not swarm.done:
    print("x" * 100_000, flush=True)
    optimizer.zero_grad()
    loss = model(torch.ones(4, 2)).square().mean()
    loss.backward()
    optimizer.step()
    swarm.step(samples=4, loss=loss.item())
"""


def full_pipe() -> tuple[int, int]:
    """A pipe that takes no further byte."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, b"-" * 65536)
    except BlockingIOError:
        os.set_blocking(writing, True)
    return reading, writing


def test_a_daemon_whose_output_nobody_reads_trains_and_answers(tmp_path: Path) -> None:
    """Both streams are full from the first byte. The node starts, its script trains past what any queue holds, and
    /status answers. The log has what was dropped, and SIGTERM ends it."""
    reading, writing = full_pipe()
    (tmp_path / "train.py").write_text(SCRIPT)
    folder = tmp_path / "state"
    process = start_p2pnode(
        [
            *("run", "--port", "0", "--status-port", "0", "--state-dir", str(folder)),
            *("--set", "training.threads=1", "--set", "training.local_steps=5", "--set", "log.level=debug"),
            *("--", sys.executable, "train.py"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=writing,
        stderr=writing,
    )

    def answer() -> dict[str, Any]:
        found = find(folder)
        try:
            return NodeClient(found.address, timeout_s=ANSWER_S).status() if found else {}
        except UserError:
            return {}

    try:
        until(lambda: int(answer().get("step", -1)) >= 30, START_S, "150 turns of 100 kB each")
        found = find(folder)
        assert found is not None
        names = [event["event"] for event in NodeClient(found.address, timeout_s=ANSWER_S).events()["events"]]
        assert names.count("output_dropped") == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 0
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        os.close(writing)
        os.close(reading)

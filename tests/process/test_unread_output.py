"""A daemon whose standard output and error are not read, as in a terminal stopped by Ctrl-S: it trains and answers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.process.harness.swarm_world import START_S, ProcessNode, until

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
    settings = {"training.local_steps": 5, "log.level": "debug"}
    script = [sys.executable, "train.py"]
    node = ProcessNode(tmp_path, "node", settings, script=script, stdout=writing, forks=True, needs_torch=True)
    try:
        until(lambda: node.step >= 30, START_S, "150 turns of 100 kB each")
        client = node.client()
        assert client is not None
        names = [event["event"] for event in client.events()["events"]]
        assert names.count("output_dropped") == 1
        node.terminate()
        assert node.process.wait(90) == 0
    finally:
        node.kill()
        os.close(writing)
        os.close(reading)

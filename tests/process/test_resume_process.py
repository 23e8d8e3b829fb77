"""Real daemons switched off and on again: bit by bit after SIGTERM, from what the disks have after SIGKILL."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from p2pnode.commands.files import newest_checkpoint
from p2pnode.overlay.system import FolderDisk
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.exchange.store.records import StoredState
from p2pnode.training.files import checkpoint
from p2pnode.training.layout import shard_bounds
from p2pnode.training.shards.state import last_steps
from tests.harness.project.repository import ROOT
from tests.process.harness.swarm_world import START_S, ProcessNode, until
from tests.unit.training.files.test_checkpoint import Lines

NODES = 3
TOTAL, SHARDS = NODES * 64, 8
BOUNDS = shard_bounds(TOTAL, SHARDS)
SETTINGS: dict[str, Any] = {
    "training.task": "tests.harness.trainers.tasks:Ledger",
    "training.local_steps": 1,
    "training.eval_steps": 0,
    "training.checkpoint_s": 1.5,
    "training.linger_s": 3.0,
    "exchange.weight": "sum",
    "exchange.outer_lr": 1.0,
    "exchange.outer_momentum": 0.0,
    "exchange.codec": "float32",
    "exchange.pull_codec": "float32",
    "exchange.shards": SHARDS,
    "log.format": "json",
}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., list[ProcessNode]]]:
    """Starts all nodes, the first as the founder."""
    started: list[ProcessNode] = []

    def start(**settings: Any) -> list[ProcessNode]:
        nodes = []
        for part in range(NODES):
            values = SETTINGS | {key.replace("__", "."): value for key, value in settings.items()}
            values["training.options"] = {"part": part, "parts": NODES, "seconds": STEP_S}
            for key in [key for key in values if values[key] == "{part}"]:
                values[key] = str(tmp_path / f"part-{part}.safetensors")
            nodes.append(ProcessNode(tmp_path, f"n{part}", values, bootstrap=nodes[0].address if nodes else ""))
            started.append(nodes[-1])
            until(lambda: nodes[-1].address != "" or nodes[-1].ended, START_S, "it listens", nodes)
        return nodes

    yield start
    for node in started:
        node.kill()


def steps(nodes: list[ProcessNode]) -> list[int]:
    return [node.step for node in nodes]


def leave(nodes: list[ProcessNode]) -> None:
    """SIGTERM to all at one moment: each exits 0 within seconds."""
    for node in nodes:
        node.terminate()
    for node in nodes:
        assert node.process.wait(timeout=90) == 0, node.output()[-2000:]


def on_disk(nodes: list[ProcessNode]) -> tuple[list[int], dict[int, StoredState]]:
    """The step of each node's newest checkpoint, and the highest state of each shard on any disk."""
    counted, highest = [], dict[int, StoredState]()
    for node in nodes:
        disk = FolderDisk(node.state_dir)
        found = checkpoint.newest(disk, Lines())
        assert found is not None
        counted.append(found.state.step)
        for shard, stored in checkpoint.read_states(disk, found, BOUNDS, TOTAL, Lines()).items():
            best = highest.setdefault(shard, stored)
            if (stored.term, stored.state.known_count) > (best.term, best.state.known_count):
                highest[shard] = stored
    return counted, highest


def vector_of(states: dict[int, StoredState]) -> Vector:
    vector = np.zeros(TOTAL, np.float32)
    for shard, (start, stop) in enumerate(BOUNDS):
        vector[start:stop] = states[shard].state.value
    return vector


#: A step takes at least so long.
STEP_S = 0.1


def ledger(counts: list[int]) -> Vector:
    """The model in which so many steps of each node are, each once."""
    return np.repeat(np.array(counts, np.float32) / -1024, 64)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_swarm_that_was_switched_off_goes_on(start: Callable[..., list[ProcessNode]], tmp_path: Path) -> None:
    """SIGTERM to all: every step counted is on the disks once; started again the swarm has that vector bit by bit, at
    those steps. SIGKILL to all: it resumes from the highest states, logs that, and no step is ever in the model
    twice."""
    nodes = start(training__min_nodes=NODES)
    until(lambda: min(steps(nodes)) >= 10, START_S, "ten steps everywhere", nodes)
    leave(nodes)
    counted, states = on_disk(nodes)
    had = vector_of(states)
    assert all(stored.clean for stored in states.values())
    np.testing.assert_array_equal(had, ledger(counted))

    nodes = start(
        training__max_steps=1, training__linger_s=60.0, training__export="{part}"
    )  # which they have: they end without training
    for node in nodes:
        assert node.process.wait(timeout=START_S) == 0, node.output()[-2000:]
    for part, node in enumerate(nodes):
        exported = load_file(tmp_path / f"part-{part}.safetensors")["rows"]
        np.testing.assert_array_equal(exported.ravel(), had)
        assert on_disk([node])[0] == [counted[part]]
    (resumed,) = nodes[0].events("swarm_resumed")
    assert (resumed["clean"], resumed["deltas_lost"], resumed["level"]) == (True, 0, "info")

    nodes = start(training__min_nodes=1, training__max_steps=0)  # the directory remembers the last start's end
    until(lambda: min(steps(nodes)) >= max(counted) + 20, START_S, "twenty more steps", nodes)
    looked_s = time.monotonic()
    reached = steps(nodes)
    for node in nodes:
        node.kill()
    # One is in the middle at the look, and one more may have its delta on the way.
    until_killed = 2 + int((time.monotonic() - looked_s) / STEP_S)
    # A node goes on from its checkpoint: the steps since are trained again, and some of their deltas may be on disks.
    saved, _ = on_disk(nodes)
    again = [max(0, step + until_killed - had) for step, had in zip(reached, saved, strict=True)]

    nodes = start(training__min_nodes=1, training__max_steps=0)  # the directory remembers the last start's end
    until(lambda: all(node.trains for node in nodes), START_S, "it trains again", nodes)
    until(lambda: bool(nodes[0].events("swarm_resumed")), START_S, "its log, which a thread writes, has it", nodes)
    (resumed,) = nodes[0].events("swarm_resumed")
    assert (resumed["clean"], resumed["level"]) == (False, "warning")
    assert "deltas_lost" in resumed
    until(lambda: min(steps(nodes)) >= max(reached) + 5, START_S, "they go on", nodes)
    leave(nodes)
    _, states = on_disk(nodes)
    identities = [node.events("started")[0]["id"] for node in nodes]
    for shard, (begin, stop) in enumerate(BOUNDS):
        state = states[shard].state
        present = [
            node.hex() for node, _, ranges in state.applied.rows() for low, high in ranges for _ in range(low, high + 1)
        ]
        counts = [present.count(identity) for identity in identities]
        last = last_steps(state)
        highest = [last.get(bytes.fromhex(identity), 0) for identity in identities]
        assert state.known_count == state.unlisted + len(present)
        if not state.unlisted:  # otherwise it went on with a replica, whose deltas are not known
            assert min(counts) > 0
            # A delta has one step or several; none is in it twice.
            assert np.all(state.value <= ledger(counts)[begin:stop])
            most = [step + twice for step, twice in zip(highest, again, strict=True)]
            assert np.all(state.value >= ledger(most)[begin:stop])

    check_export(nodes[0], tmp_path)


def check_export(node: ProcessNode, folder: Path) -> None:
    """`p2pnode export` gives safetensors, and a state_dict that loads where nothing of this project is to be found."""
    for name in ("model.safetensors", "model.pt"):
        command = [sys.executable, "-m", "p2pnode", "export", name, "--state-dir", str(node.state_dir)]
        subprocess.run(
            command, cwd=folder, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
    wanted = load_file(newest_checkpoint(node.state_dir)[2])
    np.testing.assert_array_equal(load_file(folder / "model.safetensors")["rows"], wanted["rows"])
    # Without `site` an editable install is not on the path; the packages' own folder is added by hand.
    packages = Path(np.__file__).parents[1]
    code = (
        f"import sys; sys.path.append({str(packages)!r})\n"
        "import importlib.util as found, numpy, torch\n"
        "assert not [name for name in ('p2pnode',) if found.find_spec(name)]\n"
        "model = torch.nn.Module(); model.rows = torch.nn.Parameter(torch.zeros(3, 64))\n"
        "model.load_state_dict(torch.load('model.pt', weights_only=True), strict=True)\n"
        "numpy.save('loaded.npy', model.rows.detach().numpy())\n"
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd=folder, check=True, timeout=120)
    np.testing.assert_array_equal(np.load(folder / "loaded.npy"), wanted["rows"])

"""The slow cables of other tests and benchmarks: they are what they claim, and nothing of them is left."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.project.repository import ROOT
from tests.process.harness.lan_world import NotPermitted
from tests.process.harness.line_model import Cable
from tests.process.harness.swarm_world import until
from tests.process.harness.wan_check import NotAsClaimed, check
from tests.process.harness.wan_world import Wan, wan

#: A world that is wrong is wrong in each of them; one beside other tests may look wrong in some.
ATTEMPTS = 10

#: Makes a world with a process in it, says what it made, and waits.
PARENT = """
import json, subprocess, sys, time
from tests.process.harness.line_model import Cable
from tests.process.harness.wan_world import wan
with wan([Cable(), Cable()]) as world:
    inside = subprocess.Popen([*world.machines[0].prefix, "sleep", "600"], start_new_session=True)
    time.sleep(0.2)
    print(json.dumps([inside.pid, *(machine.name for machine in world.machines)]), flush=True)
    time.sleep(600)
"""


def test_the_world_is_what_its_cables_claim() -> None:
    """Rates and round trips measured through sockets are those of the cables. Of a lossy cable only what it claims
    falsely is named. The kernel and the lines count the same bytes."""
    cables = [Cable(8.0, 8.0, delay_s=0.01), Cable(8.0, 6.0, delay_s=0.02)]
    try:
        with wan(cables, seed=3) as world:
            print(*check(world, ATTEMPTS), sep="\n")
            until(lambda: _sent(world) == _offered(world), 90, "the lines have taken what the kernel has sent")
            world.change(1, dataclasses.replace(cables[1], jitter_s=0.02, loss=0.02))
            world.cables[0] = Cable(16.0, 8.0, delay_s=0.03)
            for _ in range(ATTEMPTS):
                with pytest.raises(NotAsClaimed) as refused:
                    check(world, attempts=1)
                print(refused.value)
                if "machine 1 to 0: round trip" in str(refused.value) and "lost" not in str(refused.value):
                    break
            else:
                pytest.fail("no attempt names the round trip alone")
    except NotPermitted as error:
        pytest.skip(f"slow cables between network namespaces: {error}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_is_left_however_its_owner_ends(number: signal.Signals) -> None:
    """When the process that made a world is killed, its namespaces and all processes in them are gone soon."""
    try:
        with wan([Cable()]):
            pass
    except NotPermitted as error:
        pytest.skip(f"slow cables between network namespaces: {error}")
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    with parent, parent.stdout:
        pid, *names = json.loads(parent.stdout.readline())
        assert len(names) == 2
        assert all(Path("/run/netns", name).exists() for name in names)
        parent.send_signal(number)

    until(lambda: not any(Path("/run/netns", name).exists() for name in names), 90, "the namespaces are gone")
    until(lambda: not _runs(pid), 90, "the process in them is gone")


def _sent(world: Wan) -> list[int]:
    return [world.sent_bytes(node) for node in range(len(world.machines))]


def _offered(world: Wan) -> list[int]:
    return [line["offered_bytes"] for line in world.counted()["up"]]


def _runs(pid: int) -> bool:
    """A process of this number that is no zombie: its parent here may be one that collects none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

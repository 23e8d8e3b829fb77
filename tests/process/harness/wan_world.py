"""Nodes behind slow cables: network namespaces that a relay of ours joins with rate, delay, jitter and loss.

This kernel has no `netem`, and token buckets alone have no delay. So each namespace has a TUN device, and one process
(`wan_relay`) forwards all packets by the arithmetic of `line_model`. It also makes and removes the namespaces, because
it survives however its parent ends. Needs root, `ip` and `/dev/net/tun`; `NotPermitted` names what is missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.harness.project.repository import ROOT
from tests.process.harness.lan_world import Machine, NotPermitted
from tests.process.harness.line_model import Cable

START_S = 90.0
ANSWER_S = 10.0


class Wan:
    """Machines with one cable each, `cables[i]` that of `machines[i]`."""

    def __init__(
        self, cables: Sequence[Cable], relay: subprocess.Popen[bytes], namespaces: list[dict[str, str]]
    ) -> None:
        self.cables = list(cables)
        self.machines = [Machine(one["name"], one["host"]) for one in namespaces]
        self._relay = relay

    def change(self, node: int, cable: Cable) -> None:
        """Give a machine another cable, from now on."""
        self.cables[node] = cable
        self._ask({"node": node, "cable": dataclasses.asdict(cable)})

    def cut(self, node: int) -> None:
        """Nothing passes this machine's cable any more, in either direction; `change` mends it."""
        self.change(node, dataclasses.replace(self.cables[node], loss=1.0))

    def counted(self) -> dict[str, list[dict[str, int]]]:
        """Packets and bytes `offered` to each machine's line `up` and `down`, those `dropped` from its queue, and those
        `lost` behind it."""
        return self._ask({})

    def sent_bytes(self, node: int) -> int:
        """What this machine's interface has sent, by the kernel's own counter, headers of IP included."""
        return self._counter(node, 8)

    def received_bytes(self, node: int) -> int:
        """What it has received."""
        return self._counter(node, 0)

    def _counter(self, node: int, column: int) -> int:
        found = self.machines[node].inside(lambda: Path("/proc/thread-self/net/dev").read_text())
        [line] = [line for line in found.splitlines() if line.strip().startswith("wan0:")]
        return int(line.split(":")[1].split()[column])

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._relay.stdin is not None
        self._relay.stdin.write(json.dumps(order).encode() + b"\n")
        self._relay.stdin.flush()
        return _answer(self._relay, ANSWER_S)


def _answer(relay: subprocess.Popen[bytes], within_s: float) -> dict[str, Any]:
    """Its next line. Raises `NotPermitted` where it could not make its world, `OSError` where it does not answer."""
    assert relay.stdout is not None
    if not select.select([relay.stdout], [], [], within_s)[0]:
        raise OSError(f"the relay does not answer within {within_s} s")
    line = relay.stdout.readline()
    if not line:
        raise OSError(f"the relay has ended with exit code {relay.wait()}")
    answer: dict[str, Any] = json.loads(line)
    if "failed" in answer:
        raise NotPermitted(answer["failed"])
    return answer


@contextmanager
def wan(cables: Sequence[Cable], seed: int = 0, congestion: str = "reno") -> Iterator[Wan]:
    """A `Wan` that is gone at the end, with all processes in it. `congestion`: the congestion control of TCP on all
    machines: by losses, as most have it, not that of this machine. Raises `NotPermitted`."""
    if os.geteuid() != 0:
        raise NotPermitted("network namespaces need root")
    relay = subprocess.Popen(
        [sys.executable, "-m", "tests.process.harness.wan_relay"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches the parent, which still needs the namespaces to end its nodes
    )
    assert relay.stdin is not None
    assert relay.stdout is not None
    made: list[str] = []
    try:
        plan = {"cables": [dataclasses.asdict(cable) for cable in cables], "seed": seed, "congestion": congestion}
        relay.stdin.write(json.dumps(plan).encode() + b"\n")
        relay.stdin.flush()
        namespaces = _answer(relay, START_S)["namespaces"]
        made = [one["name"] for one in namespaces]
        yield Wan(cables, relay, namespaces)
    finally:
        with contextlib.suppress(OSError):
            relay.stdin.close()
        try:
            relay.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            relay.kill()
            relay.wait()
        relay.stdout.close()
        for name in made:  # where the relay itself was killed
            if Path("/run/netns", name).exists():
                subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

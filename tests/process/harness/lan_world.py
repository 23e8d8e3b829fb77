"""Two switches and a link between them in network namespaces: machines with addresses, rates, and a link to cut.

Needs root and the permission to make namespaces; `NotPermitted` names what is missing. Without `netem`, rates are token
buckets (`tbf`) on both ends of a machine's link. All names contain this process's id, and everything is removed.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from p2pnode.errors import UserError
from tests.process.harness.swarm_world import ProcessNode

T = TypeVar("T")
CLONE_NEWNET = 0x40000000
NETWORK = "10.77.3"
#: What a token bucket may send at once, and how long a queue may get before it drops, as a home router's.
BURST, LATENCY = "128kb", "400ms"


class NotPermitted(Exception):
    """Namespaces, bridges or token buckets cannot be made here."""


def run(*command: str, given: str | None = None) -> None:
    """Raises `NotPermitted` with the command's message."""
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError as error:
        raise NotPermitted(f"{command[0]} is not installed") from error
    if done.returncode != 0:
        raise NotPermitted(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


class Machine:
    """A namespace with one interface; `prefix` runs a command in it."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.prefix = ("ip", "netns", "exec", name)

    def inside(self, call: Callable[[], T]) -> T:
        """Run a function on a thread of its own in this machine's network."""
        results: list[T] = []
        errors: list[BaseException] = []

        def enter() -> None:
            try:
                with Path("/run/netns", self.name).open() as namespace:
                    if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) != 0:
                        raise OSError(ctypes.get_errno(), f"cannot enter {self.name}")
                results.append(call())
            except (UserError, OSError, AssertionError) as error:
                errors.append(error)

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]


class LanNode(ProcessNode):
    """A daemon on one of the machines. Its API is on that machine's loopback."""

    def __init__(
        self,
        folder: Path,
        name: str,
        settings: dict[str, Any],
        *,
        machine: Machine,
        bootstrap: str = "",
        script: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.machine = machine
        values = {"node.host": machine.address, "swarm.allow_open": True, **settings}
        super().__init__(
            folder,
            name,
            values,
            bootstrap=bootstrap,
            prefix=machine.prefix,
            script=script,
            environment=environment,
        )

    def post(self, path: str) -> None:
        self.machine.inside(lambda: super(LanNode, self).post(path))

    def status(self) -> dict[str, Any]:
        try:
            return self.machine.inside(super().status)
        except OSError:
            return {}

    def steps(self, limit: int) -> list[dict[str, Any]]:
        """Its last steps, oldest first. Raises `UserError` or `AssertionError` where it cannot be asked."""

        def ask() -> list[dict[str, Any]]:
            client = self.client()
            assert client is not None, f"{self.name} does not run"
            return client.steps(limit)

        return self.machine.inside(ask)


class Lan:
    """`sides[i]` is the one of the two switches that machine *i* is connected to; `rates_mbit` limits both ways, 0 is
    no limit."""

    def __init__(self, sides: Sequence[int], rates_mbit: Sequence[float]) -> None:
        self._tag = f"p{os.getpid() % 100000}"
        self.machines = [Machine(f"{self._tag}-m{place}", f"{NETWORK}.{place + 1}") for place in range(len(sides))]
        self._bridges = [f"{self._tag}b0", f"{self._tag}b1"]
        #: The switch's end of each machine's cable: what it sends is what the machine receives.
        self.ports = [f"{self._tag}v{place}" for place in range(len(sides))]
        self._line = (f"{self._tag}l0", f"{self._tag}l1")
        for bridge in self._bridges:
            run("ip", "link", "add", bridge, "type", "bridge")
            run("ip", "link", "set", bridge, "up")
        run("ip", "link", "add", self._line[0], "type", "veth", "peer", "name", self._line[1])
        for end, bridge in zip(self._line, self._bridges, strict=True):
            run("ip", "link", "set", end, "master", bridge)
            run("ip", "link", "set", end, "up")
        for place, machine in enumerate(self.machines):
            self._plug(place, machine, self._bridges[sides[place]], rates_mbit[place])

    def _plug(self, place: int, machine: Machine, bridge: str, rate_mbit: float) -> None:
        port = self.ports[place]
        run("ip", "netns", "add", machine.name)
        run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", machine.name)
        run("ip", "link", "set", port, "master", bridge)
        run("ip", "link", "set", port, "up")
        run("ip", "-n", machine.name, "link", "set", "lo", "up")
        run("ip", "-n", machine.name, "address", "add", f"{machine.address}/24", "dev", "eth0")
        run("ip", "-n", machine.name, "link", "set", "eth0", "up")
        if rate_mbit:
            bucket = ("root", "tbf", "rate", f"{rate_mbit:g}mbit", "burst", BURST, "latency", LATENCY)
            run("tc", "qdisc", "add", "dev", port, *bucket)
            run("tc", "-n", machine.name, "qdisc", "add", "dev", "eth0", *bucket)

    def cut(self) -> None:
        """Nothing passes between the two switches from now on."""
        run("ip", "link", "set", self._line[0], "down")

    def mend(self) -> None:
        run("ip", "link", "set", self._line[0], "up")

    def remove(self) -> None:
        """Everything that was made, as far as it was; idempotent."""
        for machine in self.machines:
            attempt("ip", "netns", "del", machine.name)
        for name in (*self._line[:1], *self._bridges):
            attempt("ip", "link", "del", name)


def attempt(*command: str) -> None:
    """Run it, whatever comes of it."""
    subprocess.run(command, capture_output=True, check=False)


@contextmanager
def lan(sides: Sequence[int], rates_mbit: Sequence[float]) -> Iterator[Lan]:
    """A `Lan` that is gone at the end. Raises `NotPermitted`."""
    made = Lan.__new__(Lan)
    try:
        made.__init__(sides, rates_mbit)
        yield made
    finally:
        if hasattr(made, "_line"):
            made.remove()

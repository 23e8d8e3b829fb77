"""The process that is the Internet of a `wan_world.Wan`: a TUN device in the namespace of each node, and the lines.

Its first line of input has the cables; it makes the namespaces, says so in a line, and forwards packets by
`line_model.Internet`. Later lines change a cable or ask for the counters. At the end of its input, which comes however
its parent ends, and at SIGTERM it ends what still runs in its namespaces and removes them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import math
import os
import secrets
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.process.harness.line_model import PACKET_BYTES, Cable, Internet

NETWORK = "10.78.0"
DEVICE = "wan0"
CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TUN_WITHOUT_HEADER = 0x0001 | 0x1000
#: Packets read from one node before the next one's turn.
BATCH = 64
#: The kernel's own queue before the device, in packets: longer than any queue of ours, which is the one that drops.
KERNEL_QUEUE = 4000


class Failed(Exception):
    """A namespace or device cannot be made here."""


def run(*command: str) -> str:
    """Its output. Raises `Failed` with what it complains of."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError as error:
        raise Failed(f"{command[0]} is not installed") from error
    if done.returncode:
        raise Failed(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


class Namespace:
    """One node's network: a TUN device with an address, and the loopback. `congestion`: the control of its TCP."""

    def __init__(self, name: str, host: str, congestion: str) -> None:
        self.name, self.host = name, host
        self._congestion = congestion
        self.device = -1

    def make(self) -> None:
        run("ip", "netns", "add", self.name)
        errors: list[OSError] = []
        thread = threading.Thread(target=self._open, args=[errors])
        thread.start()
        thread.join()
        if errors:
            raise Failed(f"no TUN device: {errors[0]}")
        run("ip", "-n", self.name, "link", "set", "lo", "up")
        run("ip", "-n", self.name, "address", "add", f"{self.host}/24", "dev", DEVICE)
        size = ("mtu", str(PACKET_BYTES), "txqueuelen", str(KERNEL_QUEUE))
        run("ip", "-n", self.name, "link", "set", DEVICE, *size, "up")

    def _open(self, errors: list[OSError]) -> None:
        """In a thread of its own, because the namespace is that of a thread."""
        try:
            with Path("/run/netns", self.name).open() as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            # Otherwise the kernel looks for routers and neighbours, which use the lines.
            Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
            # With BBR, which this machine may have, queues stay short and losses cost little; most have neither.
            Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text(self._congestion)
            self.device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(self.device, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN_WITHOUT_HEADER))
        except OSError as error:
            errors.append(error)

    def remove(self) -> None:
        """With everything that runs in it; as far as it was made."""
        with contextlib.suppress(Failed):
            for pid in run("ip", "netns", "pids", self.name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        if self.device >= 0:
            os.close(self.device)
        with contextlib.suppress(Failed):
            run("ip", "netns", "delete", self.name)


class Relay:
    """Forwards between the devices until the input ends."""

    def __init__(self, namespaces: list[Namespace], internet: Internet) -> None:
        self._internet = internet
        self._devices = [namespace.device for namespace in namespaces]
        self._nodes = {device: node for node, device in enumerate(self._devices)}
        self._targets = {
            bytes(int(part) for part in namespace.host.split(".")): node for node, namespace in enumerate(namespaces)
        }
        self._poll = select.poll()
        for device in (*self._devices, sys.stdin.fileno()):
            self._poll.register(device, select.POLLIN)
        self._input = b""

    def run(self) -> None:
        internet, clock = self._internet, time.monotonic
        while True:
            next_s = internet.next_s
            wait_ms = None if next_s is None else max(0, math.ceil(1000 * (next_s - clock())))
            for file, _ in self._poll.poll(wait_ms):
                node = self._nodes.get(file)
                if node is not None:
                    self._read(file, node)
                elif not self._obey():
                    return
            for target, packet in internet.arrived(clock()):
                try:
                    os.write(self._devices[target], packet)
                except OSError:
                    continue  # a full or closed device loses it, as any machine's does

    def _read(self, device: int, node: int) -> None:
        send, targets, now = self._internet.send, self._targets, time.monotonic()
        try:
            for _ in range(BATCH):
                packet = os.read(device, PACKET_BYTES)
                target = targets.get(packet[16:20])
                if target is not None:
                    send(now, node, target, packet, len(packet))
        except BlockingIOError:
            return

    def _obey(self) -> bool:
        """Follow what came in; False at the end of the input."""
        more = os.read(sys.stdin.fileno(), 1 << 16)
        *lines, self._input = (self._input + more).split(b"\n")
        for line in lines:
            order = json.loads(line)
            if "cable" in order:
                self._internet.change(order["node"], Cable(**order["cable"]))
            say({"up": _counted(self._internet.up), "down": _counted(self._internet.down)})
        return bool(more)


def _counted(lines: list[Any]) -> list[dict[str, int]]:
    names = ("offered", "offered_bytes", "dropped", "lost")
    return [{name: getattr(line, name) for name in names} for line in lines]


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def main() -> int:
    """Exit code 0 after the end of the input, 1 where the world could not be made."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends this input
    first = bytearray()
    while not first.endswith(b"\n"):
        more = os.read(sys.stdin.fileno(), 1)  # no buffer may take what comes after this line
        if not more:
            return 0
        first += more
    plan = json.loads(first)
    cables = [Cable(**cable) for cable in plan["cables"]]
    tag = f"p2pw{os.getpid()}-{secrets.token_hex(2)}"
    namespaces = [
        Namespace(f"{tag}-{node}", f"{NETWORK}.{node + 1}", plan["congestion"]) for node in range(len(cables))
    ]
    with contextlib.suppress(OSError):
        # A relay that waits for a processor delivers late, and then much at once: a line with another jitter.
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    try:
        for namespace in namespaces:
            namespace.make()
        say({"namespaces": [{"name": one.name, "host": one.host} for one in namespaces]})
        gc.disable()  # packets are tuples of bytes: there are no cycles to find
        Relay(namespaces, Internet(cables, plan["seed"])).run()
    except Failed as error:
        say({"failed": str(error)})
        return 1
    except BrokenPipeError:
        return 0
    finally:
        for namespace in namespaces:
            namespace.remove()
    return 0


if __name__ == "__main__":
    sys.exit(main())

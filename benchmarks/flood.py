"""flood: 100,000 junk datagrams and 1,000 stalled connections at four training nodes of a closed swarm.

Windows without and with the flood take turns. The flood is a process on the same machine, so the first figure contains
its processor time. In a third window the same flood goes to sockets that are not read. The step rate relative to that
window is the cost of the flood for the nodes themselves. Junk datagrams have the lengths and first bytes of sealed
ones, spread over the window and the nodes. Connections send nothing or half a ClientHello, and are opened again when
they are dropped, so that 1,000 are open at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import secrets
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks.daemons import Daemon, daemons, status, wait_until
from benchmarks.record import NotMeasured, Outcome, Series
from benchmarks.start import resident_bytes
from p2pnode.keys.key_files import write_key_file
from p2pnode.overlay.addresses import split_address
from p2pnode.overlay.sealing.handshake import INIT, INIT_BYTES, RESPONSE, RESPONSE_BYTES, SEALED
from p2pnode.overlay.sealing.swarm_key import KeyRing, SwarmKey
from p2pnode.overlay.sockets.listener import bind_pair
from p2pnode.training.settings import TrainingSettings

NODES = 4
DATAGRAMS, CONNECTIONS = 100_000, 1000
WINDOW_S = 12.0
REPETITIONS = 3
_TRAINING = TrainingSettings(task="digits", checkpoint_s=0.0, eval_steps=0, local_steps=50, threads=1)


def measure(arguments: argparse.Namespace) -> Outcome:
    repetitions = arguments.repetitions or REPETITIONS
    ratios, own_ratios, grown_mb, refused = [], [], [], 0.0
    with daemons() as group, _unread_sockets() as unread:
        key_file = group.folder / "swarm.key"
        write_key_file(key_file, KeyRing((SwarmKey(secrets.token_bytes(32)),)))
        first = group.start(_TRAINING, key_file=str(key_file))
        wait_until(first, lambda found: found["step"] >= 3, what="training")
        nodes = [first]
        nodes += [group.start(_TRAINING, bootstrap=first.listens_at, key_file=str(key_file)) for _ in range(NODES - 1)]
        for node in nodes:
            wait_until(node, lambda found: found["step"] >= 10, what="training")
        addresses = [node.listens_at for node in nodes]
        _window(nodes)  # a warm-up, not measured
        for _ in range(repetitions):
            calm = _window(nodes)
            diverted = _flooded_window(nodes, unread)
            before = max(resident_bytes(node.pid) for node in nodes)
            flooded = _flooded_window(nodes, addresses)
            grown_mb.append((max(resident_bytes(node.pid) for node in nodes) - before) / 1e6)
            ratios.append(flooded / calm)
            own_ratios.append(flooded / diverted)
        refused = sum(_refused(node) for node in nodes)
    return Outcome(
        "flood",
        f"{NODES} daemons that train digits on this machine, {DATAGRAMS} junk datagrams and {CONNECTIONS} stalled "
        f"connections within {WINDOW_S:g} s, the flooding process beside them; {refused:.0f} datagrams and connections "
        "were counted as refused in all",
        [
            Series("step rate under a flood, beside undisturbed", "", ratios, aim="≥ 0.8"),
            Series("step rate under a flood, beside the same flood at sockets nobody reads", "", own_ratios),
            Series("growth of the largest daemon under a flood", "MB", grown_mb),
        ],
    )


def _window(nodes: list[Daemon]) -> float:
    """Steps per second of all nodes together."""
    began, before = time.monotonic(), _steps(nodes)
    time.sleep(WINDOW_S)
    return (_steps(nodes) - before) / (time.monotonic() - began)


def _flooded_window(nodes: list[Daemon], targets: list[str]) -> float:
    """Steps per second of all nodes together while `targets` are flooded."""
    with subprocess.Popen([sys.executable, "-m", "benchmarks.flood", *targets]) as flood:
        try:
            rate = _window(nodes)
            if flood.wait(timeout=60):
                raise NotMeasured("the flood failed")
        finally:
            flood.kill()  # has no effect on a process that has ended
    return rate


@contextlib.contextmanager
def _unread_sockets() -> Iterator[list[str]]:
    """As many addresses as nodes, where the kernel accepts connections and datagrams and no process reads them."""
    with contextlib.ExitStack() as opened:
        addresses = []
        for _ in range(NODES):
            datagrams, stream, address = bind_pair("127.0.0.1", 0)
            opened.enter_context(datagrams)
            opened.enter_context(stream)
            addresses.append(str(address))
        yield addresses


def _steps(nodes: list[Daemon]) -> int:
    found = [status(node) for node in nodes]
    if None in found:
        raise NotMeasured("a node did not answer")
    return sum(int(entry["step"]) for entry in found if entry is not None)


def _refused(node: Daemon) -> float:
    found = status(node)
    counters = {} if found is None else found["overlay"]["socket"]
    return sum(count for name, count in counters.items() if "dropped" in name)


# -- the flood, in its own process -------------------------------------------------------------------------------


def _flood(addresses: list[str]) -> None:
    rng = random.Random(6)
    targets = [split_address(address) for address in addresses]
    junk = [
        bytes([kind]) + rng.randbytes(size - 1)
        for kind, size in (
            (INIT, INIT_BYTES),
            (RESPONSE, RESPONSE_BYTES),
            (SEALED, 160),
            (SEALED, 1400),
            (0, 160),
        )
        for _ in range(50)
    ]
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.setblocking(False)
    selector = selectors.DefaultSelector()
    began, sent, opened = time.monotonic(), 0, 0
    while (elapsed := time.monotonic() - began) < WINDOW_S - 1:
        while len(selector.get_map()) < CONNECTIONS:
            _stall(selector, targets[opened % len(targets)], half=opened % 2 == 0)
            opened += 1
        due = min(DATAGRAMS, int(DATAGRAMS * elapsed / (WINDOW_S - 2)))
        while sent < due:
            with contextlib.suppress(BlockingIOError):
                datagrams.sendto(junk[sent % len(junk)], targets[sent % len(targets)])
            sent += 1
        for key, _ in selector.select(timeout=0.005):
            stream = key.fileobj
            assert isinstance(stream, socket.socket)
            with contextlib.suppress(OSError):
                if stream.recv(4096):
                    os.write(2, b"junk got an answer\n")
                    sys.exit(1)
            selector.unregister(stream)
            stream.close()


def _stall(selector: selectors.BaseSelector, target: tuple[str, int], *, half: bool) -> None:
    stream = socket.socket()
    stream.setblocking(False)  # if no process accepts, the connection may never be made
    with contextlib.suppress(OSError):
        stream.connect(target)
    if half:
        with contextlib.suppress(OSError):
            stream.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
    selector.register(stream, selectors.EVENT_READ)


if __name__ == "__main__":
    _flood(sys.argv[1:])

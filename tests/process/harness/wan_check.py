"""Measures a `wan_world.Wan` through sockets in its namespaces, and says where it is not what its cables claim.

Each machine sends to the next one, all at the same time: 40 datagrams that are answered, for the round trip and the
jitter; datagrams at a fifth of the line's rate, for the loss; then datagrams beyond the rate, of which as many
arrive as the line carries. On fast lines without loss a TCP stream measures the rate instead.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.process.harness.lan_world import Machine
from tests.process.harness.line_model import MBIT_BYTES, PACKET_BYTES, Cable
from tests.process.harness.wan_world import Wan

PORT = 7
PINGS, PING_INTERVAL_S = 40, 0.01
PROBES, PROBE_BYTES = 1500, 60
RATE_S = 1.2
#: A stream loses packets at the end of its slow start, and then leaves a part of the line empty for a while.
STREAM_S = 5.0
BEYOND = 0.3
HEADER_BYTES = 28
#: TCP's payload is 0.965 of the bytes, and the acknowledgements of the stream that comes in use the line as well.
LOWEST_RATE, HIGHEST_RATE = 0.7, 1.02
#: Slower lines are filled with datagrams: a slow start that ends early leaves a part of them empty for seconds.
#: Threads of one process do not send enough datagrams for faster ones.
STREAM_MBIT = 50.0
#: A busy machine answers late. The shortest of all round trips is judged.
LATE_S = 0.008
SIGMAS = 4.0


@dataclass(frozen=True, slots=True)
class Measured:
    """From one machine to the next: round trip and its spread in seconds, rate in Mbit/s, share lost in one direction.
    A rate of 0 was not measured."""

    round_trip_s: float
    spread_s: float
    mbit: float
    loss: float


class NotAsClaimed(Exception):
    """The world is not what its cables say; the text has every difference."""


def check(world: Wan, attempts: int = 3) -> list[Measured]:
    """Measure, machine by machine. On a busy machine a measurement may be wrong where the world is not, so only one
    that is wrong in every attempt raises `NotAsClaimed`."""
    while True:
        attempts -= 1
        try:
            return _check(world)
        except NotAsClaimed:
            if attempts <= 0:
                raise


def _check(world: Wan) -> list[Measured]:
    count = len(world.machines)
    found: list[Measured | None] = [None] * count
    errors: list[BaseException] = []

    def one(node: int) -> None:
        try:
            found[node] = _measure(world, node, (node + 1) % count, together)
        except BaseException as error:
            errors.append(error)
            together.abort()

    together = threading.Barrier(count)
    threads = [threading.Thread(target=one, args=[node]) for node in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    measured = [one for one in found if one is not None]
    wrong = [
        f"machine {node} to {(node + 1) % count}: {text}"
        for node, result in enumerate(measured)
        for text in differences(world.cables[node], world.cables[(node + 1) % count], result)
    ]
    if wrong:
        raise NotAsClaimed("; ".join(wrong))
    return measured


def differences(cable: Cable, other: Cable, found: Measured) -> list[str]:
    """Where what was measured between the machines with these cables is not what they claim. Pure."""
    wrong = []
    shortest_s = 2 * (cable.delay_s + other.delay_s)
    widest_s = 2 * (cable.jitter_s + other.jitter_s)
    # The shortest of many round trips may still have some of the jitter.
    if not shortest_s - 0.001 <= found.round_trip_s <= shortest_s + widest_s / 2 + LATE_S:
        wrong.append(f"round trip {1000 * found.round_trip_s:.1f} ms, not {1000 * shortest_s:.1f}")
    if widest_s and not found.spread_s > widest_s / 10:
        wrong.append(f"round trips differ by {1000 * found.spread_s:.1f} ms, not up to {1000 * widest_s:.1f}")
    loss = 1 - (1 - cable.loss) * (1 - other.loss)
    margin = SIGMAS * math.sqrt(loss * (1 - loss) / PROBES)
    if abs(found.loss - loss) > margin:
        wrong.append(f"{found.loss:.2%} lost, not {loss:.2%}")
    mbit = _rate(cable, other)
    if mbit and not LOWEST_RATE * mbit <= found.mbit <= HIGHEST_RATE * mbit:
        wrong.append(f"{found.mbit:.2f} Mbit/s, not {mbit:g}")
    return wrong


def _rate(cable: Cable, other: Cable) -> float:
    """Mbit/s from one to the other; 0 without a limit."""
    return min((mbit for mbit in (cable.up_mbit, other.down_mbit) if mbit), default=0.0)


def _measure(world: Wan, node: int, other: int, together: threading.Barrier) -> Measured:
    here, there = world.machines[node], world.machines[other]
    cable, other_cable = world.cables[node], world.cables[other]
    mbit = _rate(cable, other_cable)
    by_datagrams = bool(cable.loss or other_cable.loss) or mbit < STREAM_MBIT
    slowest_s = 1.0 + 2 * (cable.delay_s + cable.jitter_s + other_cable.delay_s + other_cable.jitter_s)
    with (
        there.inside(lambda: _datagrams(there.address)) as far,
        here.inside(lambda: _datagrams(here.address, 0)) as near,
        there.inside(lambda: socket.create_server((there.address, PORT))) as server,
    ):
        near.settimeout(slowest_s)
        far.settimeout(slowest_s)
        target = (there.address, PORT)
        together.wait(60)
        trips = _round_trips(near, far, target)
        together.wait(60)
        pace_s = 8 * (PROBE_BYTES + HEADER_BYTES) / (mbit * 2e5) if mbit else 1e-4
        lost = 1 - _received(near, far, target, PROBES, PROBE_BYTES, pace_s)[0] / PROBES
        together.wait(60)
        found = 0.0
        if mbit and by_datagrams:
            size = PACKET_BYTES - HEADER_BYTES
            pace_s = PACKET_BYTES / ((1 + BEYOND) * mbit * MBIT_BYTES)
            got, took_s = _received(near, far, target, int(RATE_S / pace_s), size, pace_s)
            found = (got - 1) * PACKET_BYTES / took_s / MBIT_BYTES / (1 - lost)
        elif mbit:
            found = _stream(here, server, target, mbit * MBIT_BYTES, lambda: world.received_bytes(other))
        together.wait(60)
        # The datagrams beyond the rate, which wait in the queue, are not the next one's.
        time.sleep(BEYOND * RATE_S if by_datagrams else 0.0)
    return Measured(min(trips), max(trips) - min(trips), found, lost)


def _datagrams(host: str, port: int = PORT) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    made.bind((host, port))
    return made


def _round_trips(near: socket.socket, far: socket.socket, target: tuple[str, int]) -> list[float]:
    """Seconds of those datagrams that came back."""
    sent: dict[bytes, float] = {}
    trips: list[float] = []

    def answer() -> None:
        for _ in range(PINGS):
            far.sendto(*far.recvfrom(100))

    def listen() -> None:
        for _ in range(PINGS):
            got = near.recv(100)
            trips.append(time.monotonic() - sent[got])

    with _beside(answer), _beside(listen):
        for number in range(PINGS):
            sent[name := b"%d" % number] = time.monotonic()
            near.sendto(name, target)
            time.sleep(PING_INTERVAL_S)
    if not trips:
        raise NotAsClaimed(f"nothing came back from {target[0]}")
    return trips


def _received(
    near: socket.socket, far: socket.socket, target: tuple[str, int], count: int, size: int, pace_s: float
) -> tuple[int, float]:
    """How many of so many datagrams came, and how long after the first the last one."""
    times: list[float] = []

    def listen() -> None:
        while len(times) < count:
            if len(far.recv(PACKET_BYTES)) == size:
                times.append(time.monotonic())

    with _beside(listen):
        began, data = time.monotonic(), bytes(size)
        for number in range(count):
            wait_s = began + number * pace_s - time.monotonic()
            if wait_s > 0.001:
                time.sleep(wait_s)
            near.sendto(data, target)
    return len(times), times[-1] - times[0] if len(times) > 1 else math.inf


def _stream(
    here: Machine, server: socket.socket, target: tuple[str, int], rate: float, received: Callable[[], int]
) -> float:
    """Mbit/s over the interface of the receiver while a TCP connection carries its second half. The connection itself
    is no measure: what arrived behind a lost packet is read at once when that has come again."""
    size = max(1 << 17, int(rate * STREAM_S))
    found: list[float] = []

    def receive() -> None:
        connection, _ = server.accept()
        got, begun, before = 0, 0.0, 0
        with connection:
            while data := connection.recv(1 << 16):
                got += len(data)
                if not begun and got >= size // 2:
                    begun, before = time.monotonic(), received()
            found.append((received() - before) / (time.monotonic() - begun) / MBIT_BYTES)

    server.settimeout(60)
    with _beside(receive), here.inside(lambda: socket.create_connection(target, timeout=60)) as connection:
        connection.sendall(bytes(size))
    return found[0]


@contextmanager
def _beside(function: Callable[[], None]) -> Iterator[None]:
    """Run a function in a thread during the body; what is late is what does not come any more."""

    def quiet() -> None:
        with contextlib.suppress(TimeoutError):
            function()

    thread = threading.Thread(target=quiet)
    thread.start()
    try:
        yield
    finally:
        thread.join()

"""An in-memory network of many hosts behind `overlay.transport.Transport`, with seeded faults.

Datagrams are delayed, lost, duplicated and therefore reordered. A request is an ordered stream in each direction with
a bounded number of chunks in flight, as with HTTP over TCP. A partition delays a stream, a crash ends it.
All chance comes from one `random.Random(seed)`, all time from the loop.

Faults: `partition`/`cut`/`hole`/`heal`, `pause`/`resume` (SIGSTOP), `crash` (kill, or power loss), `unreachable`
(accepts no streams), `behind` (a NAT, tests/harness/network/nat.py). The numbers `delay`, `loss`, `duplicate` and
`bandwidth` may change at any moment. `line` gives a host a line of its own, whose rate all its streams share.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.transport import FailureKind, PortInUse, TransportError
from tests.harness.network.line import Line
from tests.harness.network.nat import Nat
from tests.harness.network.pipe import Pipe
from tests.harness.network.transport import MemoryTransport

#: Datagrams that wait in a paused process's socket; the kernel drops what comes after.
SOCKET_QUEUE = 512

Delay = tuple[float, float] | Callable[[Address, Address, random.Random], float]


@dataclass(slots=True)
class Traffic:
    """What a network, or one host, has carried. `bytes` counts heads and bodies both ways, not datagrams."""

    datagrams: int = 0
    datagrams_lost: int = 0
    datagram_bytes: int = 0
    requests: int = 0
    bytes: int = 0


class Network:
    """Hosts, and the links between them. Make transports with `transport`, then break things."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop | None = None,
        seed: int = 0,
        *,
        delay: Delay = (0.01, 0.05),
        loss: float = 0.0,
        duplicate: float = 0.0,
        bandwidth: float | None = None,
    ) -> None:
        """`delay`: seconds one way, a range or a function; `bandwidth`: bytes per second of one stream."""
        self.loop = loop or asyncio.get_running_loop()
        self.random = random.Random(f"{seed}/network")
        self.delay = delay
        self.loss = loss
        self.duplicate = duplicate
        self.bandwidth = bandwidth
        #: Share of body chunks that arrive in two pieces: no receiver may rely on the sender's chunks.
        self.fragment = 0.1
        self.traffic = Traffic()
        self._hosts: dict[Address, MemoryTransport] = {}
        self._silent: dict[Address, bool] = {}
        self._unreachable: dict[str, bool] = {}
        self._nats: dict[str, Nat] = {}
        self._behind: dict[str, Nat] = {}
        self._cuts: dict[tuple[str, str], bool] = {}
        #: Pairs of hosts, and how a stream between them fails at once.
        self._refusals: dict[tuple[str, str], tuple[FailureKind, str]] = {}
        self._groups: dict[str, int] = {}
        self._paused: dict[Address, deque[tuple[bytes, Address]]] = {}
        self._held: dict[Pipe, bool] = {}
        #: Lines of hosts: up and down.
        self._lines: dict[str, tuple[Line, Line]] = {}
        self._calm = True
        self._ports = 0

    # -- building

    def transport(self, host: str, port: int = 8468) -> MemoryTransport:
        """The transport of a (new) process on `host`; a port of 0 takes a free one when it is opened."""
        return MemoryTransport(self, host, port)

    def bind(self, transport: MemoryTransport, address: Address) -> Address:
        if address.port == 0:
            port = next(n for n in range(20000, 65536) if Address(address.host, n) not in self._hosts)
            address = Address(address.host, port)
        elif address in self._hosts:
            raise PortInUse(address, "the port is taken")
        self._hosts[address] = transport
        self._silent.pop(address, None)
        return address

    def unbind(self, transport: MemoryTransport) -> None:
        if self._hosts.get(transport.address) is transport:
            del self._hosts[transport.address]
            queue = self._paused.pop(transport.address, None)
            if queue is not None:
                self._changed()

    def serves(self, address: Address) -> MemoryTransport | None:
        """Who accepts streams to this address: the host, or the one a NAT forwards them to."""
        nat = self._nats.get(address.host)
        return self._hosts.get(address if nat is None else nat.forwarded.get(address.port, address))

    def host(self, address: Address) -> MemoryTransport | None:
        return self._hosts.get(address)

    def line(self, host: str, up: float, down: float | None = None) -> tuple[Line, Line]:
        """Connect a host by a line of so many bytes per second in each direction; all its streams share it in turn.
        Datagrams pass beside it: their loss and delay are the network's."""
        lines = Line(self.loop, up), Line(self.loop, up if down is None else down)
        self._lines[host] = lines
        return lines

    def has_line(self, host: str) -> bool:
        """Whether a line connects this host; otherwise its streams are as fast as the network."""
        return host in self._lines

    def lines_between(self, source: Address, target: Address) -> list[Line]:
        """What a stream from one host to the other passes through, in order."""
        if not self._lines or source.host == target.host:
            return []
        ends = self._lines.get(source.host), self._lines.get(target.host)
        return [lines[way] for way, lines in enumerate(ends) if lines is not None]

    def stream_port(self) -> int:
        self._ports = (self._ports + 1) % 20000
        return 40000 + self._ports

    # -- breaking

    def crash(self, address: Address, refused: bool = False) -> None:
        """End the process at `address` without a word: what it had sent and what is on the way to it vanishes.

        `refused=True` is a killed process on a living machine: its streams break and connecting is refused.
        `refused=False` is a machine without power: nothing answers. The node's own code still runs: cancel its tasks;
        whatever they try to send fails as `closed`. The address is free for a restart at once.
        """
        transport = self._hosts.get(address)
        if transport is None:
            return
        self.unbind(transport)
        if not refused:
            self._silent[address] = True
        transport.crashed = True
        transport.end(notify=refused)

    def partition(self, *groups: Iterable[str | Address]) -> None:
        """Only hosts of one group reach each other. Hosts in no group form one more group."""
        self._groups = {_host(member): index for index, group in enumerate(groups) for member in group}
        self._changed()

    def cut(self, source: str | Address, target: str | Address) -> None:
        """Nothing passes from one host to the other; the way back stays open (to datagrams: a stream needs both)."""
        self._cuts[_host(source), _host(target)] = True
        self._changed()

    def hole(self, one: str | Address, other: str | Address, refusal: tuple[FailureKind, str] | None = None) -> None:
        """Nothing passes between two hosts. New streams fail at once with this kind and detail; None: in silence."""
        for source, target in ((_host(one), _host(other)), (_host(other), _host(one))):
            self._cuts[source, target] = True
            if refusal is not None:
                self._refusals[source, target] = refusal
        self._changed()

    def refusal(self, source: Address, target: Address) -> TransportError | None:
        """How a stream from one host to the other fails at once."""
        found = self._refusals.get((source.host, target.host)) if self._refusals else None
        return None if found is None else TransportError(found[0], target, found[1])

    def heal(self) -> None:
        """End every partition, cut and hole; streams that were held up continue."""
        self._groups = {}
        self._cuts = {}
        self._refusals = {}
        self._changed()

    def pause(self, address: Address) -> None:
        """As SIGSTOP seen from outside: the process receives and sends nothing until `resume`. Datagrams wait in its
        socket, streams are silent. Its code still runs, deaf and mute."""
        self._paused.setdefault(address, deque())
        self._changed()

    def resume(self, address: Address) -> None:
        queue = self._paused.pop(address, None)
        self._changed()
        transport = self._hosts.get(address)
        if transport is not None:
            for datagram, source in queue or ():
                self.loop.call_soon(transport.receive, datagram, source)

    def unreachable(self, host: str, *, since_now: bool = True) -> None:
        """`host` accepts no streams, as behind a NAT; `since_now=False` takes it back. Datagrams still pass."""
        if since_now:
            self._unreachable[host] = True
        else:
            self._unreachable.pop(host, None)

    def behind(self, nat: Nat, *hosts: str) -> None:
        """These hosts reach the others, and are reached, through a NAT alone. Those of one NAT meet directly."""
        self._nats[nat.public] = nat
        for host in hosts:
            self._behind[host] = nat

    def outward(self, source: Address, to: Address) -> Address:
        """The address that `to` sees."""
        nat = self._behind.get(source.host)
        return source if nat is None or self._behind.get(to.host) is nat else nat.outward(source, to)

    def host_seen(self, source: Address, to: Address) -> str:
        """The host that `to` sees a stream come from."""
        nat = self._behind.get(source.host)
        return source.host if nat is None or self._behind.get(to.host) is nat else nat.public

    def _inward(self, to: Address, seen: Address) -> Address | None:
        """Whose socket a datagram from `seen` to this address comes to; None where it is dropped on the way."""
        nat = self._nats.get(to.host)
        if nat is not None:
            return nat.inward(to.port, seen)
        own = self._behind.get(to.host)
        return to if own is None or self._behind.get(seen.host) is own else None

    def _changed(self) -> None:
        self._calm = not (self._groups or self._cuts or self._paused)
        for pipe in list(self._held):
            if not self.stream_held(pipe.source, pipe.target):
                del self._held[pipe]
                self.loop.call_later(self.draw_delay(pipe.source, pipe.target), pipe.release)

    # -- carrying

    def draw_delay(self, source: Address, target: Address) -> float:
        if callable(self.delay):
            return self.delay(source, target, self.random)
        low, high = self.delay
        return low + (high - low) * self.random.random()

    def _parted(self, source: str, target: str) -> bool:
        if source == target:
            return False
        return self._groups.get(source, -1) != self._groups.get(target, -1) or (source, target) in self._cuts

    def stream_held(self, one: Address, other: Address) -> bool:
        """A stream needs both directions (acknowledgements) and two processes that run."""
        if self._calm:
            return False
        if one in self._paused or other in self._paused:
            return True
        return self._parted(one.host, other.host) or self._parted(other.host, one.host)

    def hold(self, pipe: Pipe) -> None:
        self._held[pipe] = True

    def answers_nothing(self, address: Address, source: Address) -> bool:
        """Connecting from `source` to this address is met with silence instead of a refusal."""
        if address.host in self._nats:
            return address.port not in self._nats[address.host].forwarded
        own = self._behind.get(address.host)
        hidden = own is not None and self._behind.get(source.host) is not own
        return hidden or address in self._silent or address.host in self._unreachable

    def carry(self, source: MemoryTransport, to: Address, datagram: bytes) -> None:
        traffic = self.traffic
        traffic.datagrams += 1
        traffic.datagram_bytes += len(datagram)
        copies = 1
        if self.loss and self.random.random() < self.loss:
            copies = 0
        elif self.duplicate and self.random.random() < self.duplicate:
            copies = 2
        if not self._calm and (source.address in self._paused or self._parted(source.address.host, to.host)):
            copies = 0
        if copies == 0:
            traffic.datagrams_lost += 1
        seen = self.outward(source.address, to)
        target = self._hosts.get(self._nats[to.host].inside(to.port) or to if to.host in self._nats else to)
        context = target.context if target is not None else None  # it arrives in the receiver's loop
        for _ in range(copies):
            delay_s = self.draw_delay(source.address, to)
            self.loop.call_later(delay_s, self._arrive, source, seen, to, datagram, context=context)

    def _arrive(self, source: MemoryTransport, seen: Address, to: Address, datagram: bytes) -> None:
        inside = self._inward(to, seen)
        target = None if inside is None else self._hosts.get(inside)
        if inside is None or target is None or source.crashed:
            self.traffic.datagrams_lost += 1
            return
        to = inside
        if not self._calm:
            if self._parted(source.address.host, to.host):
                self.traffic.datagrams_lost += 1
                return
            queue = self._paused.get(to)
            if queue is not None:
                if len(queue) < SOCKET_QUEUE:
                    queue.append((datagram, seen))
                return
        target.receive(datagram, seen)


def _host(member: str | Address) -> str:
    return member.host if isinstance(member, Address) else member

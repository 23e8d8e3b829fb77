"""Getting into a swarm, and back into it: names, addresses, remembered peers, for ever, with backoff.

Every address of every bootstrap and every remembered peer is tried, remembered ones first; each failure has its
reason. Giving up is for one case only: every bootstrap answered, and none belongs to our swarm (`NotThisSwarm`).
A node never founds a swarm because nobody answered.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from overlay.doors import Log
from overlay.hello import Caller, Greeted, TwinMet, Unsuitable, say_hello
from overlay.transport import Address, Transport

#: Longest wait for one `hello`: connecting, and its answer.
HELLO_TIMEOUT_S = 2.0
FIRST_PAUSE_S, LAST_PAUSE_S = 0.25, 10.0
#: Remembered peers get this much of a start before the bootstraps are dialled too.
REMEMBERED_FIRST_S = 0.2
#: Remembered peers dialled in one round.
MOST_REMEMBERED = 16


class NotThisSwarm(Exception):
    """Every bootstrap answered and none belongs to our swarm. `attempts`: (address, reason)."""

    def __init__(self, attempts: list[tuple[str, str]]) -> None:
        tried = "; ".join(f"{address} {reason}" for address, reason in attempts)
        super().__init__(f"no bootstrap belongs to this swarm: {tried}. Check swarm.run and swarm.bootstrap")
        self.attempts = attempts


@dataclass(frozen=True)
class _Target:
    """One address to dial, and the text the user gave it as (the address itself for remembered peers)."""

    label: str
    address: Address
    remembered: bool


class Dialler:
    """Dials until somebody of our swarm answers. `attempts` holds the last failure by address."""

    def __init__(
        self,
        transport: Transport,
        rng: random.Random,
        log: Log,
        caller: Caller,
        *,
        twin: Callable[[int, int, Address], None],
    ) -> None:
        self.attempts: dict[str, str] = {}
        self._transport = transport
        self._rng = rng
        self._log = log
        self._caller = caller
        self._twin = twin

    async def dial(self, bootstraps: Sequence[str], remembered: Sequence[Address], genesis: bytes | None) -> Greeted:
        """The first node of our swarm that answers; for ever. Raises `NotThisSwarm`."""
        pause_s = FIRST_PAUSE_S
        while True:
            greeted, hopeless = await self._round(bootstraps, remembered, genesis)
            if greeted is not None:
                self.attempts.clear()
                return greeted
            if bootstraps and hopeless:
                raise NotThisSwarm(list(self.attempts.items()))
            await asyncio.sleep(pause_s * (0.5 + self._rng.random()))
            pause_s = min(1.6 * pause_s, LAST_PAUSE_S)

    async def _round(
        self, bootstraps: Sequence[str], remembered: Sequence[Address], genesis: bytes | None
    ) -> tuple[Greeted | None, bool]:
        """One try of everybody; whether all bootstraps have answered for good that they are not ours."""
        targets = [_Target(str(address), address, True) for address in remembered[:MOST_REMEMBERED]]
        for label in bootstraps:
            try:
                targets += [_Target(label, address, False) for address in await resolve(label)]
            except (OSError, ValueError) as error:
                self._note(label, f"cannot be resolved: {error}")
        results: asyncio.Queue[tuple[_Target, Greeted | Unsuitable]] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._try(target, bool(remembered), genesis, results), name=f"hello {target.label}")
            for target in targets
        ]
        final: dict[str, None] = {}
        try:
            for _ in tasks:
                target, outcome = await results.get()
                if isinstance(outcome, Greeted):
                    return outcome, False
                self._note(str(target.address), outcome.reason)
                if outcome.final and not target.remembered:
                    final[target.label] = None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return None, all(label in final for label in bootstraps)

    async def _try(
        self,
        target: _Target,
        others_first: bool,
        genesis: bytes | None,
        results: asyncio.Queue[tuple[_Target, Greeted | Unsuitable]],
    ) -> None:
        if others_first and not target.remembered:
            await asyncio.sleep(REMEMBERED_FIRST_S)
        try:
            greeted = await say_hello(
                self._transport,
                target.address,
                caller=self._caller,
                genesis=genesis,
                timeout_s=HELLO_TIMEOUT_S,
            )
        except Unsuitable as error:
            if isinstance(error, TwinMet):
                self._twin(error.incarnation, error.boot, error.address)
            results.put_nowait((target, error))
        else:
            results.put_nowait((target, greeted))

    def _note(self, address: str, reason: str) -> None:
        """Keep the reason; log it when it is another than before."""
        if self.attempts.get(address) != reason:
            self.attempts[address] = reason
            self._log.warning("bootstrap_failed", address=address, reason=reason)


def split_host_port(text: str) -> tuple[str, int]:
    """`host:port`, `1.2.3.4:port` or `[v6]:port`. Raises `ValueError` that says what is wrong."""
    host, colon, port = text.rpartition(":")
    if not colon or not host:
        raise ValueError(f"{text!r} is not host:port")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r}: an IPv6 address is written [address]:port")
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r}: {port!r} is no port from 1 to 65535")
    return host, int(port)


async def resolve(text: str) -> list[Address]:
    """All addresses of `host:port`; a name is resolved off the loop. Raises `OSError`, `ValueError`."""
    host, port = split_host_port(text)
    try:
        return [Address.checked(str(ipaddress.ip_address(host)), port)]
    except ValueError:
        pass
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(Address.checked(str(entry[4][0]), port) for entry in found))

"""Dials the addresses of bootstraps and remembered peers until a node of this swarm answers, with backoff.

Each round tries all remembered peers at the same time, and a moment later the bootstraps one by one, in a random
order (RFC 8305, section 5). The next is dialled when all before have failed, or `ATTEMPT_DELAY_S` after the one before.
So nodes that start at one moment spread over the bootstraps, and a silent bootstrap costs a joiner only that delay. The
last failure of each address is kept with its reason. Names are resolved while other addresses are dialled; if the
resolver does not answer, its last addresses are used.
Dialling ends without success in one case only: every bootstrap answered, and none belongs to this swarm
(`NotThisSwarm`). A node never founds a swarm because no bootstrap answered.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from p2pnode.overlay.addresses import Address, is_loopback, split_address, usable_host
from p2pnode.overlay.bootstrap.hello import (
    DuplicateIdentityFound,
    HelloContext,
    HelloRejected,
    HelloResult,
    OwnAddress,
    say_hello,
)
from p2pnode.overlay.environment import Environment
from p2pnode.overlay.errors import OverlayError
from p2pnode.overlay.local_node import LocalNode
from p2pnode.overlay.transport import Transport

#: Longest wait for one `hello`: connecting, and each wait for the response.
HELLO_TIMEOUT_S = 2.0
#: The pause after a round grows from one to the other.
MIN_RETRY_DELAY_S, MAX_RETRY_DELAY_S = 0.25, 10.0
#: Bootstraps are dialled this much later than remembered peers.
BOOTSTRAP_DELAY_S = 0.2
#: The next bootstrap is dialled this much later than the one before (the value of RFC 8305).
ATTEMPT_DELAY_S = 0.25
#: While nothing answers, the log says so this often, with what to do.
REMIND_S = 60.0
#: Most remembered peers dialled in one round.
MAX_REMEMBERED = 16
#: Longest wait for a resolver.
RESOLVE_TIMEOUT_S = 5.0
UNRESOLVED = "cannot be resolved"
#: All addresses of `host:port`. Raises `OSError`, `ValueError`.
Resolver = Callable[[str], Awaitable[Sequence[Address]]]

#: Addresses in one reminder; remembered peers may be many.
MAX_EXPLAINED = 8
_SILENT = "see that the machine is up, and that its firewall and router let TCP and UDP to that port through"
#: Parts of reasons (`hello`, `dialer`, `overlay.sockets`), each with the next step. The first match counts.
_ADVICE: tuple[tuple[str, str], ...] = (
    (
        "same swarm key and run",
        "compare the fingerprints: `p2pnode key show` here, and on the machine at that address; a new invitation has "
        "key, run and address",
    ),
    (
        "certificate of this swarm",
        "this node has the key or the run of another swarm: start it with a new invitation of the right one",
    ),
    ("belongs to run", "set --run to the run of that swarm, or give the address of a member of yours"),
    (
        "belongs to another swarm",
        "this state directory belongs to another swarm of the same name: name another one with --state-dir, or empty "
        "it with `p2pnode forget`",
    ),
    (
        "does not use TLS",
        "that swarm has no key, and this node has one: take the address of a member of yours, and its node.port",
    ),
    ("certificate of a node", "install the same version of p2pnode on both machines"),
    ("protocol version", "install the same version of p2pnode on both machines"),
    ("not as a p2pnode", "another program listens there: check the port, which is node.port of the other node"),
    ("without proof", "something between the machines answers for that node: give its own address and port"),
    ("own identity", "this state directory was copied: remove identity.key and incarnation from the copy"),
    ("this node itself", "give the address of another member"),
    ("has not joined", "that node still joins itself; this one dials again"),
    ("IPv6", 'set node.host = "::" on this node'),
    ("IPv4", 'set node.host = "::" on this node'),
    ("not on the loopback", 'set node.host = "0.0.0.0" on this node'),
    ("cannot be resolved", "check the name, and the DNS of this machine"),
    ("refused", "nothing listens there: see that the node runs, and that its node.port is the one given"),
    ("did not answer", _SILENT),
    ("was silent", _SILENT),
    ("cannot be reached", "no way leads there: check this machine's network, and the address"),
    ("broke", "see the log of the node at that address; one that runs with a key breaks off with one that has none"),
)
OTHERWISE = "check that it runs and the address is right"


def what_to_do(reason: str) -> str:
    """The next step for a person who reads why a bootstrap failed."""
    lower = reason.lower()
    return next((advice for part, advice in _ADVICE if part.lower() in lower), OTHERWISE)


def explained(failures: Mapping[str, str]) -> list[str]:
    """One sentence per address: why it failed, and what to do."""
    return [f"{address} {reason}: {what_to_do(reason)}" for address, reason in list(failures.items())[:MAX_EXPLAINED]]


class NotThisSwarm(OverlayError):
    """Every bootstrap answered and none belongs to this swarm. `failures`: (address, reason)."""

    def __init__(self, failures: list[tuple[str, str]]) -> None:
        tried = "; ".join(f"{address} {reason}" for address, reason in failures)
        super().__init__(f"no bootstrap belongs to this swarm: {tried}. Check swarm.run and swarm.bootstrap")
        self.failures = failures


class OnlyItself(NotThisSwarm):
    """Every bootstrap is this node itself, so there is nobody to join through."""


@dataclass(frozen=True)
class _Target:
    """One address to dial. `label` is the text in the settings, or the address itself for a remembered peer."""

    label: str
    address: Address
    remembered: bool


_Outcome = tuple[_Target, HelloResult | HelloRejected]


class Dialer:
    """Dials until a node of this swarm answers. `failures`: the reason of the last failure, by address."""

    def __init__(
        self,
        local: LocalNode,
        transport: Transport,
        context: HelloContext,
        environment: Environment,
        *,
        on_duplicate_identity: Callable[[int, int, Address], None],
        resolver: Resolver | None = None,
    ) -> None:
        self.failures: dict[str, str] = {}
        self.resolver: Resolver = resolver or resolve
        self._resolved: dict[str, Sequence[Address]] = {}
        self._local = local
        self._transport = transport
        self._rng = environment.entropy.random
        self._clock = environment.clock
        self._log = environment.log
        self._context = context
        self._on_duplicate_identity = on_duplicate_identity

    async def dial(
        self, bootstraps: Sequence[str], remembered: Callable[[], Sequence[Address]], genesis: bytes | None
    ) -> HelloResult:
        """Dial until a node of this swarm answers. `remembered` is called for each round. Raises `NotThisSwarm`, and of
        it `OnlyItself`, which is decided by the bootstraps alone."""
        pause_s = MIN_RETRY_DELAY_S
        began = reminded = self._clock.monotonic()
        while True:
            result, error = await self._round(bootstraps, remembered(), genesis)
            if result is not None:
                self.failures.clear()
                return result
            if error is not None:
                raise error(list(self.failures.items()))
            now = self._clock.monotonic()
            if now - reminded >= REMIND_S and self.failures:
                reminded = now
                self._log.warning("still_not_joined", waited_s=round(now - began), tried=explained(self.failures))
            await asyncio.sleep(pause_s * (0.5 + self._rng.random()))
            pause_s = min(1.6 * pause_s, MAX_RETRY_DELAY_S)

    async def try_once(
        self, label: str | Address, genesis: bytes | None, *, is_noted: bool = False
    ) -> HelloResult | None:
        """Dial the addresses of one bootstrap or peer once; the first node of this swarm that answers. `is_noted`: keep
        and log the reason of each failure."""
        for address in await self._addresses(label):
            try:
                found = await self._hello(address, genesis)
                self.failures.pop(str(address), None)
                return found
            except HelloRejected as error:
                if is_noted:
                    self._note(str(address), error.reason)
        return None

    async def _round(
        self, bootstraps: Sequence[str], remembered: Sequence[Address], genesis: bytes | None
    ) -> tuple[HelloResult | None, type[NotThisSwarm] | None]:
        """Try all addresses once: the answer of a node of this swarm; or the error that ends dialling, where all
        bootstraps answered and none belongs to this swarm."""
        outcomes: asyncio.Queue[_Outcome | None] = asyncio.Queue()
        tasks: list[asyncio.Task[None]] = []

        def begin(label: str | Address) -> None:
            tasks.append(asyncio.create_task(self._try(label, genesis, outcomes), name=f"hello {label}"))

        for address in remembered[:MAX_REMEMBERED]:
            begin(address)
        now = asyncio.get_running_loop().time
        waiting = self._rng.sample(list(bootstraps), len(bootstraps))
        next_s = now() + (BOOTSTRAP_DELAY_S if remembered else 0.0)
        # Bootstraps by the answers of their addresses, of which each may have several.
        final: set[str] = set()
        own: set[str] = set()
        foreign: set[str] = set()
        ended = 0
        try:
            while waiting or ended < len(tasks):
                if waiting and (ended == len(tasks) or now() >= next_s):
                    begin(waiting.pop())
                    next_s = now() + ATTEMPT_DELAY_S
                try:
                    async with asyncio.timeout_at(next_s if waiting else None):
                        outcome = await outcomes.get()
                except TimeoutError:
                    continue
                if outcome is None:
                    ended += 1
                    continue
                target, answer = outcome
                if isinstance(answer, HelloResult):
                    return answer, None
                self._note(str(target.address), answer.reason)
                if target.remembered:
                    continue
                (own if isinstance(answer, OwnAddress) else foreign).add(target.label)
                if answer.final:
                    final.add(target.label)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not bootstraps or not final.issuperset(bootstraps):
            return None, None
        return None, OnlyItself if own.issuperset(bootstraps) and not foreign else NotThisSwarm

    async def _try(self, label: str | Address, genesis: bytes | None, outcomes: asyncio.Queue[_Outcome | None]) -> None:
        """Dial all addresses of one bootstrap or peer at once; put each outcome, and None after the last."""
        try:
            addresses = await self._addresses(label)
            targets = [_Target(str(label), address, isinstance(label, Address)) for address in addresses]
            if len(targets) == 1:  # nearly always: a group would double what a dial takes
                await self._try_one(targets[0], genesis, outcomes)
                return
            async with asyncio.TaskGroup() as group:
                for target in targets:
                    group.create_task(self._try_one(target, genesis, outcomes), name=f"hello {target.address}")
        finally:
            outcomes.put_nowait(None)

    async def _try_one(self, target: _Target, genesis: bytes | None, outcomes: asyncio.Queue[_Outcome | None]) -> None:
        try:
            outcomes.put_nowait((target, await self._hello(target.address, genesis)))
        except HelloRejected as error:
            outcomes.put_nowait((target, error))

    async def _hello(self, address: Address, genesis: bytes | None) -> HelloResult:
        if reason := why_unreachable(self._local.bound, address):
            raise HelloRejected(reason, final=False)
        try:
            return await say_hello(
                self._transport, address, context=self._context, genesis=genesis, timeout_s=HELLO_TIMEOUT_S
            )
        except DuplicateIdentityFound as error:
            self._on_duplicate_identity(error.incarnation, error.boot_id, error.address)
            raise

    async def _addresses(self, label: str | Address) -> Sequence[Address]:
        """The present addresses of a bootstrap, or the last ones that the resolver gave; empty if it never gave any."""
        if isinstance(label, Address):
            return [label]
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                self._resolved[label] = await self.resolver(label)
            if self.failures.get(label, "").startswith(UNRESOLVED):
                del self.failures[label]
        except TimeoutError:
            self._note(label, f"{UNRESOLVED}: no answer within {RESOLVE_TIMEOUT_S:g} s")
        except (OSError, ValueError) as error:
            self._note(label, f"{UNRESOLVED}: {error}")
        return self._resolved.get(label, ())

    def _note(self, address: str, reason: str) -> None:
        """Keep the reason of a failure; log it when it changed."""
        if self.failures.get(address) != reason:
            self.failures[address] = reason
            self._log.warning("bootstrap_failed", address=address, reason=reason)


def why_unreachable(bound: Address, address: Address) -> str:
    """Why a socket bound to `bound` cannot send to an address; empty where it can."""
    if bound.host == "::":
        return ""
    if ":" in address.host and ":" not in bound.host:
        return 'is IPv6, and this node listens on IPv4 only; node.host = "::" takes both'
    if ":" in bound.host and ":" not in address.host:
        return 'is IPv4, and this node listens on IPv6 only; node.host = "::" takes both'
    if is_loopback(bound.host) and not is_loopback(address.host):
        return (
            f"is not on the loopback, and this node listens on {bound.host}, which no other machine reaches; set "
            'node.host = "0.0.0.0"'
        )
    return ""


async def resolve(text: str) -> list[Address]:
    """All addresses of `host:port`. Raises `OSError`, `ValueError`."""
    host, port = split_address(text)
    try:
        return [Address.checked(str(ipaddress.ip_address(host)), port)]
    except ValueError:
        pass
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(Address.checked(str(entry[4][0]), port) for entry in found))


async def advertised_address(text: str) -> tuple[str, int] | None:
    """The setting `node.advertise`, a name or an address, as (IP address, port or 0); None when it is empty."""
    if not text:
        return None
    if usable_host(text) is not None:
        return str(usable_host(text)), 0
    has_port = text.rpartition(":")[2].isdigit()
    address = (await resolve(text if has_port else f"{text}:1"))[0]  # any port: `resolve` asks for one
    return address.host, address.port if has_port else 0

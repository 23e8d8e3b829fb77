"""Getting into a swarm, and back into it: names, addresses, remembered peers, for ever, with backoff.

Every address of every bootstrap and every remembered peer is tried, remembered ones first; each failure has its
reason. Names are resolved beside the dialling, never before it; while a resolver is silent the addresses it gave last
are good enough. Giving up is for one case only: every bootstrap answered, and none belongs to our swarm
(`NotThisSwarm`). A node never founds a swarm because nobody answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from overlay.addresses import Address
from overlay.bootstrap.hello import DuplicateIdentityFound, HelloContext, HelloRejected, HelloResult, say_hello
from overlay.bootstrap.resolver import RESOLVE_TIMEOUT_S, UNRESOLVED, Resolver, resolve
from overlay.environment import Environment
from overlay.errors import OverlayError
from overlay.local_node import LocalNode
from overlay.transport import Transport

#: Longest wait for one `hello`: connecting, and its answer.
HELLO_TIMEOUT_S = 2.0
MIN_RETRY_DELAY_S, MAX_RETRY_DELAY_S = 0.25, 10.0
#: Remembered peers get this much of a start before the bootstraps are dialled too.
BOOTSTRAP_DELAY_S = 0.2
#: Remembered peers dialled in one round.
MAX_REMEMBERED = 16


class NotThisSwarm(OverlayError):
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


_Outcome = tuple[_Target, HelloResult | HelloRejected]


class Dialer:
    """Dials until somebody of our swarm answers. `attempts` holds the last failure by address."""

    def __init__(
        self,
        local: LocalNode,
        transport: Transport,
        caller: HelloContext,
        environment: Environment,
        *,
        on_duplicate_identity: Callable[[int, int, Address], None],
        resolver: Resolver | None = None,
    ) -> None:
        self.attempts: dict[str, str] = {}
        self.resolver: Resolver = resolver or resolve
        self._resolved: dict[str, Sequence[Address]] = {}
        self._local = local
        self._transport = transport
        self._rng = environment.entropy.random
        self._log = environment.log
        self._caller = caller
        self._on_duplicate_identity = on_duplicate_identity

    async def dial(
        self, bootstraps: Sequence[str], remembered: Callable[[], Sequence[Address]], genesis: bytes | None
    ) -> HelloResult:
        """The first node of our swarm that answers; for ever. `remembered` is asked anew for each round. Raises
        `NotThisSwarm`."""
        pause_s = MIN_RETRY_DELAY_S
        while True:
            greeted, hopeless = await self._round(bootstraps, remembered(), genesis)
            if greeted is not None:
                self.attempts.clear()
                return greeted
            if bootstraps and hopeless:
                raise NotThisSwarm(list(self.attempts.items()))
            await asyncio.sleep(pause_s * (0.5 + self._rng.random()))
            pause_s = min(1.6 * pause_s, MAX_RETRY_DELAY_S)

    async def try_once(self, label: str | Address, genesis: bytes | None) -> HelloResult | None:
        """Dial every address of one bootstrap or peer once, without a word; the first of our swarm that answers."""
        for address in await self._addresses(label):
            try:
                if not _out_of_reach(self._local.bound, address):
                    return await self._hello(address, genesis)
            except HelloRejected:
                continue
        return None

    async def _round(
        self, bootstraps: Sequence[str], remembered: Sequence[Address], genesis: bytes | None
    ) -> tuple[HelloResult | None, bool]:
        """One try of everybody; whether all bootstraps have answered for good that they are not ours."""
        outcomes: asyncio.Queue[_Outcome | None] = asyncio.Queue()
        later_s = BOOTSTRAP_DELAY_S if remembered else 0.0
        tasks = [
            asyncio.create_task(self._try(address, 0.0, genesis, outcomes), name=f"hello {address}")
            for address in remembered[:MAX_REMEMBERED]
        ] + [
            asyncio.create_task(self._try(label, later_s, genesis, outcomes), name=f"hello {label}")
            for label in bootstraps
        ]
        final: dict[str, None] = {}
        left = len(tasks)
        try:
            while left:
                outcome = await outcomes.get()
                if outcome is None:
                    left -= 1
                    continue
                target, answer = outcome
                if isinstance(answer, HelloResult):
                    return answer, False
                self._note(str(target.address), answer.reason)
                if answer.final and not target.remembered:
                    final[target.label] = None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return None, all(label in final for label in bootstraps)

    async def _try(
        self, label: str | Address, later_s: float, genesis: bytes | None, outcomes: asyncio.Queue[_Outcome | None]
    ) -> None:
        """All addresses of one bootstrap, or one remembered, at once; what each answered, and None when all have."""
        try:
            addresses = await self._addresses(label)
            await asyncio.sleep(later_s)
            targets = [_Target(str(label), address, isinstance(label, Address)) for address in addresses]
            async with asyncio.TaskGroup() as group:
                for target in targets:
                    group.create_task(self._try_one(target, genesis, outcomes), name=f"hello {target.address}")
        finally:
            outcomes.put_nowait(None)

    async def _try_one(self, target: _Target, genesis: bytes | None, outcomes: asyncio.Queue[_Outcome | None]) -> None:
        try:
            reason = _out_of_reach(self._local.bound, target.address)
            if reason:
                raise HelloRejected(reason, final=False)
            outcomes.put_nowait((target, await self._hello(target.address, genesis)))
        except HelloRejected as error:
            outcomes.put_nowait((target, error))

    async def _hello(self, address: Address, genesis: bytes | None) -> HelloResult:
        try:
            return await say_hello(
                self._transport, address, caller=self._caller, genesis=genesis, timeout_s=HELLO_TIMEOUT_S
            )
        except DuplicateIdentityFound as error:
            self._on_duplicate_identity(error.incarnation, error.boot_id, error.address)
            raise

    async def _addresses(self, label: str | Address) -> Sequence[Address]:
        """The addresses of a label now, or those it had last; none where there never were any."""
        if isinstance(label, Address):
            return [label]
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                self._resolved[label] = await self.resolver(label)
            if self.attempts.get(label, "").startswith(UNRESOLVED):
                del self.attempts[label]
        except TimeoutError:
            self._note(label, f"{UNRESOLVED}: no answer within {RESOLVE_TIMEOUT_S:g} s")
        except (OSError, ValueError) as error:
            self._note(label, f"{UNRESOLVED}: {error}")
        return self._resolved.get(label, ())

    def _note(self, address: str, reason: str) -> None:
        """Keep the reason; log it when it is another than before."""
        if self.attempts.get(address) != reason:
            self.attempts[address] = reason
            self._log.warning("bootstrap_failed", address=address, reason=reason)


def _out_of_reach(bound: Address, address: Address) -> str:
    """Why datagrams of a socket bound there cannot go to an address; empty where they can."""
    if bound.host == "::":
        return ""
    if ":" in address.host and ":" not in bound.host:
        return 'is IPv6, and this node listens on IPv4 alone; node.host = "::" takes both'
    if ":" in bound.host and ":" not in address.host:
        return 'is IPv4, and this node listens on IPv6 alone; node.host = "::" takes both'
    return ""

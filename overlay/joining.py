"""Joining and staying connected: what happens around a successful dial, and when the table has run empty."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from overlay.bootstrap import Dialler, NotThisSwarm
from overlay.doors import Log
from overlay.hello import Greeted
from overlay.lookups import Lookups
from overlay.membership import Membership
from overlay.peers import Contact
from overlay.remembered import WRITE_S, Remembered
from overlay.transport import Address

#: The lookup of ourselves that ends a join is cut off after this; the table fills in the background.
JOIN_LOOKUP_S = 2.0
#: The table is looked at this often; empty, the node dials again.
EMPTY_TABLE_S = 5.0


class Joining:
    """Enters the swarm, remembers its peers, and enters again when everybody is gone."""

    def __init__(
        self,
        dialler: Dialler,
        remembered: Remembered,
        membership: Membership,
        lookups: Lookups,
        log: Log,
        *,
        own: Callable[[], Contact],
        genesis: Callable[[], bytes | None],
        enter: Callable[[bytes], None],
        observed: Callable[[str], None],
        arrived: Callable[[], None],
    ) -> None:
        self._dialler = dialler
        self._remembered = remembered
        self._membership = membership
        self._lookups = lookups
        self._log = log
        self._own = own
        self._genesis = genesis
        self._enter = enter
        self._observed = observed
        self._arrived = arrived
        self._bootstraps: list[str] = []

    @property
    def attempts(self) -> dict[str, str]:
        """Last failure by address."""
        return self._dialler.attempts

    def load(self) -> None:
        self._remembered.load()

    def others(self) -> list[Address]:
        """Remembered addresses but our own."""
        own = self._own().address
        return [address for address in self._remembered.addresses() if address != own]

    async def join(self, bootstraps: Sequence[str], genesis: bytes | None) -> None:
        """Dial until somebody of our swarm answers, and look around. Raises `NotThisSwarm`."""
        self._bootstraps = list(bootstraps)
        greeted = await self._dialler.dial(self._bootstraps, self.others(), genesis)
        self._enter(greeted.genesis)
        await self._arrive(greeted)
        through = str(greeted.contact.address)
        self._log.info("swarm_joined", through=through, peers=len(self._membership.peers))

    async def _arrive(self, greeted: Greeted) -> None:
        """Meet the node that answered, then all around us."""
        self._observed(greeted.observed_host)
        self._membership.ask_back(greeted.contact)
        try:
            async with asyncio.timeout(JOIN_LOOKUP_S):
                await self._lookups.find(self._own().node_id, [greeted.contact, *greeted.contacts])
        except TimeoutError:
            self._log.warning("join_lookup_slow", waited_s=JOIN_LOOKUP_S)
        self._arrived()

    async def keep_connected(self) -> None:
        """Dial again when nobody is left and there is somebody to dial."""
        while True:
            await asyncio.sleep(EMPTY_TABLE_S)
            genesis = self._genesis()
            if genesis is None or len(self._membership.peers) or self._membership.detector.leaving:
                continue
            others = self.others()
            if not others and not self._bootstraps:
                continue
            self._log.info("table_empty", dialling=len(others) + len(self._bootstraps))
            try:
                await self._arrive(await self._dialler.dial(self._bootstraps, others, genesis))
            except NotThisSwarm as error:
                self._log.warning("not_this_swarm", reason=str(error))

    def remember(self) -> None:
        """Put the peers of this moment on disk."""
        self._remembered.note(self._membership.peers)
        self._remembered.write()

    async def keep_remembering(self) -> None:
        """Now and then, when they changed."""
        while True:
            await asyncio.sleep(WRITE_S)
            self.remember()

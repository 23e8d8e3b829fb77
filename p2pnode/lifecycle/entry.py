"""How a node enters its swarm: joins it, founds it, or opens the one of an earlier start again.

A node without bootstraps (or with none but itself) and without remembered peers founds a swarm; no other node does.
Only the founder opens its swarm again when none of its peers answers; every other node waits, because its own network
may be what is down.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from p2pnode.errors import ExitCode, UserError
from p2pnode.lifecycle.environment import NodePart
from p2pnode.lifecycle.state_directory import StateDirectory
from p2pnode.overlay.overlay import NotThisSwarm, OnlyItself

#: A restarted founder looks for its swarm among remembered peers this long before it founds the swarm again.
REJOIN_TIMEOUT_S = 5.0
BOOTSTRAP_HINT = "it dials them until one answers; see that they run, or give the address of another member"
WAITING_HINT = (
    "only its founder opens a swarm again; start it or any other member, or see why they cannot be reached; if the "
    "founder is lost, `p2pnode start --reopen` opens the swarm from this node's state"
)


@dataclass(eq=False)
class SwarmEntry(NodePart):
    """Of one node."""

    directory: StateDirectory
    #: This node founded the swarm, now or in an earlier run.
    founder: bool = False
    #: The founder found no other node of its swarm: it resumes from the states that its nodes have on disk.
    resumes: bool = False
    #: No member of the swarm has answered yet, and this node may not open it again.
    waits_for_swarm: bool = False

    async def connect(self) -> None:
        """Join through any peer, or found. Raises `UserError` if there is nobody to dial, or only another swarm."""
        try:
            await self._connect()
        except NotThisSwarm as error:
            raise UserError(
                str(error),
                hint="check swarm.bootstrap and swarm.run; a state directory belongs to one swarm: name another one "
                "with --state-dir, or remove what is there with `p2pnode forget`",
                exit_code=ExitCode.MISMATCH,
            ) from error

    async def _connect(self) -> None:
        bootstraps, genesis, opens = self.config.swarm.bootstrap, self.directory.genesis, self.environment.reopens
        knows_others = bool(bootstraps or self.overlay.remembered())
        if genesis is None:
            if opens:
                raise UserError(
                    "there is no swarm to open again: this state directory has not been in one",
                    hint="leave --reopen out to found a swarm, or name the right directory with --run or --state-dir",
                    exit_code=ExitCode.USAGE,
                )
            if not knows_others:
                if not await self.overlay.join_local():
                    await self._found(self.environment.entropy.token(16))
                return
        # None: the record is lost, which says who founded.
        elif opens or (self.directory.record.founder is not False and not bootstraps):
            await self._rejoin(bootstraps, genesis)
            return
        elif not knows_others and self.config.swarm.discover == "off":
            raise self._nobody_to_dial()
        try:
            await self._join(bootstraps, genesis)
        except OnlyItself:
            if genesis is None:
                self.log.info("bootstrap_is_this_node", addresses=bootstraps)
                await self._found(self.environment.entropy.token(16))
            elif self.directory.record.founder is False:
                raise self._nobody_to_dial() from None
            else:
                await self._rejoin([], genesis)

    async def _join(self, bootstraps: list[str], genesis: bytes | None) -> None:
        """Dial until a node of the swarm answers, however long that takes, and say so after a moment."""
        joining = asyncio.ensure_future(self.overlay.join(bootstraps, genesis=genesis))
        try:
            await asyncio.wait([joining], timeout=REJOIN_TIMEOUT_S)
            if genesis is not None and not joining.done():
                self.waits_for_swarm = True
                self.log.warning("waiting_for_swarm", run=self.config.swarm.run, hint=WAITING_HINT)
            elif not joining.done():
                tried = dict(self.overlay.failures)
                self.log.warning("waiting_for_bootstrap", waited_s=REJOIN_TIMEOUT_S, tried=tried, hint=BOOTSTRAP_HINT)
            await joining
        finally:
            self.waits_for_swarm = False
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)

    def _nobody_to_dial(self) -> UserError:
        return UserError(
            f'this node is a member of run "{self.config.swarm.run}", which another node founded, and it knows no '
            "address of another member",
            hint="give one with --bootstrap HOST:PORT, or a new invitation; if all others are lost, `p2pnode start "
            "--reopen` opens the swarm again from this node's state",
            exit_code=ExitCode.CONFIGURATION,
        )

    async def _rejoin(self, bootstraps: list[str], genesis: bytes) -> None:
        """Look for the swarm this node may open: it may have continued without this node."""
        if bootstraps or self.overlay.remembered() or await self.overlay.has_local_peer():
            try:
                async with asyncio.timeout(REJOIN_TIMEOUT_S):
                    await self.overlay.join(bootstraps, genesis=genesis)
                return
            except (TimeoutError, NotThisSwarm):
                self.log.warning("swarm_not_found_again", waited_s=REJOIN_TIMEOUT_S, peers=self.overlay.remembered())
        self.resumes = True
        await self._found(genesis)

    async def _found(self, genesis: bytes) -> None:
        if self.config.node.role == "master":
            raise UserError(
                "a master joins a swarm and founds none: it has no model",
                "start a node that trains first, and give its address with --bootstrap HOST:PORT",
                ExitCode.CONFIGURATION,
            )
        self.founder = True
        # Before it is told to anybody: those that have entered this swarm enter no other one.
        await self.directory.keep_genesis(genesis)
        self.overlay.found(genesis)

    async def keep_founded(self) -> None:
        """At the end: others that have entered the new swarm wait for it, even if this start has failed before it had
        a model. With a record the state directory stays, and the next start opens the same swarm."""
        genesis = self.overlay.genesis
        if self.founder and genesis is not None and self.overlay.has_admitted and not self.directory.record.run:
            await self.directory.remember(self.config.swarm.run, genesis, None, founder=True, given={})

    async def remember_swarm(self) -> None:
        """This node, which has no model, is in its swarm."""
        assert self.overlay.genesis is not None
        run, given = self.config.swarm.run, self.environment.given
        await self.directory.remember(run, self.overlay.genesis, None, founder=False, given=given)

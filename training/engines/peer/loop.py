"""The loop of the peer-to-peer engine at one node: stop, schedule, get, push, update, count the step, barrier.

Updates are acknowledged (stored and replicated, each applied once) before the step that made them is counted. A peer
that is seen to have completed a step has therefore all its updates of it in the values.

Under bsp no node may read an update of step t + 1 before it has read all of its own values for that step. Owners apply
updates as they come, so there the step has two phases, each with the barrier: every node has *read*, then every node
has *updated*. Both are announced, so a node announces twice its step. The other barriers have one phase. The order of
the verbs is that of Actor's client (Wang, Catterall and Mortier 2017). A step is announced by the host, which waits
too, so the loop runs in a script and, in tests, on a virtual clock.
"""

from __future__ import annotations

from typing import Protocol

from p2pnode.training.engines.program import Context, Verbs
from p2pnode.training.values.store import ValueStore


class PeerHost(Protocol):
    """What the loop needs of its node."""

    @property
    def store(self) -> ValueStore: ...

    @property
    def is_synchronous(self) -> bool:
        """Whether the barrier of the settings is bsp."""
        ...

    @property
    def is_stopping(self) -> bool:
        """Whether the node leaves."""
        ...

    async def begin(self) -> int:
        """Take part: wait for enough nodes, and return the count to begin with, which the others have announced."""
        ...

    async def count(self, count: int, seconds: float) -> None:
        """Announce a count; one step of the loop took so many seconds."""
        ...

    async def wait(self, count: int) -> None:
        """Wait at the barrier of the settings."""
        ...

    async def pause(self) -> None:
        """Between two tests of a barrier of the program."""
        ...

    async def finish(self) -> None:
        """Take part no more, and return when all others have finished too, or have had their time."""
        ...

    async def abandon(self) -> None:
        """Take part no more; the others go on."""
        ...


async def run_peer(verbs: Verbs, host: PeerHost, ctx: Context) -> int:
    """Run the verbs until `stop` says so or the node leaves; the number of the last step, which is in `ctx` meanwhile.

    Raises `VerbFailed`, `UpdateFailed` where a `pull` refused an update of this node, and errors of the store. After
    an error this node takes no part any more, and may begin again.
    """
    try:
        await _PeerLoop(verbs, host, ctx).run()
    except BaseException:
        await host.abandon()
        raise
    await host.finish()
    return ctx.step


class _PeerLoop:
    def __init__(self, verbs: Verbs, host: PeerHost, ctx: Context) -> None:
        self._verbs = verbs
        self._host = host
        self._phases = 2 if host.is_synchronous and verbs.barrier is None else 1
        self._began = 0.0
        self._ctx = ctx

    async def run(self) -> None:
        verbs, host, ctx = self._verbs, self._host, self._ctx
        # Between two steps of the others: never in the phase in which they update what this node would read.
        ctx.step = -(-await host.begin() // self._phases)
        self._began = ctx.clock()
        await self._pass(self._phases * ctx.step)
        while not host.is_stopping and not verbs.stops(ctx):
            self._began = ctx.clock()
            keys = verbs.scheduled(ctx)
            found = await host.store.get_many(keys) if keys else {}
            if self._phases == 2:
                await self._pass(2 * ctx.step + 1)
            updates = verbs.pushed(ctx, [(key, found[key].value if key in found else None) for key in keys])
            if updates:
                await host.store.update(updates)
            ctx.step += 1
            await self._pass(self._phases * ctx.step)

    async def _pass(self, count: int) -> None:
        """Announce the count, and wait at the barrier."""
        host = self._host
        await host.count(count, self._ctx.clock() - self._began)
        if self._verbs.barrier is None:
            await host.wait(count)
            return
        while not host.is_stopping and not self._verbs.passes(self._ctx):
            await host.pause()

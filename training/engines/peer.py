"""`p2pnode.engine("p2p")`: the peer-to-peer engine, as a script uses it, and its loop at one node: stop, schedule, get,
push, update, count the step, barrier.

    engine = p2pnode.engine("p2p")

    @engine.register_schedule
    def schedule(ctx): ...

    engine.start()

The script runs at every node (`p2pnode run -- python script.py`). Its functions are called in the thread that calls
`start`, but `pull` in a thread of its own.

Updates are acknowledged (stored and replicated, each applied once) before the step that made them is counted. A peer
that is seen to have completed a step has therefore all its updates of it in the values.

Under bsp no node may read an update of step t + 1 before it has read all of its own values for that step. Owners apply
updates as they come, so there the step has two phases, each with the barrier: every node has *read*, then every node
has *updated*. Both are announced, so a node announces twice its step. The other barriers have one phase. The order of
the verbs is that of Actor's client (Wang, Catterall and Mortier 2017). The loop asks its node to announce steps and to
wait, so it runs in a script and, in tests, on a virtual clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from p2pnode.training.engines.link import EngineLink
from p2pnode.training.engines.program import Context, Program, Pulling, Verbs
from p2pnode.training.engines.values_link import Script, ScriptEngine, answer_pull, immediate
from p2pnode.training.trainer_link.engine_messages import (
    AbandonRun,
    BeginRun,
    Counted,
    CountStep,
    EngineReady,
    FinishRun,
    PullAsked,
    PullDone,
    WaitAtBarrier,
)
from p2pnode.training.values.encoding import Key
from p2pnode.training.values.store import NewValue, Stamped, ValueUpdate

#: Barriers by name; one of a program's own is registered.
METHODS = ("asp", "bsp", "ssp", "pbsp", "pssp")


class PeerToPeer(ScriptEngine, Verbs):
    """Named values that live at their owners in the swarm, and a program that updates them, at every node."""

    def __init__(self, link: EngineLink, ready: EngineReady) -> None:
        ScriptEngine.__init__(self, link, ready)
        Verbs.__init__(self)
        self._context = Context(self._script, 0)

    @classmethod
    def open(cls, *, barrier: str | None = None, staleness: int = 4, sample: int = 0) -> PeerToPeer:
        """Join the swarm of the node that has started this script; see `p2pnode.engine`."""
        if barrier not in (None, *METHODS):
            raise ValueError(f"there is no barrier {barrier!r}; there are {', '.join(METHODS)}")
        for name, number in (("staleness", staleness), ("sample", sample)):
            if number < 0:
                raise ValueError(f"{name} must be 0 or more, not {number}")
        return cls(*EngineLink.connect("p2p", barrier or "", staleness, sample))

    def start(self, program: Program | None = None) -> int:
        """Run the program, or what was registered, until `stop` says so here and everywhere; the number of the last
        step of this node.

        Steps begin when `training.min_nodes` are there, at 0 or where the others are. It returns when all nodes have
        stopped, or `training.linger_s` after this one, and early when the node is told to leave. Raises `VerbFailed`
        for a function that raised here, `UpdateFailed` where a `pull` elsewhere refused an update of this node, and
        `StoreUnavailable`. After an error the values can be used, and `start` be called again.
        """
        if program is not None:
            self.use(program)
        self._link.on_pull(self._pull)
        return immediate(run_peer(self, self._script, self._context))

    def set(self, key: Key, value: object) -> None:
        """Replace a value: a NumPy array, or what msgspec encodes, up to 1 MiB. Its timestamp is this node's step.
        Returns when owner and backup have it. Raises `ValueNotEncodable`, which names the key."""
        self._context.set(key, value)

    @property
    def worker_num(self) -> int:
        """How many live nodes take part, this one included if it does."""
        return self._script.worker_num()

    def _pull(self, asked: PullAsked) -> PullDone:
        def pull(updates: Sequence[ValueUpdate], present: Mapping[Key, Stamped]) -> Sequence[NewValue]:
            return self.pulled(
                Context(Pulling(present, self._script, [one.key for one in updates]), self._context.step), updates
            )

        return answer_pull(asked, pull)


async def run_peer(verbs: Verbs, node: Script, ctx: Context) -> int:
    """Run the verbs until `stop` says so or the node leaves; the number of the last step, which is in `ctx` meanwhile.

    Raises `VerbFailed`, `UpdateFailed` where a `pull` refused an update of this node, and errors of the store. After
    an error this node takes no part any more, and may begin again.
    """
    try:
        await _steps(verbs, node, ctx)
    except BaseException:
        await node.ask(AbandonRun())
        raise
    await node.ask(FinishRun())
    return ctx.step


async def _steps(verbs: Verbs, node: Script, ctx: Context) -> None:
    phases = 2 if node.is_synchronous and verbs.barrier is None else 1
    began = 0.0

    async def passed(count: int) -> None:
        """Announce the count, and wait at the barrier."""
        await node.ask(CountStep(count, ctx.clock() - began))
        if verbs.barrier is None:
            await node.ask(WaitAtBarrier(count))
            return
        while not node.is_stopping and not verbs.passes(ctx):
            await node.pause()

    begun = await node.ask(BeginRun())
    assert isinstance(begun, Counted)
    # Between two steps of the others: never in the phase in which they update what this node would read.
    ctx.step = -(-begun.count // phases)
    began = ctx.clock()
    await passed(phases * ctx.step)
    while not node.is_stopping and not verbs.stops(ctx):
        began = ctx.clock()
        keys = verbs.scheduled(ctx)
        found = await node.get_many(keys) if keys else {}
        if phases == 2:
            await passed(2 * ctx.step + 1)
        updates = verbs.pushed(ctx, [(key, found[key].value if key in found else None) for key in keys])
        if updates:
            await node.update(updates)
        ctx.step += 1
        await passed(phases * ctx.step)

"""`p2pnode.engine("p2p")`: the peer-to-peer engine, as a script uses it.

    engine = p2pnode.engine("p2p")

    @engine.register_schedule
    def schedule(ctx): ...

    engine.start()

The script runs at every node (`p2pnode run -- python script.py`). Its functions are called in the thread that calls
`start`, but `pull` in a thread of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from p2pnode.training.engines.link import EngineLink
from p2pnode.training.engines.peer.loop import run_peer
from p2pnode.training.engines.program import Context, Program, Verbs
from p2pnode.training.engines.values_link import LinkedStore, LinkedValues, Pulling, Script, answer_pull, immediate
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
from p2pnode.training.values.store import NewValue, Stamped, ValueStore, ValueUpdate

#: Barriers by name; one of a program's own is registered.
METHODS = ("asp", "bsp", "ssp", "pbsp", "pssp")


class PeerToPeer(Verbs):
    """Named values that live at their owners in the swarm, and a program that updates them, at every node."""

    def __init__(self, link: EngineLink, ready: EngineReady) -> None:
        super().__init__()
        self._link = link
        self._values = LinkedValues(link)
        self._script = Script(link, self._values, ready)
        self._host = _ScriptHost(link, ready, self._values)
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

    def __enter__(self) -> PeerToPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the node; it hands its values over when the script ends."""
        self._link.close()

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
        return immediate(run_peer(self, self._host, self._context))

    def get(self, key: Key, default: object = ...) -> Stamped:
        """A value and its timestamp; `default` with timestamp 0 where there is none. Raises `NoSuchValue`."""
        return self._context.get(key, default)

    def set(self, key: Key, value: object) -> None:
        """Replace a value: a NumPy array, or what msgspec encodes, up to 1 MiB. Its timestamp is this node's step.
        Returns when owner and backup have it. Raises `ValueNotEncodable`, which names the key."""
        self._context.set(key, value)

    def keys(self) -> list[Key]:
        """All keys of the run."""
        return self._values.keys()

    @property
    def worker_num(self) -> int:
        """How many live nodes take part, this one included if it does."""
        return self._script.worker_num()

    @property
    def node_id(self) -> str:
        """This node's id, in hexadecimal."""
        return self._script.node_id

    def _pull(self, asked: PullAsked) -> PullDone:
        def pull(updates: Sequence[ValueUpdate], present: Mapping[Key, Stamped]) -> Sequence[NewValue]:
            return self.pulled(
                Context(Pulling(present, self._script, [one.key for one in updates]), self._context.step), updates
            )

        return answer_pull(asked, pull)


class _ScriptHost:
    """The loop's host in a script; no method suspends."""

    def __init__(self, link: EngineLink, ready: EngineReady, values: LinkedValues) -> None:
        self._link = link
        self._pause_s = ready.pause_s
        self.store: ValueStore = LinkedStore(values)
        self.is_synchronous = ready.is_synchronous

    @property
    def is_stopping(self) -> bool:
        return self._link.is_stopping

    async def begin(self) -> int:
        reply = self._link.ask(BeginRun())
        assert isinstance(reply, Counted)
        return reply.count

    async def count(self, count: int, seconds: float) -> None:
        self._link.ask(CountStep(count, seconds))

    async def wait(self, count: int) -> None:
        self._link.ask(WaitAtBarrier(count))

    async def pause(self) -> None:
        time.sleep(self._pause_s)  # noqa: ASYNC251 - there is no event loop

    async def finish(self) -> None:
        self._link.ask(FinishRun())

    async def abandon(self) -> None:
        self._link.ask(AbandonRun())

"""What the loops of server and worker need of their node. A script implements it over the link to its daemon; the tests
implement it on a virtual clock. Pure.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from p2pnode.training.engines.program import Surroundings
from p2pnode.training.trainer_link.engine_messages import TaskCounts
from p2pnode.training.values.store import ValueStore

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Members:
    """`servers`: the known live ones, in the order of their ids, this node included if it is one. `gone`: which of the
    nodes that were asked about are dead or have left."""

    servers: Sequence[bytes]
    gone: Sequence[bytes] = ()


class Asked(Protocol):
    """A request of another node, which waits for its answer."""

    @property
    def sender(self) -> bytes: ...

    @property
    def payload(self) -> bytes: ...

    async def answer(self, payload: bytes) -> None: ...


class NodeHost(Protocol):
    """One node: a server, which alone receives requests and shows tasks, or a worker."""

    @property
    def node_id(self) -> bytes: ...

    @property
    def store(self) -> ValueStore: ...

    @property
    def surroundings(self) -> Surroundings: ...

    @property
    def is_stopping(self) -> bool:
        """Whether the node leaves."""
        ...

    def clock(self) -> float:
        """Monotonic seconds."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    async def members(self, nodes: Sequence[bytes] = ()) -> Members: ...

    async def announce(self, step: int) -> None:
        """Show the completed steps in the node's heartbeat."""
        ...

    async def show(self, step: int, counts: TaskCounts) -> None:
        """As `announce`, with what has become of the tasks in the node's status."""
        ...

    async def receive(self, timeout_s: float) -> Asked | None:
        """The next request; None after so many seconds."""
        ...

    async def call(self, node: bytes, payload: bytes) -> bytes:
        """Ask a server. Raises `NotAnswered`."""
        ...

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run a function of the program, which takes as long as it takes."""
        ...

    def beside(self, work: Callable[[], Awaitable[None]], every_s: float) -> AbstractAsyncContextManager[None]:
        """Run `work` every so many seconds beside what the block does; at its end the last one has ended too."""
        ...

"""What training requires of the overlay, as one protocol: membership, sampling, placement, and requests to peers.

`overlay.overlay.Overlay` implements it. The tests implement it with a table of peers and a light network, so that
training runs without sockets, failure detection or lookups. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.discovery.population import Population
from p2pnode.overlay.line.rate import MeasuredLine
from p2pnode.overlay.peers import Activity, Contact, Peer, PeerChange
from p2pnode.overlay.requests import Handler
from p2pnode.overlay.transport import Body, ReceivedResponse


class KnownPeers(Protocol):
    """The live peers that this node knows, by node id."""

    def __len__(self) -> int: ...

    def get(self, node_id: bytes, /) -> Peer | None: ...


class Swarm(Protocol):
    """The other nodes, as one node sees them."""

    @property
    def node_id(self) -> bytes: ...

    @property
    def address(self) -> Address:
        """Where other nodes reach this node; it may change."""
        ...

    @property
    def is_eligible(self) -> bool:
        """Whether this node may own shards itself: others reach it, and it is willing."""
        ...

    @property
    def peers(self) -> KnownPeers: ...

    # -- membership

    def members(self) -> list[Peer]:
        """All live peers known."""
        ...

    def contact(self, node_id: bytes) -> Contact | None:
        """The present address of a live peer."""
        ...

    def is_alive(self, node_id: bytes) -> bool:
        """Known, and neither dead nor left; a suspected peer counts as alive."""
        ...

    def is_gone(self, node_id: bytes) -> bool:
        """Known to be dead or to have left; an unknown node is neither gone nor alive."""
        ...

    def is_suspect(self, node_id: bytes) -> bool: ...

    def suspect(self, node_id: bytes, reason: str) -> None:
        """Have the failure detector probe this node now."""
        ...

    def watch(self, node_ids: Iterable[bytes]) -> None:
        """Have the failure detector probe these nodes in every round; replaces the previous list."""
        ...

    def on_change(self, callback: Callable[[PeerChange], None]) -> None:
        """Call `callback` synchronously with every change in the state of a peer."""
        ...

    def remembered(self) -> list[str]:
        """Addresses of peers stored on disk, also from earlier starts."""
        ...

    # -- sampling and barriers

    def population(self) -> Population: ...

    def workers(self) -> float:
        """Estimated number of live nodes that train, this node included if it does; at least 1."""
        ...

    def sample(self, count: int, since: float = 0.0) -> list[Peer]:
        """A uniform sample, without replacement, of at most `count` live peers that count for barriers."""
        ...

    def all_members(self, since: float = 0.0) -> list[Peer]:
        """All live peers known that count for barriers."""
        ...

    async def query_steps(self, node_ids: Sequence[bytes]) -> None:
        """Ask these nodes for their heartbeats at the same time; the answers update `peers`."""
        ...

    def announce(
        self,
        *,
        activity: Activity | None = None,
        step: int | None = None,
        step_seconds: float | None = None,
        samples: int | None = None,
    ) -> None:
        """Change this node's heartbeat; every later message carries it."""
        ...

    # -- placement

    async def lookup(self, target: bytes) -> list[Contact]:
        """The nodes closest to `target` that answered, closest first; this node included where it belongs."""
        ...

    def may_own(self, peer: Peer) -> bool:
        """Whether a peer is eligible to own shards and its streams work."""
        ...

    def takes_streams(self, node_id: bytes) -> bool:
        """False for a peer behind a NAT, and for a while after streams to a node failed repeatedly."""
        ...

    async def candidates(self, key: bytes) -> list[Contact]:
        """The nodes that should own `key`, best first."""
        ...

    async def candidates_of_all(self, keys: Sequence[bytes]) -> list[list[Contact]]:
        """`candidates` of several keys, which cost little more than one."""
        ...

    def capacity(self, node_id: bytes) -> int:
        """The capacity class that a node, this one included, has announced (`overlay.line.capacity`); 0: none."""
        ...

    @property
    def line(self) -> MeasuredLine:
        """The measured rates of this node's line."""
        ...

    # -- requests

    def register(self, name: str, handler: Handler, *, waits: bool = False) -> None:
        """Serve requests of this name. `waits`: the handler may wait for an answer of another node."""
        ...

    def request(
        self, to: Contact, name: str, payload: bytes, body: Body = (), *, timeout_s: float
    ) -> AbstractAsyncContextManager[ReceivedResponse]:
        """Send a request to a node. Raises `TransportError`."""
        ...

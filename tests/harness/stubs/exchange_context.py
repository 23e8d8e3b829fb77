"""An `ExchangeContext` over a scripted swarm: a table of peers, and requests that the test answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np

from p2pnode.overlay.discovery.population import Population, counted
from p2pnode.overlay.environment import Environment
from p2pnode.overlay.line.rate import MeasuredLine
from p2pnode.overlay.peers import Activity, Contact, PeerChange
from p2pnode.overlay.requests import Handler
from p2pnode.overlay.transport import Body, ReceivedResponse, Response, TransportError
from p2pnode.training.encoding.codec_choice import CodecChoice
from p2pnode.training.exchange.directory import OwnerDirectory
from p2pnode.training.exchange.messages import decode, encode
from p2pnode.training.exchange.owner.deltas import DeltaHandler
from p2pnode.training.exchange.peer_score import PeerScore
from p2pnode.training.exchange.rpc import ExchangeRpc
from p2pnode.training.exchange.run_state import RebalanceRequests, RunState, SwarmView
from p2pnode.training.exchange.store.replica import Replica
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.swarm import Swarm
from tests.harness.environment.simulated import InlineExecutor, ListLog, MemoryDisk, Record, VirtualClock
from tests.harness.swarms.exchange_overlay import chunks, collected
from tests.harness.swarms.exchange_swarm import StartEntropy

GENESIS = b"g" * 16
#: What a test answers to a request: a message, a message with a body, or an exception to raise.
Answer = msgspec.Struct | tuple[msgspec.Struct, list[bytes]] | Exception


class ScriptedSwarm:
    """Implements `training.swarm.Swarm`; the attributes are the script."""

    def __init__(self, me: Contact, others: Sequence[Contact] = ()) -> None:
        self.node_id = me.node_id
        self.address = me.address
        self.is_eligible = True
        self.peers: dict[bytes, Any] = {one.node_id: self._peer(one) for one in others}
        self._candidates: list[Contact] = [me, *others]
        self.suspects: list[bytes] = []
        self.gone: list[bytes] = []
        self.handlers: dict[str, Handler] = {}
        self.callbacks: list[Callable[[PeerChange], None]] = []
        #: Answers by name of the request: called with the receiver and the payload.
        self.answers: dict[str, Callable[[Contact, bytes], Answer]] = {
            "indirect": lambda to, _: TransportError("timeout", to.address, "no answer")
        }
        self.requests: list[tuple[str, Contact, bytes]] = []
        #: The last body of each request, by its name.
        self.bodies: dict[str, list[bytes]] = {}
        self.suspected: list[bytes] = []
        self.watched: list[bytes] = []
        self.worker_count = 1.0
        #: How long each request takes.
        self.request_s = 0.0
        self.line = MeasuredLine()

    @staticmethod
    def _peer(contact: Contact) -> Any:
        return SimpleNamespace(
            node_id=contact.node_id,
            contact=contact,
            eligible=True,
            step=0,
            step_seconds=0.0,
            last_heard=0.0,
            activity=Activity.READY,
            is_worker=lambda _now: True,
        )

    def members(self) -> list[Any]:
        return [peer for node_id, peer in self.peers.items() if node_id not in self.gone]

    def contact(self, node_id: bytes) -> Contact | None:
        return self.peers[node_id].contact if self.is_alive(node_id) else None

    def is_alive(self, node_id: bytes) -> bool:
        return node_id in self.peers and node_id not in self.gone

    def is_gone(self, node_id: bytes) -> bool:
        return node_id in self.gone

    def is_suspect(self, node_id: bytes) -> bool:
        return node_id in self.suspects

    def suspect(self, node_id: bytes, reason: str) -> None:
        self.suspected.append(node_id)

    async def query_steps(self, node_ids: Iterable[bytes]) -> None:
        """The steps in the script are the present ones."""

    def watch(self, node_ids: Iterable[bytes]) -> None:
        self.watched = list(node_ids)

    def on_change(self, callback: Callable[[PeerChange], None]) -> None:
        self.callbacks.append(callback)

    def remembered(self) -> list[str]:
        return []

    def workers(self) -> float:
        return self.worker_count

    def population(self) -> Population:
        return counted(len(self.peers) + 1)

    def capacity(self, node_id: bytes) -> int:
        return 0

    def may_own(self, peer: Any) -> bool:
        return bool(peer.eligible)

    def takes_streams(self, node_id: bytes) -> bool:
        return True

    async def candidates_of_all(self, keys: Sequence[bytes]) -> list[list[Contact]]:
        return [await self.candidates(key) for key in keys]

    async def candidates(self, key: bytes) -> list[Contact]:
        return [one for one in self._candidates if one.node_id not in self.gone]

    def register(self, name: str, handler: Handler, *, waits: bool = False) -> None:
        self.handlers[name] = handler

    @asynccontextmanager
    async def request(
        self, to: Contact, name: str, payload: bytes, body: Body = (), *, timeout_s: float
    ) -> AsyncIterator[ReceivedResponse]:
        self.requests.append((name, to, payload.removeprefix(GENESIS)))
        buffers = self.bodies[name] = await collected(body)
        answer = self.answers[name](to, payload.removeprefix(GENESIS))
        if isinstance(answer, Exception):
            raise answer
        if self.request_s:
            await asyncio.sleep(self.request_s)
        head, buffers = answer if isinstance(answer, tuple) else (answer, [])
        yield ReceivedResponse(encode(head), chunks(buffers))

    def sent(self, name: str, kind: Any) -> list[Any]:
        """The messages of all requests of this name."""
        return [decode(payload, kind) for sent_name, _, payload in self.requests if sent_name == name]

    async def deliver(self, name: str, sender: Contact, message: msgspec.Struct, kind: Any, body: Any = ()) -> Any:
        """Have this node handle a request; returns the message of its answer."""
        return decode((await self.respond(name, sender, message, body)).head, kind)

    async def respond(self, name: str, sender: Contact, message: msgspec.Struct, body: Any = ()) -> Response:
        """Have this node handle a request; returns its answer."""
        return await self.handlers[name](sender, GENESIS + encode(message), chunks(list(body)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeContext:
    """What the services under test are given."""

    swarm: Swarm
    environment: Environment
    genesis: bytes
    settings: ExchangeSettings
    stale_limit: int | None
    store: ShardStore
    replica: Replica
    run: RunState
    view: SwarmView
    rpc: ExchangeRpc
    rebalance: RebalanceRequests
    codec: CodecChoice


def context_of(swarm: ScriptedSwarm, store: ShardStore, *, settings: ExchangeSettings | None = None) -> ExchangeContext:
    """A context on the running virtual loop; its log is `records_of(context)`."""
    clock = VirtualClock()
    log = ListLog([], "", clock)
    run, score = RunState(incarnation=1), PeerScore(swarm.node_id, clock, log)
    plain = ExchangeSettings(codec="float32", weight="sum", outer_lr=1.0, outer_momentum=0.0)
    view: Any = swarm
    return ExchangeContext(
        swarm=view,
        environment=Environment(
            clock=clock,
            entropy=StartEntropy("context"),
            disk=MemoryDisk(),
            executor=InlineExecutor(),
            log=log,
        ),
        genesis=GENESIS,
        settings=settings or plain,
        stale_limit=None,
        store=store,
        replica=Replica(np.zeros(store.bounds[-1][1], np.float32), store.bounds),
        run=run,
        view=SwarmView(view, clock, run, score, has_backups=bool((settings or plain).replicas)),
        rpc=ExchangeRpc(swarm=view, genesis=GENESIS, clock=clock, score=score),
        rebalance=RebalanceRequests(store),
        codec=CodecChoice(settings or plain),
    )


def directory_of(context: ExchangeContext) -> OwnerDirectory:
    """Over the same swarm and store."""
    return OwnerDirectory(
        swarm=context.swarm,
        store=context.store,
        view=context.view,
        rpc=context.rpc,
        rebalance=context.rebalance,
        environment=context.environment,
    )


def deltas_of(context: ExchangeContext, **changes: Any) -> DeltaHandler:
    """The owner's side of a push; `changes` of its arguments."""
    given = {
        "swarm": context.swarm,
        "stale_limit": context.stale_limit,
        "settings": context.settings,
        "store": context.store,
        "view": context.view,
        "run": context.run,
        "rpc": context.rpc,
        "rebalance": context.rebalance,
        "codec": context.codec,
        "environment": context.environment,
    }
    return DeltaHandler(**{**given, **changes})


def records_of(owner: Any) -> list[Record]:
    """The events that were logged where a context, or an exchange, says."""
    return cast(ListLog, owner.environment.log).records

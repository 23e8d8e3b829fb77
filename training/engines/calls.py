"""Requests between scripts, through their daemons: a worker's script asks that of a server.

The payload is the scripts' own; the daemons do not look into it. A node whose script answers is a *server*: it has
`node.role = "server"`, and announces that it may own shards, which the workers of such a run do not. A call ends when
it is answered, when the other node is declared dead, or when its script has ended.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence

from p2pnode.overlay.ids import short
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import Buffer, RequestRejected, Response, TransportError, gathered, in_parts
from p2pnode.training.swarm import Swarm
from p2pnode.training.trainer_link.engine_messages import CallAnswered, CallReceived, MembersFound, NotAnswered

REQUEST = "script_call"
#: Longer than a server waits before it answers (`training.engines.server.service`), and than its verbs should take.
CALL_S = 60.0
#: Between two looks at whether the other node is dead.
LOOK_S = 0.25
#: The link between daemon and script takes messages of 64 MiB.
MAX_CALL_BYTES = 60 * 1024 * 1024
#: Calls that wait for this node's script. Each worker has two at most.
MAX_OPEN = 4096


class ScriptCalls:
    """Belongs to one node whose script uses the parameter server. `send` passes a call on to this node's script."""

    def __init__(self, swarm: Swarm, send: Callable[[CallReceived], None], *, is_server: bool) -> None:
        self._swarm = swarm
        self._send = send
        self._is_server = is_server
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[bytes]] = {}
        self._has_ended = False
        swarm.register(REQUEST, self._on_request, waits=True)

    def end(self) -> None:
        """This node's script has ended: whoever waits for it is refused."""
        self._has_ended = True
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(RequestRejected("the script of this node has ended"))

    def members(self, nodes: Sequence[bytes]) -> MembersFound:
        """The servers among the known live nodes, and which of `nodes` are gone."""
        servers = [peer.node_id for peer in self._swarm.members() if peer.eligible]
        own = [self._swarm.node_id] if self._is_server else []
        return MembersFound(sorted([*servers, *own]), [node for node in nodes if self._swarm.is_gone(node)])

    # -- calls of this node's script

    async def call(self, node: bytes, payload: bytes) -> bytes:
        """What the script of that node answers. Raises `NotAnswered`."""
        contact = self._swarm.contact(node)
        if contact is None:
            raise NotAnswered(f"the node {short(node)} is not known to live")
        calling = asyncio.create_task(self._called(contact, payload), name="script-call")
        try:
            while not calling.done():
                await asyncio.wait([calling], timeout=LOOK_S)
                if self._swarm.is_gone(node):
                    raise NotAnswered(f"the node {short(node)} is gone")
            return calling.result()
        except (TransportError, ValueError) as error:
            raise NotAnswered(str(error)) from error
        finally:
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)

    async def _called(self, contact: Contact, payload: bytes) -> bytes:
        async with self._swarm.request(contact, REQUEST, b"", in_parts(payload), timeout_s=CALL_S) as response:
            return await gathered(response.body, MAX_CALL_BYTES)

    # -- calls of other nodes' scripts

    async def _on_request(self, sender: Contact, _: bytes, body: AsyncIterator[Buffer]) -> Response:
        if not self._is_server:
            raise RequestRejected('this node is no server: it has not node.role = "server"')
        if self._has_ended or len(self._open) >= MAX_OPEN:
            raise RequestRejected("the script of this node answers no calls now")
        try:
            payload = await gathered(body, MAX_CALL_BYTES)
        except ValueError as error:
            raise RequestRejected(f"a call: {error}") from error
        number = next(self._numbers)
        waiting = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(CallReceived(number, sender.node_id, payload))
            return Response(b"", in_parts(await waiting))
        finally:
            del self._open[number]

    def on_answer(self, answer: CallAnswered) -> None:
        """The script has answered a call; one that nobody waits for any more is dropped."""
        waiting = self._open.get(answer.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer.payload)

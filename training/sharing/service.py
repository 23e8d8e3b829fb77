"""Shares the data of this node's script with the other nodes: the daemon's side of `swarm.sampler` and `swarm.shard`.

`DataMember` decides. This service exchanges its statements over requests: with all whose answer is missing at once, and
with one member about every second. It answers the trainer's `DataWanted` when the member is admitted, which takes one
round trip, and at most `ADMISSION_S` if a member does not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import msgspec

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.ids import short
from p2pnode.overlay.peers import Contact, PeerChange
from p2pnode.overlay.supervision import logged, supervised
from p2pnode.overlay.transport import Buffer, RequestRejected, Response, TransportError, gathered, in_parts
from p2pnode.training.sharing.member import ADMISSION_S, DataMember
from p2pnode.training.sharing.messages import ShareData
from p2pnode.training.swarm import Swarm
from p2pnode.training.trainer_link.data_messages import (
    DataFromTrainer,
    DataGranted,
    DataKnown,
    DataOpened,
    DataShape,
    DataTrained,
    DataWanted,
)
from p2pnode.training.trainer_link.interface import Trainer
from p2pnode.training.trainer_link.record_messages import RecordsFromTrainer

REQUEST = "share_data"
#: A living node answers at once: the request has no body.
REQUEST_TIMEOUT_S = 2.0
#: Seconds between two exchanges with some member, and between two attempts at one whose answer is missing.
SYNC_S = 1.0
RETRY_S = 0.25
#: Nodes that are asked at the same time.
MAX_ASKED = 8
#: Of one request or answer.
MAX_MESSAGE_BYTES = 8 << 20
#: A new iteration is stated at once, if the last exchange was this long ago: with little data epochs are short.
HURRY_S = 0.2
#: What is known to be trained goes to the trainer, for its next checkpoint, at most this often.
KNOWN_S = 1.0


class DataService:
    """One node's share of the data; does nothing until the script opens a data set."""

    def __init__(self, swarm: Swarm, trainer: Trainer, incarnation: int, environment: Environment) -> None:
        self.member: DataMember | None = None
        self._swarm = swarm
        self._trainer = trainer
        self._incarnation = incarnation
        self._clock = environment.clock
        self._random = environment.entropy.random
        self._log = environment.log
        self._wanted: DataWanted | None = None
        self._wake = asyncio.Event()
        self._known_s = 0.0
        self._synced_s = 0.0
        self._next_sync_s = 0.0
        self._asking: dict[bytes, asyncio.Task[bool]] = {}
        self._said: dict[tuple[str, bytes], None] = {}
        self._task: asyncio.Task[None] | None = None
        trainer.on_data(self.on_trainer)

    async def start(self) -> None:
        """Serve requests and begin to exchange statements."""
        self._swarm.register(REQUEST, self._on_request)
        self._swarm.on_change(self._on_change)
        self._task = asyncio.create_task(supervised("share-data", self._run, logged(self._log)), name="share-data")

    async def stop(self) -> None:
        """Cancel all tasks; idempotent."""
        tasks = [*self._asking.values(), *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._asking.clear()
        self._task = None

    async def leave(self, timeout_s: float) -> None:
        """State to every member how far this node has come; it begins nothing any more."""
        member = self.member
        if member is None or member.has_left:
            return
        member.leave()
        self._serve()
        waiting = {node for node, _ in member.view() if node != self._swarm.node_id}
        try:
            async with asyncio.timeout(timeout_s):
                while waiting:
                    told = await asyncio.gather(*(self._exchange(member, node) for node in sorted(waiting)))
                    waiting -= {node for node, heard in zip(sorted(waiting), told, strict=True) if heard}
                    waiting = {node for node in waiting if not self._swarm.is_gone(node)}
                    if waiting:
                        await asyncio.sleep(RETRY_S)
        except TimeoutError:
            self._log.info("data_left_untold", peers=[short(node) for node in sorted(waiting)])

    # -- the trainer ---------------------------------------------------------------------------------------------

    def on_trainer(self, message: DataFromTrainer | RecordsFromTrainer) -> None:
        """What the trainer has sent; records are dispatched elsewhere."""
        match message:
            case DataOpened():
                self._open(message)
            case DataWanted():
                self._wanted = message
                self._serve()
            case DataTrained() if self.member is not None:
                self.member.on_trained(message.trained, message.partitions)
                self._tell_known(self.member, message.turn)

    def _open(self, message: DataOpened) -> None:
        now = self._clock.monotonic()
        self._wanted = None
        member = self.member
        if member is None or member.shape != message.shape:
            self.member = member = DataMember(self._swarm.node_id, self._incarnation, message.shape, now)
            self._log.info("data_opened", kind=message.shape.kind, size=message.shape.size)
        else:
            member.grant_again()
        if message.state is not None:
            member.restore(message.state)
        self._note_peers(member, now)
        self._wake.set()

    def _serve(self) -> None:
        """Answer the trainer, if this node may begin something now or has nothing to begin."""
        wanted, member = self._wanted, self.member
        now = self._clock.monotonic()
        if wanted is None or member is None:
            return
        if member.has_left:
            self._wanted = None
            self._trainer.send_data(DataGranted(wanted.number, member.epoch, []))
            return
        if not member.is_admitted(now):
            return
        if wanted.begins:
            if not member.begin(now, finished=wanted.finished, has_claims=wanted.has_claims):
                return
            self._next_sync_s = min(self._next_sync_s, self._synced_s + HURRY_S)
            self._wake.set()
        self._wanted = None
        claims = member.claim(wanted.position, wanted.count)
        if not claims and wanted.begins and not wanted.has_claims:
            claims = [member.claim_copy()]
        self._trainer.send_data(DataGranted(wanted.number, member.epoch, claims))
        self._warn(member)

    def _tell_known(self, member: DataMember, turn: int) -> None:
        now = self._clock.monotonic()
        if now - self._known_s >= KNOWN_S:
            self._known_s = now
            self._trainer.send_data(DataKnown(turn, member.state()))

    def warnings(self) -> list[tuple[str, str]]:
        """What is unusual about the shared data, each with what to do."""
        return [] if self.member is None else [(what, do) for _, _, what, do in _unusual(self.member)]

    def _warn(self, member: DataMember) -> None:
        """Log what is unusual, each thing once."""
        for event, about, what, do in _unusual(member):
            if (event, about) not in self._said:
                self._said[event, about] = None
                self._log.warning(event, reason=what, hint=do)

    # -- the other nodes -----------------------------------------------------------------------------------------

    def _note_peers(self, member: DataMember, now: float) -> None:
        member.on_peers([peer.node_id for peer in self._swarm.members()], now)

    def _on_change(self, change: PeerChange) -> None:
        if self.member is not None and change.kind in ("dead", "left", "restarted"):
            self.member.on_gone(change.node_id)
            self._serve()

    async def _on_request(self, sender: Contact, _: bytes, body: AsyncIterator[Buffer]) -> Response:
        request = await _read(body)
        if request is None:
            raise RequestRejected("malformed ShareData")
        member = self.member
        if member is None:
            return Response(b"", _body(ShareData([])))
        member.on_message(sender.node_id, request, self._clock.monotonic())
        self._serve()
        return Response(b"", _body(member.answer(request)))

    async def _run(self) -> None:
        """Keep asking those whose answer is missing, and exchange statements with one member after another."""
        while True:
            member = self.member
            now = self._clock.monotonic()
            missing: list[bytes] = []
            if member is not None:
                self._note_peers(member, now)
                missing = member.missing()
                for node in missing:
                    self._ask(member, node)
                if now >= self._next_sync_s:
                    self._synced_s = now
                    self._next_sync_s = now + SYNC_S * self._random.uniform(0.5, 1.5)
                    for node in member.partners(self._random):
                        self._ask(member, node)
                self._serve()
            self._wake.clear()
            wait_s = (
                None
                if member is None
                else RETRY_S
                if missing or self._wanted is not None
                else max(0.0, self._next_sync_s - now)
            )
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _ask(self, member: DataMember, node: bytes) -> None:
        # A joiner's first answers bring the statements of all, so it must not ask everybody at once.
        if node not in self._asking and len(self._asking) < MAX_ASKED:
            task = asyncio.create_task(self._exchange(member, node), name="ask-data")
            self._asking[node] = task
            task.add_done_callback(lambda _: self._asking.pop(node, None))

    async def _exchange(self, member: DataMember, node: bytes) -> bool:
        """Exchange statements with a node; whether it answered."""
        contact = self._swarm.contact(node)
        if contact is None:
            return False
        try:
            body = _body(member.request())
            async with self._swarm.request(contact, REQUEST, b"", body, timeout_s=REQUEST_TIMEOUT_S) as response:
                answer = await _read(response.body)
        except TransportError as error:
            if error.kind != "rejected":
                return False
            answer = ShareData([])  # it does not serve this request, and so shares no data
        if answer is None:
            return False
        if member is self.member:
            member.on_message(node, answer, self._clock.monotonic())
            self._serve()
        return True


def _unusual(member: DataMember) -> Iterator[tuple[str, bytes, str, str]]:
    """(event, node or nothing, what, what to do)"""
    if member.is_short_of_data():
        yield (
            "data_short",
            b"",
            f"{len(member.view())} nodes share {member.ledger.partitions} samples: some train those of others too",
            "run fewer nodes, or use more data",
        )
    for node in member.unanswered:
        yield (
            "data_member_silent",
            node,
            f"{short(node)} shares data and did not answer within {ADMISSION_S:g} s: both may train the same samples",
            "see whether it can be reached",
        )
    for node, shape in member.strangers.items():
        yield (
            "data_differs",
            node,
            f"{short(node)} has other data ({_named(shape)}) than this node ({_named(member.shape)}): "
            "they share nothing",
            "give all nodes the same data, the same block and the same training.seed; or let none share it, where each "
            "has data of its own: SwarmCallback(share_data=False)",
        )
    if member.ledger.given_up:
        yield (
            "data_given_up",
            b"",
            f"other nodes were so far ahead that {member.ledger.given_up} epochs, or parts of them, were left out here",
            "a node that was stopped for long does so once; otherwise see why this one is so slow",
        )


def _named(shape: DataShape) -> str:
    what = f"a stream in blocks of {shape.size}" if shape.is_stream else f"{shape.size} samples"
    return f"{what}, seed {shape.seed}"


def _body(message: ShareData) -> list[memoryview]:
    """The statements of a thousand nodes do not fit a head."""
    return in_parts(msgspec.msgpack.encode(message))


async def _read(body: AsyncIterator[Buffer]) -> ShareData | None:
    """None for a malformed message."""
    try:
        return msgspec.msgpack.decode(await gathered(body, MAX_MESSAGE_BYTES), type=ShareData)
    except ValueError:
        return None

"""Parts of `/status` that not every node has, and the peers of a node: those that live, and those that it lost lately.

The list of peers has the furthest ahead first, with the age of each number and the shards that they own. A lost peer
that comes back is forgotten, so what is shown is what is missing now.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from p2pnode.lifecycle.node import Node
from p2pnode.overlay.line.rate import MeasuredLine
from p2pnode.overlay.peers import Activity, Peer, PeerChange
from p2pnode.status.schema import (
    CoordinationStatus,
    DeviceStatus,
    DispatchStatus,
    GpuStatus,
    LineStatus,
    LostPeer,
    MemoryStatus,
    Ongoing,
    PeerStatus,
    QuarantinedMember,
    ServerStatus,
    ValuesStatus,
)
from p2pnode.training.devices.host import HostTrainer
from p2pnode.training.dispatch.master import MasterFacts
from p2pnode.training.dispatch.worker import RecordsFacts
from p2pnode.training.encoding.codec_choice import CodecChoice, LineFacts
from p2pnode.training.exchange.exchange import Exchange
from p2pnode.training.supervisor.gpu_monitor import GpuMonitor
from p2pnode.training.trainer_link.engine_messages import TaskCounts
from p2pnode.training.trainer_link.interface import Trainer


def dispatch_status(
    source: str, master: MasterFacts | None, records: RecordsFacts | None, now: float
) -> DispatchStatus | None:
    """The records of this node; None for a node that neither serves nor draws any. `now`: monotonic seconds."""
    if master is None and records is None:
        return None
    counts = None if records is None else records.counts
    trouble = None if records is None else records.trouble
    queue = None if master is None else master.queue
    if queue is None and counts is not None:
        queue = counts.queue
    counted = {} if queue is None else msgspec.structs.asdict(queue)
    counted.pop("end", None)
    return DispatchStatus(
        **counted,
        source=source,
        serves=master is not None and master.serves_since is not None,
        serves_seconds=None if master is None or master.serves_since is None else round(now - master.serves_since, 3),
        master=None if records is None or records.master is None else records.master.hex(),
        store=master.store if master is not None else (counts.store if counts is not None else ""),
        epoch=0 if master is None else master.epoch,
        discarded=master.discarded if master is not None else (counts.discarded if counts is not None else 0),
        held=0 if records is None else records.held,
        records_trained=0 if records is None else records.trained,
        tasks_finished=0 if records is None else records.finished,
        tasks_superseded=0 if records is None else records.superseded,
        ended=records is not None and records.ended,
        last_error=_last_error(master, records),
        unanswered_seconds=None if trouble is None else round(max(0.0, now - trouble.since), 3),
    )


def _last_error(master: MasterFacts | None, records: RecordsFacts | None) -> str:
    if records is not None and records.refused is not None:
        return records.refused[0]
    if records is not None and records.trouble is not None:
        return records.trouble.reason
    return "" if master is None else master.reason


def device_status(trainer: Trainer) -> list[DeviceStatus]:
    """One entry per trainer; none where there is a single one."""
    if not isinstance(trainer, HostTrainer):
        return []
    return [
        DeviceStatus(
            index=one.index,
            device=one.name,
            state=one.state,
            pid=one.pid,
            failures=one.failures,
            optimizer_steps=one.optimizer_steps,
            samples=one.samples,
            loss=one.last.loss if one.last is not None and math.isfinite(one.last.loss) else None,
            step_seconds=one.last.seconds if one.last is not None else 0.0,
            leads=one.leads,
        )
        for one in trainer.devices()
    ]


def gpu_status(monitor: GpuMonitor) -> list[GpuStatus]:
    """One entry per GPU that the driver knows."""
    return [GpuStatus(device=device, **one._asdict()) for device, one in sorted(monitor.readings.items())]


def coordination_status(trainer: Trainer) -> CoordinationStatus | None:
    """None where each node decides for itself."""
    found = trainer.coordination if isinstance(trainer, HostTrainer) else None
    if found is None:
        return None
    return CoordinationStatus(
        server=found.server.hex() or None,
        serves=found.serves,
        trainers=found.trainers,
        leader=found.leader.hex() or None,
    )


def values_status(exchange: Exchange | None) -> ValuesStatus | None:
    """The named values of this node; None in a run of a model, and before the exchange has begun."""
    if exchange is None or not exchange.store.holds_values:
        return None
    handler = exchange.values.handler
    rounds = handler.rounds
    tables = [owned.state.table for owned in exchange.store.owned.values() if owned.state.table is not None]
    return ValuesStatus(
        keys=sum(len(table.entries) for table in tables),
        bytes=sum(table.size_bytes for table in tables),
        limit_bytes=rounds.limit_bytes,
        updates=rounds.applied,
        refused=rounds.refused,
        reads=handler.reads,
        batches=rounds.batches,
        waiting=rounds.waiting,
        waiting_bytes=rounds.waiting_bytes,
        unanswered=exchange.values.waiting(),
    )


def server_status(tasks: TaskCounts | None) -> ServerStatus | None:
    """The tasks of the parameter server, where this node serves."""
    return None if tasks is None else ServerStatus(**msgspec.structs.asdict(tasks))


def line_status(
    line: MeasuredLine, choice: CodecChoice | None, facts: LineFacts | None, held_back: float | None = None
) -> LineStatus:
    """The line, and beside it what a step sends in the present codec; without an exchange the line alone."""
    upload, bound, download = line.upload_bytes_per_s, line.upload.bytes_per_s, line.download.bytes_per_s
    needed = carried = None
    if choice is not None and facts is not None and facts.shape.nodes > 1.0:
        needed = round(choice.needed_bytes(facts))
        if upload is not None and facts.step_s:
            carried = round(upload * facts.step_s)
    return LineStatus(
        upload_bytes_per_s=None if upload is None else round(upload),
        upload_at_least_bytes_per_s=None if bound is None else round(bound),
        download_bytes_per_s=None if download is None else round(download),
        capacity=line.capacity,
        capacity_source=line.capacity_source,
        codec="" if choice is None else choice.codec,
        codec_reason="" if choice is None else choice.reason,
        needed_bytes_per_step=needed,
        carried_bytes_per_step=carried,
        held_back_deltas=held_back,
    )


def memory_status(node: Node) -> MemoryStatus:
    """Of a node without a model yet there is only what is free and what its process has."""
    budget = node.budget()
    return MemoryStatus(
        budget_bytes=None if budget is None else budget.total,
        parts={} if budget is None else budget.parts(),
        available_bytes=node.environment.available_memory(),
        trainer_bytes=node.trainer_bytes,
        private_bytes=node.environment.private_memory(),
    )


def quarantined(exchange: Exchange | None) -> list[QuarantinedMember]:
    found = [] if exchange is None else exchange.view.score.quarantined()
    return [QuarantinedMember(id=one.node.hex(), reason=one.reason, seconds=round(one.seconds, 1)) for one in found]


def ongoing(node: Node, uptime_s: float) -> list[Ongoing]:
    """The join, the download of the state, nodes that are missing, the steps of the run, and the last checkpoint."""
    found = []
    if node.phase == "joining":
        found.append(_join(node, uptime_s))
    if node.state == "waiting_for_nodes":
        have, need = node.nodes_ready(), node.config.training.min_nodes
        found.append(Ongoing(what="nodes", done=min(have, need), total=need, unit="nodes", since_seconds=uptime_s))
    if (steps := _steps(node)) is not None:
        found.append(steps)
    if node.checkpoints is not None and (written := node.checkpoints.progress_of_last) is not None:
        found.append(_bytes("last checkpoint", *written))
    return found


def awaits_script(node: Node) -> bool:
    """Whether the user's script runs and has neither called `attach` nor opened an engine: it may read data for
    minutes, or never do so."""
    return node.trainer.is_script and node.trainer.state == "starting"


def _join(node: Node, uptime_s: float) -> Ongoing:
    exchange = node.exchange
    if exchange is not None and (download := exchange.pull_client.download) is not None:
        return _bytes("download of the state", *download)
    if node.overlay.genesis is None:
        what = "join the swarm"
    elif node.manifest is None:
        what = "start the trainer" if not awaits_script(node) else "wait until the script calls p2pnode.attach"
    else:
        what = "join"
    return Ongoing(what=what, done=0, total=0, unit="", since_seconds=uptime_s)


def _steps(node: Node) -> Ongoing | None:
    """The steps of a run with an end, while it trains."""
    total, step, turn_s = node.config.training.max_steps, node.progress.step, node.progress.turn_seconds
    if not total or node.phase != "training":
        return None
    left_s = None if turn_s is None else round(max(0, total - step) * turn_s, 1)
    done_s = 0.0 if turn_s is None else round(step * turn_s, 1)
    return Ongoing(
        what="max_steps", done=min(step, total), total=total, unit="steps", since_seconds=done_s, left_seconds=left_s
    )


def _bytes(what: str, done: int, total: int, passed_s: float) -> Ongoing:
    """Work that is counted in bytes; the rest goes as the part that is done."""
    left_s = round((total - done) * passed_s / done, 1) if done > 0 else None
    return Ongoing(
        what=what, done=done, total=total, unit="bytes", since_seconds=round(passed_s, 3), left_seconds=left_s
    )


#: Peers kept, the newest ones; more are counted by nobody and matter to nobody.
MAX_KEPT = 32
#: A loss is old news after this long.
KEPT_S = 3600.0


def peer_list(node: Node) -> list[PeerStatus]:
    """One entry per live peer, furthest ahead first."""
    now = node.environment.clock.monotonic()
    step = node.progress.step
    ordered = sorted(node.overlay.members(), key=lambda peer: (-peer.step, peer.node_id))
    owned = _owned(node)
    return [
        PeerStatus(
            id=peer.node_id.hex(),
            address=str(peer.address),
            step=peer.step,
            lag=step - peer.step,
            state=_state(node, peer.node_id, peer.activity),
            round_trip_ms=None if peer.round_trip_s is None else round(1000 * peer.round_trip_s, 3),
            last_seen_seconds=round(now - peer.last_heard, 3),
            incarnation=peer.incarnation,
            step_seconds=peer.step_seconds,
            eligible=peer.eligible,
            progress_seconds=round(max(0.0, now - peer.last_progress), 3),
            samples=peer.samples,
            shards=None if owned is None else owned[peer.node_id],
            version=peer.version or None,
        )
        for peer in ordered
    ]


def _owned(node: Node) -> Counter[bytes] | None:
    """Shards per owner, as far as this node knows."""
    exchange = node.exchange
    if exchange is None:
        return None
    return Counter(known.owner.node_id for known in exchange.store.ownership.known_owners.values())


def _state(node: Node, node_id: bytes, activity: Activity) -> str:
    if node.overlay.is_suspect(node_id):
        return "suspect"
    return "waiting_for_nodes" if activity is Activity.READY else activity.name.lower()


class _Loss(NamedTuple):
    change: PeerChange
    at_s: float


class LostPeers:
    """Follows the changes of peers. `now` returns monotonic seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._losses: dict[bytes, _Loss] = {}

    def note(self, change: PeerChange) -> None:
        """A change in the state of a peer."""
        if change.kind in ("up", "returned", "restarted"):
            self._losses.pop(change.node_id, None)
        elif change.kind in ("dead", "left") and change.last is not None:
            self._losses.pop(change.node_id, None)
            if len(self._losses) >= MAX_KEPT:
                del self._losses[next(iter(self._losses))]
            self._losses[change.node_id] = _Loss(change, self._now())

    def rows(self) -> list[LostPeer]:
        """The peers that are missing, newest loss first."""
        now = self._now()
        return [
            _row(loss.change, loss.change.last, now - loss.at_s)
            for loss in reversed(self._losses.values())
            if loss.change.last is not None and now - loss.at_s <= KEPT_S
        ]


def _row(change: PeerChange, last: Peer, seconds: float) -> LostPeer:
    return LostPeer(
        id=change.node_id.hex(),
        address=str(last.address),
        how="left" if change.kind == "left" else "dead",
        reason=change.reason,
        step=last.step,
        seconds_ago=round(max(0.0, seconds), 3),
    )

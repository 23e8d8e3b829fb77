"""What a staged node shows: each state of a node that the dashboard has to show well, and some that attack it.

A scene is the status, peers and events of one moment. `moved` makes the moment later: a node that trains makes steps,
its loss falls, and its counters rise. Pure.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import fields, replace

from p2pnode.status.events import Level
from p2pnode.status.schema import (
    BarrierStatus,
    CoordinationStatus,
    DataStatus,
    DeviceStatus,
    DispatchStatus,
    ExchangeStatus,
    Finding,
    GpuStatus,
    LineStatus,
    LoopStatus,
    LostPeer,
    MemoryStatus,
    Ongoing,
    PeerStatus,
    QuarantinedMember,
    ResultStatus,
    ServerStatus,
    Status,
    SwarmStatus,
    ValuesStatus,
    WaitingStatus,
)
from p2pnode.training.goal import Best
from tests.process.harness.fake_node import STATUS

Part = TypeVar("Part", bound=Struct)

STEP_S = 1.4
GOAL = 2000
SHARDS = 64
#: What a peer might put where it may choose a text.
EVIL = (
    '<img src=x onerror="window.owned=1">',
    "<script>window.owned=1</script>",
    "'\"><svg onload=window.owned=1>",
    "javascript:window.owned=1",
    "\u202egnirts\u202c",
    "A" * 300,
)


class Scene(NamedTuple):
    """One moment of a node. `events`: age in seconds, level, name and fields, oldest first."""

    status: Status
    peers: Sequence[PeerStatus] = ()
    events: Sequence[tuple[float, Level, str, Mapping[str, Any]]] = ()


def node_id(number: int) -> str:
    """The id of the node of a number; this node is 0."""
    return hashlib.sha1(f"node {number}".encode()).hexdigest()


def moved(scene: Scene, passed_s: float) -> tuple[Status, list[PeerStatus]]:
    """The scene later: only a node that trains changes, and its peers with it."""
    status = scene.status
    if status.state not in ("training", "waiting"):
        return status, list(scene.peers)
    steps = 0 if status.state == "waiting" else int(passed_s / STEP_S)
    step = status.step + steps
    left = math.exp(-step / 260)
    noise = 0.04 * math.sin(step * 2.399)
    training = replace(
        status.training,
        loss=None if status.training.loss is None else 0.11 + (2.1 + noise) * left,
        metrics=dict.fromkeys(status.training.metrics, 0.97 - 0.87 * left + noise / 5),
        evaluated_step=step // 5 * 5,
        samples=status.training.samples + 64 * steps,
        optimizer_steps=10 * step,
    )
    exchange = replace(
        status.exchange,
        bytes_sent=status.exchange.bytes_sent + 900_000 * steps + 40_000 * (step % 7),
        bytes_received=status.exchange.bytes_received + 1_300_000 * steps + 60_000 * (step % 5),
    )
    goal = [
        replace(one, done=step, left_seconds=(GOAL - step) * STEP_S) if one.what == "max_steps" else one
        for one in status.progress
    ]
    peers = [replace(peer, step=max(0, step - peer.lag)) for peer in scene.peers]
    return replace(status, step=step, training=training, exchange=exchange, progress=goal), peers


def peer(number: int, lag: int = 0, state: str = "training", **fields: Any) -> PeerStatus:
    """A peer that is `lag` steps behind."""
    known: dict[str, Any] = {
        "address": f"192.0.2.{number % 250 + 1}:{8468 + number // 250}",
        "round_trip_ms": 4.0 + 17 * (number % 6),
        "last_seen_seconds": 0.3 * (number % 4),
        "incarnation": 1 + number % 3,
        "step_seconds": STEP_S,
        "eligible": True,
        "progress_seconds": 0.4,
        "samples": 64,
        "shards": 10,
        "version": None if number % 5 == 4 else "0.1.0",
    }
    return PeerStatus(id=node_id(number), step=max(0, 300 - lag), lag=lag, state=state, **(known | fields))


def alone() -> Scene:
    """The first node of a swarm, before anyone else has come."""
    training = replace(STATUS.training, loss=2.2, metrics={"accuracy": 0.1}, step_seconds=STEP_S, training_share=0.93)
    status = replace(
        STATUS,
        summary="training",
        node=replace(STATUS.node, id=node_id(0), version="0.1.0", address="192.0.2.1:8468", uptime_seconds=612.0),
        run="digits",
        swarm=SwarmStatus(closed=True, keys=["5e884898"]),
        state="training",
        step=40,
        population=replace(STATUS.population, estimate=1.0, low=1.0, high=1.0, workers=1.0),
        barrier=BarrierStatus(method="pssp", sample=10, staleness=4, quantile=1.0, queries=0),
        training=training,
        exchange=ExchangeStatus(arithmetic="compiled", shards=SHARDS, shards_owned=SHARDS, state_bytes=64_000_000),
        memory=MemoryStatus(budget_bytes=412_000_000, parts={}, available_bytes=9_100_000_000),
        overlay={**STATUS.overlay, "peers": 0},
        loop=LoopStatus(delay_ms_p50=0.4, delay_ms_p99=3.1, delay_ms_max=9.0, tasks=38),
        health=[],
    )
    return Scene(status, (), (*_started(), (40.0, "info", "evaluated", {"accuracy": 0.42, "step": 30})))


def training(amount: int = 5) -> Scene:
    """A swarm that trains, at a measured line."""
    before = alone()
    peers = tuple(peer(number, lag=(number * 7) % 5 - 1) for number in range(1, amount + 1))
    status = replace(
        before.status,
        step=80,
        population=replace(before.status.population, estimate=amount + 1.0, low=amount + 1.0, workers=amount + 1.0),
        overlay={**before.status.overlay, "peers": amount, "round_trip_ms": 12.4},
        exchange=replace(
            before.status.exchange, shards_owned=11, shards_backed=12, merged_last_step=amount, bytes_sent=2_000_000
        ),
        line=_line(),
        progress=[Ongoing(what="max_steps", done=300, total=GOAL, unit="steps", since_seconds=420.0)],
    )
    handed = (30.0, "info", "shards_handed_over", {"count": 11, "to": node_id(2)})
    return Scene(status, peers, (*before.events, handed))


def waiting() -> Scene:
    """The barrier holds this node, for long."""
    before = training()
    slow = peer(3, lag=9, progress_seconds=31.0)
    held = WaitingStatus(since_seconds=14.2, behind=2, sampled=5, slowest=slow.id, its_step=71)
    peers = [peer(1), peer(2), peer(4, lag=6), peer(5, lag=1), slow]
    return before._replace(status=replace(before.status, state="waiting", waiting=held), peers=peers)


def starting() -> Scene:
    """A joiner downloads the state."""
    before = alone()
    status = replace(
        before.status,
        state="joining",
        step=0,
        summary="joining",
        training=replace(before.status.training, loss=None, metrics={}, evaluated_step=None, training_share=None),
        exchange=ExchangeStatus(arithmetic="compiled"),
        progress=[
            Ongoing(
                what="download of the state",
                done=410_000_000,
                total=990_000_000,
                unit="bytes",
                since_seconds=12.0,
                left_seconds=17.0,
            )
        ],
    )
    return Scene(status, (), _started())


def too_few() -> Scene:
    """It waits for `training.min_nodes`."""
    before = starting()
    status = replace(
        before.status,
        state="waiting_for_nodes",
        summary="waiting for nodes: have 2, need 4",
        overlay={**before.status.overlay, "peers": 1},
        progress=[Ongoing(what="nodes", done=2, total=4, unit="nodes", since_seconds=95.0)],
    )
    return Scene(status, [peer(1, state="waiting_for_nodes", step_seconds=0.0)], before.events)


def fault() -> Scene:
    """The trainer hangs, others are lost, shards are mended, and more is wrong."""
    before = training()
    status = replace(
        before.status,
        state="stalled",
        summary="stalled at step 412: the trainer makes no progress",
        step=412,
        progress=[replace(one, done=412, left_seconds=None) for one in before.status.progress],
        training=replace(before.status.training, loss=None, trainer="hung", trainer_failures=3, training_share=0.02),
        overlay={**before.status.overlay, "peers": 3, "suspects": 1},
        exchange=replace(
            before.status.exchange,
            shards_without_backup=4,
            refused=12,
            shards_resigned=2,
            shards_to_mend=1,
        ),
        lost=[_lost(4, 14.0), _lost(5, 190.0)],
        health=[
            Finding(
                level="error",
                what="the trainer makes no progress since 41 s",
                do="see trainer.log in the state directory; it is started again after 60 s",
            ),
            Finding(
                level="warning",
                what="port 8468 cannot be reached from outside",
                do="forward UDP and TCP 8468, or set node.client_only",
            ),
            Finding(level="info", what="4 shards have no backup", do="nothing: they get one within seconds"),
        ],
    )
    events: tuple[tuple[float, Level, str, Mapping[str, Any]], ...] = (
        *before.events,
        (190.0, "warning", "peer_dead", {"node": node_id(5), "reason": "no answer for 6.2 s"}),
        (41.0, "warning", "trainer_hung", {"seconds": 41.0, "turn": 412}),
        (14.0, "error", "trainer_failed", {"exit_code": 1, "hint": "see trainer.log"}),
    )
    peers = [peer(2, lag=-3), peer(1, lag=2), peer(3, lag=4, state="suspect")]
    return Scene(status, [replace(one, step=412 - one.lag) for one in peers], sorted(events, key=lambda one: -one[0]))


def failed() -> Scene:
    """A node that has ended by an error."""
    before = fault()
    return before._replace(status=replace(before.status, state="failed"), peers=())


def left_alone() -> Scene:
    """Everyone else has died."""
    before = alone()
    status = replace(before.status, lost=[_lost(number, 5.0 + number) for number in range(1, 6)])
    return before._replace(status=status)


def paused() -> Scene:
    """Paused by a person."""
    before = training()
    return before._replace(status=replace(before.status, state="paused", step=300))


def finished() -> Scene:
    """The run has ended, and the model is saved."""
    before = training()
    result = ResultStatus(
        reason="max_steps",
        steps=GOAL,
        best=Best(metric="accuracy", value=0.9722, step=1940),
        model="/home/user/.local/state/p2pnode/digits/model/model.safetensors",
        sha256="9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        load=["from safetensors.torch import load_file", 'state = load_file("model.safetensors")'],
        may_differ=None,
    )
    peers = [replace(one, state="finished", lag=0, step=GOAL) for one in before.peers]
    status = replace(before.status, state="finished", step=GOAL, result=result, progress=[])
    return before._replace(status=status, peers=peers)


def many(amount: int = 200) -> Scene:
    """A large swarm, whose size is estimated."""
    before = training()
    states = ("training",) * 17 + ("paused", "waiting_for_nodes", "suspect")
    peers = [
        peer(number, lag=round(6 * math.sin(number * 1.7)) + 3, state=states[number % 20], shards=number % 3)
        for number in range(1, amount + 1)
    ]
    population = replace(
        STATUS.population,
        estimate=1.04 * amount,
        low=0.93 * amount,
        high=1.17 * amount,
        exact=False,
        zone_estimate=0.98 * amount,
        workers=0.9 * amount,
    )
    status = replace(
        before.status,
        population=population,
        overlay={**before.status.overlay, "peers": amount, "suspects": amount // 20},
        waiting=WaitingStatus(since_seconds=0.8, behind=1, sampled=10, slowest=peers[6].id, its_step=300),
        exchange=replace(before.status.exchange, shards=1024, shards_owned=5),
    )
    return before._replace(status=status, peers=sorted(peers, key=lambda one: one.lag))


def several_parts() -> Scene:
    """A node that has all that a node can have: devices, values, a server's tasks, records, shared data."""
    before = training()
    devices = [
        _numbered(
            DeviceStatus,
            index=index,
            device=f"cuda:{index}",
            state="crashed" if index == 2 else "running",
            leads=index == 0,
        )
        for index in range(4)
    ]
    status = replace(
        before.status,
        devices=devices,
        gpus=[
            GpuStatus(
                device=f"cuda:{index}",
                name="NVIDIA H100 80GB HBM3",
                memory_used_bytes=61_000_000_000,
                memory_total_bytes=85_520_809_984,
                utilisation=0.97,
                temperature_celsius=64.0,
                error=None if index != 2 else "Xid 79: the GPU has fallen off the bus",
            )
            for index in range(4)
        ],
        coordination=CoordinationStatus(server=node_id(3), serves=False, trainers=0, leader=node_id(0)),
        values=_numbered(ValuesStatus),
        server=_numbered(ServerStatus),
        dispatch=_numbered(
            DispatchStatus,
            source="master",
            serves=True,
            master=node_id(0),
            store="sqlite",
            ended=False,
            last_error="",
            unanswered_seconds=None,
        ),
        data=DataStatus(kind="samples", size=60_000, epoch=3, open_epoch=3, trained=0.62, nodes=6, joining=False),
        members_quarantined=[QuarantinedMember(id=node_id(77), reason="nonsense", seconds=600.0)],
        exchange=replace(before.status.exchange, shards_resigned=2, shards_to_mend=1),
        progress=[
            *before.status.progress,
            Ongoing(
                what="last checkpoint",
                done=12_000_000,
                total=64_000_000,
                unit="bytes",
                since_seconds=1.2,
                left_seconds=5.2,
            ),
        ],
    )
    return before._replace(status=status)


def hostile() -> Scene:
    """Every text that another node, a script or a file can choose is an attack or very long."""
    before = several_parts()
    evil = EVIL[0]
    status = replace(
        before.status,
        summary=evil,
        run=EVIL[1],
        node=replace(before.status.node, address=EVIL[5], version=evil, role=evil),
        training=replace(before.status.training, metrics={evil: 0.5, "accuracy": 0.5}, trainer=evil),
        barrier=replace(before.status.barrier, method=evil),
        lost=[replace(_lost(number, 3.0), reason=text, address=text) for number, text in enumerate(EVIL, 50)],
        health=[Finding(level="error", what=text, do=EVIL[1]) for text in EVIL],
        devices=[replace(one, device=evil, state=EVIL[2]) for one in before.status.devices or ()],
        members_quarantined=[QuarantinedMember(id=node_id(77), reason=EVIL[1], seconds=1e300)],
        result=ResultStatus(
            reason=evil,
            steps=1 << 62,
            best=Best(metric=evil, value=-1e300, step=3),
            model=EVIL[5],
            sha256="f" * 64,
            load=[*EVIL],
            may_differ=evil,
        ),
    )
    peers = [
        peer(number, address=text, state=text, version=text, lag=-(1 << 47), round_trip_ms=1e300)
        for number, text in enumerate(EVIL, 1)
    ]
    events = [(3.0, "error", text, {text: text, "node": node_id(3)}) for text in EVIL]
    return Scene(status, peers, events)


#: The scenes that are looked at in every width, by name.
SCENES = {
    "alone": alone,
    "failed": failed,
    "fault": fault,
    "finished": finished,
    "hostile": hostile,
    "left_alone": left_alone,
    "many": many,
    "paused": paused,
    "several_parts": several_parts,
    "starting": starting,
    "too_few": too_few,
    "training": training,
    "waiting": waiting,
}


def _numbered(part: type[Part], **given: Any) -> Part:
    """A part of the status: what is given, and for each other field a number of its own."""
    numbers = {field.name: 1007 * at for at, field in enumerate(fields(part), 1)}
    return part(**numbers | given)


def _started() -> tuple[tuple[float, Level, str, Mapping[str, Any]], ...]:
    return (
        (612.0, "info", "started", {"id": node_id(0), "incarnation": 1, "run": "digits"}),
        (603.0, "info", "codec_chosen", {"codec": "bfloat16", "reason": "a step has few bytes"}),
    )


def _lost(number: int, seconds: float) -> LostPeer:
    return LostPeer(
        id=node_id(number),
        address=f"192.0.2.{number + 1}:8468",
        how="dead",
        reason="no answer for 6.2 s",
        step=290,
        seconds_ago=seconds,
    )


def _line() -> LineStatus:
    return LineStatus(
        upload_bytes_per_s=1_250_000,
        upload_at_least_bytes_per_s=None,
        download_bytes_per_s=6_100_000,
        capacity=6,
        capacity_source="transfers",
        codec="int4",
        codec_reason="the line carries 1.25 MB/s",
        needed_bytes_per_step=1_100_000,
        carried_bytes_per_step=1_750_000,
    )

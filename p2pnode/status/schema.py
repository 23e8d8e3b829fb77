"""The answers of the status API as types: `/status`, `/peers`, `/events`, and the short answers.

One definition serves the JSON, `/openapi.json` (`p2pnode.status.openapi`) and `/metrics`. Within one schema number keys
may be added; no key changes its meaning. A field with a default is always sent. The rows
of `/steps` are `training.progress.StepRow`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from p2pnode.lifecycle.environment import State
from p2pnode.overlay.line.rate import CapacitySource
from p2pnode.status.events import Event
from p2pnode.status.prometheus import counter, gauge
from p2pnode.training.goal import Best

SchemaNumber = Literal[1]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]
NodeId = Annotated[str, Meta(pattern="^[0-9a-f]{40}$")]


class NodeStatus(Struct, frozen=True, kw_only=True):
    """Who this node is. `eligible`: it may own shards."""

    id: NodeId
    incarnation: Count
    version: str
    address: str
    role: str
    client_only: bool
    eligible: bool
    uptime_seconds: Annotated[Seconds, gauge("p2pnode_uptime_seconds", "Seconds since the start.")]


class SwarmStatus(Struct, frozen=True, kw_only=True):
    """Whether the swarm is closed, and the fingerprints of the keys valid now, the one in use first."""

    closed: bool
    keys: list[str]


class PopulationStatus(Struct, frozen=True, kw_only=True):
    """The number of nodes, as counted or estimated, with its 95 % interval. `workers`: those that train."""

    estimate: Annotated[
        float,
        gauge("p2pnode_population", "Nodes of the swarm, estimated, with its interval.", bound={"estimate": None}),
    ]
    low: Annotated[float, gauge("p2pnode_population", "", bound={"low": None})]
    high: Annotated[float, gauge("p2pnode_population", "", bound={"high": None})]
    exact: bool
    observations: Count
    zone_estimate: float | None
    workers: Annotated[float, gauge("p2pnode_workers", "Live nodes that train.")]


class BarrierStatus(Struct, frozen=True, kw_only=True):
    """The barrier's rule and sample size. `queries`: peers asked for their step so far."""

    method: str
    sample: Count
    staleness: Count | None
    quantile: float
    queries: Annotated[Count, counter("p2pnode_barrier_queries_total", "Peers asked for their step.")]


class WaitingStatus(Struct, frozen=True, kw_only=True):
    """The barrier waits: `behind` of the `sampled` peers are too far behind, `slowest` furthest."""

    since_seconds: Seconds
    behind: Count
    sampled: Count
    slowest: NodeId
    its_step: Count


class BusyStatus(Struct, frozen=True, kw_only=True):
    """What the script does between two steps, as it says itself (`swarm.busy`)."""

    what: str
    since_seconds: Seconds


class FinishingStatus(Struct, frozen=True, kw_only=True):
    """The script finishes by itself: why, since when, and how long it may (`finish_s`, `stop_s`)."""

    what: str
    since_seconds: Seconds
    deadline_seconds: Seconds


class TrainingStatus(Struct, frozen=True, kw_only=True):
    """Progress and metrics. `trainer` is the state of the trainer's process. `training_share`: the share of the time of
    the last steps in which it trained; null before the first step. `best`: of the shared model so far."""

    loss: Annotated[float | None, gauge("p2pnode_loss", "Loss of the last step.")]
    metrics: Annotated[
        Mapping[str, float | None], gauge("p2pnode_metric", "Metrics as last evaluated or trained.", metric={"": None})
    ]
    evaluated_step: Count | None
    evaluated_samples: Count
    optimizer_steps: Annotated[Count, counter("p2pnode_optimizer_steps_total", "Optimiser steps since the start.")]
    samples: Annotated[Count, counter("p2pnode_samples_total", "Samples trained on.")]
    step_seconds: Annotated[Seconds, gauge("p2pnode_step_seconds", "Median time of this node's steps.")]
    trainer: str
    trainer_failures: Annotated[Count, counter("p2pnode_trainer_failures_total", "Times the trainer failed.")]
    busy: BusyStatus | None = None
    finishing: FinishingStatus | None = None
    training_share: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        gauge("p2pnode_training_share", "Share of the time of the last steps in which the trainer trained."),
    ] = None
    best: Best | None = None


class ResultStatus(Struct, frozen=True, kw_only=True):
    """What came of a run. `model`: the path of its file, and `sha256` of the safetensors file; null without one.

    `load` are lines of Python that load it. `may_differ`: why another node's file may differ; null where all nodes that
    finish write the same bytes.
    """

    reason: str
    steps: Count
    best: Best | None
    model: str | None
    sha256: str | None
    load: list[str]
    may_differ: str | None


class DataStatus(Struct, frozen=True, kw_only=True):
    """The data that this node's script shares with others. `kind` is `samples` or `stream`; `size` is the number of
    samples, or those of a block. `epoch`: that of this node. `trained`: the share of `open_epoch`, the first incomplete
    one, that is known to be trained; null for a stream whose end was not seen. `nodes` share the data; `joining`: this
    node waits for their answers."""

    kind: str
    size: Count
    epoch: Count
    open_epoch: Count
    trained: float | None
    nodes: Count
    joining: bool


class DispatchStatus(Struct, frozen=True, kw_only=True):
    """The records that a master dispatches (docs/dispatch.md). `serves`: this node is the master now; `master`: the one
    that answered this node last. The counts are those of the pass `pass_number` (of `passes`; 0: without end), null
    until they are known. `held`: tasks of this node; `records_trained`: in steps that are counted. `tasks_superseded`:
    others had them when this node reported them. `ended`: the job is done. `unanswered_seconds`: how long the master
    has not answered; null: it does. `last_error` is empty where all is well."""

    source: str
    serves: Annotated[bool, gauge("p2pnode_dispatch_serves", "1 when this node serves the queue.")]
    serves_seconds: Seconds | None
    master: NodeId | None
    store: str
    epoch: Count
    pass_number: Annotated[Count | None, gauge("p2pnode_dispatch_pass", "The present pass over the records.")] = None
    passes: Count | None = None
    tasks: Count | None = None
    todo: Annotated[
        Count | None, gauge("p2pnode_dispatch_tasks", "Tasks of the pass by state.", state={"todo": None})
    ] = None
    leased: Annotated[Count | None, gauge("p2pnode_dispatch_tasks", "", state={"leased": None})] = None
    done: Annotated[Count | None, gauge("p2pnode_dispatch_tasks", "", state={"done": None})] = None
    failed: Annotated[Count | None, gauge("p2pnode_dispatch_tasks", "", state={"failed": None})] = None
    discarded: Annotated[Count, counter("p2pnode_dispatch_discarded_total", "Tasks that were given up.")]
    held: Count
    records_trained: Annotated[
        Count,
        counter("p2pnode_dispatch_records_total", "Dispatched records that this node trained in completed steps."),
    ]
    tasks_finished: Count
    tasks_superseded: Annotated[
        Count,
        counter(
            "p2pnode_dispatch_superseded_total", "Tasks that this node no longer held when it reported or renewed them."
        ),
    ]
    ended: bool
    last_error: str
    unanswered_seconds: Seconds | None


class ExchangeStatus(Struct, frozen=True, kw_only=True):
    """Shards held here and deltas sent, refused and repaired. Without an exchange yet, every number is zero.

    `shards_by`: why the run has so many: setting, model, earlier (an earlier start), or swarm (as the others have).
    """

    arithmetic: str
    shards: Count = 0
    shards_by: str = ""
    shards_owned: Annotated[Count, gauge("p2pnode_shards", "Shards held here.", role={"owner": None})] = 0
    shards_backed: Annotated[Count, gauge("p2pnode_shards", "", role={"backup": None})] = 0
    shards_without_backup: Annotated[
        Count, gauge("p2pnode_shards_without_backup", "Shards owned here that lack their backup.")
    ] = 0
    bytes_sent: Annotated[
        Count, counter("p2pnode_exchange_bytes_total", "Bytes of deltas, values and states.", direction={"out": None})
    ] = 0
    bytes_received: Annotated[Count, counter("p2pnode_exchange_bytes_total", "", direction={"in": None})] = 0
    merged_last_step: Count = 0
    refused: Annotated[
        Count, counter("p2pnode_own_deltas_refused_total", "Shards of own deltas refused by owners.")
    ] = 0
    refused_here: Annotated[
        dict[str, Count],
        counter("p2pnode_deltas_refused_total", "Shards of others' deltas refused here.", reason={"": None}),
    ] = {}
    unusual_norms: Annotated[
        Count, counter("p2pnode_unusual_norms_total", "Shards of deltas far longer than the median.")
    ] = 0
    clipped: Annotated[Count, counter("p2pnode_clipped_total", "Shards of deltas that were shortened.")] = 0
    outstanding_steps: Annotated[list[Count], gauge("p2pnode_outstanding_steps", "Steps not acknowledged yet.")] = []
    state_bytes: Annotated[Count, gauge("p2pnode_shard_state_bytes", "Memory of the shards held here.")] = 0
    repair_reach_seconds: Seconds = 0.0
    repair_log_bytes: Count = 0
    repaired: Count = 0
    published_bytes: Annotated[Count, gauge("p2pnode_published_bytes", "Memory of published values and changes.")] = 0
    shards_followed: Annotated[
        Count, counter("p2pnode_published_pulls_total", "Shards pulled as published values.", way={"changes": None})
    ] = 0
    publications_entered: Annotated[Count, counter("p2pnode_published_pulls_total", "", way={"whole": None})] = 0
    publication_mismatches: Annotated[
        Count,
        counter(
            "p2pnode_publication_mismatches_total",
            "Pulled shards that differed from the value that their owner published.",
        ),
    ] = 0
    deltas_sent_again: Count = 0
    lost_in_splits: Count = 0
    lost_in_restarts: Count = 0
    shards_resigned: Count = 0
    shards_to_mend: Count = 0
    merged: Annotated[Count, counter("p2pnode_deltas_merged_total", "Shards of deltas added here as owner.")] = 0


class ValuesStatus(Struct, frozen=True, kw_only=True):
    """Named values, in a run of an engine that has them. `keys` and `bytes` are those of the shards owned here, of at
    most `limit_bytes`; a backup has as many again. The counts are those of this node as an owner, since its start:
    `updates` were applied, in so many `batches`, and `refused` for ever; `reads` are keys that were read. `waiting`:
    updates that wait here for their batch, of `waiting_bytes`. `unanswered`: this node's own updates whose owners have
    not answered yet."""

    keys: Annotated[Count, gauge("p2pnode_values_keys", "Keys of the shards owned here.")]
    bytes: Annotated[Count, gauge("p2pnode_values_bytes", "Memory of the values owned here.")]
    limit_bytes: Count
    updates: Annotated[
        Count, counter("p2pnode_values_updates_total", "Updates of values owned here.", fate={"applied": None})
    ]
    refused: Annotated[Count, counter("p2pnode_values_updates_total", "", fate={"refused": None})]
    reads: Annotated[Count, counter("p2pnode_values_reads_total", "Keys owned here that were read.")]
    batches: Annotated[Count, counter("p2pnode_values_batches_total", "Batches of updates added here.")]
    waiting: Annotated[
        Count,
        gauge(
            "p2pnode_values_waiting_updates",
            "Updates that wait: here for their batch, or this node's own for their owners.",
            at={"owner": None},
        ),
    ]
    waiting_bytes: Annotated[Count, gauge("p2pnode_values_waiting_bytes", "Bytes of updates that wait here.")]
    unanswered: Annotated[Count, gauge("p2pnode_values_waiting_updates", "", at={"origin": None})]


class ServerStatus(Struct, frozen=True, kw_only=True):
    """The tasks of a parameter server, since this node serves. `version`: updates in the values. `given`: tasks given
    to a worker for the first time; `again`: to another one, after an error, a death, or the end of their lease. `held`:
    with workers now; `waiting`: came back, and no worker is free. `refused`: updates that were too old. `lost`: updates
    of the run that died with their worker and their server."""

    version: Annotated[Count, gauge("p2pnode_server_version", "Updates in the values of the parameter server.")]
    workers: Annotated[Count, gauge("p2pnode_server_workers", "Workers of the parameter server.")]
    given: Annotated[Count, counter("p2pnode_server_tasks_given_total", "Tasks given for the first time.")]
    done: Annotated[Count, counter("p2pnode_server_tasks_done_total", "Tasks whose update counts.")]
    held: Annotated[
        Count, gauge("p2pnode_server_open_tasks", "Tasks with workers, and those that came back.", state={"held": None})
    ]
    waiting: Annotated[Count, gauge("p2pnode_server_open_tasks", "", state={"waiting": None})]
    again: Annotated[
        Count,
        counter(
            "p2pnode_server_tasks_again_total", "Tasks given again, after an error, a death, or the end of their lease."
        ),
    ]
    refused: Annotated[Count, counter("p2pnode_server_updates_refused_total", "Updates that were too old.")]
    lost: Annotated[Count, gauge("p2pnode_server_updates_lost", "Updates that died with worker and server.")] = 0


class LineStatus(Struct, frozen=True, kw_only=True):
    """This node's line. Rates are null until they are measured: `upload_bytes_per_s` when the line was full for a time,
    `upload_at_least_bytes_per_s` when something was sent for a while. `capacity` is what it announces, 0 before;
    `capacity_source` says where it is from: what an earlier start has stored, or what it has sent since.

    `codec` is that of the pushes now, and `codec_reason` why. `needed_bytes_per_step`: what a step sends in it, as
    push, forward and served pulls. `carried_bytes_per_step`: what the line carries while a step trains.
    `held_back_deltas`: how many deltas' worth of training the last one left out, which the shared model lacks so far;
    null where the codec leaves out next to nothing.
    """

    upload_bytes_per_s: Annotated[
        Count | None,
        gauge("p2pnode_line_bytes_per_second", "Measured rates of this node's line.", direction={"out": None}),
    ]
    upload_at_least_bytes_per_s: Count | None
    download_bytes_per_s: Annotated[Count | None, gauge("p2pnode_line_bytes_per_second", "", direction={"in": None})]
    capacity: Count
    capacity_source: CapacitySource = ""
    codec: str
    codec_reason: str
    needed_bytes_per_step: Annotated[
        Count | None,
        gauge(
            "p2pnode_line_step_bytes",
            "Bytes that a step sends, and that the line carries while a step trains.",
            what={"needed": None},
        ),
    ]
    carried_bytes_per_step: Annotated[Count | None, gauge("p2pnode_line_step_bytes", "", what={"carried": None})]
    held_back_deltas: Annotated[
        float | None,
        gauge("p2pnode_held_back_deltas", "How many deltas' worth of training the last delta left out."),
    ] = None


class MemoryStatus(Struct, frozen=True, kw_only=True):
    """The daemon's memory. `parts` are its budget, as estimated before anything is allocated, and `budget_bytes` their
    sum; `available_bytes`: what this process may still take. The trainer's own is in `trainer_bytes` only: gradients,
    optimiser, and the optimiser's copy for a checkpoint, as estimated at its start. `private_bytes`: the resident
    memory of this process that is neither shared nor a file's, as the kernel counts it; null where it does not tell.
    """

    budget_bytes: Count | None
    parts: dict[str, Count]
    available_bytes: Count | None
    trainer_bytes: Count | None = None
    private_bytes: Count | None = None


class LoopStatus(Struct, frozen=True, kw_only=True):
    """How late the event loop was in the last minute, and its tasks now."""

    delay_ms_p50: float | None
    delay_ms_p99: float | None
    delay_ms_max: float | None
    tasks: Count


class DeviceStatus(Struct, frozen=True, kw_only=True):
    """One of several trainers of this node (`training.device`). `state`: `crashed` is being restarted, `failed` is
    given up; `left`: its script has ended. `loss` and `step_seconds`: of its last part of a step. `leads`: the others
    of the node follow it (`devices.step = "leader"`)."""

    index: Count
    device: str
    state: str
    pid: Count | None
    failures: Annotated[Count, counter("p2pnode_device_failures_total", "Times this trainer of the node failed.")]
    optimizer_steps: Annotated[
        Count, counter("p2pnode_device_optimizer_steps_total", "Optimiser steps of this trainer of the node.")
    ]
    samples: Annotated[
        Count, counter("p2pnode_device_samples_total", "Samples that this trainer of the node trained on.")
    ]
    loss: float | None
    step_seconds: Seconds
    leads: bool


class GpuStatus(Struct, frozen=True, kw_only=True):
    """A GPU of a trainer of this node, as NVIDIA's driver reads it; null is what it does not say. `utilisation`: the
    part of the last second in which a kernel ran. `error`: the last one that the driver reported."""

    device: str
    name: str
    memory_used_bytes: Annotated[
        Count | None, gauge("p2pnode_gpu_memory_used_bytes", "Memory of this GPU that is in use, by all programs.")
    ]
    memory_total_bytes: Annotated[Count | None, gauge("p2pnode_gpu_memory_bytes", "Memory of this GPU.")]
    utilisation: Annotated[
        float | None, gauge("p2pnode_gpu_utilization_ratio", "Part of the last second in which a kernel ran.")
    ]
    temperature_celsius: Annotated[float | None, gauge("p2pnode_gpu_temperature_celsius", "Temperature of this GPU.")]
    error: str | None


class CoordinationStatus(Struct, frozen=True, kw_only=True):
    """What the nodes decide together (`devices.coordination = "global"`). `server`: the node that divides the local
    steps; null where none answers, and each node takes its own share. `serves`: that is this node, and `trainers` take
    part as it counts them. `leader`: the node whose leader has the lowest loss of all."""

    server: str | None
    serves: bool
    trainers: Count
    leader: str | None


class LostPeer(Struct, frozen=True, kw_only=True):
    """A peer that was found dead or has left in the last hour and has not come back. `step`: its last known one."""

    id: NodeId
    address: str
    how: Literal["dead", "left"]
    reason: str
    step: Count
    seconds_ago: Seconds


class Ongoing(Struct, frozen=True, kw_only=True):
    """Work that takes long: `done` of `total` in `unit` (`bytes`, `steps`, `nodes`), since when, and the time to go.
    `total` is 0 and `unit` empty where nobody knows how much it is; `left_seconds` is null where nobody knows."""

    what: str
    done: Count
    total: Count
    unit: str
    since_seconds: Seconds
    left_seconds: Seconds | None = None


class Finding(Struct, frozen=True, kw_only=True):
    """Something that needs attention: what it is, and what to do."""

    level: Literal["info", "warning", "error"]
    what: str
    do: str


class Status(Struct, frozen=True, kw_only=True):
    """`GET /status`. `devices` is empty on a node with one trainer, `gpus` without NVIDIA's, `result` null until the
    run has ended. `values` is null but in a run of an engine with named values, and `server` but at the node that
    serves as its parameter server. `overlay` is `overlay.report.OverlayReport` with its counters beside the other
    keys."""

    schema: SchemaNumber
    summary: str
    node: NodeStatus
    run: str
    swarm: SwarmStatus
    state: State
    step: Annotated[Count, gauge("p2pnode_step", "Step that this node has completed.")]
    population: PopulationStatus
    barrier: BarrierStatus
    waiting: WaitingStatus | None
    training: TrainingStatus
    result: ResultStatus | None
    exchange: ExchangeStatus
    memory: MemoryStatus
    overlay: Annotated[dict[str, Any], Meta(extra_json_schema={"$ref": "#/components/schemas/OverlayReport"})]
    loop: LoopStatus
    health: list[Finding]
    data: DataStatus | None = None
    line: LineStatus | None = None
    dispatch: DispatchStatus | None = None
    members_quarantined: list[QuarantinedMember] = []
    lost: list[LostPeer] = []
    progress: list[Ongoing] = []
    values: ValuesStatus | None = None
    server: ServerStatus | None = None
    devices: list[DeviceStatus] = []
    gpus: list[GpuStatus] = []
    coordination: CoordinationStatus | None = None


class QuarantinedMember(Struct, frozen=True, kw_only=True):
    """A member that this node does without for so many seconds more; 0: until it answers."""

    id: NodeId
    #: `silent`, `nonsense` or `foreign`.
    reason: str
    seconds: Seconds


class PeerStatus(Struct, frozen=True, kw_only=True):
    """An entry of `GET /peers`. `lag`: steps of this node minus steps of the peer.

    Step, state and samples are as old as the last message: `last_seen_seconds`. `progress_seconds`: how long ago its
    step rose. `samples`: of its last step. `shards`: those that it owns as far as this node knows; null without an
    exchange. `version`: what it says that it runs; null until there was a request between it and this node since its
    start.
    """

    id: NodeId
    address: str
    step: Count
    lag: int
    state: str
    round_trip_ms: float | None
    last_seen_seconds: float
    incarnation: Count
    step_seconds: Seconds
    eligible: bool
    progress_seconds: Seconds = 0.0
    samples: Count = 0
    shards: Count | None = None
    version: str | None = None


class Update(Struct, frozen=True, kw_only=True):
    """The data of each `update` of `GET /stream`, once a second. `peers`: all, or of many a part that is evenly spread;
    `peers_known`: how many there are. `sample`: the figures of this moment, as rows of the history have
    them; empty in the first message."""

    schema: SchemaNumber
    time: float
    status: Status
    peers: list[PeerStatus]
    peers_known: Count
    sample: dict[str, float | None]


class HistoryAnswer(Struct, frozen=True, kw_only=True):
    """`GET /history`: the run so far in rows, at most 960. `times` are wall time in seconds since 1970, a second apart
    at first, and twice as far apart for each doubling of the run; the last row is the newest. `series` have one value
    per row, null where there was none. `samples`, `bytes_…` and the seconds of the phases only rise: a rate is the
    difference of two rows over their time. A metric of the script is `metric:NAME`."""

    schema: SchemaNumber
    times: list[float]
    series: Mapping[str, Sequence[float | None]]


class Events(Struct, frozen=True, kw_only=True):
    """`GET /events`. `dropped`: events that left the ring before they were read; `last`: the newest number."""

    schema: SchemaNumber
    events: list[Event]
    dropped: Count
    last: Count


class Alive(Struct, frozen=True, kw_only=True):
    """`GET /healthz`."""

    schema: SchemaNumber
    alive: Literal[True]


class Readiness(Struct, frozen=True, kw_only=True):
    """`GET /readyz`."""

    schema: SchemaNumber
    ready: bool
    reason: str


class Accepted(Struct, frozen=True, kw_only=True):
    """A change was accepted; it has not happened yet."""

    schema: SchemaNumber
    accepted: str


class ErrorAnswer(Struct, frozen=True, kw_only=True):
    """Why a request was refused, and what to do."""

    schema: SchemaNumber
    error: str
    hint: str

"""The settings of training: sections `[training]`, `[devices]`, `[barrier]`, `[exchange]` and `[dispatch]` of
`node.toml`.

Defaults, ranges and descriptions are defined only here; `node.toml` and `docs/config.md` are generated from them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from p2pnode.training.encoding.table import CODECS, CodecSetting, in_words
from p2pnode.training.shard_count import MAX_SHARDS

Count = Annotated[int, Meta(ge=0)]
PositiveCount = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]

_BYTES = in_words([f"{codec.bytes_per_value:.2g}" for codec in CODECS.values()], "or")
_CHANGES = in_words([name for name, codec in CODECS.items() if not codec.is_whole], "and")
_PARTIAL = in_words([name for name, codec in CODECS.items() if codec.is_partial], "or")

BarrierMethod = Literal["asp", "bsp", "ssp", "pbsp", "pssp"]


class TrainingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is trained, and until when."""

    task: Annotated[
        str,
        Meta(description='"digits", "mnist", "text", or your own "package.module:Class"; ignored by `p2pnode run`.'),
    ] = "digits"
    data_dir: Annotated[
        str, Meta(description="Folder or file with the task's data; empty: the default of the task.")
    ] = ""
    min_nodes: Annotated[
        PositiveCount,
        Meta(description="Training starts when this many nodes, this one included, are ready."),
    ] = 1
    local_steps: Annotated[
        PositiveCount,
        Meta(description="Optimiser steps between two exchanges; equal on all nodes."),
    ] = 10
    device: Annotated[
        str | list[str],
        Meta(
            description='"auto" (a GPU, if there is one), "cpu", "cuda", "cuda:1", …; one trainer for each of several, '
            'as ["cuda:0", "cuda:1"] or "cpu*4"; "all": one for each GPU of this machine.'
        ),
    ] = "auto"
    threads: Annotated[
        Count,
        Meta(description="CPU threads of the trainer; 0: PyTorch's own choice."),
    ] = 0
    nice: Annotated[
        int,
        Meta(
            ge=0,
            le=19,
            description="Added to the trainer's Unix niceness, so that the daemon answers peers while all cores "
            "train; 0: nothing.",
        ),
    ] = 5
    seed: Annotated[
        Count, Meta(description="Seed of the run; each node derives its own seed from it and from the node id.")
    ] = 0
    eval_steps: Annotated[
        Count,
        Meta(description="Steps between evaluations of the shared model; 0: never."),
    ] = 10
    max_steps: Annotated[Count, Meta(description="The run ends after this many steps of the swarm; 0: no limit.")] = 0
    max_seconds: Annotated[
        Seconds, Meta(description="The run ends for this node after this many seconds; 0: no limit.")
    ] = 0.0
    until: Annotated[
        str,
        Meta(
            description='The run ends when two evaluations in a row reach a goal, as "accuracy>=0.95"; empty: no goal.'
        ),
    ] = ""
    linger_s: Annotated[
        Seconds,
        Meta(description="After its run a node serves its shards to the other nodes for at most this long."),
    ] = 60.0
    finish_s: Annotated[
        Seconds,
        Meta(
            description="At the end of a run, or after swarm.leave(), a training script has this long to end by itself."
        ),
    ] = 600.0
    stop_s: Annotated[
        Seconds,
        Meta(description="After SIGTERM or `p2pnode leave` a training script has this long to end by itself."),
    ] = 10.0
    checkpoint_s: Annotated[
        Seconds,
        Meta(description="Seconds between checkpoints; one more is written on leaving; 0: never."),
    ] = 60.0
    export: Annotated[
        str,
        Meta(
            description="File the finished model is written to (.safetensors or .pt); a relative path is inside the "
            "state directory; empty: none."
        ),
    ] = "model.safetensors"
    tracker: Annotated[
        str,
        Meta(
            description='Each step is also written to "csv:FILE", "tensorboard:DIR" or "trackio" (extras of the same '
            "names); a relative path is inside the state directory; empty: none."
        ),
    ] = ""
    options: Annotated[
        dict[str, Any],
        Meta(description="[training.options] is passed to the task unchanged."),
    ] = {}


class DevicesSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the trainers of one node work together, where `training.device` names several."""

    period: Annotated[
        Count,
        Meta(
            description="After this many optimiser steps of each trainer, the trainers of the node merge what they "
            "learned (a distributed step). Must divide training.local_steps; 0: training.local_steps."
        ),
    ] = 0
    step: Annotated[
        Literal["average", "leader"],
        Meta(
            description="How a distributed step merges. average: all trainers continue from their mean; leader: all "
            "trainers move towards the trainer with the lowest loss."
        ),
    ] = "average"
    coordination: Annotated[
        Literal["none", "global"],
        Meta(
            description="global: one node of the swarm divides the local steps of a period among the trainers of all "
            "nodes, and faster trainers take more steps; none: each node has its own period."
        ),
    ] = "none"
    pull: Annotated[
        Share,
        Meta(
            description='With step = "leader": the share of the way to the leader of the node that a trainer moves in '
            "a distributed step. The local steps before it move the trainer by the same share in total. With "
            'coordination = "global" a trainer moves in the same way towards the leader of the swarm.'
        ),
    ] = 0.1


class BarrierSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a node may start its next step."""

    method: Annotated[
        str,
        Meta(
            description="asp never waits; bsp and ssp look at all peers, pbsp and pssp at a sample. Or your own "
            '"package.module:function", called with (mine, others) → bool.'
        ),
    ] = "pssp"
    sample: Annotated[
        Count,
        Meta(description="Peers sampled at each test of the barrier (β); 0: √population, from 1 to 10."),
    ] = 0
    staleness: Annotated[
        Count,
        Meta(description="Completed steps a sampled peer may be behind (s); used by ssp and pssp."),
    ] = 4
    quantile: Annotated[
        float,
        Meta(gt=0, le=1, description="Share of the compared peers that must have completed enough steps; 1: all."),
    ] = 1.0


class ExchangeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How deltas are merged into one model."""

    codec: Annotated[
        CodecSetting,
        Meta(
            description=f"Encoding of pushed deltas: {_BYTES} bytes per value; the next delta includes what the "
            "encoding left out. auto: the largest values, as many as the measured bandwidth allows; whole values under "
            "bsp, and where a step has few bytes."
        ),
    ] = "auto"
    pull_codec: Annotated[
        CodecSetting,
        Meta(
            description=f"Encoding of pulled values; with {_CHANGES} a node receives only changes of values. auto: "
            f"the encoding of pushes, and with {_PARTIAL} one of about four times as many values."
        ),
    ] = "auto"
    shards: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_SHARDS,
            description="Slices of the model's vector, the same number for the whole run. 0: the founder chooses "
            "64, 16 to 32 for less than a million values, at least four for each of training.min_nodes, and slices "
            "of at most 2 MiB; the other nodes use the founder's number.",
        ),
    ] = 0
    replicas: Annotated[
        int,
        Meta(
            ge=0,
            le=1,
            description="Backups of each shard: with 1 a crash loses nothing; 0 saves a third of the traffic.",
        ),
    ] = 1
    weight: Annotated[
        Literal["population", "samples", "sum"],
        Meta(
            description="Weight of a delta. population: 1/workers; samples: 1/workers times the node's samples over "
            "the mean (¼ to 4); sum: 1."
        ),
    ] = "population"
    outer_lr: Annotated[
        float,
        Meta(
            gt=0,
            le=10,
            description="Outer learning rate of the owners, under bsp and with codecs of all values; nodes measure "
            "that of sparse deltas.",
        ),
    ] = 0.7
    outer_momentum: Annotated[
        float,
        Meta(ge=0, lt=1, description="Outer momentum (Delayed Nesterov); a higher one learns worse with Adam."),
    ] = 0.5
    robust: Annotated[
        Literal["", "clip"],
        Meta(description="Protection from members that send wrong deltas. clip: shorten long deltas; empty: none."),
    ] = ""
    log_seconds: Annotated[
        Seconds,
        Meta(description="A network partition of at most this length loses no delta; 0: no partition is repaired."),
    ] = 60.0
    log_bytes: Annotated[
        int,
        Meta(
            ge=0, description="Most bytes of deltas kept to repair partitions; /status shows how far back they reach."
        ),
    ] = 256 * 1024 * 1024


class DispatchSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which records a node trains on, and who divides them."""

    source: Annotated[
        Literal["local", "shared", "master"],
        Meta(
            description="local: every node reads all records; shared: the nodes divide them among themselves; "
            "master: a master leases them to the nodes, in tasks."
        ),
    ] = "local"
    records: Annotated[
        list[str],
        Meta(
            max_length=4096,
            description="RecordIO files, as names or patterns below training.data_dir; all nodes give the same names.",
        ),
    ] = []
    store: Annotated[
        str,
        Meta(
            description='Where a master keeps its queue: "sqlite" (in the state directory), "sqlite:PATH", or '
            '"etcd://host:port,host:port/prefix"; with etcd, further masters may wait to take over.'
        ),
    ] = "sqlite"
    passes: Annotated[Count, Meta(description="The run ends after this many passes over the records; 0: never.")] = 0
    shuffle: Annotated[
        bool,
        Meta(description="True: tasks come in a new order in every pass, and so do the records within a task."),
    ] = True

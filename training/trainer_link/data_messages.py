"""Messages between daemon and trainer about the data that the nodes of a swarm share.

The trainer opens a data set and asks for partitions; the daemon grants *claims*, which no other living node has, and
hears after each turn how far they are trained. `training.sharing` decides, `training.trainer.sampling` iterates. Pure.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Number = Annotated[int, Meta(ge=0, le=1 << 48)]

#: The number of partitions while the end of a stream has not been seen.
UNKNOWN = -1
#: Partitions of a data set of known length; fewer if it has fewer samples.
PARTITIONS = 1024


class DataShape(msgspec.Struct, frozen=True, array_like=True):
    """What is equal on nodes that share a data set. They share nothing with nodes of another shape.

    `kind`: `samples` for a data set of known length, in random order; `stream` for one that can only be read in order.
    `size`: the number of samples, or the samples in each block of a stream. `seed`: the run's seed.
    """

    kind: Literal["samples", "stream"]
    size: Annotated[int, Meta(ge=1, le=1 << 48)]
    seed: int

    @property
    def is_stream(self) -> bool:
        return self.kind == "stream"

    @property
    def partitions(self) -> int:
        return UNKNOWN if self.is_stream else min(self.size, PARTITIONS)


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """A partition of an epoch that this node is to train, from sample `offset` on.

    `counted` is False for data that others train too, because there are more nodes than partitions.
    """

    epoch: Number
    partition: Number
    offset: Number
    counted: bool = True


class PartitionTrained(msgspec.Struct, frozen=True, array_like=True):
    """How far a claim is trained: the first `offset` samples, or all of them."""

    epoch: Number
    partition: Number
    offset: Number
    finished: bool


class SectionMask(msgspec.Struct, frozen=True, array_like=True):
    """A set of partitions of one epoch: bit i of `mask` (little-endian) is partition 1024 · `lap` + i."""

    epoch: Number
    lap: Number
    mask: Annotated[bytes, Meta(max_length=128)]


class DataState(msgspec.Struct, frozen=True, array_like=True):
    """What is known to be trained; part of the trainer's saved state.

    `epoch` is the one that this node iterates over. Everything before section `first` (epoch, lap) counts as trained.
    `offsets` are partitions that were begun: (epoch, partition, samples trained). `partitions` may be `UNKNOWN`.
    """

    epoch: Number
    partitions: Annotated[int, Meta(ge=-1)]
    first: tuple[Number, Number]
    trained: list[SectionMask]
    offsets: list[tuple[Number, Number, Number]]


class DataOpened(msgspec.Struct, frozen=True, tag="data_opened"):
    """The script has made its sampler. `state` is what it saved earlier; None if there is none."""

    shape: DataShape
    state: DataState | None


class DataWanted(msgspec.Struct, frozen=True, tag="data_wanted"):
    """Asks for at most `count` claims; answered by a `DataGranted` of the same `number`.

    `begins`: a new iteration begins; `finished`: the one before went to its end. `position`: for a stream, the next
    block that the iteration can read. `has_claims`: the trainer still has earlier claims to iterate over.
    """

    number: int
    begins: bool
    finished: bool
    position: Number
    count: Annotated[int, Meta(ge=1)]
    has_claims: bool


class DataTrained(msgspec.Struct, frozen=True, tag="data_trained"):
    """Sent before the `Trained` of the same turn: the claims whose progress changed in it.

    `partitions`: the number of blocks of a stream, once its end was seen; otherwise `UNKNOWN`.
    """

    turn: int
    trained: list[PartitionTrained]
    partitions: Annotated[int, Meta(ge=-1)]


class DataGranted(msgspec.Struct, frozen=True, tag="data_granted"):
    """The answer to `DataWanted`. Without claims the iteration of this node ends. `epoch` is the iteration's."""

    number: int
    epoch: Number
    claims: list[Claim]


class DataKnown(msgspec.Struct, frozen=True, tag="data_known"):
    """What the swarm is known to have trained, with the reports of this trainer up to `turn`, for its saved state."""

    turn: int
    state: DataState


DataFromDaemon = DataGranted | DataKnown
DataFromTrainer = DataOpened | DataWanted | DataTrained

"""What a step of exchange moves over the line of one node, in closed form: a function of codecs, nodes and shares.

Per step a node sends its delta to the owners of the shards that are not its own (*pushed*). As an owner it sends each
delta of its shards to the backups that lack it (*forwarded*), and its shards to every other node (*served*). It
receives the same: values or changes (*pulled*), deltas of the others for its own shards, and those for the shards that
it backs up. Headers are left out; with shards of 10,000 values or more they are under one percent. Counted swarms agree
(tests/simulated/test_scale_model.py). Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2pnode.training.encoding.codecs import SPARSE_VALUES, CodecName
from p2pnode.training.encoding.pull_codecs import pulled_in

#: A value and its share of a block's scales; sparse is `bytes_per_value`.
_DENSE: dict[CodecName, float] = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "int8": 1.0 + 4 / 1024,
    "int4": 0.5 + 2 / 64,
}
_SPARSE_BLOCK = 4096
#: Of a sparse block: its count in two bytes, two magnitudes; per value sent 12 bits of index and 2 of value.
_SPARSE_HEAD_BYTES, _SPARSE_VALUE_BYTES = 6.0, 14 / 8


def bytes_per_value(codec: CodecName, sparse_values: int = SPARSE_VALUES) -> float:
    """Encoded bytes per parameter; sparse sends `sparse_values` of a block."""
    if codec == "sparse":
        return (_SPARSE_HEAD_BYTES + _SPARSE_VALUE_BYTES * sparse_values) / _SPARSE_BLOCK
    return _DENSE[codec]


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a node exchanges in a step: `parameters` float32 values, shared by `nodes` nodes that train.

    `owned` and `backed` are the shares of the vector that this node owns and backs up, from 0 to 1.
    """

    parameters: int
    nodes: float
    owned: float
    backed: float

    @classmethod
    def even(cls, parameters: int, nodes: float, *, replicas: int = 1) -> StepShape:
        """A node of a swarm whose nodes own equal shares."""
        share = 1.0 / nodes
        return cls(parameters, nodes, share, share * replicas if nodes > 1 else 0.0)


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes of one step over the line of one node, by direction and purpose."""

    pushed: float
    forwarded: float
    served: float
    pulled: float
    deltas_received: float
    forwards_received: float

    @property
    def up(self) -> float:
        return self.pushed + self.forwarded + self.served

    @property
    def down(self) -> float:
        return self.pulled + self.deltas_received + self.forwards_received


def step_bytes(shape: StepShape, codec: CodecName, pull_codec: CodecName | None = None) -> StepBytes:
    """The bytes of a step with deltas in `codec` and pulls in `pull_codec`; None: what `exchange.pull_codec = "auto"`
    makes of `codec`. Every node trains and pulls once a step; a share that is owned has a backup where any is."""
    push = bytes_per_value(codec) * shape.parameters
    pull = bytes_per_value(pull_codec or pulled_in(codec)) * shape.parameters
    others = max(0.0, shape.nodes - 1.0)
    has_backup = shape.backed > 0.0
    return StepBytes(
        pushed=push * (1.0 - shape.owned),
        # A backup has its own delta.
        forwarded=push * shape.owned * others if has_backup else 0.0,
        served=pull * shape.owned * others,
        pulled=pull * (1.0 - shape.owned),
        deltas_received=push * shape.owned * others,
        forwards_received=push * shape.backed * others,
    )

"""What a step of exchange moves over the line of one node, in closed form: a function of codecs, nodes and shares.

Per step a node sends its delta to the owners of the shards that are not its own (*pushed*). As an owner it sends each
delta of its shards to the backups that lack it (*forwarded*), and its shards to every other node (*served*). It
receives the same: values or changes (*pulled*), deltas of the others for its own shards, and those for the shards that
it backs up. Headers are left out; with shards of 10,000 values or more they are under one percent. Counted swarms agree
(tests/simulated/test_scale_model.py). Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2pnode.training.encoding.table import CODECS, CodecName


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
    """The bytes of a step with deltas in `codec` and pulls in `pull_codec`; None: in the same. Every node trains and
    pulls once a step; a share that is owned has a backup where any is."""
    push = CODECS[codec].bytes_per_value * shape.parameters
    pull = CODECS[pull_codec or codec].bytes_per_value * shape.parameters
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

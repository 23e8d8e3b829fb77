"""Messages between the nodes of a swarm with `devices.coordination = "global"`, as MessagePack. Pure.

`lease_steps` asks the global server for local steps of a cycle. `leader_values` asks the node of the swarm's leader for
that leader's values. They follow in the body as bfloat16 (`training.encoding.frames`).
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from overlay.peers import Counter, Id
from training.devices.names import MAX_DEVICES

Genesis = Annotated[bytes, Meta(max_length=16)]
#: No cycle has so many steps.
Steps = Annotated[int, Meta(ge=0, lt=1 << 32)]

Message = TypeVar("Message", bound=msgspec.Struct)


class LeaseSteps(msgspec.Struct, frozen=True, array_like=True):
    """Asks for `wants` more local steps of a cycle, in which `trainers` of this node take part with a period of
    `period`. `taken` and `total`: what this node, and all nodes, have leased of it, as the last answer said. `loss`:
    the running loss of this node's leader; None where it follows none."""

    genesis: Genesis
    cycle: Counter
    trainers: Annotated[int, Meta(ge=1, le=MAX_DEVICES)]
    period: Annotated[int, Meta(ge=1, lt=1 << 24)]
    taken: Steps
    total: Steps
    wants: Annotated[int, Meta(ge=0, le=MAX_DEVICES)]
    loss: float | None = None


class StepsLeased(msgspec.Struct, frozen=True, array_like=True):
    """Of the cycle the node may take `allowed` steps in all, and no more if `is_closed`. `leader`: the node whose
    leader has the lowest loss; None: none has one yet."""

    cycle: Counter
    allowed: Steps
    is_closed: bool
    total: Steps
    leader: Id | None = None


class LeaderWanted(msgspec.Struct, frozen=True, array_like=True):
    """Asks for the values of this node's leader."""

    genesis: Genesis


class LeaderGiven(msgspec.Struct, frozen=True, array_like=True):
    """The head before the values of a leader, `values` numbers; 0: there is none yet."""

    values: Annotated[int, Meta(ge=0, lt=1 << 40)]


_ENCODER = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    return _ENCODER.encode(message)


def decode(data: bytes, kind: type[Message]) -> Message:
    """Raises `msgspec.DecodeError`."""
    return msgspec.msgpack.decode(data, type=kind)

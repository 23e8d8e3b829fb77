"""The devices of a node in `/status`, and two quantities that the rest of it uses too (`p2pnode.status.schema`)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]


class DeviceStatus(Struct, frozen=True, kw_only=True):
    """One of several trainers of this node (`training.devices`). `state`: `crashed` is being restarted, `failed` is
    given up; `left`: its script has ended. `loss` and `step_seconds`: of its last part of a step. `leads`: the others
    of the node follow it (`devices.step = "leader"`)."""

    index: Count
    device: str
    state: str
    pid: Count | None
    failures: Count
    optimizer_steps: Count
    samples: Count
    loss: float | None
    step_seconds: Seconds
    leads: bool


class CoordinationStatus(Struct, frozen=True, kw_only=True):
    """What the nodes decide together (`devices.coordination = "global"`). `server`: the node that divides the local
    steps; null where none answers, and each node takes its own share. `serves`: that is this node, and `trainers` take
    part as it counts them. `leader`: the node whose leader has the lowest loss of all."""

    server: str | None
    serves: bool
    trainers: Count
    leader: str | None

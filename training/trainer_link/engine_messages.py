"""Messages between daemon and script about a run of an engine: named values, steps and barriers, and pull.

A script that uses an engine sends `EngineOpened` instead of `Hello`, and gets `EngineReady` when its node is in the
swarm. Then it asks; every question has a number, which its answer repeats, and many may be open. The daemon asks back
when a batch of updates needs the script's `pull`. Keys and values pass as the bytes of `training.values.encoding`: the
daemon does not look into them. Pure.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from p2pnode.training.errors import TrainingError

Number = Annotated[int, Meta(ge=0, le=1 << 48)]
Timestamp = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]
NodeId = Annotated[bytes, Meta(min_length=20, max_length=20)]
EncodedKey = Annotated[bytes, Meta(min_length=2, max_length=257)]
#: A value and its timestamp.
Encoded = tuple[bytes, Timestamp]
#: An update: key, update, timestamp, and how it changes the value (`training.values.store.EncodedUpdate`).
UpdateParts = tuple[EncodedKey, bytes, Timestamp, Literal["pull", "add", "replace"]]

#: The values of one message take about so many bytes; more are asked for again. The event loop copies each message.
MESSAGE_VALUES_BYTES = 1 << 20


class NotAnswered(TrainingError):
    """The script of another node did not answer: its node is gone or cannot be reached, or it is no server."""


class EngineOpened(msgspec.Struct, frozen=True, tag="engine_opened"):
    """The script uses an engine of this kind. An empty `method` means the barrier of the node's settings; otherwise it
    replaces method, staleness and sample of `[barrier]`."""

    kind: str
    pid: int
    method: str = ""
    staleness: Annotated[int, Meta(ge=0)] = 4
    sample: Annotated[int, Meta(ge=0)] = 0


class EngineReady(msgspec.Struct, frozen=True, tag="engine_ready"):
    """The node is in its swarm, and the values can be used. `is_synchronous`: the barrier is bsp. `pause_s`: between
    two tests of a barrier."""

    node_id: bytes
    seed: int
    is_synchronous: bool
    pause_s: float


# -- questions of the script


class BeginRun(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    """Take part; answered by `Counted` when enough nodes do."""


class CountStep(msgspec.Struct, frozen=True, array_like=True, tag="count"):
    """Announce a count; the step took so many seconds."""

    count: Number
    seconds: Annotated[float, Meta(ge=0)]


class WaitAtBarrier(msgspec.Struct, frozen=True, array_like=True, tag="wait"):
    """Answered when the barrier of the settings has passed."""

    count: Number


class FinishRun(msgspec.Struct, frozen=True, array_like=True, tag="finish"):
    """Take part no more; answered when all others have finished, or have had their time."""


class AbandonRun(msgspec.Struct, frozen=True, array_like=True, tag="abandon"):
    """Take part no more; answered at once."""


class ListPeers(msgspec.Struct, frozen=True, array_like=True, tag="peers"):
    """Steps of the others that take part: of a fresh sample of this size; 0: of all."""

    sample: Annotated[int, Meta(ge=0)]


class GetValues(msgspec.Struct, frozen=True, array_like=True, tag="get"):
    """The values of these keys; answered by the first so many of them."""

    keys: list[EncodedKey]


class ApplyUpdates(msgspec.Struct, frozen=True, array_like=True, tag="update"):
    updates: list[UpdateParts]


class CallNode(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """Ask the script of a server; answered by `Called`, or refused as "unanswered"."""

    node: NodeId
    payload: bytes


class ListMembers(msgspec.Struct, frozen=True, array_like=True, tag="members"):
    """The live servers, and which of these nodes are gone."""

    nodes: list[NodeId]


class TaskCounts(msgspec.Struct, frozen=True, array_like=True, tag="tasks"):
    """What the parameter server has done, for `/status`: since this node serves. `given`: tasks given to a worker for
    the first time; `again`: given to another one after an error, a death, or the end of their lease. `held`: with
    workers now; `waiting`: came back, and no worker is free. `refused`: updates that were too old. `lost`: updates of
    the run that died with worker and server."""

    version: Number
    workers: Number
    given: Number
    done: Number
    held: Number
    waiting: Number
    again: Number
    refused: Number
    lost: Number = 0


class AskKeys(msgspec.Struct, frozen=True, array_like=True, tag="keys"):
    """The keys after this one; empty: all. Answered by as many as a message takes."""

    after: Annotated[bytes, Meta(max_length=257)] = b""


Question = (
    BeginRun
    | CountStep
    | WaitAtBarrier
    | FinishRun
    | AbandonRun
    | ListPeers
    | GetValues
    | ApplyUpdates
    | AskKeys
    | CallNode
    | ListMembers
    | TaskCounts
)


class EngineAsked(msgspec.Struct, frozen=True, tag="engine_asked"):
    number: Number
    question: Question


# -- answers of the daemon


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """It is done, and there is nothing to say."""


class Counted(msgspec.Struct, frozen=True, array_like=True, tag="counted"):
    count: Number


class PeerSteps(msgspec.Struct, frozen=True, array_like=True, tag="steps"):
    """Steps by node id; `workers`: the nodes that take part, with this one."""

    steps: dict[bytes, int]
    workers: int


class ValuesFound(msgspec.Struct, frozen=True, array_like=True, tag="values"):
    values: list[Encoded | None]


class KeysFound(msgspec.Struct, frozen=True, array_like=True, tag="found"):
    """Keys in their order, text first; `is_last`: there are no more."""

    keys: list[EncodedKey]
    is_last: bool


class Called(msgspec.Struct, frozen=True, array_like=True, tag="called"):
    payload: bytes


class MembersFound(msgspec.Struct, frozen=True, array_like=True, tag="members_found"):
    """The known live servers by their ids, this node included if it is one; and those asked about that are gone."""

    servers: list[bytes]
    gone: list[bytes]


class QuestionRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """It failed. `kind`: `update`: an update was refused for ever, by `node`; `unavailable`: no owner answered;
    `unanswered`: another node's script did not answer; `other`: the daemon's own trouble."""

    kind: Literal["update", "unavailable", "unanswered", "other"]
    reason: str
    key: bytes = b""
    node: str = ""


Reply = Done | Counted | PeerSteps | ValuesFound | KeysFound | Called | MembersFound | QuestionRefused


class EngineAnswered(msgspec.Struct, frozen=True, tag="engine_answered"):
    number: Number
    reply: Reply


# -- pull, asked by the daemon of the owner


class PullAsked(msgspec.Struct, frozen=True, tag="pull_asked"):
    """A batch of updates of keys that this node owns, and the present values of these keys."""

    number: Number
    updates: list[UpdateParts]
    present: dict[bytes, Encoded]


class PullDone(msgspec.Struct, frozen=True, tag="pull_done"):
    """New values by key. With a `failure`, which is the text of the user's error, nothing is stored; `failed` is the
    key that raised, or empty if it was the batch as a whole."""

    number: Number
    values: dict[bytes, Encoded]
    failure: str = ""
    failed: bytes = b""


# -- calls of other nodes' scripts


class CallReceived(msgspec.Struct, frozen=True, tag="call_received"):
    """The script of the node `sender` asks this one, which is a server's."""

    number: Number
    sender: NodeId
    payload: bytes


class CallAnswered(msgspec.Struct, frozen=True, tag="call_answered"):
    """The answer to a `CallReceived`."""

    number: Number
    payload: bytes


EngineFromDaemon = EngineReady | EngineAnswered | PullAsked | CallReceived
#: What a script says once its engine is open.
EngineSaid = EngineAsked | PullDone | CallAnswered
EngineFromScript = EngineOpened | EngineSaid

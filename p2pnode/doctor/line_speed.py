"""How fast members send to this machine: a part of the model is read from two of them, as a joining node reads it.

`pull` is the request that every member with a model serves. Not more than `READ_BYTES` are read from each within
`READ_S`, and nothing is kept. No request is fit for the other direction: what this machine can send is measured while
its node trains. `judged` is pure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol

import msgspec

from p2pnode.doctor.check import DoctorCheck, info, ok, warning
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import ReceivedResponse, TransportError
from p2pnode.terminal.numbers import rate, size
from p2pnode.training.exchange.messages import Pull, PullAnswer, Wanted, decode, encode
from p2pnode.training.exchange.terms import ZERO_TERM

READ_BYTES = 4 << 20
READ_S = 4.0
#: Less says how fast a connection begins, not how fast the line is.
ENOUGH_BYTES = 256 << 10
#: A line below this is far slower than training on most machines.
SLOW_BYTES_PER_S = 1e6


class LineRead(NamedTuple):
    """What a member sent after the first buffer, and in which time; `reason`: why it sent nothing."""

    address: str
    received_bytes: int = 0
    seconds: float = 0.0
    reason: str = ""

    @property
    def bytes_per_s(self) -> float | None:
        """None where too little was received."""
        return self.received_bytes / self.seconds if self.received_bytes >= ENOUGH_BYTES and self.seconds else None


class Asking(Protocol):
    """What this uses of the overlay."""

    def request(
        self, to: Contact, name: str, payload: bytes, *, timeout_s: float
    ) -> AbstractAsyncContextManager[ReceivedResponse]: ...


async def read_from(overlay: Asking, member: Contact, genesis: bytes, shards: int) -> LineRead:
    """Read a part of the model from a member that may have some of these shards."""
    wanted = [Wanted(shard, ZERO_TERM, 0) for shard in range(shards)]
    # Of step 0: it shows an owner no step that this node would not be entitled to see.
    pull = genesis + encode(Pull(0, "float32", wanted, takes_copies=True))
    address, loop = str(member.address), asyncio.get_running_loop()
    received, began_s, last_s = 0, 0.0, 0.0
    try:
        async with asyncio.timeout(READ_S), overlay.request(member, "pull", pull, timeout_s=READ_S) as answer:
            decode(answer.head, PullAnswer)
            async for buffer in answer.body:
                last_s = loop.time()
                if not began_s:
                    began_s = last_s
                    continue
                received += len(buffer)
                if received >= READ_BYTES:
                    break
    except TimeoutError:
        if not received:
            return LineRead(address, reason=f"sent nothing within {READ_S:g} s")
    except TransportError as failure:
        return LineRead(address, reason=failure.detail)
    except (msgspec.MsgspecError, ValueError):
        return LineRead(address, reason="answers as no member does")
    return LineRead(address, received, last_s - began_s)


def judged(reads: Sequence[LineRead]) -> DoctorCheck:
    """One finding; its next step says how the rest is measured."""
    speeds = {one.address: one.bytes_per_s for one in reads}
    known = {address: speed for address, speed in speeds.items() if speed is not None}
    if known:
        what = ", ".join(f"{rate(speed)} from {address}" for address, speed in known.items())
        if max(known.values()) < SLOW_BYTES_PER_S:
            return warning(
                "line",
                f"slow: {what}",
                'longer steps (training.local_steps), or exchange.codec = "sparse"; docs/slow-lines.md',
            )
        return ok("line", f"{what}; what this machine can send is measured once its node trains")
    do = "start the node: after some steps `p2pnode status` says what its line carries"
    if not reads:
        return info("line", "no member is known whose line could be measured", do)
    failed = [f"{one.address} {one.reason}" for one in reads if one.reason]
    if len(failed) == len(reads):
        return info("line", f"its speed was not measured: {'; '.join(failed)}", do)
    most = max(one.received_bytes for one in reads)
    return info("line", f"its speed was not measured: members sent no more than {size(most)} of the model", do)

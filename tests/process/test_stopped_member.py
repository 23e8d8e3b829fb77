"""A member whose process is stopped is found dead although its kernel takes all that is sent to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time

import pytest

from p2pnode.overlay.overlay import Overlay
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import Response, TransportError
from tests.harness.project.repository import ROOT
from tests.harness.runner.stories import run_by
from tests.process.test_overlay_sockets import GENESIS, V4, Real, port_of, until

#: A request is sent this often.
EVERY_S = 0.1
MEMBER = """
import asyncio, sys
from tests.process.test_stopped_member import serve
asyncio.run(serve(int(sys.argv[1])))
"""


async def serve(founder_port: int) -> None:
    """A member that answers requests, in a process of its own, until that ends."""
    async with Real() as member:
        member.register("echo", _echo)
        await member.join([f"{V4}:{founder_port}"], genesis=None)
        await asyncio.Event().wait()


async def _echo(_sender: Contact, payload: bytes, _body: object) -> Response:
    return Response(payload)


async def ask(node: Overlay, member: Contact) -> None:
    """One small request; it need not be answered."""
    with contextlib.suppress(TransportError):
        async with node.request(member, "echo", b"x" * 500, timeout_s=3.0):
            pass


@pytest.mark.promise(3)
@run_by(asyncio.run)
async def test_a_stopped_process_that_is_asked_all_the_time_is_found_dead() -> None:
    """Ten new requests a second: its kernel acknowledges each of them, and nobody reads them. It is found dead all the
    same, on a quiet machine after 5 s: a round, a probe, and a suspicion of 3 s."""
    async with Real() as founder:
        founder.found(GENESIS)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", MEMBER, str(port_of(founder))]
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environment)
        asked = set[asyncio.Task[None]]()
        try:
            await until(lambda: len(founder.peers) == 1, "it has joined")
            (peer,) = founder.peers
            process.send_signal(signal.SIGSTOP)

            def is_found_dead() -> bool:
                if len(asked) < (time.monotonic() - began_s) / EVERY_S:
                    asked.add(asyncio.create_task(ask(founder, peer.contact)))
                return founder.is_gone(peer.node_id)

            began_s = time.monotonic()
            await until(is_found_dead, "it is found dead")
            print(f"found dead {time.monotonic() - began_s:.1f} s after the stop, {len(asked)} requests")
        finally:
            process.kill()
            await process.wait()
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

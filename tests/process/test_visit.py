"""The doctor goes into a real swarm for a moment: each bootstrap has a result, and the swarm stays as it was."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path

from p2pnode.config.settings import Config
from p2pnode.doctor.machine import DoctorCheck
from p2pnode.doctor.visit import visit
from p2pnode.overlay.environment import Environment
from p2pnode.overlay.identity import load_identity
from p2pnode.overlay.overlay import Overlay
from p2pnode.overlay.peers import PeerChange
from p2pnode.overlay.settings import NodeSettings, OverlaySettings, SwarmSettings
from p2pnode.overlay.sockets.transport import SocketTransport
from p2pnode.overlay.system import FolderDisk, SystemClock, SystemEntropy, ThreadExecutor
from tests.harness.environment.simulated import NoLog

RUN = "digits"


def config_of(folder: Path, bootstrap: Sequence[str], *, run: str = RUN, client_only: bool = False) -> Config:
    return Config(
        node=NodeSettings(state_dir=str(folder), port=0, client_only=client_only),
        swarm=SwarmSettings(run=run, bootstrap=list(bootstrap)),
    )


def test_each_bootstrap_is_named_and_the_way_in_is_tried(tmp_path: Path) -> None:
    """A member answers by UDP and TCP, and connects back. A closed port,
    an unknown name and another run have their reasons; what keeps a node out is an error only if no bootstrap leads in.
    The member sees it leave."""
    changes: list[PeerChange] = []

    async def scenario() -> tuple[list[DoctorCheck], list[DoctorCheck], str]:
        executor, entropy, disk = ThreadExecutor(), SystemEntropy(), FolderDisk(tmp_path / "member")
        environment = Environment(clock=SystemClock(), entropy=entropy, disk=disk, executor=executor, log=NoLog())
        member = Overlay(
            identity=load_identity(disk, entropy),
            incarnation=1,
            boot_id=1,
            settings=OverlaySettings(NodeSettings(port=0), SwarmSettings(run=RUN)),
            transport=SocketTransport("127.0.0.1", 0, log=environment.log, clock=environment.clock),
            environment=environment,
        )
        member.on_change(changes.append)
        await member.start()
        member.found(bytes(16))
        try:
            with socket.socket() as closed:
                closed.bind(("127.0.0.1", 0))
                places = [str(member.address), f"127.0.0.1:{closed.getsockname()[1]}", "nowhere.invalid:1"]
                good = [check async for check in visit(config_of(tmp_path, places), None)]
            other = [check async for check in visit(config_of(tmp_path, [str(member.address)], run="other"), None)]
            return good, other, str(member.address)
        finally:
            await member.stop()
            executor.close()

    good, other, address = asyncio.run(scenario())

    assert [(check.name, check.level) for check in good] == [
        ("bootstrap", "ok"),
        ("bootstrap", "warning"),
        ("bootstrap", "warning"),
        ("UDP", "ok"),
        ("reachable", "ok"),
    ]
    assert address in good[0].what
    assert "refused" in good[1].what
    assert "cannot be resolved" in good[2].what
    assert all(check.do for check in good[1:3])
    assert [(check.name, check.level) for check in other] == [("bootstrap", "error")]
    assert "belongs to run 'digits'" in other[0].what
    kinds = [change.kind for change in changes]
    assert kinds[0] == "up"
    assert kinds[-1] == "left"
    assert not any(path.name.startswith("p2pnode-doctor") for path in tmp_path.iterdir())

"""A node joins through a member with another manifest: of several members those that agree count."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from overlay.peers import Contact
from overlay.transport import Response, gathered, in_parts
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.swarms.swarm import Swarm
from tests.harness.trainers.stub_trainer import StubTrainer
from training import manifest_check
from training.manifest import Manifest
from training.manifest_check import MAX_MANIFEST_BYTES

SIZE, SHARDS = 64, 4


def step_s(generator: Any, _step: int) -> float:
    return float(generator.uniform(0.8, 1.2))


@pytest.mark.parametrize("first", [True, False])
def test_one_member_alone_gives_no_number_of_shards(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where it is asked first. The joiner was given none, and two members say the same."""
    true, asked = manifest_check.compare_with, []

    async def differing(swarm: Any, peer: Contact, proposal: Manifest, **given: Any) -> Manifest:
        asked.append(peer)
        manifest = await true(swarm, peer, proposal, **given)
        return msgspec.structs.replace(manifest, shards=5) if (len(asked) == 1) is first else manifest

    async def main() -> None:
        swarm = Swarm(
            seed=9,
            settings={"exchange.shards": SHARDS},
            make_trainer=lambda name: StubTrainer(name, SIZE, step_s=step_s, start_s=0.3),
        )
        try:
            swarm.start_many(4)
            await swarm.until(
                lambda: all(one.living.progress.step >= 2 for one in swarm.running()), within_s=60, what="two steps"
            )
            monkeypatch.setattr(manifest_check, "compare_with", differing)
            joiner = swarm.start("n4", bootstrap="n3", exchange__shards=0)
            await swarm.until(lambda: joiner.living.exchange is not None, within_s=20, what="it has joined")
            assert len(asked) == 3
            assert len(joiner.living.exchange.store) == (SHARDS if first else 5)
        finally:
            await swarm.stop()

    VirtualLoop().run(main(), limit_s=600)


@pytest.mark.parametrize(("others", "changes"), [(1, {"local_steps": 77}), (4, {"local_steps": 77})])
def test_one_member_with_another_manifest_keeps_nobody_out(others: int, changes: dict[str, Any]) -> None:
    """Where all have another manifest it is this node that differs."""

    async def main() -> None:
        swarm = Swarm(
            seed=8,
            settings={"exchange.shards": SHARDS},
            make_trainer=lambda name: StubTrainer(name, SIZE, step_s=step_s, start_s=0.3),
        )
        try:
            swarm.start_many(4)
            await swarm.until(
                lambda: all(one.living.progress.step >= 2 for one in swarm.running()), within_s=60, what="two steps"
            )
            for name in ("n3", "n2", "n1", "n0")[:others]:
                handlers: dict[str, Any] = swarm.hosts[name].living.overlay._requests._handlers

                async def another(_sender: Contact, _payload: bytes, stream: Any) -> Response:
                    mine = msgspec.msgpack.decode(await gathered(stream, MAX_MANIFEST_BYTES), type=Manifest)
                    return Response(b"", in_parts(msgspec.msgpack.encode(Manifest(**{**_fields(mine), **changes}))))

                handlers["manifest"] = another
            joiner = swarm.start("n4", bootstrap="n3", exchange__shards=0)
            await asyncio.sleep(12.0)
            assert joiner.task is not None
            if others == 1:
                assert not joiner.task.done()
                assert joiner.living.progress.step >= 4
                assert len(joiner.living.exchange.store) == SHARDS
            else:
                assert "local_steps" in str(joiner.task.exception())
        finally:
            await swarm.stop()

    VirtualLoop().run(main(), limit_s=600)


def _fields(manifest: Manifest) -> dict[str, Any]:
    return {name: getattr(manifest, name) for name in manifest.__struct_fields__}

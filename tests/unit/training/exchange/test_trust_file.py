"""Members that are left out stay left out over a restart, and those that were forgiven do not."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from tests.harness.builders.stores import IDS, contact, owner_of
from tests.harness.environment.simulated import MemoryDisk
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.stubs.exchange_context import GENESIS, ScriptedSwarm, context_of, records_of
from training.exchange.trust import APART_S, LIES
from training.exchange.trust_file import TRUST_FILE, TrustFile


def started(files: dict[str, bytes]) -> tuple[Any, TrustFile, MemoryDisk]:
    """A node on the disk with these files."""
    context: Any = context_of(ScriptedSwarm(contact("a"), [contact("b")]), owner_of("a"))
    disk = context.environment.disk
    disk.files = files
    return context, TrustFile(context), disk


async def written(file: TrustFile, seconds: float = 2.5) -> None:
    task = asyncio.create_task(file.run())
    await asyncio.sleep(seconds)
    task.cancel()


def run(scenario: Any) -> None:
    VirtualLoop().run(scenario)


def test_a_liar_is_left_out_after_a_restart_until_it_is_forgiven() -> None:
    """The reason and the number of its lies are kept. One that was forgiven is trusted after the next start."""

    async def scenario() -> None:
        context, file, disk = started({})
        for _ in range(LIES):
            context.lied(IDS["b"], "value")
            await asyncio.sleep(APART_S)
        await written(file)

        again, file, disk = started(dict(disk.files))
        (found,) = again.view.trust.distrusted()
        assert (found.node, found.reason, found.lies) == (IDS["b"], "value", LIES)
        assert again.view.is_gone(IDS["b"])
        (event,) = [one for one in records_of(again) if one.event == "member_distrusted"]
        assert event.fields["source"] == IDS["b"].hex()

        assert again.view.trust.forgive(IDS["b"])
        await written(file)
        third, _, _ = started(dict(disk.files))
        assert IDS["b"] in third.view.trust

    run(scenario())


def test_a_disk_that_is_full_is_tried_again() -> None:
    """One error in the log, and the file as soon as there is room."""

    async def scenario() -> None:
        context, file, disk = started({})
        for _ in range(LIES):
            context.lied(IDS["b"], "value")
            await asyncio.sleep(APART_S)
        disk.full = True
        await written(file, 4.5)
        assert TRUST_FILE not in disk.files
        assert len([one for one in records_of(context) if one.event == "trust_not_written"]) == 1
        disk.full = False
        await written(file)
        assert TRUST_FILE in disk.files

    run(scenario())


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff" * 40,
        msgspec.msgpack.encode((GENESIS, [(b"short", "value", 5)])),
        msgspec.msgpack.encode((b"x" * 16, [(IDS["b"], "value", 5)])),
    ],
    ids=["empty", "garbage", "no node", "another run"],
)
def test_a_file_that_is_of_no_use_leaves_nobody_out(raw: bytes) -> None:
    """The node starts, and trusts all."""

    async def scenario() -> None:
        context, _, _ = started({TRUST_FILE: raw})
        assert context.view.trust.distrusted() == []

    run(scenario())

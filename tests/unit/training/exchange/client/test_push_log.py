"""The record of a node's own deltas on its disk, written while it pushes."""

from __future__ import annotations

import asyncio

from tests.harness.builders.stores import contact, owner_of, store_of
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import GENESIS, ScriptedSwarm, context_of, records_of
from training.exchange.client.push_log import RECORD_FILE, WRITE_INTERVAL_S, PushLog
from training.exchange.store.push_record import PushRecord
from training.exchange.terms import GENERATION, Term


def test_a_push_is_on_disk_before_it_ends_and_a_slow_disk_is_written_to_no_faster_than_it_bears() -> None:
    """With the generation of the owners' terms, each step on its own. On a disk that takes 25 ms short steps share a
    write. A delta that is not added is no longer in it. A full disk is logged once."""

    async def scenario() -> None:
        context = context_of(ScriptedSwarm(contact("a")), owner_of("a"))
        context.store.note_owner(1, Term(3 * GENERATION + 2, contact("b").node_id), contact("b"))
        disk, log = context.environment.disk, PushLog(context)
        writing = asyncio.create_task(log.run())
        log.begin(7)
        await asyncio.sleep(0.01)
        found = PushRecord()
        found.load(disk.read(RECORD_FILE) or b"", GENESIS)
        assert found.generation == 3
        assert [ranges for _, _, ranges in found.deltas().rows()] == [[(7, 7)]]

        writes = disk.writes
        for step in range(8, 108):
            pushed = log.begin(step)
            await asyncio.sleep(0.001)
            found.load(disk.read(RECORD_FILE) or b"", GENESIS)
            assert pushed in found.deltas()
            log.end(pushed, is_added=True)
            await asyncio.sleep(0.001)
        assert disk.writes - writes == 100  # the end of a push changes nothing
        context.environment.executor.delay_s = 0.025
        await asyncio.sleep(1.0)
        writes = disk.writes
        for step in range(108, 208):
            log.end(log.begin(step), is_added=True)
            await asyncio.sleep(WRITE_INTERVAL_S / 10)
        assert 7 <= disk.writes - writes <= 9
        context.environment.executor.delay_s = 0.0
        log.end(log.begin(208), is_added=False)
        await asyncio.sleep(1.0)
        found.load(disk.read(RECORD_FILE) or b"", GENESIS)
        assert max(ranges[-1][1] for *_, ranges in found.deltas().rows()) == 207
        disk.full = True
        for step in range(300, 320):
            log.end(log.begin(step), is_added=True)
            await asyncio.sleep(WRITE_INTERVAL_S)
        assert [one.event for one in records_of(context)] == ["push_record_not_written"]
        writing.cancel()

    run(scenario())


def test_a_damaged_record_is_logged_and_the_node_starts() -> None:
    """What it recorded is unknown then."""

    async def scenario() -> None:
        context = context_of(ScriptedSwarm(contact("a")), store_of("a"))
        context.environment.disk.write(RECORD_FILE, b"\x93\x00")
        PushLog(context)
        assert [one.event for one in records_of(context)] == ["push_record_unreadable"]
        assert not context.record.deltas().count()

    run(scenario())

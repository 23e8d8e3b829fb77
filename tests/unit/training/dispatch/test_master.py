"""The life of a master's service; what it answers is tested in `tests.simulated.test_dispatch`."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from p2pnode.training.dispatch.master import REOPEN_S, MasterService
from p2pnode.training.dispatch.store import Store
from p2pnode.training.settings import DispatchSettings
from tests.harness.environment.memory_store import MemoryStore
from tests.harness.environment.simulated import ListLog, make_environment
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by


@run_by(run)
async def test_a_master_that_had_a_fault_serves_again() -> None:
    """Whatever went wrong, it opens its store again, says why it did not serve, and logs each reason once."""
    faults: list[Exception] = [KeyError("a bug"), KeyError("a bug"), OSError("no such host")]

    def make_store() -> Store:
        if faults:
            raise faults.pop(0)
        return MemoryStore()

    async def nobody(*_: object) -> None:
        return None

    log = ListLog([])
    swarm = SimpleNamespace(node_id=b"m" * 20, register=lambda *_: None, on_change=lambda _: None)
    directory = SimpleNamespace(
        on_record=lambda _: None, confirmed=nobody, publish=nobody, own_record=lambda *_: None, record=None
    )
    environment = make_environment(log=log)
    settings = DispatchSettings(store="sqlite")
    master = MasterService(
        cast(Any, swarm), cast(Any, directory), settings, seed=0, make_store=make_store, environment=environment
    )
    master.start(b"g" * 16)
    await asyncio.sleep(REOPEN_S / 2)
    assert master.facts().reason == "the master had a fault: KeyError('a bug')"
    assert master.facts().serves_since is None
    await asyncio.sleep(4 * REOPEN_S)

    assert master.facts().serves_since is not None
    assert [record.fields["reason"] for record in log.of("dispatch_store_failed")] == [
        "the master had a fault: KeyError('a bug')",
        "the master had a fault: OSError('no such host')",
    ]
    await master.stop()

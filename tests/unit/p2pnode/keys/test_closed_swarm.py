"""The watch on the key file: new keys are used, unusable files are reported once, and the former keys stay."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from p2pnode.config.settings import Config
from p2pnode.errors import UserError
from p2pnode.keys import closed_swarm
from p2pnode.keys.closed_swarm import POLL_INTERVAL_S, ClosedSwarm, open_closed_swarm
from p2pnode.keys.key_files import write_key_file
from p2pnode.overlay.identity import identity_from_seed
from p2pnode.overlay.sealing.certificate_maker import make_bundle
from p2pnode.overlay.sealing.swarm_key import KeyRing, SwarmKey
from p2pnode.overlay.sealing.tls import CertificateError, CertificateRequest
from p2pnode.overlay.settings import NodeSettings, SwarmSettings
from tests.harness.environment.simulated import InlineExecutor, ListLog, make_environment
from tests.harness.environment.virtual_loop import VirtualLoop, run
from tests.harness.runner.stories import Fixture, played_by, run_by

ONE, TWO = SwarmKey(b"\1" * 32), SwarmKey(b"\2" * 32)
IDENTITY = identity_from_seed(b"i" * 32)


@pytest.fixture(autouse=True)
def certificates_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Certificates are made in this process, without the cost of another one."""

    def make(identity: Any, keys: KeyRing, run: str, wall_s: float) -> Any:
        return make_bundle(CertificateRequest(identity.seed, run, [key.secret for key in keys], wall_s))

    monkeypatch.setattr(closed_swarm, "make_certificates", make)


def play(story: Callable[[ClosedSwarm, Path, ListLog], Awaitable[None]], folder: Path) -> None:
    """Run a story beside the watch on the virtual loop, with one key in the key file."""
    path = folder / "swarm.key"
    write_key_file(path, KeyRing((ONE,)))

    async def main() -> None:
        log = ListLog([])
        config = Config(node=NodeSettings(host="127.0.0.1", port=0), swarm=SwarmSettings(key_file=str(path)))
        environment = make_environment(log=log, executor=InlineExecutor())
        swarm = await open_closed_swarm(config, IDENTITY, KeyRing((ONE,)), folder, environment)
        watching = asyncio.ensure_future(swarm.watch())
        await asyncio.sleep(POLL_INTERVAL_S)
        await story(swarm, path, log)
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching

    VirtualLoop().run(main(), limit_s=60)


def spoil(path: Path) -> None:
    """Write no key, with another time than before whatever the resolution of the file system."""
    found = path.stat()
    path.write_text("no key")
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns + 1_000_000_000))


@played_by(play, Fixture("tmp_path"))
async def test_new_keys_are_used(swarm: ClosedSwarm, path: Path, log: ListLog) -> None:
    """When the key file changes, the swarm uses its keys and logs their fingerprints once."""
    write_key_file(path, KeyRing((TWO, ONE)))
    await asyncio.sleep(3 * POLL_INTERVAL_S)
    assert swarm.keys == KeyRing((TWO, ONE))
    (record,) = log.of("swarm_keys_changed")
    assert record.fields == {
        "used": TWO.fingerprint,
        "accepted": [TWO.fingerprint, ONE.fingerprint],
        "before": [ONE.fingerprint],
    }


@played_by(play, Fixture("tmp_path"))
async def test_an_unusable_file_is_reported_once(swarm: ClosedSwarm, path: Path, log: ListLog) -> None:
    """The former keys stay in use, the warning comes once, and a repaired file is used."""
    for _ in range(3):
        spoil(path)
        await asyncio.sleep(POLL_INTERVAL_S)
    assert swarm.keys == KeyRing((ONE,))
    assert len(log.of("swarm_key_not_changed")) == 1
    write_key_file(path, KeyRing((TWO,)))
    await asyncio.sleep(2 * POLL_INTERVAL_S)
    assert swarm.keys == KeyRing((TWO,))


@pytest.mark.parametrize("failure", [CertificateError("no memory"), OSError("no process"), KeyError("a bug")])
@played_by(play, Fixture("tmp_path"))
async def test_certificates_that_fail_are_tried_again(
    swarm: ClosedSwarm, path: Path, log: ListLog, *, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the file is valid but the certificates cannot be made, the watch tries again without another change."""
    make, failures = closed_swarm.make_certificates, [failure, failure]

    def failing(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return make(*arguments)

    monkeypatch.setattr(closed_swarm, "make_certificates", failing)
    write_key_file(path, KeyRing((TWO,)))
    await asyncio.sleep(4 * POLL_INTERVAL_S)
    assert swarm.keys == KeyRing((TWO,))
    assert len(log.of("swarm_key_not_changed")) == 1


@run_by(run, limit_s=60)
async def test_no_certificates_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without certificates the start ends with one sentence."""

    def failing(*_arguments: Any) -> None:
        raise CertificateError("no memory")

    monkeypatch.setattr(closed_swarm, "make_certificates", failing)
    with pytest.raises(UserError, match="certificate could not be made: no memory"):
        await open_closed_swarm(Config(), IDENTITY, KeyRing((ONE,)), tmp_path, make_environment())

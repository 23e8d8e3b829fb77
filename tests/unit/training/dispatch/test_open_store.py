"""From the setting `dispatch.store` to a store, and what is wrong with a setting that names none."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from p2pnode.training.dispatch.etcd_store import EtcdStore
from p2pnode.training.dispatch.open_store import BadStoreSetting, open_store
from p2pnode.training.dispatch.sqlite_store import SqliteStore
from tests.harness.environment.simulated import make_environment
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by


@run_by(run)
async def test_settings_and_their_stores(tmp_path: Path) -> None:
    """The default is a file in the state directory; a path may be relative to it; etcd has several endpoints."""
    (tmp_path / "password").write_text("secret\n")
    environment = make_environment()
    for spec, path in (
        ("sqlite", tmp_path / "dispatch.sqlite"),
        ("sqlite:queues/one", tmp_path / "queues/one"),
        ("sqlite:/elsewhere/one", Path("/elsewhere/one")),
    ):
        store = open_store(spec, tmp_path, environment)
        assert isinstance(store, SqliteStore)
        assert store.path == path
    spec = f"etcd://ann@one:1,[::1]:2,three/runs/mine/?tls=true&password_file={tmp_path}/password&ttl_s=5"
    store = open_store(spec, tmp_path, environment)
    assert isinstance(store, EtcdStore)
    gateway = store._calls
    assert gateway._endpoints == ["https://one:1", "https://[::1]:2", "https://three:2379"]
    assert gateway._user == ("ann", "secret")
    assert store._key("head") == b"/runs/mine/head"
    plain = open_store("etcd://one/prefix", tmp_path, environment)
    assert isinstance(plain, EtcdStore)
    assert plain._calls._endpoints == ["http://one:2379"]
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("", "names no store"),
        ("redis://one", "names no store"),
        ("etcd://one", "no prefix"),
        ("etcd://one/", "no prefix"),
        ("etcd:///prefix", "no host and port"),
        ("etcd://one:port/prefix", "no host and port"),
        ("etcd://one,,two/prefix", "no host and port"),
        ("etcd://one/prefix?tsl=true", "unknown option tsl; known are ca"),
        ("etcd://one/prefix?tls=yes", "tls is true or false"),
        ("etcd://one/prefix?tls=false&ca=/x", "contradicts"),
        ("etcd://one/prefix?ca=/nowhere", "certificates cannot be read"),
        ("etcd://one/prefix?ttl_s=1", "from 2 to 3600"),
        ("etcd://one/prefix?ttl_s=nan", "from 2 to 3600"),
        ("etcd://one/prefix?ttl_s=soon", "from 2 to 3600"),
        ("etcd://ann:secret@one/prefix", "password_file"),
        ("etcd://ann@one/prefix", "a user needs a password_file"),
        ("etcd://one/prefix?password_file=/x", "a password_file a user"),
        ("etcd://ann@one/prefix?password_file=/nowhere", "password cannot be read"),
    ],
)
@run_by(run)
async def test_a_setting_that_names_no_store(spec: str, reason: str, tmp_path: Path) -> None:
    """Each is refused with what is wrong and what is right."""
    with pytest.raises(BadStoreSetting, match=reason):
        open_store(spec, tmp_path, make_environment())
    await asyncio.sleep(0)

"""The store in a real etcd: one writer whatever stops or lags, nothing acknowledged lost, values below its limit."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.system import FolderDisk, SystemClock, SystemEntropy, ThreadExecutor
from p2pnode.training.dispatch.etcd_gateway import EtcdGateway, EtcdRefused, Json, coded
from p2pnode.training.dispatch.etcd_store import EtcdStore
from p2pnode.training.dispatch.open_store import open_store
from p2pnode.training.dispatch.store import MAX_BYTES, MAX_ROWS, StoreLost
from tests.harness.environment.simulated import ListLog
from tests.harness.project.repository import ROOT
from tests.harness.runner.stories import played_by
from tests.process.harness.etcd_server import EtcdServer, etcd_binary

pytestmark = pytest.mark.skipif(
    etcd_binary() is None, reason="no etcd: install Debian's etcd-server, or name a binary in P2PNODE_ETCD"
)

#: Of leases that have to end, and of all others: a busy machine writes late, and an etcd there answers late.
TTL_S, LONG_TTL_S = 3.0, 30.0
PREFIX = "/p2pnode/test"


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path)
    try:
        server.start()
        yield server
    finally:
        server.close()


def environment(folder: Path) -> Environment:
    return Environment(
        clock=SystemClock(),
        entropy=SystemEntropy(),
        disk=FolderDisk(folder),
        executor=ThreadExecutor(),
        log=ListLog([], clock=SystemClock()),
    )


#: What `run` closes: a session that nobody closes would fail a later test with its warning.
opened: list[EtcdGateway] = []


def gateway(*endpoints: str, user: tuple[str, str] | None = None) -> EtcdGateway:
    opened.append(EtcdGateway(endpoints, user=user))
    return opened[-1]


def master(etcd: EtcdServer, folder: Path, name: str = "master", ttl_s: float = LONG_TTL_S) -> EtcdStore:
    return EtcdStore(gateway(etcd.endpoint), PREFIX, name, environment(folder), ttl_s)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        try:
            async with asyncio.timeout(90):
                await scenario()
        finally:
            while opened:
                await opened.pop().close()

    asyncio.run(limited())


@played_by(run)
async def test_what_was_written_is_read_by_the_next_master(*, etcd: EtcdServer, tmp_path: Path) -> None:
    """The largest writes, of rows and of bytes, are within etcd's limits; the next master reads the rows as they were
    written last, with a higher epoch."""
    store = master(etcd, tmp_path)
    assert await store.open() == {}
    rows = {f"task/{number}": b"%d" % number for number in range(MAX_ROWS)}
    await store.write(rows)
    large = {f"chunks/{number}": os.urandom(MAX_BYTES) for number in range(3)}
    for key, row in large.items():
        await store.write({key: row})
    await store.write({"task/3": b"another"})
    epoch = store.epoch
    await store.close()

    store = master(etcd, tmp_path)
    assert await store.open() == {**rows, **large, "task/3": b"another"}
    assert store.epoch > epoch
    await store.close()


@played_by(run)
async def test_a_write_that_etcd_refuses_ends_the_service(*, etcd: EtcdServer, tmp_path: Path) -> None:
    """Nothing of it lands, and the next master goes on."""
    for rows, reason in (
        ({"a": b"2", "large": bytes(7 << 18)}, "too large"),
        ({"a": b"2", "large": bytes(2 << 20)}, "larger than max"),
        ({"a": b"2", **{f"b{number}": b"" for number in range(MAX_ROWS)}}, "too many operations"),
    ):
        store = master(etcd, tmp_path)
        await store.open()
        await store.write({"a": b"1"})
        with pytest.raises(StoreLost, match=reason):
            await store.write(rows)
        await store.close()
    store = master(etcd, tmp_path)
    assert await store.open() == {"a": b"1"}
    await store.close()


WRITES_FOR_EVER = """
import asyncio, itertools, sys
from pathlib import Path
from tests.process.harness.etcd_server import EtcdServer
from tests.process.test_etcd_store import environment, EtcdGateway, EtcdStore, PREFIX, TTL_S

async def main():
    store = EtcdStore(EtcdGateway([sys.argv[1]]), PREFIX, "old", environment(Path(sys.argv[2])), TTL_S)
    await store.open()
    for number in itertools.count():
        try:
            await store.write({"old": b"%d" % number, f"old {number}": b""})
        except Exception as error:
            print(type(error).__name__, flush=True)
            await store.close()
            return
        print(number, flush=True)

asyncio.run(main())
"""


def test_no_write_of_a_paused_leader_lands(etcd: EtcdServer, tmp_path: Path) -> None:
    """The leader is stopped for longer than its lease, in the middle of its writes; another takes over and writes. When
    the old one goes on it writes nothing more, and says that it lost the store. What it had acknowledged is kept."""
    command = [sys.executable, "-c", WRITES_FOR_EVER, etcd.endpoint, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as old:
        assert old.stdout is not None
        try:
            for _ in range(50):
                old.stdout.readline()
            old.send_signal(signal.SIGSTOP)

            async def takes_over() -> None:
                store = master(etcd, tmp_path, "new")
                before = await store.open()
                for number in range(20):
                    await store.write({f"new {number}": b""})
                old.send_signal(signal.SIGCONT)
                printed = await asyncio.to_thread(old.stdout.read)
                acknowledged = [line for line in printed.splitlines() if line.isdigit()]
                assert printed.splitlines()[-1] == "StoreLost"
                writes = int(before["old"]) + 1
                assert 50 + len(acknowledged) <= writes
                assert before == {"old": b"%d" % (writes - 1)} | {f"old {number}": b"" for number in range(writes)}
                await store.write({"new 20": b""})
                await store.close()

                store = master(etcd, tmp_path, "third")
                assert await store.open() == before | {f"new {number}": b"" for number in range(21)}
                await store.close()

            run(takes_over)
        finally:
            old.kill()


@played_by(run)
async def test_the_lock_alone_refuses_a_former_master(*, etcd: EtcdServer, tmp_path: Path) -> None:
    """A former master whose own clock says that it still is the master cannot write."""
    etcds = gateway(etcd.endpoint)
    old = master(etcd, tmp_path, "old")
    await old.open()
    assert old._lock._renewals is not None
    old._lock._renewals.cancel()
    await etcds.call("lease/revoke", {"ID": old._lock._lease}, 10.0)  # as etcd does when it ends
    new = master(etcd, tmp_path, "new")
    await new.open()
    await new.write({"a": b"new"})
    old._lock._until = float("inf")
    old.check()
    with pytest.raises(StoreLost, match="taken over"):
        await old.write({"a": b"bad"})
    with pytest.raises(StoreLost):
        old.check()
    await new.close()
    last = master(etcd, tmp_path, "last")
    assert await last.open() == {"a": b"new"}
    await last.close()
    await old.close()


@played_by(run)
async def test_a_killed_etcd_loses_nothing(*, etcd: EtcdServer, tmp_path: Path) -> None:
    """etcd dies while a master writes and comes back within the lease: every acknowledged write is there."""
    store = master(etcd, tmp_path)
    await store.open()
    moments = {40: asyncio.Event(), 80: asyncio.Event()}

    async def write() -> None:
        for number in range(150):
            await store.write({"a": b"%d" % number, str(number): b""})
            if number in moments:
                moments[number].set()

    writing = asyncio.create_task(write())
    for moment in moments.values():
        await moment.wait()
        etcd.kill()
        await asyncio.to_thread(etcd.start)
    await writing
    await store.close()
    store = master(etcd, tmp_path)
    assert await store.open() == {"a": b"149"} | {str(number): b"" for number in range(150)}
    await store.close()


class TimedGateway(EtcdGateway):
    """Notes when each request began and until when it could last, and when a renewal that succeeded was sent."""

    until_s = 0.0
    renewed_s = 0.0

    async def call(self, path: str, body: Json, timeout_s: float) -> Json:
        began_s = time.monotonic()
        if path == "kv/txn":
            self.until_s = max(self.until_s, began_s + timeout_s)
        answer = await super().call(path, body, timeout_s)
        if path in ("lease/grant", "lease/keepalive"):
            self.renewed_s = began_s
        return answer


@played_by(run)
async def test_an_unreachable_etcd_is_waited_for_until_the_lease_may_have_ended(
    *, etcd: EtcdServer, tmp_path: Path
) -> None:
    """A write goes on when etcd answers in time again; otherwise the master stops before its lease could end, and no
    request of it lasts any longer."""
    patient = master(etcd, tmp_path, "patient")
    await patient.open()
    etcd.pause()
    writing = asyncio.create_task(patient.write({"in time": b""}))
    await asyncio.sleep(0.4)
    assert not writing.done()
    etcd.resume()
    await writing
    await patient.close()

    calls = TimedGateway([etcd.endpoint])
    opened.append(calls)
    store = EtcdStore(calls, PREFIX, "master", environment(tmp_path), TTL_S)
    await store.open()
    etcd.pause()
    with pytest.raises(StoreLost):
        await store.write({"too late": b""})
    assert calls.renewed_s < calls.until_s < calls.renewed_s + TTL_S
    with pytest.raises(StoreLost):
        store.check()
    etcd.resume()
    await store.close()
    store = master(etcd, tmp_path)
    assert "in time" in await store.open()
    await store.close()


@played_by(run)
async def test_another_endpoint_is_asked_when_one_does_not_answer(*, etcd: EtcdServer, tmp_path: Path) -> None:
    """Of two endpoints one refuses connections: everything works through the other."""
    calls = gateway("http://127.0.0.1:1", etcd.endpoint)
    store = EtcdStore(calls, PREFIX, "master", environment(tmp_path), LONG_TTL_S)
    await store.open()
    await store.write({"a": b""})
    await store.close()


@played_by(run)
async def test_a_user_and_a_password(*, etcd: EtcdServer, tmp_path: Path) -> None:
    """With authentication on, a store with the password works, also after its token became invalid; a wrong password
    is refused with etcd's reason."""
    root = gateway(etcd.endpoint)
    await root.call("auth/user/add", {"name": "root", "password": "secret"}, 20)
    await root.call("auth/role/add", {"name": "root"}, 20)
    await root.call("auth/user/grant", {"user": "root", "role": "root"}, 20)
    await root.call("auth/enable", {}, 20)
    with pytest.raises(EtcdRefused):
        await root.call("kv/range", {"key": coded(b"x")}, 20)
    await root.close()

    calls = gateway(etcd.endpoint, user=("root", "secret"))
    store = EtcdStore(calls, PREFIX, "master", environment(tmp_path), LONG_TTL_S)
    await store.open()
    await store.write({"a": b"one"})
    calls._token = "stale.1"
    await store.write({"a": b"two"})
    await store.close()

    wrong = gateway(etcd.endpoint, user=("root", "wrong"))
    store = EtcdStore(wrong, PREFIX, "other", environment(tmp_path), LONG_TTL_S)
    with pytest.raises(StoreLost, match="authentication failed"):
        await store.open()
    await store.close()


def self_signed(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1, which is its own authority, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "etcd of a test")])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "cert.pem").write_bytes(certificate.public_bytes(pem))
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key.pem").write_bytes(private)
    return folder / "cert.pem", folder / "key.pem"


def test_tls(tmp_path: Path) -> None:
    """With its authority given the store works over TLS; an unknown certificate is never trusted, and the log says
    why this master waits."""
    certificate = self_signed(tmp_path)
    server = EtcdServer(tmp_path, certificate)

    async def scenario() -> None:
        spec = f"etcd://127.0.0.1:{server.port}/test?ttl_s=30"
        store = open_store(f"{spec}&ca={certificate[0]}", tmp_path, environment(tmp_path))
        await store.open()
        await store.write({"a": b""})
        await store.close()

        strangers = environment(tmp_path)
        store = open_store(f"{spec}&tls=true", tmp_path, strangers)
        opening = asyncio.create_task(store.open())
        assert isinstance(strangers.log, ListLog)
        while not strangers.log.records:  # noqa: ASYNC110  a log has no event
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        assert not opening.done()
        opening.cancel()
        await asyncio.wait([opening])
        await store.close()
        assert "CERTIFICATE_VERIFY_FAILED" in strangers.log.records[0].fields["reason"]

    try:
        server.start()
        run(scenario)
    finally:
        server.close()

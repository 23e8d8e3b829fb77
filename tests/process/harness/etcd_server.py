"""A real etcd on loopback with a data directory of its own: start, stop for a while, kill, start again.

The binary is `P2PNODE_ETCD`, or the `etcd` on the path (Debian: the package etcd-server).
"""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import subprocess
import time
import urllib.request
from pathlib import Path

from tests.process.harness.free_port import free_port


def etcd_binary() -> str | None:
    """Where etcd is, or None."""
    return os.environ.get("P2PNODE_ETCD") or shutil.which("etcd")


class EtcdServer:
    """One etcd. `kill` and `start` may be called again and again; `close` ends it for good.

    `certificate` is a file with a certificate for 127.0.0.1 that signs itself, and its key: then clients need TLS.
    """

    def __init__(self, folder: Path, certificate: tuple[Path, Path] | None = None) -> None:
        self._folder = folder
        self._certificate = certificate
        self.port = free_port(2)
        self._peer_port = self.port + 1
        self._process: subprocess.Popen[bytes] | None = None
        self._log = (folder / "etcd.log").open("ab")

    @property
    def endpoint(self) -> str:
        return f"{'http' if self._certificate is None else 'https'}://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it and wait until it answers, for 30 s."""
        binary = etcd_binary()
        assert binary is not None
        peer = f"http://127.0.0.1:{self._peer_port}"
        command = [binary, "--name", "one", "--data-dir", str(self._folder / "data")]
        command += ["--listen-client-urls", self.endpoint, "--advertise-client-urls", self.endpoint]
        command += [
            "--listen-peer-urls",
            peer,
            "--initial-advertise-peer-urls",
            peer,
            "--initial-cluster",
            f"one={peer}",
        ]
        tls = None
        if self._certificate is not None:
            command += ["--cert-file", str(self._certificate[0]), "--key-file", str(self._certificate[1])]
            tls = ssl.create_default_context(cafile=self._certificate[0])
        # A shorter election: a lease may be as short as 1.5 of them.
        command += ["--heartbeat-interval", "50", "--election-timeout", "500", "--logger", "zap"]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        end = time.monotonic() + 30
        while True:
            try:
                with urllib.request.urlopen(f"{self.endpoint}/health", timeout=1, context=tls) as answer:
                    if b'"true"' in answer.read():
                        return
            except OSError:
                pass
            if time.monotonic() > end or self._process.poll() is not None:
                raise AssertionError(f"etcd does not start:\n{(self._folder / 'etcd.log').read_text()[-2000:]}")
            time.sleep(0.05)

    def pause(self) -> None:
        """Stop it; on a busy machine its threads go on until one of them has seen the signal."""
        self._signal(signal.SIGSTOP)
        assert self._process is not None
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it as a crash does."""
        self._signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
        self._log.close()

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

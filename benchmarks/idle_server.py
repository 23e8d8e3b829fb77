"""A server that answers every request with the bytes of one file, and does nothing else.

`python -m benchmarks.idle_server FILE` prints its port, and ends when its input ends. HTTP server and event loop are
those of the daemon, so the time of its answers is what the machine takes, whoever is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import web

from benchmarks.record import ROOT, NotMeasured
from p2pnode.client import SCHEMA_HEADER, NodeClient


@contextlib.contextmanager
def answering(answer: dict[str, Any]) -> Iterator[NodeClient]:
    """A client of a new server that gives this answer. Raises `NotMeasured` if it does not start."""
    with tempfile.TemporaryDirectory(prefix="p2pnode-bench-") as folder:
        file = Path(folder) / "answer.json"
        file.write_text(json.dumps(answer), encoding="utf-8")
        command = [sys.executable, "-m", "benchmarks.idle_server", str(file)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        try:
            assert process.stdout is not None
            port = process.stdout.readline().strip()
            if not port:
                raise NotMeasured("the idle server did not start")
            yield NodeClient(f"127.0.0.1:{port}")
        finally:
            process.communicate()  # its input ends, and so does it


async def _serve(body: bytes) -> None:
    async def respond(_: web.BaseRequest) -> web.Response:
        return web.Response(body=body, content_type="application/json", headers={SCHEMA_HEADER: "1"})

    runner = web.ServerRunner(web.Server(respond))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    uvloop.run(_serve(Path(sys.argv[1]).read_bytes()))

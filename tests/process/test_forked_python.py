"""Forks in place of Python processes: what a test relies on is that of a real process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.project.repository import ROOT
from tests.process.harness.forked_python import Forked, run_p2pnode, trainers_are_forks, with_daemon, with_torch

if not sys.platform.startswith("linux"):
    pytest.skip("forks replace processes on Linux only", allow_module_level=True)

SCRIPT = """
import json, os, sys
found = [sys.argv, os.getcwd(), os.environ.get("GIVEN"), os.getsid(0) == os.getpid(), __name__, sys.path[0]]
print(json.dumps([*found, "torch" in sys.modules, "p2pnode" in sys.modules, sys.stdin.read()]))
sys.exit(7)
"""


def test_a_script_finds_what_a_process_of_its_own_has(tmp_path: Path) -> None:
    """Arguments, folder, environment, session, input, output and exit code; torch and our packages are there."""
    (tmp_path / "given.txt").write_text("a line")
    (tmp_path / "train.py").write_text(SCRIPT)
    with (tmp_path / "given.txt").open() as given, (tmp_path / "out.txt").open("w") as output:
        command = [str(tmp_path / "train.py"), "--flag"]
        process = Forked(with_torch(), command, cwd=tmp_path, env={"GIVEN": "here"}, stdin=given, stdout=output)

    assert process.wait(90) == 7
    assert process.poll() == process.returncode == 7
    found = json.loads((tmp_path / "out.txt").read_text())
    folder = str(tmp_path)
    assert found == [command, folder, "here", True, "__main__", folder, True, True, "a line"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_it_and_is_in_its_exit_code(tmp_path: Path, number: signal.Signals) -> None:
    """As for `subprocess.Popen`; one that still runs has no exit code."""
    (tmp_path / "train.py").write_text("import time; time.sleep(60)")
    process = Forked(with_torch(), [str(tmp_path / "train.py")], cwd=tmp_path)

    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    process.send_signal(number)
    assert process.wait(60) == -number


def test_its_session_is_there_as_soon_as_its_process_id(tmp_path: Path) -> None:
    """A signal to the session arrives however early it is sent: whoever starts a process and ends it at once may."""
    (tmp_path / "train.py").write_text("import time; time.sleep(60)")
    for _ in range(40):
        process = Forked(with_torch(), [str(tmp_path / "train.py")], cwd=tmp_path)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL


def test_its_descriptors_are_its_own(tmp_path: Path) -> None:
    """The server's sockets have no say in it: at its end every file that it has opened is still open."""
    (tmp_path / "train.py").write_text(
        "import atexit, os\n"
        "opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(60)]\n"
        "atexit.register(lambda: [os.close(one) for one in opened])\n"
    )
    with (tmp_path / "errors.txt").open("w") as errors:
        process = Forked(with_torch(), [str(tmp_path / "train.py")], cwd=tmp_path, stderr=errors)
    assert process.wait(90) == 0
    assert (tmp_path / "errors.txt").read_text() == ""


def test_a_command_of_p2pnode_has_its_output_and_no_torch(tmp_path: Path) -> None:
    """A refusal has the exit code and the sentences of the real command; the server has not imported torch."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = run_p2pnode(
        ["key", "join", "-", "--state-dir", "s"], cwd=tmp_path, env=environment, given="junk", timeout=60
    )

    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.startswith("error: ")
    (tmp_path / "look.py").write_text(
        "import sys; sys.exit('torch' in sys.modules or 'p2pnode.daemon' not in sys.modules)"
    )
    assert Forked(with_daemon(), [str(tmp_path / "look.py")], cwd=tmp_path).wait(90) == 0


def test_asyncio_starts_this_python_as_a_fork_and_others_as_they_are(tmp_path: Path) -> None:
    """The process that a daemon gets can be waited for; commands of other programs are not touched."""
    (tmp_path / "train.py").write_text("import sys; print('torch' in sys.modules, file=sys.stderr); sys.exit(3)")

    async def start(*command: str) -> int:
        with (tmp_path / "out.txt").open("a") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output.fileno(),
                stderr=output.fileno(),
                env=os.environ,
            )
        return await process.wait()

    async def both() -> list[int]:
        return [await start(sys.executable, str(tmp_path / "train.py")), await start("false")]

    with trainers_are_forks():
        assert asyncio.run(both()) == [3, 1]
    assert (tmp_path / "out.txt").read_text() == "True\n"

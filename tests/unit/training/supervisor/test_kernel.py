"""The niceness of a trainer, and of its session where the kernel schedules sessions."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pnode.training.supervisor import kernel
from p2pnode.training.supervisor.kernel import LARGEST, make_nicer

AUTOGROUP = Path("/proc/self/autogroup")


@pytest.fixture(name="leader")
def _leader() -> Iterator[subprocess.Popen[bytes]]:
    """A process that leads a session of its own, as trainers do, and waits."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, start_new_session=True
    )
    yield process
    process.communicate()


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel does not schedule sessions")
@pytest.mark.parametrize("nice", [5, 40])
def test_the_session_of_a_trainer_is_as_nice_as_the_trainer(leader: subprocess.Popen[bytes], nice: int) -> None:
    """The kernel shares a core among sessions first, so that the niceness of the process alone has no effect."""
    asyncio.run(make_nicer(leader.pid, nice))
    wanted = min(LARGEST, os.getpriority(os.PRIO_PROCESS, 0) + nice)
    assert os.getpriority(os.PRIO_PROCESS, leader.pid) == wanted
    assert Path(f"/proc/{leader.pid}/autogroup").read_text().split("nice")[1].strip() == str(wanted)


def test_a_write_that_comes_too_soon_is_tried_again(
    leader: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes one in a tenth of a second, and several nodes of a machine start their trainers together."""
    refused = [errno.EAGAIN, errno.EAGAIN]
    written: list[tuple[Path, str]] = []

    def write_text(path: Path, text: str) -> int:
        if refused:
            raise OSError(refused.pop(), "not yet")
        written.append((path, text))
        return len(text)

    monkeypatch.setattr(Path, "write_text", write_text)
    monkeypatch.setattr("p2pnode.training.supervisor.kernel.PAUSE_S", 0.0)
    asyncio.run(make_nicer(leader.pid, 3, tmp_path))
    assert written == [(tmp_path / str(leader.pid) / "autogroup", str(os.getpriority(os.PRIO_PROCESS, 0) + 3))]


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EACCES])
def test_a_system_without_sessions_to_schedule_is_left_as_it_is(
    leader: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The process itself is nicer all the same, and nothing is raised or tried again."""
    tries: list[Path] = []

    def write_text(path: Path, text: str) -> int:
        tries.append(path)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "write_text", write_text)
    asyncio.run(make_nicer(leader.pid, 2, tmp_path))
    assert len(tries) == 1
    assert os.getpriority(os.PRIO_PROCESS, leader.pid) == os.getpriority(os.PRIO_PROCESS, 0) + 2


def test_a_process_that_has_ended_is_no_error() -> None:
    """A trainer may end at once; its end is reported by who waits for it."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    asyncio.run(make_nicer(process.pid, 5))


EVENTS = "low 0\nhigh 0\nmax 12\noom 3\noom_kill {}\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kernel, "_ROOT", tmp_path / "fs")
    monkeypatch.setattr(kernel, "_OWN_GROUPS", tmp_path / "own")
    (tmp_path / "fs").mkdir()
    return tmp_path / "fs"


def put(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_version_2_counts_in_the_own_group_and_limits_in_those_around_it(root: Path) -> None:
    """A limit may be set further up."""
    (root.parent / "own").write_text("0::/user/job\n")
    put(root, memory__events=EVENTS.format(7))
    put(root / "user", memory__max=5_000_000, memory__events=EVENTS.format(5))
    put(root / "user" / "job", memory__max="max", memory__events=EVENTS.format(2))

    assert kernel.kills() == 2
    assert kernel.limit_bytes() == 5_000_000


def test_version_1_has_its_own_tree(root: Path) -> None:
    """Where both versions are mounted, memory belongs to the first."""
    (root.parent / "own").write_text("4:cpu,memory:/job\n0::/\n")
    put(root / "memory", memory__limit_in_bytes=9223372036854771712)
    put(root / "memory" / "job", memory__oom_control=CONTROL.format(4), memory__limit_in_bytes=6_000_000)

    assert kernel.kills() == 4
    assert kernel.limit_bytes() == 6_000_000


def test_a_container_that_hides_its_path_has_the_group_at_the_mount(root: Path) -> None:
    """The path in /proc is that of the host."""
    (root.parent / "own").write_text("0::/docker/0123\n")
    put(root, memory__events=EVENTS.format(1), memory__max=7_000_000)

    assert kernel.kills() == 1
    assert kernel.limit_bytes() == 7_000_000


def test_without_control_groups_nothing_is_known(root: Path) -> None:
    """Nor with files of a form that is not known."""
    assert (kernel.kills(), kernel.limit_bytes()) == (0, None)
    (root.parent / "own").write_text("what\n")
    put(root, memory__events="what", memory__max="what")
    assert (kernel.kills(), kernel.limit_bytes()) == (0, None)


@pytest.mark.skipif(not Path("/proc/self/oom_score_adj").exists(), reason="no oom_score_adj here")
def test_the_kernel_prefers_a_process_to_this_one() -> None:
    """A daemon that is killed in place of its script cannot say why the script ended."""
    own = int(Path("/proc/self/oom_score_adj").read_text())
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as other:
        kernel.kill_first(other.pid)
        adjusted = int(Path(f"/proc/{other.pid}/oom_score_adj").read_text())
        other.communicate(b"\n")

    assert adjusted == min(1000, own + 500)


def test_a_process_that_has_ended_is_left_as_it_is(tmp_path: Path) -> None:
    """It may end between its start and this call."""
    put(tmp_path / "self", oom_score_adj=0)

    kernel.kill_first(12, tmp_path)

    assert not (tmp_path / "12").exists()

"""Counting what the kernel has killed in a control group."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from p2pnode.training.supervisor import kernel

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

"""`p2pnode doctor`: its findings on this machine and a state directory, how they are judged, and how they are shown.

`tests/process/test_visit.py` has the visit of a swarm.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from p2pnode import cli
from p2pnode.client import STATUS_FILE, status_file
from p2pnode.commands.doctor import finding_lines
from p2pnode.config.settings import Config
from p2pnode.directory_lock import locked
from p2pnode.doctor import machine
from p2pnode.doctor.examine import node_checks
from p2pnode.doctor.machine import DoctorCheck, SecretFile
from p2pnode.errors import ExitCode
from p2pnode.overlay.settings import NodeSettings
from p2pnode.terminal.lines import Style


class Doctor:
    """Asks the doctor of a state directory of its own, with free ports; torch is not imported."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, list[dict[str, str]]]:
        """The exit code, and the findings behind those of the machine."""
        ports = ("--set", "node.port=0", "--set", "status.port=0")
        code = cli.main(["doctor", "--state-dir", str(self.folder), "--json", *ports, *arguments])
        answer = json.loads(self._capsys.readouterr().out)
        assert answer["works"] == (code == 0)
        names = [found["name"] for found in answer["checks"]]
        assert names[:7] == ["version", "file limit", "delay", "clock", "torch", "state", "disk"]
        return code, [found for found in answer["checks"][7:] if found["name"] not in ("secrets", "address")]


@pytest.fixture
def doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Doctor:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "torch_facts", lambda: {"missing": True})
    return Doctor(tmp_path / "state", capsys)


def test_the_ports_and_then_the_swarm_are_looked_at(doctor: Doctor) -> None:
    """Without a network the swarm is left out."""
    code, found = doctor()
    assert (code, [one["name"] for one in found]) == (0, ["port", "bootstraps"])
    code, found = doctor("--offline")
    assert (code, [one["name"] for one in found]) == (0, ["port"])


def test_a_node_whose_api_does_not_answer_is_an_error(doctor: Doctor) -> None:
    """It has written where it listens, or it has only the directory; nothing is tried beside it."""
    doctor.folder.mkdir()
    with locked(doctor.folder):
        code, [held] = doctor()
        assert (code, held["level"]) == (ExitCode.CANNOT_WORK, "error")
        assert f"{doctor.folder}, and no HTTP API of it answers" in held["what"]
        (doctor.folder / STATUS_FILE).write_bytes(status_file("127.0.0.1:1", os.getpid(), "ab", ""))
        code, [silent] = doctor()
        assert (code, silent["level"]) == (ExitCode.CANNOT_WORK, "error")
        assert f"process {os.getpid()} runs, and its API does not answer: no node reachable" in silent["what"]


def test_ports_that_are_taken_keep_the_doctor_out_of_the_swarm(doctor: Doctor) -> None:
    """Each by its name, with how to take another one."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, [node] = doctor("--set", f"node.port={port}")
        assert (code, node["level"]) == (ExitCode.CANNOT_WORK, "error")
        assert (str(port) in node["what"], "--port" in node["do"]) == (True, True)
        _, [_, api] = doctor("--set", f"status.port={port}")
        assert (api["level"], "--status-port" in api["do"]) == ("error", True)


def test_a_key_that_is_missing_or_comes_later_keeps_the_doctor_out(doctor: Doctor, tmp_path: Path) -> None:
    """The first is an error with what to do, the second is said."""
    _, [_, key] = doctor("--set", f"swarm.key_file={tmp_path / 'none'}")
    assert (key["name"], key["level"], "p2pnode key new" in key["do"]) == ("key", "error", True)
    _, [_, key] = doctor("--set", "swarm.key_file=-")
    assert (key["name"], key["level"]) == ("key", "info")


def test_a_disk_that_cannot_be_asked_is_an_error_of_its_folder(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other findings are made."""

    def denied(_: Path) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(machine, "free_bytes", denied)
    assert doctor("--offline")[0] == ExitCode.CANNOT_WORK


def test_a_node_that_runs_says_how_it_is() -> None:
    """Its summary, everything under `health` with its level, and an installation after which it was not restarted;
    nothing is required."""
    status = {
        "summary": "training at step 7",
        "node": {"version": "1"},
        "health": [
            {"level": "warning", "what": "disk full", "do": "free space"},
            {"level": "error", "what": "hung", "do": "x"},
        ],
    }
    found = [(check.name, check.level) for check in node_checks(status, "2")]
    assert found == [("node", "ok"), ("version", "warning"), ("health", "warning"), ("health", "error")]
    assert [check.name for check in node_checks({}, "2")] == ["node"]


@pytest.mark.parametrize(
    ("check", "level", "words"),
    [
        (machine.version_check("1", "3.11", "compiled"), "ok", "compiled"),
        (machine.version_check("1", "3.11", "numpy"), "info", "C compiler"),
        (machine.files_check(1024), "warning", "ulimit"),
        (machine.files_check(4096), "ok", "4096"),
        (machine.delay_check(0.01), "ok", "10 ms"),
        (machine.delay_check(0.5), "warning", "busy"),
        (machine.delay_check(3.0), "warning", "dead"),
        (machine.clock_check(True), "ok", "time service"),
        (machine.clock_check(False), "info", "NTP"),
        (machine.clock_check(None), "info", "NTP"),
        (machine.disk_check("/s", 10 << 20, 0), "error", "--state-dir"),
        (machine.disk_check("/s", 1 << 30, 900 << 20), "warning", "a checkpoint takes"),
        (machine.disk_check("/s", 1 << 30, 1 << 20), "ok", "1.07 GB"),
        (machine.folder_check("/s", True, False, ""), "error", "--state-dir"),
        (machine.folder_check("/s", False, False, ""), "ok", "first start"),
        (machine.folder_check("/s", True, True, "process 7"), "ok", "process 7"),
        (machine.secret_check(SecretFile("/k", "key", None)), "ok", "no key yet"),
        (machine.secret_check(SecretFile("/k", "key", 0o640)), "ok", "0640"),
        (machine.secret_check(SecretFile("/k", "key", 0o644)), "error", "chmod 600 /k"),
        (machine.secret_check(SecretFile("/k", "key", 0o660)), "error", "chmod 600 /k"),
    ],
)
def test_each_fact_has_its_finding(check: DoctorCheck, level: str, words: str) -> None:
    """A warning or an error says what to do; what is well does not."""
    assert check.level == level
    assert words in f"{check.what} {check.do}"
    assert bool(check.do) >= (level in ("warning", "error"))
    assert not (check.do and level == "ok")


@pytest.mark.parametrize(
    ("found", "device", "has_nvidia", "levels"),
    [
        ({"missing": True}, "auto", False, ["warning"]),
        ({"error": "ImportError: libcudart"}, "auto", True, ["error"]),
        ({"version": "2", "cuda": None, "devices": [], "seconds": 1.0}, "auto", False, ["ok", "info"]),
        ({"version": "2", "cuda": None, "devices": [], "seconds": 1.0}, "auto", True, ["ok", "warning"]),
        (
            {"version": "2", "cuda": "12", "devices": [], "seconds": 1.0, "why": "no driver"},
            "cuda:0",
            False,
            ["ok", "error"],
        ),
        ({"version": "2", "cuda": "12", "devices": ["H100", "H100"], "seconds": 1.0}, "cuda", True, ["ok", "ok"]),
    ],
)
def test_torch_and_its_devices(found: dict[str, Any], device: str, has_nvidia: bool, levels: list[str]) -> None:
    """A GPU that the setting asks for and torch does not see is an error; one that nobody asks for is a warning."""
    assert [check.level for check in machine.torch_check(found, device, has_nvidia)] == levels


def test_a_folder_that_is_not_there_has_the_space_of_its_disk(tmp_path: Path) -> None:
    """And its checkpoint is the newest one's."""
    assert machine.free_bytes(tmp_path / "a" / "b") == pytest.approx(machine.free_bytes(tmp_path), rel=0.1)
    for step, size in (("000001", 9), ("000002", 5)):
        (tmp_path / "checkpoints" / step).mkdir(parents=True)
        (tmp_path / "checkpoints" / step / "vector").write_bytes(bytes(size))
    assert machine.checkpoint_bytes(tmp_path) == 5
    assert machine.checkpoint_bytes(tmp_path / "none") == 0


def test_the_modes_of_secrets_are_read(tmp_path: Path) -> None:
    """Of those that there are, and of the key wherever the setting has it."""
    key = tmp_path / "my.key"
    key.write_text("")
    key.chmod(0o640)
    config = Config(node=NodeSettings(state_dir=str(tmp_path / "state")))
    config = Config(node=config.node, swarm=type(config.swarm)(key_file=str(key)))
    found = {file.what: file.mode for file in machine.secret_files(config)}
    assert found == {"identity": None, "token of the API": None, "swarm key": 0o640}


def test_a_torch_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that ends its process; a real one is imported by `p2pnode doctor` alone."""
    for program, expected in (
        ("raise SystemExit(3)", {"error": "its process ended with 3"}),
        ("print('no json')", None),
        ("print('{\"missing\": true}')", {"missing": True}),
    ):
        monkeypatch.setattr(machine, "_TORCH", program)
        found = machine.torch_facts()
        assert found == expected if expected else "error" in found


def test_the_kernel_says_whether_the_clock_is_set() -> None:
    """True or false on Linux, without any right; elsewhere it does not say."""
    assert machine.clock_is_set() in ((True, False) if sys.platform == "linux" else (True, False, None))
    assert machine.longest_delay_s() >= 0
    assert machine.file_limit() > 0


PIPE = Style()


def shown(level: str, what: str, do: str, style: Style = PIPE) -> list[str]:
    return ["".join(text for text, _ in line) for line in finding_lines("disk", level, what, do, style)]


def test_a_finding_without_a_next_step_is_one_line() -> None:
    """The next step is a line of its own, below the text."""
    assert shown("ok", "enough space", "") == ["● disk        enough space"]
    assert shown("error", "full", "tidy up") == ["✖ disk        full", " " * 14 + "do: tidy up"]


def test_long_texts_are_wrapped_beside_the_name_on_a_terminal_alone() -> None:
    """No line is wider than the terminal; in a pipe a line stays whole."""
    long = "the folder is on a disk that has little space left"
    lines = shown("warning", long, long, Style(width=40))

    assert len(lines) >= 4
    assert all(len(line) <= 40 for line in lines)
    assert all(line.startswith(" " * 14) for line in lines[1:])
    assert " ".join(line[14:].strip() for line in lines) == f"{long} do: {long}"
    assert shown("warning", long, "") == [f"▲ disk        {long}"]
    assert all(len(line) <= 24 for line in shown("warning", "so it is", "", Style(width=5)))


@pytest.mark.parametrize(("level", "tone"), [("ok", ""), ("info", ""), ("warning", "warn"), ("error", "bad")])
def test_what_needs_attention_is_coloured_as_a_whole(level: str, tone: str) -> None:
    """Of the others only the mark is; a level of a later version has a mark too."""
    ((_, _, (_, found)),) = finding_lines("disk", level, "text", "", PIPE)

    assert found == tone
    assert shown("dire", "text", "") == ["? disk        text"]

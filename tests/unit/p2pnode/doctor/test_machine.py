"""What the doctor says of a machine, each case with a next step where one is needed."""

from __future__ import annotations

from typing import Any

import pytest

from p2pnode.doctor import machine
from p2pnode.doctor.machine import DoctorCheck, SecretFile, exit_code
from p2pnode.errors import ExitCode


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


def test_only_an_error_has_an_exit_code() -> None:
    """14 for a supervisor or a script; warnings do not stop a node."""
    warned = machine.files_check(1)
    assert exit_code([warned]) == ExitCode.OK
    assert exit_code([warned, machine.disk_check("/s", 0, 0)]) == ExitCode.CANNOT_WORK

"""A finding of the doctor, and the exit code of all of them."""

from __future__ import annotations

import pytest

from p2pnode.doctor.machine import DoctorCheck, error, exit_code, info, ok, warning
from p2pnode.errors import ExitCode


@pytest.mark.parametrize(
    ("checks", "code"),
    [
        ([], ExitCode.OK),
        ([ok("a", "fine"), info("b", "so"), warning("c", "hm", "do")], ExitCode.OK),
        ([ok("a", "fine"), error("c", "bad", "do"), ok("d", "fine")], ExitCode.CANNOT_WORK),
    ],
)
def test_an_error_alone_keeps_a_node_from_working(checks: list[DoctorCheck], code: ExitCode) -> None:
    """A warning does not; without a finding all is well."""
    assert exit_code(checks) == code


def test_a_finding_for_a_program_has_its_four_parts() -> None:
    """`do` is empty where there is nothing to do."""
    assert ok("disk", "fine").as_json == {"name": "disk", "level": "ok", "what": "fine", "do": ""}
    assert warning("disk", "full", "tidy").as_json == {"name": "disk", "level": "warning", "what": "full", "do": "tidy"}

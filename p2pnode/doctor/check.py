"""A finding of the doctor. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from p2pnode.errors import ExitCode

Level = Literal["ok", "info", "warning", "error"]


class DoctorCheck(NamedTuple):
    """What was looked at, how it is, and the next step where one is needed."""

    name: str
    level: Level
    what: str
    do: str = ""

    @property
    def as_json(self) -> dict[str, str]:
        return self._asdict()


def ok(name: str, what: str) -> DoctorCheck:
    return DoctorCheck(name, "ok", what)


def info(name: str, what: str, do: str = "") -> DoctorCheck:
    return DoctorCheck(name, "info", what, do)


def warning(name: str, what: str, do: str) -> DoctorCheck:
    return DoctorCheck(name, "warning", what, do)


def error(name: str, what: str, do: str) -> DoctorCheck:
    return DoctorCheck(name, "error", what, do)


def exit_code(checks: Iterable[DoctorCheck]) -> ExitCode:
    """An error keeps a node from working; a warning does not."""
    return ExitCode.CANNOT_WORK if any(check.level == "error" for check in checks) else ExitCode.OK

"""Errors for the user at the terminal, and the exit codes.

A `UserError` has one sentence on what failed and a hint on what to do next. The command line prints both and exits with
`exit_code`; a stack trace is shown only with `--debug`. Any other exception is a bug and exits with 1. The codes are
documented in docs/config.md and never change their meaning.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Why a `p2pnode` process ended. 3 asks a supervisor for a restart, as Syncthing does."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    RESTART = 3
    CONFIGURATION = 4
    MISMATCH = 5
    CANNOT_BIND = 6
    STATE_DIRECTORY = 7
    TRAINER = 8
    NOT_REACHABLE = 9
    DEMO_FAILED = 10
    IDENTITY_IN_USE = 11
    CUT_SHORT = 12
    DATA = 13
    CANNOT_WORK = 14
    STILL_LEAVING = 15


#: The meaning of each code, for the documentation.
MEANINGS: dict[ExitCode, str] = {
    ExitCode.OK: "clean end",
    ExitCode.UNEXPECTED: "unexpected error: a bug in p2pnode; run again with --debug and report it",
    ExitCode.USAGE: "the command line was not understood",
    ExitCode.RESTART: "a restart is wanted (reserved for supervisors)",
    ExitCode.CONFIGURATION: "the configuration is invalid",
    ExitCode.MISMATCH: "identity or swarm mismatch: another run, model or layout, or no bootstrap is a p2pnode",
    ExitCode.CANNOT_BIND: "an address is in use or cannot be bound",
    ExitCode.STATE_DIRECTORY: "the state directory, or a file to be written, is unusable",
    ExitCode.TRAINER: "the trainer cannot start or failed before its first step, or too often in a row after it",
    ExitCode.NOT_REACHABLE: "no node answered at the address asked",
    ExitCode.DEMO_FAILED: "the demo did not reach its goal",
    ExitCode.IDENTITY_IN_USE: "another process runs with this node's identity: its state directory was copied",
    ExitCode.CUT_SHORT: "the training script had not ended by itself in its time (finish_s, stop_s) and was killed",
    ExitCode.DATA: "a file of records, or one to be made into records, is missing, damaged or of another format",
    ExitCode.CANNOT_WORK: "`p2pnode doctor` found what keeps a node from working",
    ExitCode.STILL_LEAVING: "`p2pnode leave` has waited for its time, and the node still leaves",
}

#: What the same command meets again however often it is started: a supervisor must not restart after these. 3 asks for
#: a restart; after the others one may help, because a port is freed, a peer comes back or a disk is emptied.
LASTING: frozenset[ExitCode] = frozenset(
    {
        ExitCode.USAGE,
        ExitCode.CONFIGURATION,
        ExitCode.MISMATCH,
        ExitCode.STATE_DIRECTORY,
        ExitCode.IDENTITY_IN_USE,
        ExitCode.CUT_SHORT,
    }
)

#: What a shell reports of a program that Ctrl-C has ended.
INTERRUPTED = 130
#: Beside the codes above, for the documentation.
SCRIPTS_OWN = (
    "A training script that ends with another code than 0 after `swarm.done` gives `p2pnode run` that code,\n"
    "or 128 and the number of the signal that ended it. A command that Ctrl-C has broken off\n"
    "exits with 130. `watch` and `logs --follow`, which end in no other way, exit with 0,\n"
    "and so does a node, which leaves."
)


def code_of_script(exit_code: int, *, cut_short: bool) -> int:
    """The daemon's exit code after a script that was told to end; `exit_code` is minus the number of a signal."""
    if cut_short:
        return ExitCode.CUT_SHORT
    return exit_code if exit_code >= 0 else 128 - exit_code


class P2PNodeError(Exception):
    """The root of all exceptions of this package."""


class UserError(P2PNodeError):
    """Something the user can fix. `message` is one sentence, `hint` the next step (may be empty)."""

    def __init__(self, message: str, hint: str = "", exit_code: int = ExitCode.UNEXPECTED) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = int(exit_code)

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


def state_directory_unusable(folder: object, error: Exception) -> UserError:
    """For a state directory that cannot be read or written."""
    return UserError(
        f"the state directory {folder} cannot be used: {getattr(error, 'strerror', None) or error}",
        hint="check its permissions and free space, or name another one with --state-dir or node.state_dir",
        exit_code=ExitCode.STATE_DIRECTORY,
    )


def package_missing(setting: str, package: str, extra: str) -> UserError:
    """For a setting that needs an optional package."""
    return UserError(
        f"{setting} needs the package {package}, which is not installed",
        hint=f'install it with: pip install "p2pnode[{extra}]"',
        exit_code=ExitCode.CONFIGURATION,
    )

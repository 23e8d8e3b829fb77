"""The command line in this process: what is printed where, exit codes, files, and what is imported."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from p2pnode import cli
from p2pnode.config.settings import Config
from p2pnode.daemon import _gateway
from p2pnode.errors import INTERRUPTED
from p2pnode.overlay.settings import NodeSettings
from tests.harness.environment.simulated import SeededEntropy
from tests.harness.project.repository import ROOT

pytestmark = pytest.mark.usefixtures("own_folder")


def run(*arguments: str) -> int:
    return cli.main(list(arguments))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["start", "--config", "absent.toml"], 4, "there is no configuration file absent.toml"),
        (["start", "--port", "high"], 4, '--port: node.port = "high" is not allowed'),
        (["start", "--set", "node.prot=1"], 4, "there is no setting node.prot"),
        (["start", "--set", "nonsense"], 4, "is not an assignment"),
        (["start", "--bootstrap", "10.0.0.5"], 4, '"10.0.0.5" has no port'),
        (["start", "--task", "digit"], 4, '"digit" is not a task'),
        (["start", "--status-port", "8468"], 4, "are both 8468"),
        (["run", "--", "no-such-program", "x"], 8, 'there is no program "no-such-program"'),
        (["run"], 2, "Missing argument"),
        (["run", "--servers", "1", "--", "true"], 2, "--servers 1: that many of the nodes of --local"),
        (["run", "--local", "--servers", "2", "--", "true"], 2, "of which there are 1"),
        (["start", "--set", "port=1"], 4, "is not an assignment"),
        (["start", "--prot", "1"], 2, "No such option: --prot"),
        (["dance"], 2, "No such command 'dance'"),
        (["status"], 9, "no node reachable at 127.0.0.1:1"),
        (["peers", "--address", "127.0.0.1:1"], 9, "no node reachable at 127.0.0.1:1"),
        (["watch", "--address", "127.0.0.1:1"], 9, "no node reachable"),
        (["leave", "--state-dir", "nowhere"], 9, "no node runs on the state directory nowhere"),
        (["pause", "--address", "nonsense"], 2, '--address: "nonsense" has no port'),
        (["export", "model.onnx"], 2, "does not end in a known format"),
        (["export", "model.pt"], 7, "there is no checkpoint in"),
        (["demo", "--nodes", "0"], 2, "--nodes"),
        (["demo", "--barrier", "psp"], 2, '"psp" is not a barrier'),
        (["demo", "--task", "text"], 2, "measures no accuracy"),
        (["demo", "--task", "digit"], 4, '"digit" is not a task'),
        (["demo", "--data-dir", "nowhere"], 8, "cannot read --data-dir"),
        (["config", "check", "--set", "node.host=0.0.0.0"], 4, "listens beyond this machine"),
        (["logs", "--level", "loud"], 2, '--level: "loud" is none'),
        (["key", "rotate", "prepare", "--set", "swarm.key_file=-"], 2, "is in no file"),
        (["key", "show", "--set", 'swarm.key_file=""'], 4, "swarm.key_file is set to an empty text"),
    ],
)
def test_mistakes_get_a_sentence_a_hint_and_a_code(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One error, one hint, the documented code, nothing on standard output, no stack trace, nothing written."""
    assert run(*arguments) == code

    output = capsys.readouterr()
    assert output.out == ""
    lines = output.err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["error", "hint"]
    assert message in lines[0]
    assert list(tmp_path.iterdir()) == []


def test_stack_traces_come_only_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    """--debug shows where an error came from, and keeps its code; after `--` it is the program's own flag."""
    assert run("start", "--debug", "--config", "absent.toml") == 4
    assert "Traceback" in capsys.readouterr().err

    assert run("run", "--", "no-such-program", "--debug") == 8
    assert "Traceback" not in capsys.readouterr().err


def test_an_unexpected_fault_is_one_line_with_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unexpected exception is reported as such, without a stack trace."""

    def broken(_keys: object) -> None:
        raise ZeroDivisionError("by nought")

    monkeypatch.setattr("p2pnode.commands.files.template", broken)

    assert run("config", "default") == 1
    assert capsys.readouterr().err.startswith("error: unexpected ZeroDivisionError: by nought\nhint: run it again")


@pytest.mark.parametrize("program", ["module", "script"])
@pytest.mark.parametrize("imported", ["typer", "numpy"], ids=["command line", "daemon"])
def test_ctrl_c_during_an_import_ends_without_a_stack_trace(program: str, imported: str, tmp_path: Path) -> None:
    """The signal arrives while the command line, or the daemon, is being imported: code 130 and no text."""
    (tmp_path / "hides").mkdir()
    (tmp_path / "hides" / f"{imported}.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["p2pnode"]
    module, _, function = entry.partition(":")
    script = f"import sys; from {module} import {function}; sys.exit({function}())"
    command = ["-m", "p2pnode"] if program == "module" else ["-c", script]
    done = subprocess.run(
        [sys.executable, *command, "start", "--set", "status.port=0", "--set", "node.port=0"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path / 'hides'}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        # A shell ignores the signal in what it starts in the background, and so would these.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert (done.returncode, done.stdout, done.stderr.strip()) == (INTERRUPTED, "", "")


def test_ctrl_c_between_commands_ends_without_a_stack_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the library for command lines is not yet there to catch it."""

    def broken_off() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("p2pnode.cli.commands", broken_off)
    code = -1
    with contextlib.suppress(KeyboardInterrupt):  # it would end the whole test run
        code = run("config", "check")
    assert code == INTERRUPTED


def test_help_and_version_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """--help lists the commands, no command at all prints the same and is a usage error."""
    assert run("--help") == 0
    listed = capsys.readouterr().out
    for command in cli.app.registered_commands:
        assert (f"  {command.name} " in listed) is not command.hidden
    assert run() == 2
    assert capsys.readouterr().out == listed
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("p2pnode 0.")


def test_light_commands_import_nothing_heavy() -> None:
    """`start` until the daemon begins, and every command that asks, load neither rich, aiohttp, structlog nor torch."""
    code = (
        "import sys, p2pnode.cli, p2pnode.client, p2pnode.commands.watch\n"
        "p2pnode.cli.main(['config', 'check'])\n"
        "found = {'rich', 'aiohttp', 'structlog', 'torch', 'numpy', 'asyncio'} & set(sys.modules)\n"
        "sys.exit(f'imported {sorted(found)}' if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")


def test_the_program_completes_commands_and_options() -> None:
    """As bash asks it, in one process for the commands; an option is completed within its command."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "_P2PNODE_COMPLETE": "complete_bash"}

    def words(line: str) -> list[str]:
        asked = environment | {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
        answer = subprocess.run(
            [sys.executable, "-m", "p2pnode"], env=asked, capture_output=True, text=True, check=True
        )
        return answer.stdout.split()

    assert {"start", "status"} == set(words("p2pnode st"))
    assert words("p2pnode logs --foll") == ["--follow"]


def test_the_router_is_asked_only_on_request() -> None:
    """`node.nat = "off"` has no gateway."""
    entropy = SeededEntropy(1)

    assert _gateway(Config(), entropy) is None
    assert _gateway(Config(node=NodeSettings(nat="auto", host="0.0.0.0")), entropy) is not None

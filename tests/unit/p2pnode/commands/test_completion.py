"""`p2pnode completion`: a script for each shell, and the words that it asks for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from p2pnode.commands.completion import SHELLS, VARIABLE, completion
from p2pnode.errors import ExitCode, UserError
from tests.harness.project.repository import ROOT


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_gets_a_script_that_it_can_read(
    shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It asks the program itself; the shell, where there is one here, finds no mistake in it."""
    assert completion(shell) == 0
    script = capsys.readouterr().out
    assert VARIABLE in script
    assert "p2pnode completion" in script
    if shell == "zsh":
        assert script.startswith("#compdef p2pnode\n")
    if (program := shutil.which(shell)) is not None:
        file = tmp_path / "script"
        file.write_text(script)
        assert subprocess.run([program, "-n", str(file)], capture_output=True, check=False).returncode == 0


def test_the_shell_of_the_user_is_taken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown one is an error that names those there are."""
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    assert completion() == 0
    assert "complete --command p2pnode" in capsys.readouterr().out
    monkeypatch.setenv("SHELL", "/bin/csh")
    with pytest.raises(UserError, match="csh") as error:
        completion()
    assert error.value.exit_code == ExitCode.USAGE


def test_the_program_completes_commands_and_options() -> None:
    """As bash asks it, in one process for the commands; an option is completed within its command."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), VARIABLE: "complete_bash"}

    def words(line: str) -> list[str]:
        asked = environment | {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
        answer = subprocess.run(
            [sys.executable, "-m", "p2pnode"], env=asked, capture_output=True, text=True, check=True
        )
        return answer.stdout.split()

    assert {"start", "status", "stop"} == set(words("p2pnode st"))
    assert words("p2pnode logs --foll") == ["--follow"]

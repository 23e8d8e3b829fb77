"""Completion in a shell: the words that it asks the program for."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.harness.project.repository import ROOT


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

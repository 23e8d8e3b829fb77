"""The script for a quarter of an hour on a GPU: its deadlines, and all of it in small on a processor."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks import on_gpu
from benchmarks.__main__ import main
from benchmarks.on_gpu import SECTIONS, Section, results
from tests.process.harness.forked_python import with_torch

#: A section that prints a result, and then does as its name says.
PROGRAM = """
import json, os, sys, time
print("torch warns of something")
print(json.dumps({"name": "found", "pid": os.getpid()}), flush=True)
match sys.argv[1]:
    case "raises":
        raise RuntimeError("CUDA error: device-side assert triggered")
    case "hangs":
        time.sleep(60)
"""


def test_a_section_that_fails_or_hangs_costs_the_others_nothing(tmp_path: Path) -> None:
    """What it has found is there; its process has ended at its deadline; its lines are kept."""
    sections = [Section("hangs", 3.0), Section("raises", 30.0), Section("ends", 30.0)]

    found = list(results(sections, tmp_path, command=[sys.executable, "-c", PROGRAM]))

    assert [line["section"] for line in found] == ["hangs", "hangs", "raises", "raises", "ends"]
    assert [line.get("failed") for line in found] == [None, "cut short after 3 s", None, "ended with 1", None]
    assert found[3]["last"] == "RuntimeError: CUDA error: device-side assert triggered"
    with pytest.raises(ProcessLookupError):
        os.kill(found[0]["pid"], 0)
    kept = [json.loads(line) for line in (tmp_path / "raises.jsonl").read_text().splitlines()]
    assert [line["name"] for line in kept if "name" in line] == ["found"]


@pytest.mark.long
def test_all_of_it_runs_in_small_on_a_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every section has results, and what is no speed is as on a GPU: bits, names of errors, what is skipped."""
    forked = (sys.executable, "-m", "tests.process.harness.forked_command", with_torch().path)
    monkeypatch.setattr(on_gpu, "_COMMAND", (*forked, *on_gpu._COMMAND[1:]))
    assert main(["on_gpu", "--tiny", "--out", str(tmp_path)]) == 0

    found = {
        section.name: [json.loads(line) for line in (tmp_path / f"{section.name}.jsonl").read_text().splitlines()]
        for section in SECTIONS
    }
    lines = [line for section in found.values() for line in section]
    assert [name for name, section in found.items() if not section] == []
    assert [line for line in lines if "failed" in line] == []
    assert [line["name"] for line in lines if line.get("aim") == "≥ 1" and line["value"] < 1] == []
    assert [line["name"] for line in lines if line.get("aim") == "≤ 0" and line["value"] > 0] == []

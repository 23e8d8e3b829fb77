"""All that is to be known of one GPU within minutes: `make bench ARGS="on_gpu --out FOLDER"`, or this file by itself.

Each section of `benchmarks.gpu_sections` is a process with a deadline, so that an error of CUDA in one, or one that
hangs, costs the others nothing. Every result is a JSON line, printed at once and kept in `FOLDER/SECTION.jsonl`. With
`--tiny` everything runs in small on a processor, so that it never rots; nothing of that is a figure.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.record import NotMeasured, Outcome, Series

#: All of them, in seconds.
SECONDS = 420.0
#: In small on a processor that others use too.
TINY_SHARE = 3.0


class Section(NamedTuple):
    """The command is called with the name; `seconds` of `SECONDS` are its deadline."""

    name: str
    seconds: float


SECTIONS = (
    Section("facts", 10),
    Section("copies", 30),
    Section("vector", 60),
    Section("tests", 40),
    Section("overhead", 130),
    Section("safety", 30),
    Section("run-ahead", 25),
    Section("faults", 50),
    Section("checkpoint", 45),
)
_COMMAND = (sys.executable, "-m", "benchmarks.gpu_sections")


def results(
    sections: Sequence[Section], out: Path, *, share: float = 1.0, command: Sequence[str] = _COMMAND
) -> Iterator[dict[str, Any]]:
    """Run one section after the other, `share` of its seconds each; every line as it comes, and one for each section
    that fails or is cut short. Lines are kept in the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    for section in sections:
        began_s = time.monotonic()
        lines, errors = out / f"{section.name}.jsonl", out / f"{section.name}.err"
        with (
            lines.open("w") as kept,
            errors.open("w") as error,
            # Ours and those of the daemons that it starts: one session, which ends with it.
            subprocess.Popen(
                [*command, section.name], stdout=subprocess.PIPE, stderr=error, start_new_session=True, text=True
            ) as process,
        ):
            was_cut: list[bool] = []
            cut = threading.Timer(share * section.seconds, _end, [process, was_cut])
            cut.start()
            assert process.stdout is not None
            for line in filter(lambda line: line.startswith("{"), process.stdout):
                kept.write(line)
                kept.flush()
                yield {"section": section.name} | json.loads(line)
            code = process.wait()
            cut.cancel()
            if code or was_cut:
                why = f"cut short after {share * section.seconds:g} s" if was_cut else f"ended with {code}"
                failed = {"section": section.name, "failed": why, "last": _last(errors)}
                kept.write(json.dumps(failed) + "\n")
                yield failed
        print(f"{section.name}: {time.monotonic() - began_s:.1f} s", file=sys.stderr, flush=True)


def _end(process: subprocess.Popen[str], was_cut: list[bool]) -> None:
    was_cut.append(True)
    # It ends its daemons where it can; a kernel that hangs lets it not.
    for number, patience_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience_s)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def _last(file: Path) -> str:
    lines = file.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def measure(arguments: argparse.Namespace) -> Outcome:
    """Without a GPU only in small."""
    import torch

    if not (arguments.tiny or torch.cuda.is_available()):
        raise NotMeasured("torch finds no GPU here; --tiny runs all of it in small on the processor")
    arguments.dry_run = arguments.dry_run or arguments.tiny
    wanted = [section for section in SECTIONS if not arguments.only or section.name in arguments.only]
    command = (*_COMMAND, "--tiny") if arguments.tiny else _COMMAND
    share = (arguments.seconds or SECONDS * (TINY_SHARE if arguments.tiny else 1.0)) / SECONDS
    found: list[Series] = []
    failed = []
    for line in results(wanted, arguments.out or Path(".benchmarks") / "on_gpu", share=share, command=command):
        print(json.dumps(line), flush=True)
        if "failed" in line:
            failed.append(f"{line['section']} {line['failed']}: {line['last']}")
        elif "aim" in line:
            details = {key: value for key, value in line.items() if key not in ("name", "value", "unit", "aim")}
            found.append(Series(line["name"], line["unit"], [line["value"]], line["aim"], details))
    if failed and not found:
        raise NotMeasured("; ".join(failed))
    for one in failed:
        print(one, file=sys.stderr)
    device = "the processor, in small" if arguments.tiny else torch.cuda.get_device_name(0)
    return Outcome("on_gpu", f"on {device}, torch {torch.__version__}", found)


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["on_gpu", *sys.argv[1:]]))

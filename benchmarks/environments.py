"""The environments of other programs that a benchmark runs beside ours: each has its own, and we import none of them.

`python_of("hivemind")` makes `.benchmarks/hivemind` in the checkout at its first use, which downloads torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from benchmarks.record import ROOT, NotMeasured

FOLDER = ROOT / ".benchmarks"
PACKAGES = {
    # Its 8-bit codecs fail with numpy 2.4.
    "hivemind": ("hivemind==1.1.12", "numpy<2.4"),
    "torchft": ("torchft==0.2.0", "numpy"),
}


def python_of(program: str, given: Path | None = None) -> Path:
    """The Python that has it: `given`, or of an environment that is made here. Raises `NotMeasured`."""
    if given is not None:
        return Path(os.path.abspath(given))  # noqa: PTH100 - a link to an interpreter must stay one: it is the environment
    folder = FOLDER / program
    python = folder / "bin" / "python"
    if not (folder / ".installed").exists():
        print(f"making an environment with {program} in {folder} (once) …", file=sys.stderr, flush=True)
        torch = f"torch=={version('torch')}"
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            [str(python), "-m", "pip", "install", "--quiet", torch, *PACKAGES[program]],
        ):
            if subprocess.run(command, check=False).returncode:
                raise NotMeasured(f"no environment with {program}: {' '.join(command)} failed")
        (folder / ".installed").touch()
    return python

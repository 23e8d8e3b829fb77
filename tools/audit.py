"""Known advisories of every pinned package: fails where one has one, and says so where nobody could be asked.

`make check` runs it. It asks PyPI's advisory database through pip-audit. pip-audit reports "no known vulnerabilities"
also where a mirror without that database answered "not found" to everything, so that what was *audited* is counted
here: nothing audited is a skip with a message, never a pass.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

PINS = Path(__file__).resolve().parent.parent / "constraints.txt"
#: Longest wait for one answer of the database, and for all of them, in seconds.
ANSWER_S, ALL_S = 15, 180


class Verdict(NamedTuple):
    """`exit_code` 0 also for a skip: a machine without a network can still check the rest."""

    exit_code: int
    lines: list[str]


def judge(report: dict[str, Any]) -> Verdict:
    """What pip-audit's JSON report means. Pure."""
    entries = report.get("dependencies", [])
    audited = [entry for entry in entries if "skip_reason" not in entry]
    unknown = [entry["name"] for entry in entries if "skip_reason" in entry]
    if not audited:
        return Verdict(
            0, [f"audit skipped: the database knew none of {len(entries)} pins; is this a mirror without it?"]
        )
    found = [
        f"{entry['name']} {entry['version']}: {advisory['id']}"
        + (
            f", mended in {', '.join(advisory['fix_versions'])}"
            if advisory.get("fix_versions")
            else ", no release mends it"
        )
        for entry in audited
        for advisory in entry["vulns"]
    ]
    lines = [f"audited {len(audited)} pins, {len(found)} known advisories", *found]
    if unknown:
        lines.append(f"not in the database: {', '.join(unknown)}")
    return Verdict(1 if found else 0, lines)


def skipped(reason: str) -> Verdict:
    return Verdict(0, [f"audit skipped: {reason}"])


def main() -> int:
    """Ask, judge, print."""
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(PINS), "--no-deps", "--disable-pip"]
    command += ["--progress-spinner", "off", "--format", "json", "--timeout", str(ANSWER_S)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ALL_S, check=False)
        verdict = judge(json.loads(done.stdout))
    except subprocess.TimeoutExpired:
        verdict = skipped(f"the advisory database did not answer within {ALL_S} s")
    except ValueError:
        # No report: pip-audit could not connect, and says so on its last line.
        last = (done.stderr.strip().splitlines() or ["pip-audit said nothing"])[-1]
        verdict = skipped(f"the advisory database could not be reached ({last})")
    print("\n".join(verdict.lines))
    return verdict.exit_code


if __name__ == "__main__":
    sys.exit(main())

"""What `/status` says of an experiment tracker that does not write. Pure."""

from __future__ import annotations

from p2pnode.status.schema import Finding


def tracker_findings(name: str, problem: str, lost: int) -> list[Finding]:
    """A warning while there is a problem. `name` is the setting, `lost` counts the records that are missing there."""
    if not problem:
        return []
    return [
        Finding(
            level="warning",
            what=f"training.tracker = {name} fails: {problem}; {lost} records are missing there, training goes on",
            do="correct it: the next try is within a minute; or leave training.tracker empty",
        )
    ]

"""The finding of a node whose deltas are refused, or dropped here as too old, in several of its last steps. Pure.

One refusal is no finding: a shard that has just been recovered, or one bad batch, refuses a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

#: Steps with a refusal among the last ones (`Progress.refusals`).
MIN_STEPS = 3

#: What each `RefusalReason` means, and what to do.
MEANINGS: dict[str, tuple[str, str]] = {
    "late": (
        "they are too old, because the others have gone far ahead during its steps",
        "lower training.local_steps or the batch on this node, or raise barrier.staleness on all; see also its line",
    ),
    "not_finite": (
        "they have values that are not finite",
        "lower the learning rate, or clip the gradients; look for NaN in the data",
    ),
    "out_of_range": (
        "they are far longer than those of the other nodes",
        "compare its learning rate, its loss and its data with theirs",
    ),
    "before_era": (
        "their base is older than the copy with which shards were recovered",
        "this passes with the next pull; if it does not, start the node again",
    ),
    "ahead": (
        "their step is far beyond that of all other nodes",
        "start the node again: it goes on from their step",
    ),
    "shape": (
        "their owners have other shards",
        "start the node again: it takes the shards of the swarm",
    ),
    "malformed": (
        "their owners could not read them",
        "compare the versions in /peers; if they are equal, see this machine's memory and network",
    ),
    "not_yours": (
        "they carry the id of another node",
        "start the node again, and report it if it repeats",
    ),
}  # fmt: skip
_UNKNOWN = ("their owners say {}", "see the log of this node and the versions in /peers")


def refusal_findings(refusals: Sequence[Mapping[str, int]]) -> list[tuple[str, str]]:
    """What is wrong and what to do, by reason; `refusals` has those of the last steps, in shards by reason."""
    refused = [reasons for reasons in refusals if reasons]
    if len(refused) < MIN_STEPS:
        return []
    steps: dict[str, int] = {}
    for reasons in refused:
        for reason in reasons:
            steps[reason] = steps.get(reason, 0) + 1
    found = []
    for reason, count in sorted(steps.items()):
        meaning, do = MEANINGS.get(reason, (_UNKNOWN[0].format(reason), _UNKNOWN[1]))
        what = f"in {count} of the last {len(refusals)} steps deltas of this node were refused ({reason}): {meaning}"
        found.append((what, do))
    return found

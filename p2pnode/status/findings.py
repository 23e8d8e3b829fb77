"""Findings of `/status.health` from plain facts: the line, refused deltas, releases of peers, records, devices, the
tracker. Pure.

What a peer says of its version is shown and decides nothing. Whether nodes understand each other is decided by the
version of the protocol when they meet (`hello`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from p2pnode.status.schema import DeviceStatus, DispatchStatus, Finding, GpuStatus, LineStatus
from p2pnode.training.devices.gpus import SEE_DRIVER
from p2pnode.training.dispatch.client import TROUBLE_S
from p2pnode.training.dispatch.master import MasterFacts
from p2pnode.training.dispatch.worker import RecordsFacts
from p2pnode.training.encoding.codec_choice import CodecChoice
from p2pnode.training.encoding.table import CHOICES

#: Steps with a refusal among the last ones (`Progress.refusals`). One refusal is no finding: a shard that has just been
#: recovered, or one bad batch, refuses a step.
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
#: Versions that the sentence names.
NAMED_VERSIONS = 2
_RELEASE = re.compile(r"(\d+)\.(\d+)")


def warning(what: str, do: str) -> Finding:
    return Finding(level="warning", what=what, do=do)


def error(what: str, do: str) -> Finding:
    return Finding(level="error", what=what, do=do)


#: Deltas' worth of training that a node may hold back without a finding.
MAX_HELD_BACK = 8.0


def line_findings(status: LineStatus, choice: CodecChoice | None) -> list[Finding]:
    """That the line carries less than a step sends, or so little that the shared model stays behind, and what to do;
    nothing where it carries all."""
    if choice is None:
        return []
    found, held_back = [], status.held_back_deltas or 0.0
    if held_back > MAX_HELD_BACK and (choice.codec == CHOICES[-1] or not choice.is_automatic):
        why, do = "its line carries no more", "train fewer parameters (docs/frameworks.md, LoRA), or use a faster line"
        if not choice.is_automatic:
            why, do = f'exchange.codec = "{choice.codec}"', 'set exchange.codec = "auto"'
        found.append(warning(f"the shared model lacks about {held_back:.0f} deltas of this node's training: {why}", do))
    needed, carried = status.needed_bytes_per_step, status.carried_bytes_per_step
    if needed is None or carried is None or carried >= needed:
        return found
    what = f"this node's line carries {_megabytes(carried)} of {_megabytes(needed)} MB per step"
    advice = ["raise training.local_steps on all nodes"]
    if not choice.is_automatic and choice.codec != CHOICES[-1]:
        advice.insert(0, 'set exchange.codec = "auto"')
    return [*found, warning(what, "; or ".join(advice))]


def _megabytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:.1f}" if size_bytes >= 50_000 else f"{size_bytes / 1e6:.3f}"


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


def release_of(version: str) -> str:
    """The part of a version that matters: "0.2" of "0.2.1.dev3"; the whole text where it has no such part."""
    match = _RELEASE.match(version)
    return version if match is None else match[0]


def version_findings(own: str, heard: Iterable[str]) -> list[Finding]:
    """`heard`: the versions of the peers that said one. Two of one release (0.2.0, 0.2.1) are no finding."""
    known = list(heard)
    others = Counter(version for version in known if release_of(version) != release_of(own))
    if not others:
        return []
    named = ", ".join(f"{count} × {version}" for version, count in others.most_common(NAMED_VERSIONS))
    more = ", and others" if len(others) > NAMED_VERSIONS else ""
    what = f"{others.total()} of {len(known)} peers run another release than this node ({own}): {named}{more}"
    do = "they work together; end the upgrade one node at a time (docs/operations.md), this one too if it is the older"
    return [Finding(level="info", what=what, do=do)]


def tracker_findings(name: str, problem: str, lost: int) -> list[Finding]:
    """A warning while there is a problem. `name` is the setting, `lost` counts the records that are missing there."""
    if not problem:
        return []
    what = f"training.tracker = {name} fails: {problem}; {lost} records are missing there, training goes on"
    return [warning(what, "correct it: the next try is within a minute; or leave training.tracker empty")]


def dispatch_findings(
    status: DispatchStatus | None, master: MasterFacts | None, records: RecordsFacts | None
) -> list[Finding]:
    """What is wrong with the records, and what to do."""
    if status is None:
        return []
    found = []
    if records is not None and records.refused is not None:
        found.append(error(*records.refused))
    waited_s = status.unanswered_seconds
    if records is not None and records.trouble is not None and waited_s is not None and waited_s >= TROUBLE_S:
        what = f"no master of the records has answered for {waited_s:.0f} s: {records.trouble.reason}"
        do = (
            'see whether a node with node.role = "master" or "peer+master" runs, and its log; training goes on '
            "by itself when one serves"
        )
        found.append(error(what, do))
    if master is not None and master.serves_since is None and master.reason:
        what = f"this node is a master and does not serve: {master.reason}"
        found.append(warning(what, "a master on etcd stands by while another serves; otherwise see dispatch.store"))
    if status.discarded:
        what = f"{status.discarded} tasks were discarded: their records are left out of a pass"
        do = "see dispatch_task_discarded in the master's log; `p2pnode records check` looks at the files"
        found.append(error(what, do))
    return found


#: What is said of a trainer in a state that needs attention.
_DEVICE_STATES = {
    "failed": "has failed and is given up",
    "crashed": "has failed and is restarted",
    "hung": "makes no progress",
}


def gpu_findings(gpus: list[GpuStatus]) -> list[Finding]:
    """Errors that the driver has reported."""
    return [warning(f"{one.device} ({one.name}): {one.error}", SEE_DRIVER) for one in gpus if one.error is not None]


def device_findings(devices: list[DeviceStatus]) -> list[Finding]:
    """Trainers that do not train while others of the node do."""
    found = []
    for one in devices:
        if (said := _DEVICE_STATES.get(one.state)) is not None:
            log = "trainer.log" if one.index == 0 else f"devices/{one.index}/trainer.log"
            what = f"the trainer on device {one.index} ({one.device}) {said}; the others of this node go on"
            do = f"see device_dropped and device_given_up in the log, and {log} in the state directory"
            found.append(warning(what, do))
    return found

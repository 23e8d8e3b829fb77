"""Whether peers run another release of p2pnode, as far as they say so, for `/status.health`. Pure.

What a peer says of itself is shown and decides nothing. Whether nodes understand each other is decided by the version
of the protocol when they meet (`hello`). Two versions of one release (0.2.0, 0.2.1) are no finding.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from p2pnode.status.schema import Finding

#: Versions that the sentence names.
NAMED_VERSIONS = 2
_RELEASE = re.compile(r"(\d+)\.(\d+)")


def release_of(version: str) -> str:
    """The part of a version that matters: "0.2" of "0.2.1.dev3"; the whole text where it has no such part."""
    match = _RELEASE.match(version)
    return version if match is None else match[0]


def version_findings(own: str, heard: Iterable[str]) -> list[Finding]:
    """`heard`: the versions of the peers that said one."""
    known = list(heard)
    others = Counter(version for version in known if release_of(version) != release_of(own))
    if not others:
        return []
    named = ", ".join(f"{count} × {version}" for version, count in others.most_common(NAMED_VERSIONS))
    more = ", and others" if len(others) > NAMED_VERSIONS else ""
    what = f"{others.total()} of {len(known)} peers run another release than this node ({own}): {named}{more}"
    do = "they work together; end the upgrade one node at a time (docs/operations.md), this one too if it is the older"
    return [Finding(level="info", what=what, do=do)]

"""Peers of another release, as a finding."""

from __future__ import annotations

import pytest

from p2pnode.status.versions import release_of, version_findings


@pytest.mark.parametrize(
    ("version", "release"), [("0.2.1", "0.2"), ("10.20", "10.20"), ("0.2.1.dev3+gabc", "0.2"), ("main", "main")]
)
def test_a_release_is_the_first_two_numbers(version: str, release: str) -> None:
    """Two versions of one release do not differ in what they do."""
    assert release_of(version) == release


def test_the_same_release_is_no_finding() -> None:
    """Nor is a node that knows no version of its peers."""
    assert version_findings("0.2.1", []) == []
    assert version_findings("0.2.1", ["0.2.0", "0.2.9.dev1"]) == []


def test_another_release_is_named_with_its_count() -> None:
    """The two that most peers run are named; the number of the others is in the sum. It is for information."""
    (one,) = version_findings("0.2.1", ["0.2.1", "0.3.0", "0.3.0", "0.1.0"])
    assert one.level == "info"
    assert one.what == "3 of 4 peers run another release than this node (0.2.1): 2 × 0.3.0, 1 × 0.1.0"
    (many,) = version_findings("0.2.1", [f"1.{at % 9}.0" for at in range(20)])
    assert many.what == "20 of 20 peers run another release than this node (0.2.1): 3 × 1.0.0, 3 × 1.1.0, and others"
    assert "one node at a time" in many.do

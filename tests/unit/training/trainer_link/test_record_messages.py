"""Tasks of records: how many records one has."""

from __future__ import annotations

import pytest

from p2pnode.training.dispatch.chunks import DatasetChunk
from p2pnode.training.trainer_link.record_messages import RecordTask


@pytest.mark.parametrize("counts", [[], [5], [5, 0, 3]])
def test_a_task_has_the_records_of_all_its_chunks(counts: list[int]) -> None:
    """Those that were trained before count too."""
    chunks = [DatasetChunk("file", number, 0, count) for number, count in enumerate(counts)]

    assert RecordTask(1, 1, 1, 0, 2, chunks).records == sum(counts)

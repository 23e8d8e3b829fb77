"""`swarm.sampler` and `swarm.shard` with the real `datasets` of Hugging Face, in memory and as a stream."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.harness.stubs.shared_data import DirectConnection, Script
from tests.unit.training.trainer.sampling.test_sampler import epoch, meet

datasets = pytest.importorskip("datasets", reason="make test-frameworks installs it")

ROWS = 203


def rows() -> Any:
    return datasets.Dataset.from_dict({"row": list(range(ROWS)), "text": [f"line {row}" for row in range(ROWS)]})


def numbers(batch: list[dict[str, Any]]) -> list[int]:
    """Rows are dictionaries of both columns."""
    assert all(row["text"] == f"line {row['row']}" for row in batch)
    return [row["row"] for row in batch]


@pytest.mark.parametrize("workers", [0, 2])
def test_two_nodes_share_a_dataset(workers: int) -> None:
    """Together they yield every row once, whoever reads them: this process or a loader's workers."""
    scripts = [Script(DirectConnection(name * 20)) for name in (b"a", b"b")]
    loaders = [
        DataLoader(
            rows(),
            batch_size=8,
            sampler=script.data.sampler(ROWS, shuffle=True, nodes=2.0),
            num_workers=workers,
            collate_fn=numbers,
        )
        for script in scripts
    ]
    meet(*scripts)

    parts = [epoch(script, loader) for script, loader in zip(scripts, loaders, strict=True)]

    assert Counter(parts[0] + parts[1]) == Counter(range(ROWS))
    assert min(map(len, parts)) > 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_shared_and_each_epoch_has_every_row_once(workers: int) -> None:
    """Of a data set in three files, which divides itself among workers: here blocks divide it. Two epochs."""
    script = Script()
    loader = DataLoader(
        script.data.shard(rows().to_iterable_dataset(num_shards=3), 4),
        batch_size=8,
        num_workers=workers,
        collate_fn=numbers,
    )

    first, second = epoch(script, loader), epoch(script, loader)
    # The last batch may be trained before its worker has found the end of the stream; afterwards both have.
    script.step(0)

    assert Counter(first) == Counter(second) == Counter(range(ROWS))
    assert script.member.ledger.first == (2, 0)


def test_a_stream_that_is_resumed_skips_what_is_trained() -> None:
    """After some batches a new pass goes on behind them, without the rows before."""
    script = Script()
    loader = DataLoader(script.data.shard(rows().to_iterable_dataset(), 4), batch_size=8, collate_fn=numbers)

    begun = epoch(script, loader, batches=5)
    rest = epoch(script, loader)

    assert len(begun) == 40
    assert Counter(begun + rest) == Counter(range(ROWS))

"""Counters and fixed tensors: which buffers are which, and what is saved of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from p2pnode.training.files.model_file import PIECE_BYTES, ROW, WORD_BYTES, checksum_of
from p2pnode.training.trainer.model.unshared_tensors import UnsharedTensors, checksum
from p2pnode.training.trainer.model.vector import ModelVector
from p2pnode.training.trainer_link.interface import TrainerFailed

#: Buffers that hold several exact values: no average of two nodes' values would be one.
TABLES = {
    "packed weights": torch.arange(8, dtype=torch.uint8),
    "signed codes": torch.arange(-4, 4, dtype=torch.int8),
    "positions": torch.arange(4).expand(1, -1),
    "bool mask": torch.tensor([True, False]),
    "float8 codes": torch.arange(8, dtype=torch.uint8).view(torch.float8_e4m3fn),
    "complex": torch.tensor([1 + 2j, 3j]),
}


def with_buffer(table: torch.Tensor) -> ModelVector:
    model = nn.Linear(1, 1)
    model.register_buffer("table", table)
    model.register_buffer("count", torch.tensor(3))
    model.register_buffer("cache", table.clone(), persistent=False)
    return ModelVector(model)


def other(table: torch.Tensor) -> torch.Tensor:
    """Another table of the same type and shape."""
    if table.dtype == torch.float8_e4m3fn:
        return table.view(torch.uint8).flip(-1).view(table.dtype)
    return table.flip(-1)


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_of_exact_values_belongs_to_the_frozen_digest(kind: str) -> None:
    """Two nodes that hold it differently have other digests, and its fingerprint differs. A counter, and a buffer that
    is not persistent, change nothing."""
    mine = with_buffer(TABLES[kind])
    theirs = with_buffer(other(TABLES[kind]))

    assert list(mine.fixed) == ["table"]
    assert list(mine.local_buffers) == ["count"]
    assert mine.frozen_digest != theirs.frozen_digest
    assert mine.frozen["table"] != theirs.frozen["table"]
    mine.local_buffers["count"] += 1
    again = with_buffer(TABLES[kind])
    assert (again.frozen_digest, again.frozen) == (mine.frozen_digest, mine.frozen)


@pytest.mark.parametrize("values", [0, 1, 7, 1024, 8192, 8193, 3 * 1024 * 1024 + 11])
def test_the_checksum_of_a_tensor_is_that_of_its_bytes_in_a_file(values: int) -> None:
    """So that a file is checked by what a device has summed up, and no node reads its frozen tensors twice."""
    tensor = torch.randint(0, 255, (values,), dtype=torch.uint8)
    raw = tensor.numpy().tobytes()
    assert PIECE_BYTES % (ROW * WORD_BYTES) == 0

    assert checksum_of(raw[at : at + PIECE_BYTES] for at in range(0, len(raw), PIECE_BYTES)) == checksum(tensor)
    if values > 8:
        assert checksum(tensor) != checksum(tensor.flip(0))


def test_a_sparse_buffer_is_refused_by_name() -> None:
    """It has no memory that could be compared or written."""
    with pytest.raises(TrainerFailed, match=r"the buffer table is torch\.sparse_coo") as failure:
        with_buffer(torch.eye(3, dtype=torch.int64).to_sparse())
    assert "persistent=False" in failure.value.hint


def test_what_training_has_changed_is_saved_and_restored_with_the_counters() -> None:
    """Whatever way it was written, also past the counting of versions. An unchanged table is not saved again."""
    counters = {"count": torch.tensor(1)}
    fixed = {"teacher": torch.zeros(2000), "codes": torch.arange(4), "mask": torch.tensor([True, False])}
    tensors = UnsharedTensors(counters, fixed)
    assert tensors.own() == counters

    fixed["teacher"].data[7] = 1.0
    fixed["mask"].data = torch.tensor([False, True])
    counters["count"] += 1
    saved = {name: tensor.clone() for name, tensor in tensors.own().items()}
    assert sorted(saved) == ["count", "mask", "teacher"]

    others = {"teacher": torch.zeros(2000), "codes": torch.arange(4), "mask": torch.tensor([True, False])}
    restored = UnsharedTensors({"count": torch.tensor(1)}, others)
    restored.restore(saved)
    assert sorted(restored.changed()) == ["mask", "teacher"]
    assert all(torch.equal(others[name], fixed[name]) for name in fixed)
    with pytest.raises(KeyError):
        restored.restore({})


ROW_BYTES = ROW * WORD_BYTES


@pytest.mark.parametrize("size", [1, 7, 8, 9, ROW_BYTES, 3 * ROW_BYTES + 5])
def test_a_changed_bit_and_an_exchange_show(size: int) -> None:
    """At the beginning, in the middle and at the end, in whole rows and in the rest."""
    table = torch.arange(size, dtype=torch.int64).remainder(251).to(torch.uint8)
    before = checksum(table)

    assert checksum(table.clone()) == before
    for place in {0, size // 2, size - 1}:
        table[place] ^= 1
        assert checksum(table) != before
        table[place] ^= 1
    if size > 1:
        assert checksum(table.flip(0)) != before
        assert checksum(table.roll(WORD_BYTES if size > WORD_BYTES else 1)) != before


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float64, torch.complex64])
def test_any_type_and_any_memory_is_read(dtype: torch.dtype) -> None:
    """Scalars, empty tensors, transposed ones, and those that begin in the middle of their memory."""
    table = torch.arange(12).reshape(3, 4).to(dtype)

    assert checksum(table[1:].t()) == checksum(table[1:].t().clone())
    assert checksum(torch.arange(12, dtype=torch.uint8)[1:]) == checksum(torch.arange(1, 12, dtype=torch.uint8))
    assert checksum(table[0, 1]) != checksum(table[0, 0])
    assert checksum(table[:0]) != checksum(table[0, :1])

"""Checksums of tensors: any changed bit and any exchange of values shows, whatever the size."""

from __future__ import annotations

import pytest
import torch

from p2pnode.training.trainer.unshared_tensors import ROW, WORD_BYTES, checksum

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

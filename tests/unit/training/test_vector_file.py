"""The file of a vector: what the safetensors library reads and writes, and damage of every kind."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.numpy

from training import vector_file
from training.layout import Layout, LayoutEntry

LAYOUT = Layout(
    (
        LayoutEntry('a."quoted" ä', (2, 3), "float32", "parameter", 0, 6),
        LayoutEntry("b", (), "bfloat16", "parameter", 6, 1),
        LayoutEntry("c", (0,), "float32", "parameter", 7, 0),
        LayoutEntry("d", (2,), "float32", "buffer", 7, 2),
    )
)
VALUES = np.arange(9, dtype=np.float32)


def whole() -> bytes:
    return vector_file.header(LAYOUT) + VALUES.tobytes()


def places(raw: bytes, layout: Layout = LAYOUT) -> list[vector_file.Place]:
    return vector_file.places(raw[: vector_file.header_bytes(raw[:8], len(raw))], len(raw), layout)


def test_the_library_reads_what_is_written() -> None:
    """All tensors by name and shape, whatever their names contain, also empty and scalar ones."""
    tensors = safetensors.numpy.load(whole())

    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        entry.name: entry.shape for entry in LAYOUT.entries
    }
    for entry in LAYOUT.entries:
        np.testing.assert_array_equal(tensors[entry.name].ravel(), VALUES[entry.offset : entry.offset + entry.size])


def test_what_the_library_writes_is_read() -> None:
    """In its own order of tensors, and with metadata."""
    tensors = {entry.name: VALUES[entry.offset : entry.offset + entry.size] for entry in LAYOUT.entries}
    raw = safetensors.numpy.save({**tensors, "z.extra": VALUES}, metadata={"format": "pt"})

    for entry, offset in places(raw):
        np.testing.assert_array_equal(np.frombuffer(raw, np.float32, entry.size, offset), tensors[entry.name])


@pytest.mark.parametrize("keep_bytes", [0, 7, 8, 9, 40, -1])
def test_a_file_that_was_cut_off_is_damaged(keep_bytes: int) -> None:
    """In its length, its header or its values: an error that says so."""
    with pytest.raises(ValueError, match="damaged"):
        places(whole()[:keep_bytes])


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (b"[]", "damaged"),
        (b'{"b": {"dtype": "F32", "shape": [], "data_offsets": [-4, 0]}}', "damaged"),
        (b'{"b": {"dtype": "F32", "shape": [], "data_offsets": [0, 4000]}}', "damaged"),
        (b"{}", "missing"),
        (b'{"b": {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}}', "missing"),
        (b'{"b": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', "missing"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(header: bytes, why: str) -> None:
    """No JSON object, impossible offsets, a tensor that is missing, of another type or of another size."""
    raw = len(header).to_bytes(8, "little") + header + bytes(64)

    with pytest.raises(ValueError, match=why):
        places(raw, Layout((LayoutEntry("b", (), "float32", "parameter", 0, 1),)))


def test_an_impossible_length_is_refused_before_anything_is_read() -> None:
    """A header longer than the file, or than the library accepts."""
    for length in (10**6, 10**18):
        with pytest.raises(ValueError, match="damaged"):
            vector_file.header_bytes(length.to_bytes(8, "little"), 1000)

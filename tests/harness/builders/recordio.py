"""Bytes of RecordIO chunks for tests."""

from __future__ import annotations

import io
from collections.abc import Sequence

from p2pnode.training.dispatch.recordio import Compressor, RecordWriter


def encode(records: Sequence[bytes], compressor: Compressor) -> bytes:
    """One chunk of these records, header included."""
    sink = io.BytesIO()
    writer = RecordWriter(sink, compressor=compressor, chunk_bytes=2**27)
    writer.write_all(records)
    writer.flush()
    assert writer.chunks == 1
    return sink.getvalue()

"""RecordIO files (layout A): chunks of records, each chunk compressed and checked by itself.

`chunk` has the bytes of a chunk, without I/O, and what can be wrong with it; `reader` finds and reads the chunks of a
file; `writer` makes files; `examples` turns arrays into records and back. Scripts may use what is exported here:

    from p2pnode.training.dispatch.recordio import RecordFile
    with RecordFile("train.recordio") as records:
        for record in records: ...

Source of the format: PaddlePaddle/recordio (Go), which ElasticDL's current reader uses as well.
"""

from p2pnode.training.dispatch.recordio.chunk import Chunk, Compressor
from p2pnode.training.dispatch.recordio.examples import BadExample, decode_example, encode_example, stack_examples
from p2pnode.training.dispatch.recordio.reader import (
    MAX_CHUNK_BYTES,
    ChunkPlace,
    ChunkTooLarge,
    CorruptChunk,
    FileIndex,
    RecordFile,
    RecordFileError,
    TornChunk,
    TornPolicy,
    read_chunk,
    read_index,
)
from p2pnode.training.dispatch.recordio.writer import CHUNK_BYTES, RecordWriter, create_records

__all__ = [
    "CHUNK_BYTES",
    "MAX_CHUNK_BYTES",
    "BadExample",
    "Chunk",
    "ChunkPlace",
    "ChunkTooLarge",
    "Compressor",
    "CorruptChunk",
    "FileIndex",
    "RecordFile",
    "RecordFileError",
    "RecordWriter",
    "TornChunk",
    "TornPolicy",
    "create_records",
    "decode_example",
    "encode_example",
    "read_chunk",
    "read_index",
    "stack_examples",
]

"""RecordIO files (layout A): chunks of records, each chunk compressed and checked by itself.

`layout`, `compression` and `chunk` are the bytes of a chunk, without I/O, and what can be wrong with it; `index` finds
the chunks of a file by their headers; `reader` reads them; `writer` makes them; `files` has new files; `examples` turns
arrays into records and back. Scripts may use what is exported here:

    from p2pnode.training.dispatch.recordio import RecordFile
    with RecordFile("train.recordio") as records:
        for record in records: ...

Source of the format: PaddlePaddle/recordio (Go), which ElasticDL's current reader uses as well.
"""

from p2pnode.training.dispatch.recordio.chunk import Chunk
from p2pnode.training.dispatch.recordio.examples import BadExample, decode_example, encode_example, stack_examples
from p2pnode.training.dispatch.recordio.files import create_records
from p2pnode.training.dispatch.recordio.index import ChunkPlace, FileIndex, TornPolicy, read_index
from p2pnode.training.dispatch.recordio.layout import (
    ChunkTooLarge,
    Compressor,
    CorruptChunk,
    RecordFileError,
    TornChunk,
)
from p2pnode.training.dispatch.recordio.reader import MAX_CHUNK_BYTES, RecordFile, read_chunk
from p2pnode.training.dispatch.recordio.writer import CHUNK_BYTES, RecordWriter

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

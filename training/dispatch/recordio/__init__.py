"""RecordIO files (layout A): chunks of records, each chunk compressed and checked by itself.

`layout`, `compression` and `chunk` are the bytes of a chunk, without I/O; `index` finds the chunks of a file by their
headers; `reader` reads them; `errors` has what can be wrong with a file. Scripts may use what is exported here:

    from training.dispatch.recordio import RecordFile
    with RecordFile("train.recordio") as records:
        for record in records: ...

Source of the format: PaddlePaddle/recordio (Go), which ElasticDL's current reader uses as well.
"""

from training.dispatch.recordio.chunk import Chunk
from training.dispatch.recordio.errors import ChunkTooLarge, CorruptChunk, RecordFileError, TornChunk
from training.dispatch.recordio.index import ChunkPlace, FileIndex, TornPolicy, read_index
from training.dispatch.recordio.layout import Compressor
from training.dispatch.recordio.reader import MAX_CHUNK_BYTES, RecordFile, read_chunk

__all__ = [
    "MAX_CHUNK_BYTES",
    "Chunk",
    "ChunkPlace",
    "ChunkTooLarge",
    "Compressor",
    "CorruptChunk",
    "FileIndex",
    "RecordFile",
    "RecordFileError",
    "TornChunk",
    "TornPolicy",
    "read_chunk",
    "read_index",
]

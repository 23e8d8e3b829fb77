"""records: megabytes of records per second, read from and written to RecordIO files; headers per second for an index.

A read opens a file, checks the CRC-32 of each chunk, and copies out every record (`RecordFile`); the file is in the
page cache. A write makes a new file with `create_records`, synced to disk. Lengths vary by half around their mean;
records of one length are faster, and measured as well. The text is random words: gzip halves it. Each JSON line has
the rate by processor time too (`processor_rate`), which other load on the machine changes less.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.record import Outcome, Series
from p2pnode.training import kernels
from p2pnode.training.dispatch.recordio import Compressor, RecordFile, create_records, read_index

#: Mean length of a record, with its name.
LENGTHS = {"100 B": 100, "1 kB": 1_000, "100 kB": 100_000}
FILE_BYTES = 64_000_000
INDEX_CHUNKS = 10_000
REPETITIONS = 5
AIM_READ = "≥ 500"
_TEXT_BYTES = 4_000_000


def measure(arguments: argparse.Namespace) -> Outcome:
    repetitions = arguments.repetitions or REPETITIONS
    text = _text(random.Random(1))
    series: list[Series] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measured.recordio"
        for name, mean in LENGTHS.items():
            for varied in (True, False):
                records = list(_records(text, mean, varied))
                megabytes = sum(map(len, records)) / 1e6
                for compressor in Compressor if varied else (Compressor.NONE,):
                    what = f"{name}{'' if varied else ', all of one length'}, {compressor.name.lower()}"
                    rates = _rates(partial(_write, path, records, compressor), megabytes, repetitions)
                    series.append(Series(f"records written: {what}", "MB/s", rates.wall, "", rates.details))
                    aim = AIM_READ if compressor is Compressor.NONE else ""
                    rates = _rates(partial(_read, path), megabytes, repetitions)
                    size = {"file_bytes": path.stat().st_size, "records": len(records)}
                    series.append(Series(f"records read: {what}", "MB/s", rates.wall, aim, rates.details | size))
        with create_records(path, records_per_chunk=1, compressor=Compressor.NONE, overwrite=True) as out:
            out.write_all(bytes(10_000) for _ in range(INDEX_CHUNKS))
        rates = _rates(partial(read_index, path), INDEX_CHUNKS / 1e3, repetitions)
        series.append(Series("headers read for an index", "thousand/s", rates.wall, "", rates.details))
    return Outcome(
        "records",
        f"one process, files of {FILE_BYTES / 1e6:.0f} MB of records in chunks of 32 MiB, in the page cache; the ends "
        f"of records are found by {kernels.name()} code; writes are synced",
        series,
    )


class Rates(NamedTuple):
    """An amount per second, for each repetition: by the clock on the wall and by processor time."""

    wall: list[float]
    processor: list[float]

    @property
    def details(self) -> dict[str, Any]:
        return {"processor_rate": float(f"{statistics.median(self.processor):.4g}")}


def _rates(job: Callable[[], object], amount: float, repetitions: int) -> Rates:
    """For each repetition after a first one that does not count."""
    job()
    rates = Rates([], [])
    for _ in range(repetitions):
        began_s, began_processor_s = time.perf_counter(), time.process_time()
        job()
        rates.wall.append(amount / (time.perf_counter() - began_s))
        rates.processor.append(amount / (time.process_time() - began_processor_s))
    return rates


def _write(path: Path, records: list[bytes], compressor: Compressor) -> None:
    with create_records(path, compressor=compressor, overwrite=True) as out:
        out.write_all(records)


def _read(path: Path) -> None:
    with RecordFile(path) as file:
        for _record in file:
            pass


def _records(text: bytes, mean: int, varied: bool) -> Iterator[bytes]:
    """Pieces of the text of so many bytes on average, until the file is full."""
    generator = random.Random(mean)
    left = FILE_BYTES
    while left > 0:
        size = generator.randint(mean // 2, 3 * mean // 2) if varied else mean
        start = generator.randrange(len(text) - size)
        left -= size
        yield text[start : start + size]


def _text(generator: random.Random) -> bytes:
    words = [bytes(generator.choices(b"abcdefghijklmnopqrstuvwxyz", k=generator.randint(2, 9))) for _ in range(5_000)]
    return b" ".join(generator.choices(words, k=_TEXT_BYTES // 6))

"""`p2pnode records`: make RecordIO files of other files, list their chunks, print and check them. No node is needed.

`pack` writes its files whole or not at all; what it converts and how is in `training.dispatch.conversion`. Modules with
numpy are imported inside functions, so that other commands start fast.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from p2pnode.commands.files import ForceOption
from p2pnode.commands.options import JsonOption
from p2pnode.commands.output import print_json, print_line, print_notice
from p2pnode.errors import ExitCode, UserError
from p2pnode.screen import is_redrawable, progress_bar
from p2pnode.terminal.lines import columns
from p2pnode.terminal.numbers import size

if TYPE_CHECKING:
    from p2pnode.training.dispatch.recordio import FileIndex, RecordWriter

records_app = typer.Typer(
    help="Make, list, print and check RecordIO files, the data sets that nodes share by chunks.", rich_markup_mode=None
)

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_SIZE = re.compile(r"(\d{1,12})\s*([KMG]?)(?:i?B)?", re.IGNORECASE)
#: Fewer chunks than this cannot be shared well among nodes.
_FEW_CHUNKS = 16
_PROGRESS_S = 2.0
_PROGRESS_RECORDS = 1_000


class CompressorName(StrEnum):
    """The compressors by name."""

    NONE = "none"
    SNAPPY = "snappy"
    GZIP = "gzip"


class FormatName(StrEnum):
    """What can be converted; auto: by the name of each file."""

    AUTO = "auto"
    TEXT = "text"
    JSONL = "jsonl"
    NPZ = "npz"


def _bytes(text: str) -> int:
    """A size such as 4096, 512K, 32M or 1G; the units are powers of 1,024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or not int(match[1]):
        raise typer.BadParameter(f'"{text}" is not a size; write 4096, 512K, 32M or 1G')
    return int(match[1]) * _UNITS[match[2].upper()]


FilesArgument = Annotated[
    list[str], typer.Argument(metavar="FILE…", help='RecordIO files, or patterns such as "train-*.recordio".')
]


@records_app.command("pack")
def pack(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="SOURCE…", help='Files, or patterns such as "logs/*.txt".'),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The file to write.")],
    kind: Annotated[FormatName, typer.Option("--format", help="What the sources are.")] = FormatName.AUTO,
    compressor: Annotated[
        CompressorName, typer.Option("--compressor", help="How chunks are compressed.")
    ] = CompressorName.SNAPPY,
    chunk_bytes: Annotated[
        int, typer.Option("--chunk-bytes", parser=_bytes, metavar="SIZE", help="Most bytes of records in a chunk.")
    ] = "32M",  # type: ignore[assignment]  # typer parses the default too
    records_per_chunk: Annotated[
        int | None, typer.Option("--records-per-chunk", min=1, help="Most records in a chunk.")
    ] = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> int:
    """Make a RecordIO file of text, JSON lines or NPZ files: a record for each line, or for each index.

    Example: p2pnode records pack "corpus/*.txt" --out corpus.recordio --records-per-chunk 1000
    """
    from p2pnode.training.dispatch.conversion import SourceFormat, common_format, records_of
    from p2pnode.training.dispatch.recordio import Compressor, create_records

    progress = _Progress()
    with _explained(out):
        found = _paths(sources)
        total = _plain_bytes(found)
        chosen = common_format(found) if kind is FormatName.AUTO else SourceFormat(kind.value)
        records = records_of(found, chosen)
        first = next(records, None)  # before a file is made: most mistakes show in the first record
        if first is None:
            raise UserError("the sources have no record", "nothing was written; see the sources", ExitCode.DATA)
        with create_records(
            out,
            compressor=Compressor[compressor.name],
            chunk_bytes=chunk_bytes,
            records_per_chunk=records_per_chunk,
            overwrite=force,
        ) as to:
            progress.write(to, first, records, total)
    answer = {
        "format": chosen.value,
        "files": [str(out)],
        "records": to.records,
        "chunks": to.chunks,
        "bytes": to.written_bytes,
    }
    if as_json:
        print_json(answer)
        return 0
    print_line(f"wrote {out}: {_counted(to.records, to.chunks)}, {size(to.written_bytes)}")
    if to.chunks < _FEW_CHUNKS and to.records > _FEW_CHUNKS:
        print_notice(
            f"nodes share a data set by chunks, and this has {to.chunks}: --records-per-chunk makes smaller ones"
        )
    return 0


@records_app.command("index")
def index(
    files: FilesArgument,
    chunks: Annotated[bool, typer.Option("--chunks", help="List each chunk.")] = False,
    as_json: JsonOption = False,
) -> int:
    """List files with their records and chunks, from the headers alone: no payload is read or checked.

    Example: p2pnode records index "train-*.recordio"
    """
    from p2pnode.training.dispatch.recordio import read_index

    with _explained():
        found = [read_index(path, torn="skip") for path in _paths(files)]
    if as_json:
        print_json({"files": [_index_json(each, chunks) for each in found]})
        return 0
    if chunks:
        header = ("file", "chunk", "offset", "records", "bytes", "compressor")
        rows = [
            (each.path, *map(str, (place.number, place.offset, place.records, place.header.payload_bytes)), kind)
            for each in found
            for place in each.chunks
            for kind in [place.header.compressor.name.lower()]
        ]
    else:
        header = ("file", "records", "chunks", "bytes", "compressor", "")
        rows = [
            (
                each.path,
                str(each.records),
                str(len(each.chunks)),
                size(each.file_bytes),
                _compressors(each),
                _torn(each),
            )
            for each in found
        ]
    print_line(columns(header, rows))
    if len(found) > 1:
        total = sum(each.records for each in found)
        print_line(f"{_counted(total, sum(len(each.chunks) for each in found))} of {len(found)} files")
    return 0


@records_app.command("check")
def check(files: FilesArgument, as_json: JsonOption = False) -> int:
    """Read every record and check every checksum; exit code 13 if anything is damaged or torn.

    Example: p2pnode records check "train-*.recordio"
    """
    from p2pnode.training.dispatch.recordio import Chunk, RecordFile, RecordFileError

    results: list[dict[str, Any]] = []
    with _explained():
        for path in _paths(files):
            problems: list[dict[str, Any]] = []
            counted = {"records": 0, "chunks": 0, "bytes": 0}
            with RecordFile(path) as file:
                for found in file.scan():
                    if isinstance(found, RecordFileError):
                        problems.append(
                            {"chunk": found.chunk, "offset": found.offset, "problem": found.problem, "text": str(found)}
                        )
                    elif isinstance(found, Chunk):
                        counted["records"] += len(found)
                        counted["chunks"] += 1
                        counted["bytes"] += len(found.payload)
            results.append({"file": str(path), **counted, "problems": problems})
            if not as_json:
                state = "damaged" if problems else "whole"
                print_line(f"{path}: {state}, {_counted(counted['records'], counted['chunks'], 'good chunk')}")
                for problem in problems:
                    sys.stderr.write(f"error: {problem['text']}\n")
    damaged = [each for each in results if each["problems"]]
    if as_json:
        for result in results:
            for problem in result["problems"]:
                del problem["text"]
        print_json({"whole": not damaged, "files": results})
    return ExitCode.DATA if damaged else 0


@records_app.command("cat")
def cat(
    files: FilesArgument,
    chunk: Annotated[int | None, typer.Option("--chunk", min=0, help="This chunk alone, from 0.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=0, help="At most so many records.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="The bytes of each record and a newline, as they are.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Print records, a line each: text as it is, arrays by their type and shape, other bytes in hexadecimal.

    With --json a line is an object with the record's value. Example: p2pnode records cat train.recordio --limit 3
    """
    from p2pnode.training.dispatch.recordio import RecordFile

    if raw and as_json:
        raise UserError("--raw and --json exclude each other", "", ExitCode.USAGE)
    left = sys.maxsize if limit is None else limit
    with _explained():
        for path in _paths(files):
            with RecordFile(path) as file:
                chunks = (
                    ((place.number, records) for place, records in file.chunks())
                    if chunk is None
                    else iter([(chunk, file.chunk(chunk))])
                )
                while left > 0 and (found := next(chunks, None)) is not None:
                    number, records = found
                    for position, record in zip(range(left), records, strict=False):
                        _print_record(record, raw, as_json and (str(path), number, position))
                    left -= len(records)
    sys.stdout.flush()
    return 0


def _print_record(record: bytes, raw: bool, place: tuple[str, int, int] | bool) -> None:
    if raw:
        sys.stdout.buffer.write(record + b"\n")
        return
    from p2pnode.training.dispatch.recordio.record_text import as_json, as_text

    if isinstance(place, tuple):
        head = {"file": place[0], "chunk": place[1], "record": place[2], "bytes": len(record)}
        sys.stdout.write(json.dumps(head | as_json(record), ensure_ascii=False) + "\n")
    else:
        sys.stdout.write(as_text(record) + "\n")


class _Progress:
    """Shows how far a long conversion is: a bar on a terminal, otherwise a line every two seconds."""

    def __init__(self) -> None:
        self._next_s = time.monotonic() + _PROGRESS_S
        self._is_terminal = is_redrawable(sys.stderr)

    def write(self, to: RecordWriter, first: bytes, rest: Iterable[bytes], total_bytes: int = 0) -> None:
        """Write all records. `total_bytes`: of the sources, about what the records will have; 0: not known."""
        with progress_bar("pack") as bar:
            to.write(first)
            done = len(first)
            for number, record in enumerate(rest, 2):
                to.write(record)
                done += len(record)
                if number % _PROGRESS_RECORDS:
                    continue
                if self._is_terminal:
                    bar.show(done, max(done, total_bytes) if total_bytes else 0, "bytes")
                elif time.monotonic() >= self._next_s:
                    self._next_s = time.monotonic() + _PROGRESS_S
                    print_notice(f"{number} records so far")


def _plain_bytes(paths: Iterable[Path]) -> int:
    """The size of sources that are not compressed; 0 if one is, whose contents are longer."""
    sizes = []
    for path in paths:
        if path.suffix in (".gz", ".npz"):
            return 0
        with contextlib.suppress(OSError):
            sizes.append(path.stat().st_size)
    return sum(sizes)


def _paths(files: list[str]) -> list[Path]:
    from p2pnode.training.dispatch.conversion import find_paths

    return find_paths(files)


def _index_json(found: FileIndex, chunks: bool) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "file": found.path,
        "records": found.records,
        "chunks": len(found.chunks),
        "bytes": found.file_bytes,
        "compressors": sorted({place.header.compressor.name.lower() for place in found.chunks}),
        "torn": None if found.torn is None else {"offset": found.torn.offset, "problem": found.torn.problem},
    }
    if chunks:
        answer["places"] = [
            {
                "chunk": place.number,
                "offset": place.offset,
                "records": place.records,
                "payload_bytes": place.header.payload_bytes,
                "compressor": place.header.compressor.name.lower(),
            }
            for place in found.chunks
        ]
    return answer


def _counted(records: int, chunks: int, chunk: str = "chunk") -> str:
    return f"{records} record{'' if records == 1 else 's'} in {chunks} {chunk}{'' if chunks == 1 else 's'}"


def _compressors(found: FileIndex) -> str:
    return ", ".join(sorted({place.header.compressor.name.lower() for place in found.chunks})) or "-"


def _torn(found: FileIndex) -> str:
    return "" if found.torn is None else f"torn at offset {found.torn.offset}: its last chunk is not whole"


@contextlib.contextmanager
def _explained(out: Path | None = None) -> Iterator[None]:
    """What goes wrong with files, as an error with what to do next. `out` is the file that is written."""
    from p2pnode.training.dispatch.conversion import BadSource
    from p2pnode.training.dispatch.recordio import RecordFileError, TornChunk

    try:
        yield
    except TornChunk as error:
        hint = "the records before it are whole; make the file again"
        raise UserError(str(error), hint, ExitCode.DATA) from None
    except RecordFileError as error:
        raise UserError(str(error), "p2pnode records check FILE lists all damage", ExitCode.DATA) from None
    except BadSource as error:
        wrote = "; nothing was written" if out is not None else ""
        raise UserError(str(error), f"correct the file or name another one{wrote}", ExitCode.DATA) from None
    except IndexError as error:
        raise UserError(str(error), "p2pnode records index FILE --chunks lists them", ExitCode.USAGE) from None
    except ValueError as error:
        raise UserError(str(error), "see p2pnode records pack --help", ExitCode.USAGE) from None
    except FileExistsError as error:
        raise UserError(str(error), "name another file, or replace it with --force", ExitCode.STATE_DIRECTORY) from None
    except OSError as error:
        if out is None:
            problem = f"{error.filename}: {error.strerror or error}"
            raise UserError(problem, "name RecordIO files that exist and can be read", ExitCode.DATA) from None
        message = f"cannot write {out}: {error.strerror or error}"
        hint = "check the folder, its permissions and free space; nothing was written"
        raise UserError(message, hint, ExitCode.STATE_DIRECTORY) from None

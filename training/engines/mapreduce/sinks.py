"""Writes a data set into a folder, a file per partition. The folder appears when all of them are complete."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

from p2pnode.training.dispatch.recordio import create_records
from p2pnode.training.engines.mapreduce.errors import BadRequest, SinkFailed, shown

SaveFormat = Literal["text", "json", "recordio"]
_ENDINGS: dict[SaveFormat, str] = {"text": "txt", "json": "jsonl", "recordio": "recordio"}


class FolderSink:
    """A folder that is being written. Every worker has to see it under its path."""

    def __init__(self, folder: str | Path, form: SaveFormat) -> None:
        """Raises `BadRequest` for an unknown format, `SinkFailed` if something is there."""
        if form not in _ENDINGS:
            raise BadRequest(f"there is no format {form!r}: use text, json or recordio")
        path = str(folder)
        for local in ("unix://", "file://"):
            path = path.removeprefix(local)
        if "://" in path:
            raise BadRequest(f"{path}: a data set is saved to a local or mounted folder")
        self._folder, self._form = Path(path).absolute(), form
        self._partial = self._folder.with_name(f".{self._folder.name}.{uuid.uuid4().hex[:8]}.partial")
        if self._folder.exists():
            raise SinkFailed(f"{self._folder} exists: remove it, or save to another folder")

    def begin(self) -> None:
        """Make the folder, under another name. Raises `SinkFailed`."""
        try:
            self._partial.mkdir(parents=True)
        except OSError as error:
            raise SinkFailed(f"{self._partial} cannot be made: {error}") from error

    def write(self, items: Iterable[Any], partition: int) -> int:
        """Write one partition, in a task; returns its number of elements. Raises `SinkFailed`."""
        path = self._partial / f"part-{partition:05}.{_ENDINGS[self._form]}"
        # A task that runs twice, because its worker was lost, writes under two names.
        attempt = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        count = 0
        try:
            with self._opened(attempt) as part:
                for item in items:
                    part.write(self._encoded(item, partition))
                    count += 1
            attempt.replace(path)
        except OSError as error:
            raise SinkFailed(f"{path} cannot be written: {error}") from error
        return count

    def _opened(self, path: Path) -> AbstractContextManager[Any]:
        return create_records(path) if self._form == "recordio" else path.open("w", encoding="utf-8", newline="\n")

    def _encoded(self, item: Any, partition: int) -> str | bytes:
        """A line, or a record."""
        if self._form == "json":
            try:
                return json.dumps(item, ensure_ascii=False) + "\n"
            except (TypeError, ValueError) as error:
                raise SinkFailed(f"partition {partition}: {shown(item)} is no JSON: {error}") from None
        if self._form == "recordio":
            if not isinstance(item, (bytes, bytearray, memoryview)):
                raise SinkFailed(f"partition {partition}: {shown(item)} is no record: a record is bytes")
            return bytes(item)
        if not isinstance(item, str) or "\n" in item:
            raise SinkFailed(f"partition {partition}: {shown(item)} is no line of text: use map(str), or form='json'")
        return item + "\n"

    def finish(self) -> None:
        """All partitions are written: the folder gets its name. Raises `SinkFailed`."""
        try:
            for attempt in self._partial.glob(".part-*"):  # of lost workers
                attempt.unlink(missing_ok=True)
            self._partial.rename(self._folder)
        except OSError as error:
            raise SinkFailed(f"{self._folder} cannot be made: {error}") from error

    def abandon(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self._partial, ignore_errors=True)

"""Reads the MNIST files: finds them in a folder or downloads them, checks SHA-256, and parses the IDX format.

Checksums are of the uncompressed content, so files may be compressed or not. A download never replaces an existing
file, and is put in place atomically.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import urllib.error
import urllib.request
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from p2pnode.training.tasks.task import TaskError

#: SHA-256 of the four files' content, uncompressed.
KNOWN = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}

#: Public copies of the original files.
MIRRORS = (
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
)

_FETCH_TIMEOUT_S = 20.0
_UNSIGNED_BYTE = 0x08
_HINT = "put the four MNIST files (IDX format, compressed or not) into that folder and name it in training.data_dir"


def load(folder: Path, name: str, *, verify: bool = True, mirrors: Sequence[str] = MIRRORS) -> np.ndarray[Any, Any]:
    """The values of one file, `uint8`, in its own shape; read-only. Raises `TaskError`."""
    content, path = _content(folder, name, mirrors)
    if verify and hashlib.sha256(content).hexdigest() != KNOWN[name]:
        raise TaskError(
            f"{path} is not the MNIST file of that name: its SHA-256 is {hashlib.sha256(content).hexdigest()[:16]}…, "
            f"and {KNOWN[name][:16]}… is expected",
            "fetch it again, or set verify = false in [training.options] to train on other images",
        )
    return _parse(content, path)


def _content(folder: Path, name: str, mirrors: Sequence[str]) -> tuple[bytes, Path]:
    for path in (folder / name, folder / f"{name}.gz"):
        try:
            data = path.read_bytes()
            return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data), path
        except FileNotFoundError:
            continue
        except (OSError, EOFError, zlib.error) as error:
            raise TaskError(f"{path} cannot be read: {error}", _HINT) from error
    path = folder / f"{name}.gz"
    return _fetch(path, name, mirrors), path


def _fetch(path: Path, name: str, mirrors: Sequence[str]) -> bytes:
    failures = []
    for mirror in mirrors:
        try:
            with urllib.request.urlopen(f"{mirror}{name}.gz", timeout=_FETCH_TIMEOUT_S) as answer:  # noqa: S310
                data: bytes = answer.read()
            content = gzip.decompress(data)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            failures.append(f"{mirror}: {getattr(error, 'reason', error)}")
            continue
        if hashlib.sha256(content).hexdigest() != KNOWN[name]:
            failures.append(f"{mirror}: its file has another checksum")
            continue
        _put(path, data)
        return content
    tried = f"; fetching it failed ({'; '.join(failures)})" if failures else ""
    raise TaskError(f"the task mnist finds no {name}.gz in {path.parent}{tried}", _HINT)


def _put(path: Path, data: bytes) -> None:
    """Write a temporary file and rename it; several nodes on one machine may do so at once."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        raise TaskError(f"{path} could not be written: {error.strerror}", _HINT) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _parse(content: bytes, path: Path) -> np.ndarray[Any, Any]:
    """Two zero bytes, the type, the number of dimensions, the dimensions (u32, big-endian), the values."""
    dimensions = content[3] if len(content) > 3 else 0
    start = 4 + 4 * dimensions
    if content[:3] != bytes([0, 0, _UNSIGNED_BYTE]) or len(content) < start:
        raise TaskError(f"{path} is not an IDX file of bytes", _HINT)
    shape = tuple(int.from_bytes(content[4 + 4 * axis : 8 + 4 * axis], "big") for axis in range(dimensions))
    if len(content) - start != int(np.prod(shape, dtype=np.int64)):
        raise TaskError(f"{path} is truncated: {len(content) - start} values, and its head announces {shape}", _HINT)
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)

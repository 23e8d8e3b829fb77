"""Writes the model to a file that other programs can load: at the end of a run, or later by `p2pnode export`.

A complete model has three parts: a description of its tensors, the fixed tensors, which training never changes, and the
vector, which training changes. The trainer makes the first two. This module keeps them in the folder `model/` of the
state directory while the node trains. A checkpoint has the vector. So `p2pnode export` needs no trainer
(`training.files.model_file`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from p2pnode.lifecycle.environment import NodePart
from p2pnode.overlay.environment import Disk
from p2pnode.overlay.system import FolderDisk
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.errors import TrainingError
from p2pnode.training.files.model_file import BadModelFile, Piece, TensorFile, model_pieces, open_fixed
from p2pnode.training.layout import Layout
from p2pnode.training.supervisor.launch import add_checkout
from p2pnode.training.trainer_link.interface import ModelDescription, TrainerFailed

FOLDER = "model"
DESCRIPTION = f"{FOLDER}/description.json"
#: Suffixes of an exported file: safetensors, or a plain `state_dict` as `torch.save` writes it.
SAFETENSORS, PICKLED = (".safetensors",), (".pt", ".pth")
#: Seconds between two calls of `tick`, which shows progress while another process converts a file.
TICK_S = 0.1


class CannotExport(TrainingError):
    """The exported file could not be written. No partial file remains."""


@dataclass(eq=False)
class ModelExport(NodePart):
    """Keeps the description of one node's model on disk, and writes the file of the finished model."""

    description: ModelDescription | None = None
    _described_s: float | None = None
    _failing: bool = False

    @property
    def _state_path(self) -> Path | None:
        path = self.environment.state_path
        return None if path is None else path.absolute()

    async def describe_if_due(self) -> None:
        """Renew the description on disk, at the first call and then as often as checkpoints are written."""
        period_s = self.config.training.checkpoint_s
        now = self.clock.monotonic()
        if not period_s or (self._described_s is not None and now - self._described_s < period_s):
            return
        self._described_s = now
        try:
            await self._describe(wait=False)
        except (TrainerFailed, OSError) as error:
            if not self._failing:
                self.log.warning("model_not_described", reason=str(error))
            self._failing = True
        else:
            self._failing = False

    async def _describe(self, *, wait: bool) -> None:
        folder = "" if self._state_path is None else str(self._state_path / FOLDER)
        self.description = await self.trainer.describe(folder, wait=wait)
        raw = msgspec.json.encode(self.description)
        await self.environment.executor.run(self.environment.disk.write, DESCRIPTION, raw)

    async def describe_last(self) -> ModelDescription | None:
        """Describe the model at the end of the run, and wait until its fixed tensors are on disk.

        If the trainer does not answer, returns the last earlier description, or None without one.
        """
        try:
            await self._describe(wait=True)
        except (TrainerFailed, OSError) as error:
            self.log.warning("model_not_described", reason=str(error))
        return self.description

    async def write(self, description: ModelDescription, layout: Layout, vector: Vector) -> tuple[str, str]:
        """Write the file that `training.export` names; returns its path and the hex SHA-256 of the model.

        The digest is the digest of the safetensors file, also if the model is written in another format. Raises
        `CannotExport`.
        """
        path = export_path(self.config.training.export, self._state_path)
        try:
            return str(path), await self.environment.executor.run(self._write, description, layout, vector, path)
        except (BadModelFile, OSError) as error:
            reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
            raise CannotExport(f"{path} could not be written: {reason}") from error

    def _write(self, description: ModelDescription, layout: Layout, vector: Vector, path: Path) -> str:
        entries = {entry.name: entry for entry in layout.entries}

        def values_of(name: str) -> Iterable[Vector]:
            entry = entries.get(name)
            return () if entry is None else (vector[entry.offset : entry.offset + entry.size],)

        with fixed_tensors(self._state_path, description) as fixed:
            pieces = model_pieces(description, values_of, fixed)
            if self._state_path is None:  # only a simulated node has no folder
                return write_pieces(self.environment.disk, path.name, pieces)
            if path.suffix in SAFETENSORS:
                return write_pieces(FolderDisk(path.parent), path.name, pieces)
            # Temporary files; both are removed also after an error.
            as_safetensors = path.with_name(f".{path.name}.safetensors")
            as_pickle = path.with_name(f".{path.name}.part")
            try:
                digest = write_pieces(FolderDisk(path.parent), as_safetensors.name, pieces)
                convert(as_safetensors, as_pickle)
                as_pickle.replace(path)
            finally:
                as_safetensors.unlink(missing_ok=True)
                as_pickle.unlink(missing_ok=True)
            return digest


def export_path(export: str, state_path: Path | None) -> Path:
    """The path that `training.export` means: a relative one starts at the state directory."""
    path = Path(export).expanduser()
    return path if path.is_absolute() or state_path is None else state_path.absolute() / path


def write_pieces(disk: Disk, name: str, pieces: Iterable[Piece]) -> str:
    """Write a complete file or none; returns its hex SHA-256. Raises `OSError`, and what `pieces` raises."""
    digest = hashlib.sha256()
    file = disk.create(name)
    try:
        for piece in pieces:
            digest.update(piece)
            file.write(memoryview(piece))
        file.commit()
    except BaseException:
        file.discard()
        raise
    return digest.hexdigest()


@contextlib.contextmanager
def fixed_tensors(state_path: Path | None, description: ModelDescription) -> Iterator[TensorFile | None]:
    """Open the file of the fixed tensors and check its digest; None if the model has no fixed tensors.

    Raises `BadModelFile`.
    """
    file = None if state_path is None else open_fixed(state_path / FOLDER, description)
    if file is None:
        yield None
        return
    with file:
        tensors = TensorFile.of(file)
        if tensors.digest() != description.fixed_digest:
            raise BadModelFile(
                f"{file.name} is damaged or belongs to another model: remove it and start the node, "
                "which writes it again"
            )
        yield tensors


def read_description(state_path: Path) -> ModelDescription | None:
    """The description in a state directory; None if there is none. Raises `BadModelFile`."""
    try:
        return msgspec.json.decode((state_path / DESCRIPTION).read_bytes(), type=ModelDescription)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise BadModelFile(f"{state_path / DESCRIPTION} cannot be read: {error}") from error


def checkpoint_pieces(state_path: Path, checkpoint: Path, description: ModelDescription) -> Iterator[Piece]:
    """The complete model as a safetensors file, with the vector of the file `checkpoint`. Raises `BadModelFile`."""
    try:
        with checkpoint.open("rb") as file, fixed_tensors(state_path, description) as fixed:
            yield from model_pieces(description, TensorFile.of(file).values, fixed)
    except OSError as error:
        raise BadModelFile(f"{checkpoint} cannot be read: {error.strerror or error}") from error


def convert(source: Path, target: Path, tick: Callable[[], None] = lambda: None) -> None:
    """Convert a safetensors file to a plain `state_dict`.

    Another process converts, because the daemon and its commands never import torch. `tick` is called every `TICK_S`
    seconds until that process ends. Raises `BadModelFile`.
    """
    command = [sys.executable, "-m", "p2pnode.training.trainer.convert", str(source), str(target)]
    environment = dict(os.environ)
    add_checkout(environment)
    ended = watched(command, environment, tick)
    if ended.returncode:
        last_lines = ended.stderr.strip().splitlines()[-1:] or ["it printed no reason"]
        raise BadModelFile(f"the model could not be converted: {last_lines[0]}")


def watched(
    command: list[str], environment: dict[str, str], tick: Callable[[], None]
) -> subprocess.CompletedProcess[str]:
    """Run a program until it ends, and return its exit code and its standard error.

    `tick` is called every `TICK_S` seconds. If `tick` raises, the program is killed.
    """
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    _, errors = process.communicate(timeout=TICK_S)
                    return subprocess.CompletedProcess(command, process.returncode, "", errors)
                tick()
        except BaseException:
            process.kill()
            process.wait()
            raise

"""Reads `training.tracker`: which experiment tracker gets the steps of this node, and where. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

Kind = Literal["csv", "tensorboard", "trackio"]
FORMS = '"csv:FILE", "tensorboard:DIR" or "trackio"'
#: The package that a tracker needs; its extra has the name of the tracker.
PACKAGES: dict[Kind, str] = {"tensorboard": "tensorboardX", "trackio": "trackio"}


class Tracker(NamedTuple):
    """`place` is the file or folder as given, empty for trackio."""

    kind: Kind
    place: str

    def path(self, state_folder: Path) -> Path:
        """Where it writes: a relative place is inside the state directory."""
        return state_folder / Path(self.place).expanduser()


def parse_tracker(text: str) -> Tracker | None:
    """None for an empty text. Raises `ValueError`, whose text says what is wrong."""
    if not text:
        return None
    kind, colon, place = text.partition(":")
    match kind:
        case "trackio" if not colon:
            return Tracker("trackio", "")
        case "trackio":
            raise ValueError("trackio takes no place: its own variables, such as TRACKIO_DIR, choose one")
        case "csv" | "tensorboard" if place:
            return Tracker("csv" if kind == "csv" else "tensorboard", place)
        case "csv":
            raise ValueError('it names no file; "csv:steps.csv" writes to the state directory')
        case "tensorboard":
            raise ValueError('it names no folder; "tensorboard:runs" writes to the state directory')
    raise ValueError(f'"{kind}" is no tracker')

"""`p2pnode bundle`: one file to attach to a report of a fault, without secrets."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from p2pnode import __version__
from p2pnode.client import RunningNode
from p2pnode.commands.files import ForceOption, new_file
from p2pnode.commands.options import JsonOption, Place, running_in, takes
from p2pnode.commands.output import print_json, print_notice, print_text
from p2pnode.config.load import Loaded
from p2pnode.config.state_folders import LOCAL, local_folders
from p2pnode.config.toml import node_toml

#: Packages whose faults look like ours: a report needs their versions.
PACKAGES = ("torch", "numpy", "msgspec", "aiohttp", "cryptography", "uvloop", "typer")


@takes(Place)
def bundle(
    place: Place,
    path: Annotated[
        Path | None, typer.Argument(help="File to write; default: p2pnode-bundle-TIME.tar.gz in this folder.")
    ] = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> int:
    """Pack logs, status, settings and the findings of the doctor into one file, without keys, tokens and invitations.

    Example: p2pnode bundle --run digits
    """
    from p2pnode import bundle as packing

    found = place.loaded(for_running=True)
    folder = found.config.state_folder
    places = [folder, *local_folders(folder)]
    redactor = packing.Redactor(packing.secrets_of(found.config, places))
    path = path or Path(time.strftime("p2pnode-bundle-%Y%m%d-%H%M%S.tar.gz"))

    def texts() -> Iterator[tuple[str, str]]:
        node = running_in(folder)
        yield "about.json", json.dumps(_about(), indent=1)
        yield "config.toml", node_toml(found.config, found.origins)
        yield "doctor.json", json.dumps(_findings(found, node), indent=1)
        for one in places:
            below = "" if one == folder else f"{LOCAL}/{one.name}/"
            here = running_in(one) if below else node
            for name, text in packing.texts_of(one, here):
                yield below + name, text

    with new_file(path, force) as draft:
        names = packing.write(draft, texts(), redactor)
    path.chmod(0o600)
    if as_json:
        print_json({"path": str(path), "names": names})
    else:
        print_text("", f"wrote {path}: {', '.join(names)}")
        print_notice(
            "keys, tokens and invitations are removed; addresses of peers, paths and what your script prints are in it"
        )
    return 0


def _about() -> dict[str, object]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "p2pnode": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "machine": platform.machine(),
        "packages": versions,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _findings(found: Loaded, node: RunningNode | None) -> list[dict[str, str]]:
    """The doctor's findings without requests to other machines: a report can be written offline."""
    import asyncio  # here: other commands do not need it

    from p2pnode.doctor.examine import Examination, examine

    async def look() -> list[dict[str, str]]:
        return [check.as_json async for check in examine(Examination(found.config, node, network=False))]

    return asyncio.run(look())

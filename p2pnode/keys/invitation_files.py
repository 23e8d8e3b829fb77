"""The files that an accepted invitation leaves in a state directory, the settings for the next start that follow, and
the addresses that an invitation to this node may name.

Reads no key, only its place (`p2pnode.keys.key_files` reads it), so every command can use this module.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from p2pnode.config.load import Override
from p2pnode.errors import ExitCode, UserError
from p2pnode.overlay.addresses import Address, is_literal, is_loopback, split_address, usable_host

#: In the state directory.
KEY_FILE = "swarm.key"
SWARM_FILE = "swarm.json"
#: Contains the key itself, where neither a file nor standard input can. It is removed from the environment once read.
KEY_VARIABLE = "P2PNODE_SWARM_KEY"
STANDARD_INPUT = "-"
IN_ENVIRONMENT = f"${KEY_VARIABLE}"


def remembered_settings(
    folder: Path, environment: Mapping[str, str], *, joining: bool = False, founder: bool = False
) -> list[Override]:
    """Settings that follow from the environment and from the files of an accepted invitation.

    `joining`: as if the key file existed already. `founder`: the node founded this swarm; an invitation to its own
    swarm must not make it wait for others, so its addresses do not count.
    """
    if environment.get(KEY_VARIABLE):
        return [Override("swarm.key_file", json.dumps(IN_ENVIRONMENT), f"environment variable {KEY_VARIABLE}")]
    found = []
    key = folder / KEY_FILE
    if joining or key.is_file():
        found.append(Override("swarm.key_file", json.dumps(str(key)), str(folder)))
        run, addresses = read_swarm(folder)
        if run:
            found.append(Override("swarm.run", json.dumps(run), str(folder / SWARM_FILE)))
            if not founder:
                found.append(Override("swarm.bootstrap", json.dumps(addresses), str(folder / SWARM_FILE)))
    return found


def read_swarm(folder: Path) -> tuple[str, list[str]]:
    """Run and addresses of the accepted invitation; an empty run if there is none."""
    try:
        content = json.loads((folder / SWARM_FILE).read_bytes())
        return str(content["run"]), [str(address) for address in content["bootstrap"]]
    except FileNotFoundError:
        return "", []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"cannot read {folder / SWARM_FILE}, which an invitation left: {error}",
            "accept the invitation again with `p2pnode key join`, or remove the file",
            ExitCode.STATE_DIRECTORY,
        ) from None


#: Of the blocks for documentation (RFC 5737, RFC 3849): routed like any other address, and nothing is sent to it.
_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


class Dialable(NamedTuple):
    """Addresses that others can dial, and those that were replaced, as (before, after)."""

    addresses: tuple[str, ...]
    replaced: tuple[tuple[str, str], ...]


def dialable(addresses: Sequence[str], own: str) -> Dialable:
    """Those of `addresses` that others can dial, each once; `own` (empty: unknown) stands in for `0.0.0.0` and `::`.

    Loopback addresses are left out: on another machine they would mean that machine. Names are taken as they are.
    """
    found: dict[str, None] = {}
    replaced = []
    for text in addresses:
        host, port = split_address(text)
        if is_loopback(host):
            continue
        if not is_literal(host) or usable_host(host) is not None:
            found[text] = None
        elif own:
            after = str(Address(own, port))
            replaced.append((text, after))
            found[after] = None
    return Dialable(tuple(found), tuple(replaced))


def own_host() -> str:
    """The address from which this machine reaches others; empty without a network. Sends nothing."""
    for family, target in _ELSEWHERE:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                host = str(probe.getsockname()[0])
        except OSError:
            continue
        if usable_host(host) is not None and not is_loopback(host):
            return host
    return ""

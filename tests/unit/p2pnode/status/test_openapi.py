"""The generated description of the API: which keys are required, and how the overlay's counters are described."""

from __future__ import annotations

import json
import re

from p2pnode.status.openapi import SCHEMAS, description


def test_every_reference_resolves() -> None:
    """Each `$ref` names a component of the document."""
    text = json.dumps(description())

    assert set(re.findall(r'"\$ref": "#/components/schemas/(\w+)"', text)) <= set(SCHEMAS)


def test_a_key_that_is_always_sent_is_required() -> None:
    """A default does not make a key optional; `enabled` is optional, because a node without an exchange omits it."""
    exchange = SCHEMAS["ExchangeStatus"]

    assert set(exchange["properties"]) - set(exchange["required"]) == {"enabled"}
    assert set(SCHEMAS["Status"]["required"]) == set(SCHEMAS["Status"]["properties"])


def test_counters_of_the_overlay_are_keys_of_any_name() -> None:
    """The counters stand beside the other keys, as `/status` shows them."""
    overlay = SCHEMAS["OverlayReport"]

    assert overlay["additionalProperties"] == {"type": "integer"}
    assert "counters" not in overlay["properties"]
    assert "counters" not in overlay["required"]


def test_changes_need_a_token_and_the_header() -> None:
    """Each POST declares the token and the header that other sites' pages cannot send."""
    paths = description()["paths"]
    changes = {path: entry["post"] for path, entry in paths.items() if "post" in entry}

    assert set(changes) == {"/leave", "/pause", "/resume"}
    for operation in changes.values():
        assert operation["security"] == [{"token": []}]
        assert [parameter["name"] for parameter in operation["parameters"]] == ["X-P2PNode"]

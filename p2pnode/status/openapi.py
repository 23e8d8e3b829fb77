"""Describes the HTTP API for programs: OpenAPI 3.1, published by the node at `/openapi.json`.

The schemas of the answers are generated from their types in `p2pnode.status.schema`; the paths are written by hand. A
test compares both with the real answers of nodes in every state. This module is imported only when it is asked for.
Objects stay open: within a schema number keys may be added, and none changes its meaning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from p2pnode import __version__
from p2pnode.overlay.report import OverlayReport
from p2pnode.status import CHANGE_HEADER, MAX_LIMIT
from p2pnode.status.prometheus import CONTENT_TYPE
from p2pnode.status.schema import (
    Accepted,
    Alive,
    ErrorAnswer,
    Events,
    HistoryAnswer,
    PeerStatus,
    Readiness,
    Status,
    Update,
)
from p2pnode.training.progress import StepRow

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
TOKEN: Schema = {"token": []}

ANSWERS = (
    Status,
    PeerStatus,
    StepRow,
    Events,
    HistoryAnswer,
    Update,
    Alive,
    Readiness,
    Accepted,
    ErrorAnswer,
    OverlayReport,
)


def _schemas() -> dict[str, Schema]:
    """The components: one schema for each type of answer and each type inside one."""
    _, schemas = msgspec.json.schema_components(ANSWERS, ref_template="#/components/schemas/{name}")
    for schema in schemas.values():
        for name, field in schema["properties"].items():
            # Every field is sent, also one that has its default.
            if "default" in field and name not in schema["required"]:
                del field["default"]
                schema["required"].append(name)
    counters = schemas["OverlayReport"]
    counters["additionalProperties"] = counters["properties"].pop("counters")["additionalProperties"]
    counters["required"].remove("counters")
    return schemas


SCHEMAS = _schemas()

_MEANINGS = {
    400: "A parameter cannot be used.",
    401: "The token is missing or wrong.",
    403: "The Host or Origin is not this node's, or the header that changes need is missing.",
    404: "There is no such path.",
    405: "The path does not take this method.",
    411: "A body without a length.",
    413: "A body that is too large.",
    429: "Too many streams; ask again after Retry-After.",
    500: "A fault of the node; see its log.",
}


_FILE_NAME: Schema = {"type": "string", "pattern": "^[A-Za-z0-9-]+(\\.min)?\\.(js|css|svg|txt)$"}


def description() -> dict[str, Any]:
    """The whole document."""
    limit = _parameter("limit", "Most entries.", {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT})
    since = _parameter("since", "Events above this number.", {"type": "integer", "minimum": 0, "maximum": 1 << 62})
    not_yet = {"503": _answer("Not yet, and the reason.", _json("Readiness"))}
    paths = {
        "/": _read("The dashboard, a page for people; needs no token, unlike what it shows.", {"text/html": TEXT}),
        "/swarm": _read("The page of the whole swarm, as this node sees it; needs no token.", {"text/html": TEXT}),
        "/static/{name}": _file("A script, style or image of the pages; needs no token."),
        "/status": _read("What the node is doing.", _json("Status")),
        "/peers": _read("The live peers, furthest ahead first.", {"application/json": _list_of("PeerStatus")}),
        "/steps": _read("The last steps, oldest first.", {"application/json": _list_of("StepRow")}, limit),
        "/events": _read("Numbered events.", _json("Events"), since, limit),
        "/history": _read("Figures of the last days, for charts.", _json("HistoryAnswer")),
        "/stream": _stream("The node once a second, as server-sent events.", since),
        "/metrics": _read("Counters in Prometheus' text format.", {CONTENT_TYPE: TEXT}),
        "/healthz": _read("The process runs; needs no token.", _json("Alive")),
        "/readyz": _read("It has joined and trains; needs no token.", _json("Readiness"), other=not_yet),
        "/openapi.json": _read("This description.", {"application/json": {"type": "object"}}),
        "/leave": _change("Hand over, announce the departure, end."),
        "/pause": _change("Stop training after the current step; continue to own shards."),
        "/resume": _change("Train again."),
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "p2pnode",
            "version": __version__,
            "description": "What one node reports, and what can be asked of it. On the loopback reading needs no "
            "token; everything else does.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "The content of status.token in the node's state directory.",
                }
            },
        },
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _list_of(name: str) -> Schema:
    return {"type": "array", "items": _ref(name)}


def _json(name: str) -> dict[str, Schema]:
    return {"application/json": _ref(name)}


def _parameter(name: str, what: str, schema: Schema) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "description": what, "schema": schema}


def _answer(what: str, content: dict[str, Schema]) -> dict[str, Any]:
    return {"description": what, "content": {kind: {"schema": schema} for kind, schema in content.items()}}


def _operation(
    what: str, answers: Schema, *parameters: Schema, security: Sequence[Schema] = ({}, TOKEN), errors: Sequence[int]
) -> Schema:
    """One request; `errors` are those besides the ones that any request may get."""
    refusals = {
        str(status): _answer(_MEANINGS[status], _json("ErrorAnswer"))
        for status in sorted((*errors, 403, 405, 411, 413, 500))
    }
    return {
        "summary": what,
        "parameters": list(parameters),
        "security": list(security),
        "responses": answers | refusals,
    }


def _read(what: str, content: dict[str, Schema], *parameters: Schema, other: Mapping[str, Schema] = {}) -> Schema:
    errors = (400, 401) if parameters else (401,)
    return {"get": _operation(what, {"200": _answer(what, content), **other}, *parameters, errors=errors)}


def _file(what: str) -> Schema:
    """One file of the dashboard, by its name."""
    name = {"name": "name", "in": "path", "required": True, "schema": _FILE_NAME}
    content = dict.fromkeys(("text/javascript", "text/css", "image/svg+xml", "text/plain", "text/html"), TEXT)
    current = {"description": "The file that If-None-Match names is current."}
    answers = {"200": _answer(what, content), "304": current}
    return {"get": _operation(what, answers, name, security=({},), errors=(404,))}


def _stream(what: str, *parameters: Schema) -> Schema:
    """Events `update` with `Update` as data, `events` with `Events`, and `end`, after which the node ends."""
    answers = {"200": _answer(what, {"text/event-stream": TEXT})}
    told = (
        "`update`, once a second: components/schemas/Update. `events`, when there are new ones: "
        "components/schemas/Events, above `since`, at first the last 300. `end`: the node ends."
    )
    return {"get": _operation(what, answers, *parameters, errors=(400, 401, 429)) | {"description": told}}


def _change(what: str) -> Schema:
    marker = {
        "name": CHANGE_HEADER,
        "in": "header",
        "required": True,
        "description": "Keeps forms of other sites' pages out.",
        "schema": {"type": "string", "const": "1"},
    }
    answers = {"202": _answer("The change was accepted.", _json("Accepted"))}
    return {"post": _operation(what, answers, marker, security=(TOKEN,), errors=(401,))}

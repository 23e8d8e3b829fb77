"""The HTTP API described for programs: OpenAPI 3.1, published by the node at `/openapi.json`.

Written by hand beside the handlers, and held to them by tests: real answers in every state of a node must fit, and
must hold no key that is not described. Imported only when it is asked for. Objects stay open: within a schema number
keys may be added, none changes its meaning.
"""

from __future__ import annotations

from typing import Any, get_args

from p2pnode import __version__
from p2pnode.lifecycle.state import State
from p2pnode.status.guard import CHANGE_HEADER
from p2pnode.status.limits import MAX_LIMIT, MAX_WAIT_S, SCHEMA
from p2pnode.status.prometheus import CONTENT_TYPE

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
TRUTH: Schema = {"type": "boolean"}
NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}
SECONDS: Schema = {"type": "number", "minimum": 0}
NODE_ID: Schema = {"type": "string", "pattern": "^[0-9a-f]{40}$"}


def maybe(schema: Schema) -> Schema:
    """The same, or null."""
    kind = schema["type"]
    return schema | {"type": [*kind, "null"] if isinstance(kind, list) else [kind, "null"]}


def table(values: Schema) -> Schema:
    """An object with keys of any name."""
    return {"type": "object", "additionalProperties": values}


def record(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """An object with these keys; more may be added in later versions."""
    return {"type": "object", "properties": required | (optional or {}), "required": list(required)}


def listed(items: Schema) -> Schema:
    return {"type": "array", "items": items}


NODE = record(
    {"id": NODE_ID, "incarnation": COUNT, "version": TEXT, "address": TEXT, "role": TEXT},
    {"client_only": TRUTH, "eligible": TRUTH, "uptime_seconds": SECONDS},
)
POPULATION = record(
    {"estimate": NUMBER, "low": NUMBER, "high": NUMBER, "exact": TRUTH, "observations": COUNT},
    {"zone_estimate": maybe(NUMBER), "workers": NUMBER},
)
BARRIER = record({"method": TEXT}, {"sample": COUNT, "staleness": maybe(COUNT), "quantile": NUMBER, "queries": COUNT})
WAITING = record(
    {"since_seconds": SECONDS, "behind": COUNT, "sampled": COUNT, "slowest": NODE_ID, "its_step": COUNT},
)
TRAINING = record(
    {
        "loss": maybe(NUMBER),
        "metrics": table(maybe(NUMBER)),
        "evaluated_step": maybe(COUNT),
        "evaluated_samples": COUNT,
        "step_seconds": SECONDS,
        "trainer": TEXT,
    },
    {"optimizer_steps": COUNT, "samples": COUNT, "trainer_failures": COUNT},
)
EXCHANGE = record(
    {"shards_owned": COUNT, "bytes_sent": COUNT, "bytes_received": COUNT, "refused": COUNT},
    {
        "arithmetic": TEXT,
        "enabled": TRUTH,
        "shards": COUNT,
        "shards_backed": COUNT,
        "merged_last_step": COUNT,
        "refused_here": table(COUNT),
        "unusual_norms": COUNT,
        "clipped": COUNT,
        "outstanding_steps": listed(COUNT),
        "lost": COUNT,
        "lost_in_splits": COUNT,
        "repaired": COUNT,
        "repair_log_bytes": COUNT,
        "repair_reach_seconds": SECONDS,
        "shards_to_mend": COUNT,
        "state_bytes": COUNT,
    },
)
MEMORY = record({"budget_bytes": maybe(COUNT), "parts": table(COUNT), "available_bytes": maybe(COUNT)})
SWARM = record({"closed": TRUTH, "keys": listed(TEXT)})
REACHABLE = record({"reached": TRUTH, "reason": TEXT, "confirmed_by": listed(TEXT)})
OVERLAY = {
    "type": "object",
    "description": "Counters and sizes; the counters by name.",
    "properties": {
        "reachable": REACHABLE,
        "mapping": maybe(record({"address": TEXT, "reason": TEXT})),
        "round_trip_ms": maybe(NUMBER),
        "lookup": maybe(record({"ms": NUMBER, "rounds": NUMBER, "queries": NUMBER})),
        "sampling": record(
            {},
            {
                "balls": COUNT,
                "drawn": COUNT,
                "pool": COUNT,
                "lookups_per_second": NUMBER,
                "lookups_per_pooled_peer": maybe(NUMBER),
                "lookups_per_independent_draw": maybe(NUMBER),
                "oldest_seconds": maybe(NUMBER),
            },
        ),
        "socket": table(COUNT),
    },
    "additionalProperties": NUMBER,
}
LOOP = record(
    {"delay_ms_p50": maybe(NUMBER), "delay_ms_p99": maybe(NUMBER), "delay_ms_max": maybe(NUMBER)}, {"tasks": COUNT}
)
FINDING = record({"level": {"type": "string", "enum": ["info", "warning", "error"]}, "what": TEXT, "do": TEXT})
STATUS = record(
    {
        "schema": {"type": "integer", "const": SCHEMA},
        "summary": TEXT,
        "node": NODE,
        "run": TEXT,
        "state": {"type": "string", "enum": list(get_args(State))},
        "step": COUNT,
        "population": POPULATION,
        "barrier": BARRIER,
        "waiting": WAITING | {"type": ["object", "null"]},
        "training": TRAINING,
        "exchange": EXCHANGE,
        "health": listed(FINDING),
    },
    {"overlay": OVERLAY, "loop": LOOP, "memory": MEMORY, "swarm": SWARM},
)
PEER = record(
    {
        "id": NODE_ID,
        "address": TEXT,
        "step": COUNT,
        "lag": {"type": "integer"},
        "state": TEXT,
    },
    {
        "round_trip_ms": maybe(NUMBER),
        "last_seen_seconds": NUMBER,
        "step_seconds": SECONDS,
        "incarnation": COUNT,
        "eligible": TRUTH,
    },
)
STEP = record(
    {"step": COUNT},
    {
        "loss": maybe(NUMBER),
        "samples": COUNT,
        "train_seconds": SECONDS,
        "push_seconds": SECONDS,
        "wait_seconds": SECONDS,
        "pull_seconds": SECONDS,
        "weight": NUMBER,
        "acknowledged": COUNT,
        "refused": table(COUNT),
        "outstanding": COUNT,
        "bytes_sent": COUNT,
        "pulled": COUNT,
        "pull_missing": COUNT,
        "merged": table(COUNT),
    },
)
EVENT = record(
    {
        "id": COUNT,
        "time": NUMBER,
        "level": {"type": "string", "enum": ["debug", "info", "warning", "error"]},
        "event": TEXT,
        "fields": {"type": "object", "additionalProperties": True},
    }
)
VERSION: dict[str, Schema] = {"schema": {"type": "integer", "const": SCHEMA}}
EVENTS = record(VERSION | {"events": listed(EVENT), "dropped": COUNT, "last": COUNT})
ALIVE = record(VERSION | {"alive": {"type": "boolean", "const": True}})
READY = record(VERSION | {"ready": TRUTH, "reason": TEXT})
ACCEPTED = record(VERSION | {"accepted": TEXT})
ERROR = record(VERSION | {"error": TEXT, "hint": TEXT})

SCHEMAS = {
    "Status": STATUS,
    "Peer": PEER,
    "Step": STEP,
    "Event": EVENT,
    "Events": EVENTS,
    "Alive": ALIVE,
    "Ready": READY,
    "Accepted": ACCEPTED,
    "Error": ERROR,
}

_MEANINGS = {
    400: "A parameter cannot be used.",
    401: "The token is missing or wrong.",
    403: "The Host or Origin is foreign, or the header that changes need is missing.",
    404: "There is no such path.",
    405: "The path does not take this method.",
    411: "A body without a length.",
    413: "A body that is too large.",
    429: "Too many requests; Retry-After says when to ask again.",
    500: "A fault of the node; its log has more.",
}


def description() -> dict[str, Any]:
    """The whole document."""
    limit = _parameter("limit", "Most entries.", {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT})
    since = _parameter("since", "Events above this number.", {"type": "integer", "minimum": 0, "maximum": 1 << 62})
    timeout = _parameter("timeout", "Seconds to wait for one.", SECONDS | {"maximum": MAX_WAIT_S})
    paths = {
        "/": _read("The page for people.", {"text/html": TEXT}),
        "/status": _read("What the node is doing.", _json("Status")),
        "/peers": _read("Whom it knows, furthest ahead first.", {"application/json": listed(_ref("Peer"))}),
        "/steps": _read("The last steps, oldest first.", {"application/json": listed(_ref("Step"))}, limit),
        "/events": _read("Numbered events; waits for new ones.", _json("Events"), since, limit, timeout),
        "/metrics": _read("Counters in Prometheus' text format.", {CONTENT_TYPE: TEXT}),
        "/healthz": _read("The process lives; needs no token.", _json("Alive")),
        "/readyz": _read("It has joined and trains; needs no token.", _json("Ready"), other={"503": _json("Ready")}),
        "/openapi.json": _read("This description.", {"application/json": {"type": "object"}}),
        "/leave": _change("Hand over, say goodbye, end."),
        "/pause": _change("Stop training after the step in hand; go on owning."),
        "/resume": _change("Train again."),
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "p2pnode",
            "version": __version__,
            "description": "What one node says of itself, and what it can be asked. On the loopback reading needs no "
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


def _json(name: str) -> dict[str, Schema]:
    return {"application/json": _ref(name)}


def _parameter(name: str, what: str, schema: Schema) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "description": what, "schema": schema}


def _answer(what: str, content: dict[str, Schema]) -> dict[str, Any]:
    return {"description": what, "content": {kind: {"schema": schema} for kind, schema in content.items()}}


def _errors(*statuses: int) -> dict[str, Any]:
    return {str(status): _answer(_MEANINGS[status], _json("Error")) for status in statuses}


def _read(
    what: str,
    content: dict[str, Schema],
    *parameters: dict[str, Any],
    other: dict[str, dict[str, Schema]] | None = None,
) -> dict[str, Any]:
    answers = {"200": _answer(what, content)} | {
        status: _answer("Not yet; the reason.", body) for status, body in (other or {}).items()
    }
    wrong = _errors(400) if parameters else {}
    operation = {
        "summary": what,
        "parameters": list(parameters),
        "security": [{}, {"token": []}],
        "responses": answers | wrong | _errors(401, 403, 405, 411, 413, 429, 500),
    }
    return {"get": operation}


def _change(what: str) -> dict[str, Any]:
    marker = {
        "name": CHANGE_HEADER,
        "in": "header",
        "required": True,
        "description": "Keeps forms of foreign pages out.",
        "schema": {"type": "string", "const": "1"},
    }
    operation = {
        "summary": what,
        "parameters": [marker],
        "security": [{"token": []}],
        "responses": {"202": _answer("It will.", _json("Accepted"))} | _errors(401, 403, 405, 411, 413, 429, 500),
    }
    return {"post": operation}

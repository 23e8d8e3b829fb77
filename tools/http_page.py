"""docs/http-api.md, from the OpenAPI description that a node publishes and the types of its answers. Pure."""

from __future__ import annotations

import re
from typing import Any

from p2pnode.status.openapi import description

Schema = dict[str, Any]

_HEAD = """\
# HTTP API

Generated from the code by `make generated`; a test keeps it equal. Do not edit it by hand.

A node answers on `status.host` and `status.port`, by default `http://127.0.0.1:8080`. For programs it publishes the
same as `/openapi.json` (OpenAPI 3.1). Answers are JSON unless the table says otherwise.

* **Token.** On the loopback, reading needs no token. Beyond it everything does but `/healthz`, `/readyz` and the files
  of the dashboard. Changes (`POST`) always need it. Send `Authorization: Bearer TOKEN`. The token is the content of
  `status.token` in the state directory, or of the file that `status.token_file` names.
* **Changes** also need the header `X-P2PNode: 1`, which the pages of other sites cannot send.
* **Versions.** `schema` is 1. Keys may be added to an answer. None changes its meaning within a schema number, so a
  program should ignore keys that it does not know.
* **Errors** have the form of [ErrorAnswer](#erroranswer): what was wrong, and what to do.

```sh
curl http://127.0.0.1:8080/status
curl -X POST -H "X-P2PNode: 1" -H "Authorization: Bearer $(cat ~/.local/state/p2pnode/digits/status.token)" http://127.0.0.1:8080/pause
```

"""


def http_page() -> str:
    """The whole page."""
    document = description()
    lines = ["## Paths", "", "| request | what it is for | parameters | answer | token |", "|---|---|---|---|---|"]
    for path, operations in document["paths"].items():
        lines += [_row(path, method, operation) for method, operation in operations.items()]
    lines += ["", _notes(document["paths"]), "## Answers", ""]
    for name, schema in document["components"]["schemas"].items():
        lines += _answer(name, schema)
    return _HEAD + "\n".join(lines).rstrip() + "\n"


def _row(path: str, method: str, operation: Schema) -> str:
    parameters = ", ".join(_parameter(one) for one in operation.get("parameters", [])) or "–"
    anonymous = {} in operation["security"]
    away = "/static" in path or path in ("/", "/swarm", "/healthz", "/readyz")
    token = "no" if away else "beyond the loopback" if anonymous else "yes"
    cells = [f"`{method.upper()} {path}`", operation["summary"], parameters, _answers(operation["responses"]), token]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _parameter(parameter: Schema) -> str:
    schema = parameter["schema"]
    limits = [f"at least {schema['minimum']}" if schema.get("minimum") else "", _upper(schema)]
    told = ", ".join(part for part in limits if part)
    need = "" if parameter["required"] else "optional"
    inside = "; ".join(part for part in (need, told) if part)
    return f"`{parameter['name']}`" + (f" ({inside})" if inside else "")


def _upper(schema: Schema) -> str:
    top = schema.get("maximum")
    return f"at most {top}" if top is not None and top < 1 << 53 else ""


def _answers(responses: Schema) -> str:
    found = []
    for status, response in responses.items():
        for kind, content in response.get("content", {}).items():
            if int(status) < 400 or (status == "503" and "ErrorAnswer" not in str(content)):
                name = _type(content["schema"]) if kind == "application/json" else f"`{kind.partition(';')[0]}`"
                found.append(name if status == "200" else f"{status}: {name}")
    return ", ".join(found)


def _notes(paths: Schema) -> str:
    """What an operation says beyond its summary, and what each refusal means."""
    notes = [
        f"`{path}`: {_linked(operation['description'])}\n"
        for path, operations in paths.items()
        for operation in operations.values()
        if "description" in operation
    ]
    refusals = {
        status: response["description"]
        for operations in paths.values()
        for operation in operations.values()
        for status, response in operation["responses"].items()
        if int(status) >= 400 and status != "503"
    }
    rows = "\n".join(f"| {status} | {text} |" for status, text in sorted(refusals.items()))
    return "\n".join([*notes, f"Refusals:\n\n| status | meaning |\n|---|---|\n{rows}\n"])


def _linked(text: str) -> str:
    return re.sub(r"components/schemas/(\w+)", lambda found: _type({"$ref": found[0]}), text)


def _answer(name: str, schema: Schema) -> list[str]:
    lines = [f"### {name}", ""]
    if text := schema.get("description", "").strip():
        lines += [_unlisted(text), ""]
    lines += ["| key | type |", "|---|---|"]
    lines += [f"| `{key}` | {_type(field)} |" for key, field in schema["properties"].items()]
    extra = schema.get("additionalProperties")
    if isinstance(extra, dict):
        lines.append(f"| further keys | {_type(extra)} |")
    return [*lines, ""]


def _unlisted(text: str) -> str:
    """A docstring as one paragraph per blank line, without the indentation of the code."""
    return "\n\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n", text))


def _type(schema: Schema) -> str:
    """A schema in words: `integer`, `text`, a link to another answer, `list of …`, `… or null`."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(_type(one) for one in options)
    if "enum" in schema:
        return ", ".join(f"`{value}`" if value is not None else "null" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    kind = schema.get("type", "any")
    if isinstance(kind, list):
        return " or ".join(_type({**schema, "type": one}) for one in kind)
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if kind == "object":
        inner = schema.get("additionalProperties")
        return f"map of text to {_type(inner)}" if isinstance(inner, dict) and inner else "object"
    return {"string": "text", "boolean": "true or false"}.get(kind, kind)

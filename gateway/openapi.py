"""The OpenAPI document, out of the very types that decode requests and encode answers."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response

from redraft.gateway.decoding import BodyDecoder
from redraft.gateway.errors import ErrorBody

_REFERENCE = "#/components/schemas/{name}"


@dataclass(frozen=True)
class Operation:
    """A route: what it reads, what it answers (None is plain text), and what a stream's events are."""

    method: str
    path: str
    handler: Callable[..., Awaitable[Response]]
    answer: type[msgspec.Struct] | None
    body: BodyDecoder[Any] | None = None
    event: type[msgspec.Struct] | None = None


def document(operations: Sequence[Operation]) -> dict[str, Any]:
    """OpenAPI 3.1."""
    answers = [type_ for operation in operations for type_ in (operation.answer, operation.event) if type_ is not None]
    bodies = [operation.body for operation in operations if operation.body is not None]
    types: dict[type, None] = dict.fromkeys([*(body.type for body in bodies), *answers, ErrorBody])
    references, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    schemas = dict(zip(types, references, strict=True))
    for body in bodies:
        _describe_fields(components[body.type.__name__], body)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        path = re.sub(r":\w+}", "}", operation.path)
        paths.setdefault(path, {})[operation.method.lower()] = _operation(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Redraft", "version": importlib.metadata.version("redraft")},
        "paths": paths,
        "components": {"schemas": components},
    }


def _describe_fields(schema: dict[str, Any], body: BodyDecoder[Any]) -> None:
    """Fields that only the table of parameters knows: any value of an inert one, the neutral values of the others."""
    schema["additionalProperties"] = False
    for name, parameter in (body.parameters or {}).items():
        neutral: dict[str, Any] = {} if parameter.handling == "inert" else {"enum": [None, *parameter.neutral]}
        schema["properties"].setdefault(name, neutral)


def _operation(operation: Operation, schemas: dict[type, dict[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.answer is None:
        content["text/plain"] = {"schema": {"type": "string"}}
    else:
        content["application/json"] = {"schema": schemas[operation.answer]}
    if operation.event is not None:
        chunk = {"type": "string", "contentMediaType": "application/json", "contentSchema": schemas[operation.event]}
        event = {"type": "object", "properties": {"data": {"anyOf": [{"const": "[DONE]"}, chunk]}}}
        content["text/event-stream"] = {"schema": event}
    described: dict[str, Any] = {
        "operationId": operation.handler.__name__,
        "summary": (operation.handler.__doc__ or "").strip(),
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "default": {
                "description": "What is wrong and what to do.",
                "content": {"application/json": {"schema": schemas[ErrorBody]}},
            },
        },
    }
    names = re.findall(r"{(\w+)", operation.path)
    if names:
        parameter = {"in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        described["parameters"] = [{"name": name, **parameter} for name in names]
    if operation.body is not None:
        schema = schemas[operation.body.type]
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return described

"""What an answer may consist of: out of ``response_format``, ``tool_choice`` and what goes with them, a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from redraft.engine.chat.grammar import (
    ANY_OBJECT,
    arguments_constraint,
    json_constraint,
    problem_with,
    tool_call_constraint,
)
from redraft.engine.chat.messages import Tool
from redraft.engine.types import Constraint
from redraft.gateway.errors import InvalidRequest


class TextFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Free text."""


class JsonObjectFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class NamedSchema(Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON of a schema, whether it is called strict or not."""

    json_schema: NamedSchema


class NamedFunction(Struct, forbid_unknown_fields=True):
    name: str


class NamedToolChoice(Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: NamedFunction


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat
ToolChoice = Literal["auto", "none", "required"] | NamedToolChoice


class Grammar(Struct, frozen=True):
    """A constraint, the field that asks for it, and the schemas in it by the fields they came from."""

    constraint: Constraint
    param: str
    schemas: tuple[tuple[str, Constraint], ...]

    def check(self) -> None:
        """Raise ApiError where it cannot be enforced; takes up to seconds and lets other threads run meanwhile."""
        problem = problem_with(self.constraint)
        if problem is None:
            return
        for param, schema in self.schemas:
            if (found := problem_with(schema)) is not None:
                raise InvalidRequest(f"{param} cannot be enforced: {found}.", param, "unsupported_value")
        raise InvalidRequest(f"{self.param} cannot be enforced: {problem}.", self.param, "unsupported_value")


def answer_grammar(
    response_format: ResponseFormat | None, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool
) -> Grammar | None:
    """The grammar that a request asks for, if any.

    Forced calls follow their tool's schema. Calls of the model's own accord are held to it where a tool is strict, and
    to one in number where ``parallel`` is false. A response format is for answers that are no calls.
    """
    schema = _schema(response_format)
    called = _callable(tools, choice)
    try:
        schemas = [] if schema is None else [("response_format", json_constraint(schema))]
        if not called:
            return Grammar(schemas[0][1], "response_format", tuple(schemas)) if schemas else None
        forced = choice != "auto"
        asking = [
            *(["tool_choice"] if forced else ["response_format"] if schemas else []),
            *(f"tools[{i}].function.strict" for i, tool in enumerate(tools) if tool.strict),
            *([] if parallel else ["parallel_tool_calls"]),
        ]
        if not asking:
            return None
        schemas += [(f"tools[{tools.index(tool)}].function.parameters", arguments_constraint(tool)) for tool in called]
        parallel = parallel and not isinstance(choice, NamedToolChoice)
        instead: dict[str, Any] | Literal["text"] | None = None if forced else "text" if schema is None else schema
        return Grammar(tool_call_constraint(called, parallel=parallel, instead=instead), asking[0], tuple(schemas))
    except RecursionError as exc:
        message = "A JSON schema of the answer is nested too deeply."
        raise InvalidRequest(message, "tools" if schema is None else "response_format") from exc


def _schema(response_format: ResponseFormat | None) -> dict[str, Any] | None:
    match response_format:
        case JsonObjectFormat():
            return dict(ANY_OBJECT)
        case JsonSchemaFormat(json_schema=named):
            return named.schema
        case _:
            return None


def _callable(tools: Sequence[Tool], choice: ToolChoice) -> Sequence[Tool]:
    match choice:
        case "none":
            return ()
        case NamedToolChoice(function=function):
            named = [tool for tool in tools if tool.name == function.name]
            if not named:
                message = f"tool_choice names the tool {function.name[:64]!r}, which is not among the tools."
                raise InvalidRequest(message, "tool_choice")
            return named
        case "required" if not tools:
            raise InvalidRequest("tool_choice is required, but there are no tools.", "tool_choice")
        case _:
            return tools

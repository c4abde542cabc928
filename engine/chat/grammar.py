"""What an answer may consist of: JSON of a schema, or tool calls, as grammars for llguidance."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal, Protocol

import llguidance

from redraft.engine.chat.messages import Tool
from redraft.engine.chat.tokenizer import Tokenizer
from redraft.engine.types import Constraint

_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One way to write each value, as models write it; free white space invites endless runs of it."""

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

MAX_GRAMMAR_CHARACTERS = 128 << 10
MAX_MULTIPLES = 20_000
"""States that ``multipleOf`` may take; they are all built beforehand, and no limit of llguidance's bounds them."""

_MULTIPLE_OF = re.compile(r'"multipleOf": (-?[0-9.eE+-]+)')
_LIMITS = llguidance.LLParserLimits(max_items_in_row=16_000)
"""More than by default, for objects with a thousand optional properties; the limits on time stay as they are."""


def json_constraint(schema: Mapping[str, Any] = ANY_OBJECT) -> Constraint:
    """Exactly one JSON value of ``schema``; any object by default."""
    return Constraint("json_schema", json.dumps(_styled(schema)))


def arguments_constraint(tool: Tool) -> Constraint:
    """The arguments of one call; what a strict tool's schema asks and no grammar can is a problem, else left out."""
    return Constraint("json_schema", json.dumps(_styled(tool.parameters or ANY_OBJECT, lenient=not tool.strict)))


def tool_call_constraint(
    tools: Sequence[Tool], *, parallel: bool, instead: Mapping[str, Any] | Literal["text"] | None = None
) -> Constraint:
    """One Hermes call of one of ``tools``, or one and more if ``parallel``, with arguments of the tool's schema.

    ``instead`` allows an answer without calls: a JSON value of a schema, or text, which may also come before calls.
    """
    more = r'("\n<tool_call>" call)*' if parallel else ""
    choices = " | ".join(f"tool_{index}" for index in range(len(tools)))
    rules = [rf'call: "\n" ({choices}) "\n</tool_call>"']
    match instead:
        case None:
            rules += [f'start: "<tool_call>" call {more}']
        case "text":
            rules += [f"start: TEXT | opening call {more}", 'opening[lazy]: TEXT "<tool_call>"', r"TEXT: /(.|\n)*/"]
        case schema:
            rules += [f'start: json | "<tool_call>" call {more}', f"json: %json {json.dumps(_styled(schema))}"]
    for index, tool in enumerate(tools):
        begin = f'{{"name": {json.dumps(tool.name)}, "arguments": '
        rules += [f'tool_{index}: {json.dumps(begin)} arguments_{index} "}}"']
        rules += [f"arguments_{index}: %json {arguments_constraint(tool).text}"]
    return Constraint("lark", "\n".join(rules))


def problem_with(constraint: Constraint) -> str | None:
    """What is wrong with a constraint's grammar, in words, or None."""
    try:
        return llguidance.LLMatcher.validate_grammar(_grammar(constraint), limits=_LIMITS) or None
    except ValueError as error:
        return str(error)


class Matcher(Protocol):
    """Where an answer stands in its grammar (llguidance's ``LLMatcher``)."""

    def consume_token(self, sampled_token: int) -> bool: ...

    def get_error(self) -> str: ...

    def deep_copy(self) -> Matcher: ...

    def validate_tokens(self, tokens: list[int]) -> int:
        """How many of these tokens, from the first, may come next."""
        ...

    def compute_logit_bias(self) -> bytes:
        """One byte a token id: 0 where it may not come next."""
        ...


class GrammarCompiler:
    """Makes matchers for one tokenizer whose logits cover ``vocab_size`` ids."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = llguidance.LLTokenizer(
            tokenizer.definition, n_vocab=vocab_size, eos_token=list(tokenizer.eos_ids)
        )

    def matcher(self, constraint: Constraint) -> Matcher:
        """A matcher at the beginning of an answer; raises ValueError with what is wrong with the grammar."""
        matcher = llguidance.LLMatcher(self._tokenizer, _grammar(constraint), log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher


def _grammar(constraint: Constraint) -> str:
    if len(constraint.text) > MAX_GRAMMAR_CHARACTERS:
        raise ValueError(f"{len(constraint.text)} characters are more than the {MAX_GRAMMAR_CHARACTERS} allowed")
    if _multiples(constraint.text) > MAX_MULTIPLES:
        raise ValueError(f"multipleOf takes more than the {MAX_MULTIPLES} states allowed; use smaller or fewer ones")
    if constraint.kind == "lark":
        return llguidance.LLMatcher.grammar_from_lark(constraint.text)
    return llguidance.LLMatcher.grammar_from_json_schema(constraint.text)


def _multiples(text: str) -> int:
    """At most this many states for all ``multipleOf`` of a grammar, which may also meet in one number."""
    values = [abs(Decimal(found)) for found in _MULTIPLE_OF.findall(text)]
    scale = max([0, *(-int(value.as_tuple().exponent) for value in values)])
    whole = [int(min(value.scaleb(scale), Decimal(MAX_MULTIPLES + 1))) for value in values]
    return len(whole) * math.lcm(*filter(None, whole))


def _styled(schema: Mapping[str, Any], *, lenient: bool = False) -> dict[str, Any]:
    return {**schema, "x-guidance": {**_JSON_STYLE, "lenient": lenient, "coerce_one_of": lenient}}

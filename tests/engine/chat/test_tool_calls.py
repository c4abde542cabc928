"""Tool calls come out of text whole and byte for byte, in any cut; what is no call is content, never lost."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.engine.chat.messages import Message, ToolCall
from redraft.engine.chat.renderer import Renderer
from redraft.engine.chat.tool_calls import ContentDelta, ToolCallDelta, ToolCallParser

pytestmark = pytest.mark.unit


@dataclass
class Answer:
    """What a client makes of the deltas."""

    content: str = ""
    names: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)

    def take(self, delta: ContentDelta | ToolCallDelta) -> None:
        if isinstance(delta, ContentDelta):
            assert delta.text
            self.content += delta.text
        elif delta.name is not None:
            assert delta.id is not None
            assert delta.index == len(self.names)
            self.names.append(delta.name)
            self.ids.append(delta.id)
            self.arguments.append(delta.arguments)
        else:
            assert delta.id is None
            assert delta.index == len(self.names) - 1
            self.arguments[delta.index] += delta.arguments


def parse(text: str, cuts: list[int] | None = None) -> Answer:
    numbers = count()
    parser = ToolCallParser(new_id=lambda: f"id{next(numbers)}")
    answer = Answer()
    ends = sorted({min(cut, len(text)) for cut in cuts or []} | {len(text)})
    for start, end in zip([0, *ends], ends, strict=False):
        for delta in parser.push(text[start:end]):
            answer.take(delta)
    for delta in parser.finish():
        answer.take(delta)
    return answer


def block(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_text_and_several_calls_are_told_apart() -> None:
    answer = parse(f"I look.\n{block('f', '{}')}\n{block('g', '[1]' and chr(123) + chr(125))}\n")
    assert answer == Answer("I look.", ["f", "g"], ["id0", "id1"], ["{}", "{}"])


def test_arguments_keep_every_byte_the_model_wrote() -> None:
    arguments = '{"a" :\t[1.0, {"b": "}</tool_call>\\"{\\\\"}],\n "c": "<tool_call>\\u00e9é"  }'
    assert parse(block("f", arguments)).arguments == [arguments]


def test_a_whole_call_in_one_push_still_comes_as_start_and_arguments() -> None:
    first, second = ToolCallParser(new_id=lambda: "id").push(block("f", '{"a": 1}'))
    assert first == ToolCallDelta(0, "id", "f", "")
    assert second == ToolCallDelta(0, None, None, '{"a": 1}')


def test_arguments_stream_while_the_model_still_writes_them() -> None:
    parser = ToolCallParser(new_id=lambda: "id")
    assert parser.push('<tool_call>{"name": "f", "arguments"') == []
    assert parser.push(': {"a": "lo') == [ToolCallDelta(0, "id", "f", ""), ToolCallDelta(0, None, None, '{"a": "lo')]
    assert parser.push("ng") == [ToolCallDelta(0, None, None, "ng")]
    assert parser.push('"}}\n</tool_call>') == [ToolCallDelta(0, None, None, '"}')]
    assert parser.finish() == []


def test_what_looks_like_a_tag_is_held_back_only_while_it_may_be_one() -> None:
    parser = ToolCallParser()
    assert parser.push("a < b") == [ContentDelta("a < b")]
    assert parser.push("\n<tool") == []
    assert parser.push("box") == [ContentDelta("\n<toolbox")]
    assert parser.push("\n") == []
    assert parser.push("\n") == [ContentDelta("\n")]
    assert parser.finish() == [ContentDelta("\n")]


def test_ids_are_new_for_every_call() -> None:
    parser = ToolCallParser()
    deltas = parser.push(block("f", "{}") * 2)
    ids = [delta.id for delta in deltas if isinstance(delta, ToolCallDelta) and delta.id]
    assert len(set(ids)) == 2
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", i) for i in ids)


@pytest.mark.parametrize(
    ("text", "names", "arguments"),
    [
        ('<tool_call>{"name": "f"}</tool_call>', ["f"], ["{}"]),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', ["f"], ['{"a": 1}']),
        ('<tool_call>\n\n  { "name" : "\\u0066" , "arguments" : {} }  \n</tool_call>', ["f"], ["{}"]),
        ('<tool_call>{"name": "f", "arguments": {}\n</tool_call>', ["f"], ["{}"]),
        ('<tool_call>{"name": "f", "arguments": {}}', ["f"], ["{}"]),
        ('<tool_call>{"name": "f", "arguments": {}}\n</tool_', ["f"], ["{}"]),
        ('<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "g"}</tool_call>', ["f", "g"], ["{}", "{}"]),
        ('<tool_call>{"name": "f", "arguments": {\'a\': 1,}}</tool_call>', ["f"], ["{'a': 1,}"]),
    ],
    ids=[
        "no arguments",
        "arguments first",
        "blanks and escapes",
        "last brace missing",
        "closing tag missing",
        "closing tag cut off",
        "closing tag forgotten",
        "arguments that are no JSON",
    ],
)
def test_small_slips_of_the_model_still_make_a_call(text: str, names: list[str], arguments: list[str]) -> None:
    answer = parse(text)
    assert (answer.content, answer.names, answer.arguments) == ("", names, arguments)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>oops</tool_call>",
        "<tool_call>[]</tool_call>",
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "text"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "name": "g"}</tool_call>',
        '<tool_call>{"name": "f", "id": 1}</tool_call>',
        '<tool_call>{"name": "f", "arg',
        '<tool_call>{"name": "f',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}, "name": "f',
        "\n<tool_call>\nlet me think",
        "</tool_call>",
        "text\n<tool_c",
    ],
)
def test_what_is_no_call_is_given_back_as_content_whole(text: str) -> None:
    for before in ("", "Hi ", "Hi\n"):
        for after in ("", " and on"):
            answer = parse(before + text + after)
            assert (answer.content, answer.names) == (before + text + after, [])


def test_a_call_that_breaks_off_keeps_what_was_streamed() -> None:
    assert parse('<tool_call>{"name": "f", "arguments": {"a": [1, 2').arguments == ['{"a": [1, 2']


def test_what_follows_a_broken_call_is_content() -> None:
    answer = parse(f'{block("f", "{}")[:-13]}, "extra": 1}}\n</tool_call> bye')
    assert (answer.names, answer.arguments) == (["f"], ["{}"])
    assert answer.content == ', "extra": 1}\n</tool_call> bye'


def test_a_call_after_a_malformed_block_is_found() -> None:
    answer = parse(f"<tool_call>oops\n{block('f', '{}')}")
    assert (answer.content, answer.names) == ("<tool_call>oops", ["f"])


def test_text_after_calls_is_content_but_blanks_are_not() -> None:
    assert parse(f"{block('f', '{}')}\n\n").content == ""
    assert parse(f"{block('f', '{}')}\n\nDone.\n").content == "\n\nDone.\n"
    assert parse(f"{block('f', '{}')}  \n {block('g', '{}')}") == Answer("", ["f", "g"], ["id0", "id1"], ["{}", "{}"])


scraps = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", "arguments": ',
        '{"arguments": ',
        '"name": "g"',
        '{"a": "}\\""}',
        "{",
        "}",
        '"',
        "\\",
        ", ",
        "\n",
        " ",
        "<",
        "text",
        "é",
        block("h", '{"x": [1, {"y": null}]}'),
    ]
)


@settings(deadline=None, max_examples=500)
@given(parts=st.lists(scraps, max_size=12), data=st.data())
def test_cuts_do_not_matter_and_nothing_but_punctuation_is_lost(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    whole = parse(text)
    assert parse(text, data.draw(st.lists(st.integers(0, len(text)), max_size=8))) == whole
    assert parse(text, list(range(len(text)))) == whole
    kept = whole.content + "".join(whole.arguments) + "".join(whole.names)
    for word in ("text", "é"):
        assert kept.count(word) == text.count(word)


arguments = st.dictionaries(st.text(), st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=4))


@settings(deadline=None)
@given(content=st.text(), calls=st.lists(st.tuples(st.text(min_size=1), arguments), min_size=1, max_size=3))
def test_what_the_template_renders_is_what_the_parser_reads(
    smollm2_template: str, content: str, calls: list[tuple[str, dict[str, object]]]
) -> None:
    message = Message(
        "assistant",
        content,
        tuple(ToolCall(f"id{i}", name, json.dumps(value)) for i, (name, value) in enumerate(calls)),
    )
    text = Renderer(smollm2_template).render([message], add_generation_prompt=False)
    answer = parse(text.partition("<|im_start|>assistant\n")[2].removesuffix("<|im_end|>\n"))
    assert answer.content == content
    assert [ToolCall(*call) for call in zip(answer.ids, answer.names, answer.arguments, strict=True)] == [
        *message.tool_calls
    ]

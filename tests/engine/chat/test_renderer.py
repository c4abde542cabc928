"""A prompt is what the checkpoint's template makes of the whole conversation, or there is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import _compile_jinja_template

from redraft.engine.chat.messages import Message, Tool, ToolCall
from redraft.engine.chat.renderer import Renderer, RenderError
from redraft.engine.checkpoints import CheckpointError

pytestmark = pytest.mark.unit

# The template that the model's own GGUF carries.
ORIGINAL_SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
WEATHER = Tool("get_weather", "Weather of a <city>", {"type": "object", "properties": {"city": {"type": "string"}}})
CALL = ToolCall("call_1", "get_weather", '{"city":  "Zürich"}')


@pytest.fixture
def smollm2(smollm2_template: str) -> Renderer:
    return Renderer(smollm2_template)


def test_a_plain_chat_gets_the_default_system_prompt(smollm2: Renderer) -> None:
    assert smollm2.render([Message("user", "Hi")]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_every_role_and_tools_are_rendered(smollm2: Renderer) -> None:
    messages = [
        Message("system", "Be brief."),
        Message("user", "Weather in Zürich & Bern?"),
        Message("assistant", None, (CALL, ToolCall("call_2", "get_weather", '{"city": "Bern"}'))),
        Message("tool", '{"sky": "blue"}', tool_call_id="call_1"),
        Message("tool", "rain", tool_call_id="call_2"),
        Message("assistant", "Let me check again.", (ToolCall("call_3", "get_weather", "{}"),)),
        Message("tool", "", tool_call_id="call_3"),
        Message("developer", "Answer now."),
        Message("assistant", "Blue."),
        Message("user", "Thanks"),
    ]
    assert smollm2.render(messages, [WEATHER]) == (
        "<|im_start|>system\nBe brief.\n\n"
        "You are a function calling AI model. You are provided with function signatures within <tools></tools> XML "
        "tags. You may call one or more functions to assist with the user query. Don't make assumptions about what "
        "values to plug into functions. Here are the available tools:\n"
        "<tools>\n"
        '{"type": "function", "function": {"name": "get_weather", "description": "Weather of a <city>", '
        '"parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}\n'
        "</tools>\n"
        "For each function call return a JSON object with function name and arguments within <tool_call></tool_call> "
        'XML tags as follows:\n<tool_call>\n{"name": <function-name>, "arguments": <args-dict>}\n</tool_call>'
        "<|im_end|>\n"
        "<|im_start|>user\nWeather in Zürich & Bern?<|im_end|>\n"
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city":  "Zürich"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call><|im_end|>\n'
        '<|im_start|>tool\n{"sky": "blue"}<|im_end|>\n'
        "<|im_start|>tool\nrain<|im_end|>\n"
        "<|im_start|>assistant\nLet me check again.\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n<|im_end|>\n"
        "<|im_start|>system\nAnswer now.<|im_end|>\n"
        "<|im_start|>assistant\nBlue.<|im_end|>\n"
        "<|im_start|>user\nThanks<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_tools_without_a_system_message_take_the_default_prompts_place(smollm2: Renderer) -> None:
    text = smollm2.render([Message("user", "Hi")], [Tool("now")], add_generation_prompt=False)
    assert text.startswith("<|im_start|>system\nYou are a function calling AI model.")
    assert (
        '{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}' in text
    )
    assert text.endswith("</tool_call><|im_end|>\n<|im_start|>user\nHi<|im_end|>\n")


plain_chats = st.lists(
    st.builds(Message, st.sampled_from(["system", "user", "assistant"]), st.text()), min_size=1, max_size=6
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(messages=plain_chats, prompt=st.booleans())
def test_plain_chats_equal_the_models_own_template(smollm2: Renderer, messages: list[Message], prompt: bool) -> None:
    expected = _compile_jinja_template(ORIGINAL_SMOLLM2).render(
        messages=[{"role": message.role, "content": message.content} for message in messages],
        add_generation_prompt=prompt,
    )
    assert smollm2.render(messages, add_generation_prompt=prompt) == expected


TRICKY = """
{%- macro show(x) -%}[{{ x | tojson }}|{{ x | tojson(indent=2) }}]{%- endmacro %}
{%- for m in messages %}
    {%- if m.role == 'skip' %}{% continue %}{% endif %}
    {% generation %}
{{ bos_token }}{{ m.role }}: {{ show(m.content) }}{{ m.content }}
    {% endgeneration %}
    {% for call in m.tool_calls %}{{ call.function.name }}{{ call.function.arguments | tojson }}
    {% endfor %}
{%- endfor %}
{%- for t in tools %}{{ show(t) }}{% endfor %}
{{ strftime_now('now') }}{{ eos_token }}
"""


def test_templates_run_as_under_transformers(make_folder: Callable[[str], Path]) -> None:
    folder = make_folder(TRICKY)
    messages = [
        Message("user", "é <b> & 'q' \"d\""),
        Message("assistant", "", (CALL,)),
        Message("tool", "ok", tool_call_id="call_1"),
    ]
    plain: list[dict[str, Any]] = [
        {"role": "user", "content": messages[0].content},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": CALL.name, "arguments": json.loads(CALL.arguments)}}],
        },
        {"role": "tool", "content": "ok"},
    ]
    function = {"name": WEATHER.name, "description": WEATHER.description, "parameters": WEATHER.parameters}
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        plain, tools=[{"type": "function", "function": function}], tokenize=False, add_generation_prompt=True
    )
    assert Renderer.from_folder(folder).render(messages, [WEATHER]) == expected


def test_arguments_go_as_the_text_the_model_wrote_where_the_template_takes_text(smollm2: Renderer) -> None:
    odd = ToolCall("c", "get_weather", '{ "city" :"\\u005a", "n": 1.0, broken')
    assert odd.arguments in smollm2.render([Message("assistant", None, (odd,))])


def test_reasoning_is_rendered_where_the_template_has_a_place_for_it() -> None:
    template = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.content }}{% endfor %}"
    assert Renderer(template).render([Message("assistant", "x", reasoning="hm")]) == "hm|x"
    with pytest.raises(RenderError, match="has reasoning"):
        Renderer(template).render([Message("user", "x", reasoning="hm")])


def test_developer_stays_developer_where_the_template_knows_it() -> None:
    knows = CHATML + "{# developer #}"
    assert "<|im_start|>developer\n" in Renderer(knows).render([Message("developer", "x")])
    assert "<|im_start|>system\n" in Renderer(CHATML).render([Message("developer", "x")])


def test_a_tools_answer_carries_the_name_of_the_call() -> None:
    template = "{% for m in messages %}{{ m.name }}:{{ m.content }};{{ m.tool_calls }}{% endfor %}"
    text = Renderer(template).render(
        [Message("assistant", None, (CALL,)), Message("tool", "sunny", tool_call_id="call_1")]
    )
    assert "get_weather:sunny" in text


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ([Message("robot", "x")], r"messages\[0\] has the unknown role 'robot'"),
        ([Message("user", None)], r"messages\[0\] has neither content nor tool calls"),
        ([Message("assistant", None)], r"messages\[0\] has neither content nor tool calls"),
        ([Message("user", "x", (CALL,))], r"messages\[0\]: only assistant messages can call tools"),
        ([Message("user", "x"), Message("tool", "y")], r"messages\[1\] is a tool's answer, but no message before it"),
        (
            [Message("assistant", None, (CALL,)), Message("tool", "y", tool_call_id="call_9")],
            r"messages\[1\] answers the tool call 'call_9', which no message before it made",
        ),
        ([Message("user", "x", name="Ann")], r"messages\[0\] has a name, for which"),
        ([Message("assistant", "x", reasoning="hm")], r"messages\[0\] has reasoning, for which"),
        ([Message("user", "\ud800")], "lone surrogate"),
    ],
)
def test_a_conversation_that_makes_no_sense_is_refused(
    smollm2: Renderer, messages: list[Message], message: str
) -> None:
    with pytest.raises(RenderError, match=message):
        smollm2.render(messages)


@pytest.mark.parametrize(
    ("template", "messages", "tools", "message"),
    [
        (CHATML, [Message("user", "x")], [WEATHER], "no place for tools"),
        ("{% if tools %}tools!{% endif %}" + CHATML, [Message("user", "x")], [WEATHER], "leaves out the tool"),
        (CHATML, [Message("assistant", "x", (CALL,))], [], r"messages\[0\] calls tools, for which"),
        ("{# tool_calls #}" + CHATML, [Message("assistant", "x", (CALL,))], [], "leaves out a tool call"),
        (
            "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
            [Message("developer", "secret"), Message("user", "x")],
            [],
            r"leaves out the content of messages\[0\] \(system message\)",
        ),
        (
            "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{{ m.tool_calls }}{% endfor %}",
            [Message("user", "a"), Message("assistant", None, (CALL,)), Message("tool", "lost", tool_call_id="call_1")],
            [],
            r"leaves out the content of messages\[2\] \(tool message\)",
        ),
        ("{{ messages[-1].content }}", [Message("user", "a"), Message("user", "a")], [], r"messages\[1\]"),
        ("{{ messages[0].content[:3] }}", [Message("user", "abcdef")], [], r"messages\[0\]"),
        ("{{ raise_exception('only one') }}", [Message("user", "x")], [], "refuses the conversation: only one"),
        ("{{ 1 + messages[0].content }}", [Message("user", "x")], [], "cannot render the conversation"),
        ("{{ messages[0].content.x.y }}", [Message("user", "x")], [], "refuses the conversation"),
        ("{{ ''.__class__.__mro__ }}", [Message("user", "x")], [], "refuses the conversation"),
        (
            "{% for m in messages %}{{ m.tool_calls[0].function.arguments }}{% endfor %}",
            [Message("assistant", None, (ToolCall("c", "f", "{broken"),))],
            [],
            r"messages\[0\]\.tool_calls\[0\]: arguments is not JSON",
        ),
    ],
)
def test_what_a_template_cannot_render_whole_is_refused(
    template: str, messages: list[Message], tools: list[Tool], message: str
) -> None:
    with pytest.raises(RenderError, match=message):
        Renderer(template).render(messages, tools)


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        ("{% for m in messages %}{{ m.content | trim }}{% endfor %}", [Message("user", "  padded\n")]),
        ("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", [Message("user", 'a "quoted"\nline é')]),
        (
            "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}",
            [Message("assistant", "<think>hm</think>yes")],
        ),
        (
            "{{ messages[0].content }}{{ messages[2].content }}{{ messages[1].content }}",
            [Message("user", "a"), Message("system", "b"), Message("user", "c")],
        ),
    ],
    ids=["trimmed", "as JSON", "thoughts left out", "system text moved"],
)
def test_what_templates_do_by_design_is_no_loss(template: str, messages: list[Message]) -> None:
    Renderer(template).render(messages)


def test_a_folder_without_a_template_or_with_a_broken_one_is_refused(make_folder: Callable[[str], Path]) -> None:
    folder = make_folder("{% for m in messages %}")
    with pytest.raises(CheckpointError, match=f"The chat template of {folder} is broken"):
        Renderer.from_folder(folder)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointError, match="has no chat template"):
        Renderer.from_folder(folder)

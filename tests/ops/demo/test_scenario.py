"""The demo's drift: what changes, what does not, and that nothing is evaluated on what was trained on."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest

from redraft.ops.demo.scenario import CHANGES, after, batch_calls, before, evaluation, rename_tools, sessions
from redraft.retrain.data.conversation import Conversation
from redraft.retrain.data.families import normalised
from redraft.retrain.data.splits import split_of

pytestmark = pytest.mark.unit

ENVELOPE = "Request: "


def texts(found: Iterable[Conversation]) -> set[str]:
    """What users ask, without what the rewrite puts around it."""
    return {normalised(text.rpartition(ENVELOPE)[2]) for session in found for text in session.user_texts}


def test_no_user_text_and_no_family_crosses_from_traffic_to_evaluation() -> None:
    traffic, judged = [*before(), *after()], [*evaluation(), *evaluation(*CHANGES.values())]
    assert texts(traffic).isdisjoint(texts(judged))
    assert {each.family for each in traffic}.isdisjoint(each.family for each in judged)
    assert {split_of(each.source, each.family) for each in judged} == {"test"}


def test_before_and_after_share_no_family_and_before_has_none_that_the_bundled_drafter_learnt() -> None:
    old, new = before(), after()
    assert {each.family for each in old}.isdisjoint(each.family for each in new)
    assert "train" not in {split_of(each.source, each.family) for each in old}
    assert min(len(old), len(new)) >= 60


def test_every_call_is_of_a_tool_on_offer_and_has_its_required_parameters() -> None:
    for changes in ((), tuple(CHANGES.values())):
        for session in sessions(*changes):
            schemas = {tool.name: tool.parameters or {} for tool in session.tools}
            assert len(schemas) == len(session.tools), "two tools have one name"
            for message in session.messages:
                for call in message.tool_calls:
                    arguments, schema = json.loads(call.arguments), schemas[call.name]
                    assert set(schema["required"]) <= set(schema["properties"])
                    assert set(arguments) <= set(schema["properties"]), (session.id, call)


def test_an_assistant_has_the_same_tools_in_every_session() -> None:
    for changes in ((), tuple(CHANGES.values())):
        tools: dict[str, set[str]] = {}
        for session in sessions(*changes):
            tools.setdefault(session.id.partition("/")[0], set()).add(repr(session.tools))
        assert [len(each) for each in tools.values()] == [1, 1, 1, 1]


def test_renaming_merges_no_two_parameters() -> None:
    for old, new in zip(sessions(), sessions(rename_tools), strict=True):
        for one, other in zip(old.tools, new.tools, strict=True):
            assert one.parameters and other.parameters
            assert len(one.parameters["properties"]) == len(other.parameters["properties"])


def test_batching_keeps_every_call_and_its_result() -> None:
    for old, new in zip(sessions(), sessions(batch_calls), strict=True):
        assert [call for message in new.messages for call in message.tool_calls] == [
            call for message in old.messages for call in message.tool_calls
        ]
        answered = [message.tool_call_id for message in new.messages if message.role == "tool"]
        assert answered == [call.id for message in new.messages for call in message.tool_calls]
        assert all(
            not (one.tool_calls and other.tool_calls)
            for one, other in zip(new.messages, new.messages[1:], strict=False)
        )


def test_the_rewrite_leaves_nothing_of_the_old_vocabulary_in_the_tools() -> None:
    old = {tool.name for session in sessions() for tool in session.tools}
    new = {tool.name for session in after() for tool in session.tools}
    assert old.isdisjoint(new)

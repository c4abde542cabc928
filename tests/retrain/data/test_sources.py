"""Where conversations come from: whole, always the same, and in families that share no user text."""

from __future__ import annotations

import json
import sys
from collections import defaultdict

import pytest

from redraft.engine.chat.messages import ToolCall
from redraft.retrain.data.conversation import SOURCE_NAMES, Conversation
from redraft.retrain.data.errors import DataError
from redraft.retrain.data.families import joined, normalised
from redraft.retrain.data.sources import SOURCES
from redraft.retrain.data.sources.bfcl import answers, cases
from redraft.retrain.data.sources.bfcl_multi_turn import Simulator
from redraft.retrain.data.sources.packages import package_folder
from redraft.retrain.data.splits import SPLITS, split_of

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def conversations() -> dict[str, list[Conversation]]:
    return {source: list(SOURCES[source]()) for source in SOURCE_NAMES}


@pytest.fixture(scope="module")
def by_id(conversations: dict[str, list[Conversation]]) -> dict[str, Conversation]:
    return {conversation.id: conversation for all_ in conversations.values() for conversation in all_}


def test_no_user_text_crosses_splits(conversations: dict[str, list[Conversation]]) -> None:
    splits = defaultdict(set)
    for source, all_ in conversations.items():
        for conversation in all_:
            for text in conversation.user_texts:
                splits[normalised(text)].add(split_of(source, conversation.family))
    assert len(splits) > 7000
    assert {text: found for text, found in splits.items() if len(found) > 1} == {}


def test_variants_of_a_scenario_are_one_family(by_id: dict[str, Conversation]) -> None:
    variants = ["base_7", "miss_func_7", "miss_func_7/more-tools", "miss_param_7", "long_context_7"]
    assert len({by_id[f"multi_turn_{variant}"].family for variant in variants}) == 1
    assert by_id["live_multiple_3-2-0"].family == by_id["live_multiple_4-2-1"].family


def test_every_source_reaches_every_split(conversations: dict[str, list[Conversation]]) -> None:
    for source, all_ in conversations.items():
        found = [split_of(source, conversation.family) for conversation in all_]
        assert set(found) == set(SPLITS), source
        assert 0.5 < found.count("train") / len(found) < 0.7, source


def test_ids_are_unique_and_families_no_larger_than_a_scenario(conversations: dict[str, list[Conversation]]) -> None:
    ids = [conversation.id for all_ in conversations.values() for conversation in all_]
    assert len(ids) == len(set(ids)) > 7000
    for source, all_ in conversations.items():
        sizes: defaultdict[str, int] = defaultdict(int)
        for conversation in all_:
            sizes[conversation.family] += 1
        assert max(sizes.values()) <= (40 if source == "math" else 31), source


def test_tool_results_answer_calls_and_arguments_are_json(conversations: dict[str, list[Conversation]]) -> None:
    for conversation in (conversation for all_ in conversations.values() for conversation in all_):
        names = {tool.name for tool in conversation.tools}
        open_calls: set[str] = set()
        for i, message in enumerate(conversation.messages):
            for call in message.tool_calls:
                assert isinstance(json.loads(call.arguments), dict)
                assert call.name in names or i < conversation.start, conversation.id
                open_calls.add(call.id)
            if message.role == "tool":
                open_calls.remove(message.tool_call_id or "")
            elif message.role == "assistant" and message.content is not None and i >= conversation.start:
                assert message.content.strip() == message.content != ""


def test_bfcl_is_whole(conversations: dict[str, list[Conversation]]) -> None:
    single, multi = conversations["bfcl-single"], conversations["bfcl-multi-turn"]
    assert len(single) == 3641
    assert len(multi) == 4 * 200 + 200
    assert sum(not conversation.truth for conversation in single) < 40


def test_optional_arguments_are_given_only_where_the_user_speaks_of_them(by_id: dict[str, Conversation]) -> None:
    def arguments(case: str) -> object:
        return json.loads(by_id[case].messages[-1].tool_calls[0].arguments)

    assert arguments("simple_python_0") == {"base": 10, "height": 5, "unit": "units"}
    assert arguments("multiple_0") == {"side1": 5, "side2": 4, "side3": 3}
    coffee = {"size": "large", "milk_type": "coconut", "sweetness_level": "extra", "temperature": "hot"}
    special = {"special_instructions": "served boiling hot"}
    assert arguments("live_multiple_0-0-0") == {"drink_id": "latte", "new_preferences": coffee | special}


def test_simulators_answer_ground_truth_calls(by_id: dict[str, Conversation]) -> None:
    session = by_id["multi_turn_base_2"]
    answered = {m.content for m in session.messages if m.role == "tool"}
    assert json.dumps({"current_working_directory": "documents"}) in answered
    failing = [m for m in session.messages if m.role == "tool" and (m.content or "").startswith("Error during")]
    assert failing == []
    again = [c for c in SOURCES["bfcl-multi-turn"]() if c.id == session.id]
    assert again == [session]


def test_nearly_all_simulated_calls_work(conversations: dict[str, list[Conversation]]) -> None:
    results = [m.content or "" for c in conversations["bfcl-multi-turn"] for m in c.messages if m.role == "tool"]
    assert sum(result.startswith("Error during") for result in results) < 0.01 * len(results)


def test_text_that_is_no_call_is_refused_and_never_run() -> None:
    simulator = Simulator(cases("multi_turn_base")[0], long_context=False)
    assert simulator.parse("cd('document')") == ToolCall("", "cd", '{"folder": "document"}')
    for text in ("__import__('os').getcwd()", "cd(folder=open('/etc/hostname').read())", "nobody()", "1 + 1"):
        with pytest.raises((DataError, ValueError)):
            simulator.parse(text)


def test_a_held_out_function_is_missing_until_it_is_handed_in(by_id: dict[str, Conversation]) -> None:
    before, after = by_id["multi_turn_miss_func_2"], by_id["multi_turn_miss_func_2/more-tools"]
    assert {tool.name for tool in after.tools} - {tool.name for tool in before.tools} == {"cp", "cat"}
    assert before.asked_turns == (len(before.messages) - 1,)
    assert before.messages[-1].tool_calls == ()
    assert after.messages[: after.start] == before.messages
    assert "cp, cat" in (after.messages[after.start].content or "")
    assert after.messages[after.start + 1].tool_calls[0].name == "cp"


def test_a_missing_parameter_is_asked_for(by_id: dict[str, Conversation]) -> None:
    session = by_id["multi_turn_miss_param_2"]
    assert session.messages[1].role == "assistant"
    assert "file name" in (session.messages[1].content or "")
    truths = answers("multi_turn_miss_param")["multi_turn_miss_param_2"]
    calls = [call for message in session.messages for call in message.tool_calls]
    assert len(calls) == sum(map(len, truths))


def test_irrelevance_gets_a_reply_that_names_what_the_tools_do(by_id: dict[str, Conversation]) -> None:
    reply = by_id["irrelevance_0"].messages[-1].content or ""
    assert "determine_body_mass_index" in reply
    assert "calculate body mass index given weight and height" in reply


def test_customer_service_starts_with_the_users_own_words(by_id: dict[str, Conversation]) -> None:
    session = by_id["airline-0"]
    assert session.messages[0].content is not None
    assert session.messages[0].content.startswith("# Airline Agent Policy")
    words = session.messages[1].content or ""
    assert words.startswith("I am Emma Kim. My user id is emma_kim_9957. I want to cancel reservation EHGLP3.")
    assert "you" not in words.lower().split()
    assert session.messages[-1].role == "user"


def test_customer_service_tools_act_on_their_own_data(by_id: dict[str, Conversation]) -> None:
    session = by_id["retail-0"]
    results = [message.content or "" for message in session.messages if message.role == "tool"]
    assert results[0] == "yusuf_rossi_9620"
    assert json.loads(results[-1])["status"] == "exchange requested"
    find = next(tool for tool in session.tools if tool.name == "find_user_id_by_name_zip")
    assert find.parameters is not None
    assert find.parameters["required"] == ["first_name", "last_name", "zip"]
    assert find.parameters["properties"]["zip"]["type"] == "string"
    assert "tau2" not in sys.modules


def test_families_that_share_words_are_joined() -> None:
    def saying(family: str, text: str) -> Conversation:
        from redraft.engine.chat.messages import Message

        return Conversation(family, "plain", family, (), (Message(role="user", content=text),))

    long = "please find me a quiet hotel near the old harbour with a view of the sea"
    said = [
        saying("a", "Hello there"),
        saying("b", long),
        saying("c", "hello,  THERE!"),
        saying("d", long + " and breakfast"),
        saying("e", "something else that nobody said before"),
    ]
    assert [c.family for c in joined(said, near=True)] == ["a", "b", "a", "b", "e"]
    assert [c.family for c in joined(said, near=False)] == ["a", "b", "a", "d", "e"]


def test_a_missing_package_is_an_error_that_says_what_to_install() -> None:
    with pytest.raises(DataError, match=r"pip install --no-deps nowhere==1\.0"):
        package_folder("nowhere_to_be_found", "nowhere==1.0")

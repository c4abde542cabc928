"""What an assistant says after its calls is read off the results, and is always the same."""

from __future__ import annotations

import pytest

from redraft.engine.chat.messages import Tool
from redraft.retrain.data.closings import missing_parameters, missing_tool, no_tool_fits, tell

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ('{"current_working_directory": "/home"}', "The current working directory is /home."),
        ('{"fuelLevel": 15.5}', "The fuel level is 15.5."),
        ('{"error": "No such file."}', "No such file."),
        ("Error during execution: bad argument", "bad argument."),
        ('{"matches": ["a", "b", "c"]}', "The matches are a, b and c."),
        ('{"costs": [1520.0]}', "The costs is 1520.0."),
        ('{"matches": []}', "There are no matches."),
        ('{"locked": true}', "Locked: yes."),
        ('{"message": "The order was sent today"}', "The order was sent today."),
        ("user_17", "The result is user_17."),
    ],
)
def test_a_result_is_put_into_words(result: str, said: str) -> None:
    assert tell([("f", result)], "session/1").endswith(said)


def test_nothing_to_tell_is_done_and_long_results_are_shortened() -> None:
    assert len(tell([("f", "None"), ("g", "{}")], "session/2")) < 30
    assert len(tell([("cat", '{"file_content": "%s"}' % ("word " * 500))], "session/2")) < 260


def test_wordings_vary_by_turn_and_never_by_run() -> None:
    for say in (
        lambda key: tell([("f", "None")], key),
        missing_tool,
        lambda key: missing_parameters(("file_name",), key),
        lambda key: no_tool_fits((Tool("f", "Adds two numbers. Really."),), key),
    ):
        said = {say(f"session/{turn}") for turn in range(60)}
        assert 4 <= len(said) <= 8
        assert say("session/0") == say("session/0")


def test_refusals_name_the_tools_and_questions_the_parameters() -> None:
    assert "f (adds two numbers)" in no_tool_fits((Tool("f", "Adds two numbers. Really."),), "k")
    assert "card id and travel date" in missing_parameters(("card_id", "travelDate"), "k")

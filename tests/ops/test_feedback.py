"""What a real deployment keeps of its answers: exactly what was served, whatever ends its gateway."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from redraft.engine.chat.tokenizer import Tokenizer
from redraft.engine.checkpoints import DEFAULT_MODEL
from redraft.feedback.events import START, Event, SpanEvent, TurnEvent, session_hash
from redraft.feedback.local_contexts import LocalContextStore
from redraft.feedback.segments import SegmentLog

from .test_deployment import Shell, short_folder

pytestmark = pytest.mark.integration

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Deployed:
    """A deployment that takes every session as baseline."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self.folder = shell.folder / "redraft" / "feedback" / DEFAULT_MODEL
        self.contexts = LocalContextStore(self.folder / "contexts")

    def post(self, path: str, session: str, **body: Any) -> dict[str, Any]:
        response = httpx.post(
            f"{self.shell.state().url}{path}",
            json={"model": DEFAULT_MODEL, **body},
            headers={"x-redraft-session": session},
            timeout=60,
            trust_env=False,
        )
        found: dict[str, Any] = response.raise_for_status().json()
        return found

    def ask(self, session: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
        statistics = {"return_statistics": True}
        asked = {"messages": messages, "tools": [TOOL], "temperature": 0, "max_tokens": 30, "redraft": statistics}
        return self.post("/v1/chat/completions", session, **asked)

    def events(self, session: str) -> list[Event]:
        name = session_hash("default", session)
        events, _ = SegmentLog(self.folder / "events").read(START, 10_000)
        return [event for event in events if event.origin.session == name]

    def wait_for(self, session: str, turns: int) -> list[Event]:
        """The session's events, once those of so many turns are written."""
        self.shell.run_until(lambda done: f"answers: {turns} " in done.stdout, "feedback", "status")
        return self.events(session)


@pytest.fixture(scope="module")
def deployed() -> Iterator[Deployed]:
    with short_folder() as folder:
        shell = Shell(folder, REDRAFT_FEEDBACK__BASELINE_SHARE="1", REDRAFT_ENGINE__LOSSLESS="tolerant")
        up = shell.run("up")
        assert up.returncode == 0, up.stderr
        yield Deployed(shell)
        shell.run("down")


def test_a_session_leaves_its_counts_and_tokens_survives_a_kill_and_is_forgotten_when_asked(
    deployed: Deployed, default_target: Path
) -> None:
    """One story, for each part goes on from what the one before left."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]
    answers, prompts = [], []
    for follow in ("And in Rome?", ""):
        prompts.append(deployed.post("/v1/tokenize", "s", messages=messages, tools=[TOOL])["tokens"])
        answers.append(deployed.ask("my-session", messages))
        said = answers[-1]["choices"][0]["message"]
        messages += [
            {key: said[key] for key in ("role", "content", "tool_calls") if said.get(key)},
            {"role": "user", "content": follow},
        ]
    events = deployed.wait_for("my-session", turns=2)
    turns = [event for event in events if isinstance(event, TurnEvent)]
    spans = [event for event in events if isinstance(event, SpanEvent)]
    tokenizer = Tokenizer.from_folder(default_target)
    for answer, prompt, turn, span in zip(answers, prompts, turns, spans, strict=True):
        length = answer["redraft"]["accept_length"]
        assert sum(counts.committed for counts in turn.counts) == length["committed_tokens"] > 0
        assert sum(counts.verify_steps for counts in turn.counts) == length["verify_steps"] > 0
        assert {counts.drafter.id for counts in turn.counts} == {
            each["version"] for each in answer["redraft"]["drafters"]
        }
        assert sum(counts.explored_steps for counts in turn.counts) > 0, "the default length is fixed"
        assert turn.context is not None
        context = deployed.contexts.get("default", turn.context)
        assert context is not None
        assert list(context.token_ids[: context.prompt_tokens]) == prompt
        said = context.token_ids[context.prompt_tokens :]
        assert len(said) == answer["usage"]["completion_tokens"]
        message = answer["choices"][0]["message"]
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        assert all(part in tokenizer.decode(said) for call in calls for part in (call["name"], call["arguments"]))
        assert (message["content"] or "").strip() in tokenizer.decode(said)
        assert (span.reason, span.context) == ("baseline", turn.context)
        assert span.target_tokens == context.token_ids[span.start : span.end] == said[1:]
        assert span.entropies is not None
        assert len(span.entropies) == len(span.target_tokens)
    assert turns[1].origin.session == turns[0].origin.session

    gateway = deployed.shell.state().services["gateway"].process
    assert gateway
    gateway.send(signal.SIGKILL)
    deployed.shell.run_until(lambda done: gateway != deployed.shell.state().services["gateway"].process, "status")
    assert deployed.shell.run("up").returncode == 0
    deployed.ask("my-session", messages[:1])
    later = deployed.wait_for("my-session", turns=3)
    assert later[: len(events)] == events
    assert len(later) > len(events)

    shown = deployed.shell.run("feedback", "show")
    assert session_hash("default", "my-session") in shown.stdout
    assert "baseline" in shown.stdout
    deployed.ask("another", messages[:1])
    deployed.wait_for("another", turns=4)
    erased = deployed.shell.run("feedback", "erase", "--tenant", "default", "--session", "my-session")
    assert erased.stdout == f"Erased {len(later)} events and the tokens of 3 turns\n"
    assert deployed.events("my-session") == []
    assert deployed.contexts.get("default", turns[0].context or "") is None
    assert len(deployed.wait_for("another", turns=1)) == 2


def test_feedback_that_is_off_keeps_nothing_and_says_so(tmp_path: Path) -> None:
    shell = Shell(tmp_path, REDRAFT_FEEDBACK__ENABLED="false")
    status = shell.run("feedback", "status")
    assert (status.returncode, status.stderr) == (0, "")
    assert "feedback.enabled is off" in status.stdout
    assert "answers: 0" in status.stdout
    assert not (tmp_path / "redraft" / "feedback").exists()
    assert shell.run("feedback", "erase", "--tenant", "x").stdout == "Erased 0 events and the tokens of 0 turns\n"
    shown = shell.run("feedback", "show")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert re.fullmatch(
        r"Nothing is kept in .*/feedback/.* yet\. .*redraft up; but feedback\.enabled is off\n", shown.stdout
    )


def test_what_is_no_part_of_the_log_is_named_and_sizes_are_for_people(tmp_path: Path) -> None:
    events = tmp_path / "events"
    for name in ("old.seg", "²", "²²²²²²²²²²²².seg", "000000000001.seg"):
        (events / name).mkdir(parents=True)
    (events / "000000000002.seg").write_bytes(bytes(3 << 19))
    status = Shell(tmp_path, REDRAFT_FEEDBACK__FOLDER=str(tmp_path)).run("feedback", "status")
    assert (status.returncode, status.stderr) == (0, "")
    assert "events take 1.5 MiB, tokens 0 bytes, and they may 2.0 GiB" in status.stdout
    assert "passed over: 000000000001.seg, old.seg, ²" in status.stdout

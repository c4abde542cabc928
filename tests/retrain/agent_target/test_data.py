"""What is imitated is of train families: whole turns that fit the window, and replies that the base ended by itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import pytest

from redraft.engine.chat.encoding import ChatEncoder
from redraft.engine.chat.messages import Message, Tool, ToolCall
from redraft.engine.checkpoints import identity
from redraft.engine.checkpoints.adapter import MAX_RANK
from redraft.engine.types import SamplingParams
from redraft.retrain.agent_target import data
from redraft.retrain.agent_target.data import prepare
from redraft.retrain.agent_target.prepared import Example
from redraft.retrain.agent_target.recipe import Recipe, with_settings
from redraft.retrain.agent_target.responses import score
from redraft.retrain.data import generate, store
from redraft.retrain.data.conversation import Conversation, Source
from redraft.retrain.data.errors import DataError
from redraft.retrain.data.prompts import Prompts
from redraft.retrain.data.responses import Response
from redraft.retrain.data.splits import Split, split_of
from redraft.retrain.errors import TrainingError

pytestmark = pytest.mark.unit
EOS = 257
ADD = Tool("add", parameters={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
REPLY = "Two."


def family(source: Source, split: Split, number: int) -> str:
    """The ``number``-th name that falls into a split."""
    found = (name for name in map(str, range(10_000)) if split_of(source, name) == split)
    return [next(found) for _ in range(number + 1)][-1]


def calling(split: Split, number: int) -> Conversation:
    call = Message("assistant", None, (ToolCall("c", "add", json.dumps({"a": number})),))
    messages = (Message("user", f"add {number} ({split})"), call)
    name = f"simple_python_{split}-{number}"
    return Conversation(name, "bfcl-single", family("bfcl-single", split, number), (ADD,), messages, truth=True)


def refusing(split: Split, number: int) -> Conversation:
    messages = (Message("user", f"sing {number} ({split})"), Message("assistant", "I cannot."))
    name = f"irrelevance_{split}-{number}"
    return Conversation(name, "bfcl-single", family("bfcl-single", split, 9 + number), (ADD,), messages, truth=True)


def session(turns: int, start: int = 0) -> Conversation:
    messages = [m for turn in range(turns) for m in (Message("user", f"turn {turn}"), Message("assistant", "x" * 40))]
    name = family("bfcl-multi-turn", "train", 0)
    return Conversation(f"s{turns}-{start}", "bfcl-multi-turn", name, (ADD,), tuple(messages), start, truth=True)


def plain(split: Split, number: int) -> Conversation:
    messages = (Message("user", f"say {number} ({split})"),)
    return Conversation(f"p-{split}-{number}", "plain", family("plain", split, number), (), messages)


@pytest.fixture(scope="session")
def base(make_checkpoint: Callable[..., Path]) -> Path:
    folder = make_checkpoint(max_position_embeddings=8192)
    template = resources.files("redraft.engine.chat").joinpath("smollm2.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="session")
def chat(base: Path) -> ChatEncoder:
    return ChatEncoder.from_folder(base)


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Conversation]]:
    """The conversations of each source, to be filled; ground truth is what the tiny cases say."""
    found: dict[str, list[Conversation]] = {"bfcl-single": [], "bfcl-multi-turn": [], "plain": []}
    for conversations in (calling, refusing):
        for split, count in (("train", 3), ("calibrate", 2), ("test", 2), ("gate", 2)):
            found["bfcl-single"] += [conversations(split, number) for number in range(count)]
    for split in ("train", "calibrate", "test", "gate"):
        found["plain"] += [plain(split, number) for number in range(4)]

    def answers(category: str) -> dict[str, list[Any]]:
        ids = [c.id for c in found["bfcl-single"] if c.id.startswith(f"{category}_")]
        return {name: [{"add": {"a": [int(name.rpartition("-")[2])]}}] for name in ids}

    monkeypatch.setattr(data, "answers", answers)
    monkeypatch.setattr(data, "SOURCES", {source: lambda s=source: iter(found[s]) for source in found})
    return found


WriteReplies = Callable[..., Path]


@pytest.fixture
def write_replies(base: Path, chat: ChatEncoder, tmp_path: Path) -> WriteReplies:
    """Returns a function that writes a folder of prompts and the answers that ``reply`` gives them."""

    def write(
        conversations: list[Conversation],
        reply: Callable[[str], tuple[str, bool, bool]] = lambda id_: (REPLY, True, False),
        **manifest: Any,
    ) -> Path:
        folder = tmp_path / "replies"
        shutil.rmtree(folder, ignore_errors=True)
        prompts = list(Prompts(chat, conversations))
        counted = store.save_prompts(folder, conversations, prompts)
        writer = store.ResponseWriter(folder)
        for prompt in prompts:
            text, ends, loops = reply(prompt.id)
            ids = (*chat.tokenizer.encode_ordinary(text), *([EOS] if ends else []))
            sampling = SamplingParams(temperature=0)
            writer.add(Response(prompt.id, sampling, ids, "stop" if ends else "length", loops))
        writer.close()
        facts: dict[str, Any] = {
            "command": "test",
            "commit": "abc",
            "model": "tiny",
            "chat": generate.chat_hash(base),
            "target": identity(base),
            "sources": ("plain",),
            "sessions": counted["sessions"],
            "sessions_cut": 0,
            "prompts_repeated": 0,
            "prompts": counted["prompts"],
            "prompt_tokens": counted["tokens"],
            "counts": {},
        }
        store.save_manifest(folder, store.Manifest(**(facts | manifest)))
        return folder

    return write


def texts(chat: ChatEncoder, example: Example) -> list[str]:
    return [chat.tokenizer.decode(example.ids[start:end]) for start, end in example.spans]


def test_examples_are_the_train_families_calls_refusals_and_replies(
    base: Path, chat: ChatEncoder, sources: dict[str, list[Conversation]], write_replies: WriteReplies
) -> None:
    folder = write_replies(sources["plain"])
    prepared = prepare(base, folder, Recipe(plain_share=0.5, refusal_share=0.25))
    assert (prepared.identity, prepared.commit) == (identity(base), "abc")
    spoken = [chat.tokenizer.decode(example.ids) for example in prepared.train]
    assert all("(train)" in text for text in spoken)
    assert all("(calibrate)" in chat.tokenizer.decode(example.ids) for example in prepared.held_out)
    assert prepared.counts == {"bfcl-single": 4, "plain": 4}
    supervised = [text for example in prepared.train for text in texts(chat, example)]
    calls = [f'<tool_call>\n{{"name": "add", "arguments": {{"a": {number}}}}}\n</tool_call>' for number in range(3)]
    assert sorted(supervised) == sorted([*calls, "I cannot.", *[REPLY] * 4])
    assert all(example.ids[end - 1] == EOS for example in prepared.train for _, end in example.spans)


def test_cases_are_of_the_test_split_and_have_the_ids_of_prompts(
    base: Path, chat: ChatEncoder, sources: dict[str, list[Conversation]], write_replies: WriteReplies
) -> None:
    cases = prepare(base, write_replies(sources["plain"]), Recipe()).cases
    prompts = {prompt.id for prompt in Prompts(chat, sources["bfcl-single"]) if prompt.split == "test"}
    assert {case.id for case in cases} == prompts
    assert [case.calls for case in cases] == [(("add", {"a": [0]}),), (("add", {"a": [1]}),), (), ()]


@pytest.mark.parametrize(
    "reply",
    [("loops", (REPLY, True, True)), ("never ends", (REPLY, False, False)), ("is long", ("x" * 5000, True, False))],
)
def test_a_reply_that_loops_does_not_end_or_is_too_long_is_not_imitated(
    base: Path,
    sources: dict[str, list[Conversation]],
    write_replies: WriteReplies,
    reply: tuple[str, tuple[str, bool, bool]],
) -> None:
    spoilt = {"p-train-1:1", "p-train-2:1"}
    folder = write_replies(sources["plain"], lambda id_: reply[1] if id_ in spoilt else (REPLY, True, False))
    assert prepare(base, folder, Recipe(plain_share=0.9)).counts["plain"] == 2


@pytest.mark.parametrize("turns", [1, 2, 5])
def test_a_long_session_is_cut_after_the_last_turn_that_fits(
    base: Path, chat: ChatEncoder, sources: dict[str, list[Conversation]], write_replies: WriteReplies, turns: int
) -> None:
    whole = session(turns)
    sources["bfcl-multi-turn"].append(session(8))
    fits = len(chat.encode_chat(whole.messages, whole.tools, add_generation_prompt=False)) - 1
    for window, expected in ((fits, turns), (fits - 1, turns - 1)):
        prepared = prepare(base, write_replies(sources["plain"]), Recipe(window=window))
        found = [example for example in prepared.train if example.source == "bfcl-multi-turn"]
        assert [len(example.spans) for example in found] == ([expected] if expected else [])
        assert all(
            example.ids == chat.encode_chat(whole.messages, whole.tools)[: len(example.ids)] for example in found
        )


def test_history_that_nobody_is_asked_for_is_not_supervised(
    base: Path, chat: ChatEncoder, sources: dict[str, list[Conversation]], write_replies: WriteReplies
) -> None:
    sources["bfcl-multi-turn"].append(session(3, start=4))
    prepared = prepare(base, write_replies(sources["plain"]), Recipe())
    [example] = [example for example in prepared.train if example.source == "bfcl-multi-turn"]
    assert len(example.spans) == 1
    assert example.spans[0][1] == len(example.ids)


def test_the_same_recipe_prepares_the_same_data(
    base: Path, sources: dict[str, list[Conversation]], write_replies: WriteReplies
) -> None:
    folder = write_replies(sources["plain"])
    recipe = Recipe(plain_share=0.3)
    assert prepare(base, folder, recipe).sha256 == prepare(base, folder, recipe).sha256
    other = msgspec.structs.replace(recipe, seed=2)
    assert prepare(base, folder, recipe).sha256 != prepare(base, folder, other).sha256


def test_replies_of_another_model_are_refused(
    base: Path, sources: dict[str, list[Conversation]], write_replies: WriteReplies
) -> None:
    with pytest.raises(DataError, match=r"are of the target 1{64}, not of \w{64}"):
        prepare(base, write_replies(sources["plain"], target="1" * 64), Recipe())
    with pytest.raises(DataError, match="no whole reply to a plain prompt of the train split"):
        prepare(base, write_replies([plain("test", 0)]), Recipe())


def test_a_folder_of_answers_is_scored_without_the_sources(
    base: Path, sources: dict[str, list[Conversation]], write_replies: WriteReplies
) -> None:
    prepared = prepare(base, write_replies(sources["plain"]), Recipe())
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 0}}\n</tool_call>'
    asked = [*sources["bfcl-single"], *sources["plain"]]
    folder = write_replies(asked, lambda id_: (call, True, "p-test-0" in id_))
    found = score(folder, prepared, base)
    assert found["responses"] == 2 + 2 + 4
    assert (found["simple_cases"], found["valid_call_share"], found["correct_call_share"]) == (2, 1.0, 0.5)
    assert (found["irrelevant_cases"], found["no_call_share"]) == (2, 0.0)
    assert (found["looping_share_agent_prompts"], found["looping_share_plain_prompts"]) == (0.0, 0.25)


def test_settings_change_the_recipe_and_unknown_ones_are_named() -> None:
    assert with_settings(Recipe(), ["epochs=2", "learning_rate=1e-3"]) == Recipe(epochs=2, learning_rate=1e-3)
    for setting, said in (
        ("epoch=2", "no setting 'epoch' in the recipe; there are: seed"),
        ("epochs=two", "epochs=two"),
    ):
        with pytest.raises(TrainingError, match=said):
            with_settings(Recipe(), [setting])


def test_the_recipe_can_be_merged() -> None:
    assert Recipe().rank <= MAX_RANK
    assert Recipe().alpha / Recipe().rank in (0.5, 1, 2, 4)

"""The drafter that `redraft bench loop` compares with: all sessions after the rewrite, and ten times the training.

    python -m redraft.ops.bench.loop_offline answer ANSWERS
    python -m redraft.ops.bench.loop_offline train ANSWERS RUN

The first has the target answer, on a CPU, where answers are bit-equal to what serving says; the second runs on a GPU
host and writes ops/bench/results/loop_offline.json: what the drafter accepted of each evaluation session, and the hash
of its weights, which are not kept in the repository.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import torch
import typer
from msgspec import Struct

from redraft.engine.chat.encoding import ChatEncoder
from redraft.engine.checkpoints import DEFAULT_MODEL, resolve
from redraft.engine.config import EngineConfig
from redraft.engine.drafters.loading import bundled, content_id
from redraft.engine.embedded.core import EngineCore
from redraft.engine.embedded.server import build_core
from redraft.engine.types import GREEDY, GenerationRequest, StopConditions, is_looping
from redraft.ops.bench.report import progress
from redraft.ops.demo.scenario import CHANGES, MAX_TOKENS, after, evaluation
from redraft.retrain.config import TrainConfig
from redraft.retrain.data.conversation import Conversation
from redraft.retrain.data.sample import Sample
from redraft.retrain.errors import TrainingError
from redraft.retrain.features import cache_budget
from redraft.retrain.features_store import MemoryStore
from redraft.retrain.finetune import finetune
from redraft.retrain.frozen import FrozenTarget, pick_device
from redraft.retrain.paradigms.kinds import load_model
from redraft.retrain.provenance import present_commit
from redraft.retrain.replay import ModelReplay, replay
from redraft.retrain.traffic import TrafficData

RESULT = Path(__file__).resolve().parent / "results" / "loop_offline.json"
BLOCK_LENGTH = 7
HELD_OUT = 20
"""Every so many families one chooses the step."""

app = typer.Typer(no_args_is_help=True, add_completion=False)


class Answer(Struct, frozen=True):
    """The target's greedy answer to one turn of a session."""

    session: str
    turn: int
    tokens: tuple[int, ...]


class Accepted(Struct, frozen=True):
    """What a drafter would have committed of one answer; ``digest`` is of the answer's tokens."""

    digest: str
    committed: int
    verify_steps: int


class Offline(Struct, frozen=True, kw_only=True):
    """The offline drafter: where it comes from, and what it accepts of ``answers``, by session and turn."""

    target: str
    weights: str
    command: str
    commit: str | None
    sessions: int
    samples: int
    blocks: int
    """Blocks that were trained on: what compute is compared by."""
    answers: dict[str, Accepted]


def key(session: str, turn: int) -> str:
    """A turn's name in `Offline.answers`."""
    return f"{session}:{turn}"


def digest(tokens: Sequence[int]) -> str:
    return hashlib.blake2b(msgspec.json.encode(list(tokens)), digest_size=8).hexdigest()


@app.command()
def answer(
    out: Annotated[Path, typer.Argument(help="File to write.")],
    every: Annotated[int, typer.Option(min=1, help="Only every so many sessions.")] = 1,
) -> None:
    """Have the target answer every turn after the rewrite, as serving would on this machine."""
    core = build_core(EngineConfig(kv_bytes=4 << 30))[0]
    encoder = ChatEncoder.from_folder(resolve(DEFAULT_MODEL))
    sessions = [*after(), *evaluation(*CHANGES.values())][::every]
    out.write_bytes(msgspec.json.encode(list(_answers(core, encoder, sessions))))


@app.command()
def train(
    answers: Annotated[Path, typer.Argument(help="What `answer` wrote.")],
    out: Annotated[Path, typer.Argument(help="The run's folder.")],
    model: Annotated[str, typer.Option(help="The target that answered: a name or a folder.")] = DEFAULT_MODEL,
    steps: Annotated[int, typer.Option(min=1)] = 1500,
    sequences: Annotated[int, typer.Option(min=1)] = 32,
    blocks: Annotated[int, typer.Option(min=1)] = 32,
    learning_rate: Annotated[float, typer.Option()] = 3e-4,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    commit: Annotated[str | None, typer.Option(help="Of this code, where it is no git checkout.")] = None,
    result: Annotated[Path, typer.Option(help="File to write.")] = RESULT,
) -> None:
    """Train on all sessions but those of the test families, and say what is accepted of these."""
    at = pick_device(device)
    folder = resolve(model)
    target = FrozenTarget.load(folder, at, torch.bfloat16)
    serving = bundled(target.identity)
    if serving is None:
        raise TrainingError(f"{model} is not the target that the bundled drafter is for")
    encoder = ChatEncoder.from_folder(folder)
    found = msgspec.json.decode(answers.read_bytes(), type=list[Answer])
    learnt = list(samples(encoder, after(), found))
    families = sorted({each.family for each in learnt})
    held_out = set(families[::HELD_OUT])
    data = TrafficData(
        target=target.identity,
        cut=math.inf,
        train=tuple(each for each in learnt if each.family not in held_out),
        replay=(),
        validation=tuple(each for each in learnt if each.family in held_out),
        gate=(),
        anchor=(),
        left_out={},
        begun=frozenset(),
        learnt=frozenset(),
    )
    config = TrainConfig(
        steps=steps,
        sequences=sequences,
        blocks=blocks,
        loss="tokens",
        weights="dpace",
        learning_rate=learning_rate,
        warmup=50,
        eval_every=max(1, steps // 10),
        held_out=200,
    )
    store = MemoryStore(cache_budget(None, at))
    candidate = finetune(
        data, target=target, serving=serving, out=out, config=config, features=store, progress=_printed
    )
    drafting = ModelReplay(load_model(candidate.folder, at), target)
    judged = list(samples(encoder, evaluation(*CHANGES.values()), found))
    accepted = {}
    for each in replay(judged, drafting, [BLOCK_LENGTH]):
        length = each.counts[BLOCK_LENGTH].length
        start, end = each.sample.spans[0]
        tokens = each.sample.token_ids[start:end]
        accepted[each.sample.id] = Accepted(digest(tokens), length.committed, length.verify_steps)
    offline = Offline(
        target=target.identity,
        weights=content_id(candidate.folder),
        command=f"train --steps {steps} --sequences {sequences} --blocks {blocks} --learning-rate {learning_rate}",
        commit=commit or present_commit(),
        sessions=len({each.session for each in data.train}),
        samples=len(data.train),
        blocks=steps * sequences * blocks,
        answers=accepted,
    )
    result.write_bytes(msgspec.json.format(msgspec.json.encode(offline)) + b"\n")
    progress(f"{result}: held out {candidate.before} before, {candidate.after} at step {candidate.step}")


def samples(encoder: ChatEncoder, sessions: Iterable[Conversation], answers: Iterable[Answer]) -> Iterator[Sample]:
    """The answered turns of sessions, each a sample by its `key`; its prompt is rendered as serving does."""
    answered = {key(each.session, each.turn): each.tokens for each in answers}
    for session in sessions:
        for turn in session.asked_turns:
            tokens = answered.get(key(session.id, turn), ())
            if len(tokens) > 1:
                prompt = encoder.encode_chat(session.messages[:turn], session.tools)
                yield Sample(
                    id=key(session.id, turn),
                    source=session.source,
                    family=session.family,
                    split="train",
                    session=session.id,
                    token_ids=(*prompt, *tokens),
                    spans=((len(prompt), len(prompt) + len(tokens)),),
                    greedy=True,
                    looping=is_looping(tokens),
                )


def _answers(core: EngineCore, encoder: ChatEncoder, sessions: Sequence[Conversation]) -> Iterator[Answer]:
    """Greedy answers, a few at a time; what is in the batch changes none of them."""
    turns = ((session, turn) for session in sessions for turn in session.asked_turns)
    total = sum(len(session.asked_turns) for session in sessions)
    asked: dict[str, tuple[str, int]] = {}
    tokens: dict[str, list[int]] = {}
    for number in itertools.count():
        for session, turn in itertools.islice(turns, max(0, 4 - len(core.request_ids))):
            name = key(session.id, turn)
            asked[name], tokens[name] = (session.id, turn), []
            prompt = encoder.encode_chat(session.messages[:turn], session.tools)
            core.submit(
                GenerationRequest(
                    request_id=name,
                    prompt_ids=prompt,
                    stopping=StopConditions(max_tokens=MAX_TOKENS),
                    sampling=GREEDY,
                )
            )
        if not core.request_ids:
            return
        for commit in core.step():
            tokens[commit.request_id] += commit.token_ids
            if commit.finish_reason:
                yield Answer(*asked[commit.request_id], tuple(tokens.pop(commit.request_id)))
        if number % 500 == 0:
            progress(f"{len(asked)} of {total} turns")


def _printed(step: int, steps: int, text: str) -> None:
    if step % max(1, steps // 20) == 0 or step == steps:
        progress(f"{step}/{steps} {text}")


def load(file: Path = RESULT) -> Offline | None:
    """What was committed; None if nothing was."""
    return msgspec.json.decode(file.read_bytes(), type=Offline) if file.exists() else None


if __name__ == "__main__":
    app()

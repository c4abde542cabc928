from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from redraft.engine.chat.tokenizer import Tokenizer
from redraft.engine.drafters.base import Drafter
from redraft.engine.drafters.dflash import DFlashDrafter
from redraft.engine.drafters.dflash_checkpoint import DFlashConfig
from redraft.engine.embedded.core import EngineCore
from redraft.engine.policy.fixed import FixedLength
from redraft.engine.types import (
    Commit,
    DrafterVersion,
    GenerationRequest,
    SamplingParams,
    StopConditions,
    VerifyStep,
)
from redraft.retrain.config import TrainConfig
from redraft.retrain.data.sample import Sample
from redraft.retrain.dflash.model import DFlashModel
from redraft.retrain.dflash.strategy import DFlashStrategy
from redraft.retrain.features import FeatureCache, FeatureCapture
from redraft.retrain.frozen import FrozenTarget
from redraft.retrain.replay import DFlashReplay, walk
from redraft.retrain.trainer import DRAFTER, Trainer

from ..conftest import CPU, make_record, make_sample, random_tokens

pytestmark = pytest.mark.unit


@dataclass
class Served:
    """A greedy answer of the real engine."""

    tokens: list[int]
    steps: list[VerifyStep]


def serve(
    target: FrozenTarget,
    checkpoint: Path,
    prompt: list[int],
    drafter: Drafter | None,
    *,
    length: int,
    stop: int,
    most: int,
) -> Served:
    core = EngineCore(
        target.target,
        target.target.new_kv(512),
        identity=target.identity,
        tokenizer=Tokenizer.from_folder(checkpoint),
        grammars=None,
        context_length=512,
        drafter=drafter,
        policy=FixedLength(length + 1),
        block_size=4,
        max_running=1,
        max_waiting=1,
    )
    stopping = StopConditions(max_tokens=most, token_ids=(stop,), ignore_eos=True)
    core.submit(
        GenerationRequest(
            request_id="r", prompt_ids=tuple(prompt), stopping=stopping, sampling=SamplingParams(temperature=0)
        )
    )
    commits: list[Commit] = []
    while core.running or core.waiting:
        commits += core.step()
    steps = [commit.verify_step for commit in commits if commit.verify_step]
    return Served([token for commit in commits for token in commit.token_ids], steps)


def answered(target: FrozenTarget, checkpoint: Path, seed: int) -> Sample:
    """A prompt with the target's own greedy answer, ended by its first new token after the 20th."""
    prompt = random_tokens(30, seed)
    free = serve(target, checkpoint, prompt, None, length=3, stop=319, most=80).tokens
    end = next(at for at in range(20, len(free)) if free[at] not in free[:at])
    return make_sample([*prompt, *free[: end + 1]], [(30, 30 + end + 1)])


def test_one_sample_is_learnt_to_the_whole_block_in_replay_and_in_the_engine(
    target: FrozenTarget, checkpoint: Path, shape: DFlashConfig, tmp_path: Path
) -> None:
    sample = answered(target, checkpoint, seed=5)
    config = TrainConfig(
        steps=150, sequences=1, blocks=64, warmup=10, learning_rate=3e-3, save_every=150, weight_decay=0
    )
    record = make_record(config, target)
    model = DFlashModel(shape, CPU, seed=0)
    strategy = DFlashStrategy(model, target, config, record)
    capture = FeatureCache(FeatureCapture(target.target, shape.feature_layers), 1 << 24, hidden=False)
    Trainer(strategy, [sample], capture, config, tmp_path, record).run()

    ((start, end),) = sample.spans
    reloaded = DFlashModel.load(tmp_path / DRAFTER, CPU)
    counts = walk(sample, DFlashReplay(reloaded, target)(sample), 3)
    assert counts.committed == end - 1 - start
    assert counts.verify_steps == -(-(end - 1 - start) // 4), "a block was not wholly accepted"

    serving = DFlashDrafter(tmp_path / DRAFTER, DrafterVersion("dflash", "1"), target.target, target.identity, 512)
    prompt, answer = list(sample.token_ids[:start]), list(sample.token_ids[start:end])
    served = serve(target, checkpoint, prompt, serving, length=3, stop=answer[-1], most=200)
    assert served.tokens == answer
    assert len(served.steps) == counts.verify_steps

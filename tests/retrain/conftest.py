from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from redraft.engine.chat.tokenizer import Tokenizer
from redraft.engine.checkpoints import identity
from redraft.engine.checkpoints.checkpoint import load_config
from redraft.engine.drafters.base import Drafter
from redraft.engine.drafters.dflash_checkpoint import DFlashConfig
from redraft.engine.drafters.eagle3_checkpoint import Eagle3Config
from redraft.engine.drafters.mtp_checkpoint import MtpConfig
from redraft.engine.embedded.core import EngineCore
from redraft.engine.policy.fixed import FixedLength
from redraft.engine.types import Commit, GenerationRequest, SamplingParams, StopConditions, VerifyStep
from redraft.retrain.config import TrainConfig
from redraft.retrain.data.sample import Sample
from redraft.retrain.frozen import FrozenTarget
from redraft.retrain.paradigms.base import DraftModel
from redraft.retrain.paradigms.dflash import DFlashModel
from redraft.retrain.paradigms.eagle3 import Eagle3Model
from redraft.retrain.paradigms.mtp import MtpModel
from redraft.retrain.provenance import Provenance

CPU = torch.device("cpu")
EOS = 257


@pytest.fixture(scope="session")
def checkpoint(make_checkpoint: Callable[..., Path]) -> Path:
    """A tiny target deep enough for a drafter of two layers."""
    torch.set_num_threads(1)
    return make_checkpoint(num_hidden_layers=6, scale=0.15)


@pytest.fixture(scope="session")
def target(checkpoint: Path) -> FrozenTarget:
    return FrozenTarget.load(checkpoint, CPU, torch.float32)


@pytest.fixture(scope="session")
def shape(checkpoint: Path) -> DFlashConfig:
    config = load_config(checkpoint)
    return DFlashConfig.for_target(config, identity(checkpoint), layers=2, block_size=4, mask_token_id=3)


@pytest.fixture
def drafter(shape: DFlashConfig) -> DFlashModel:
    """Random weights large enough for every part to matter."""
    model = DFlashModel(shape, CPU, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0 if parameter.dim() > 1 else 1.0)
    return model


SIZE = 4
LAYERS = (0, 2, 4)
WORDS = torch.arange(3, 320)


def dflash(target: FrozenTarget, *, injection: bool = True, autoregressive: bool = False) -> DraftModel:
    shape = DFlashConfig.for_target(target.target.config, target.identity, layers=2, block_size=SIZE, mask_token_id=3)
    shape = replace(shape, feature_layers=LAYERS, injection=injection, autoregressive=autoregressive)
    return DFlashModel(shape, CPU, seed=1)


def eagle3(target: FrozenTarget, layers: int) -> DraftModel:
    config, identity = target.target.config, target.identity
    shape = Eagle3Config.for_target(config, identity, layers=layers, block_size=SIZE, draft_vocab=len(WORDS))
    return Eagle3Model(replace(shape, feature_layers=LAYERS), WORDS, CPU, seed=1)


def mtp(target: FrozenTarget) -> DraftModel:
    return MtpModel(MtpConfig.for_target(target.target.config, target.identity, block_size=SIZE), CPU, seed=1)


PARADIGMS: dict[str, Callable[[FrozenTarget], DraftModel]] = {
    "dflash": dflash,
    "diffusion only": lambda target: dflash(target, injection=False),
    "injection only": lambda target: dflash(target, autoregressive=True),
    "eagle3 of 1 layer": lambda target: eagle3(target, 1),
    "eagle3 of 3 layers": lambda target: eagle3(target, 3),
    "mtp": mtp,
}


def make_sample(tokens: Sequence[int], spans: Sequence[tuple[int, int]], **changes: Any) -> Sample:
    fields: dict[str, Any] = {
        "id": "sample",
        "source": "plain",
        "family": "family",
        "split": "train",
        "session": "session",
        "greedy": True,
        "looping": False,
    }
    return Sample(token_ids=tuple(tokens), spans=tuple(spans), **(fields | changes))


def make_record(config: TrainConfig, target: FrozenTarget) -> Provenance:
    return Provenance(
        command="test",
        commit=None,
        target=target.identity,
        data="data",
        samples=1,
        tokens=1,
        config=config.model_dump(),
    )


def random_tokens(count: int, seed: int) -> list[int]:
    tokens: list[int] = torch.randint(4, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return tokens


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

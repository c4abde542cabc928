from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from redraft.engine.chat.tokenizer import Tokenizer
from redraft.engine.drafters.dflash_checkpoint import DFlashConfig, save
from redraft.engine.drafters.loading import load_drafter
from redraft.engine.embedded.core import EngineCore
from redraft.engine.policy.cost import CostGrid, CostTable
from redraft.engine.policy.fixed import FixedLength
from redraft.engine.types import Capabilities
from redraft.retrain.config import TrainConfig
from redraft.retrain.data.sample import Sample
from redraft.retrain.features import Captured, FeatureCapture
from redraft.retrain.frozen import FrozenTarget
from redraft.retrain.paradigms.dflash import DFlashModel
from redraft.retrain.strategy import BlockStrategy
from redraft.retrain.trainer import DRAFTER, Trainer

from ..conftest import CPU, make_record, make_sample, random_tokens, serve

SLOTS = 1024

Built = tuple[EngineCore, Capabilities]


@pytest.fixture(scope="session")
def sessions(target: FrozenTarget, checkpoint: Path) -> list[Sample]:
    """The target's own greedy answers to random prompts, one a session."""
    answered = []
    for seed in range(20, 28):
        prompt = random_tokens(30, seed)
        answer = serve(target, checkpoint, prompt, None, length=3, stop=319, most=24).tokens
        tokens = [*prompt, *answer]
        answered.append(make_sample(tokens, [(30, len(tokens))], id=f"turn-{seed}", session=f"session-{seed}"))
    return answered


@pytest.fixture(scope="session")
def untrained(shape: DFlashConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("untrained")
    save(folder, shape, DFlashModel(shape, CPU, seed=1).state_dict(), card="")
    return folder


@pytest.fixture(scope="session")
def trained(
    target: FrozenTarget, shape: DFlashConfig, sessions: list[Sample], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A drafter that has learnt the sessions by heart."""
    folder = tmp_path_factory.mktemp("trained")
    config = TrainConfig(steps=60, sequences=4, blocks=24, warmup=5, learning_rate=5e-3, save_every=60)
    record = make_record(config, target)
    capture = FeatureCapture(target.target, shape.feature_layers)
    strategy = BlockStrategy(DFlashModel(shape, CPU, seed=0), target, config, record)

    def features(samples: Sequence[Sample], lengths: Sequence[int]) -> list[Captured]:
        return capture([each.token_ids[:length] for each, length in zip(samples, lengths, strict=True)])

    Trainer(strategy, sessions, features, config, folder, record).run()
    return folder / DRAFTER


@pytest.fixture(scope="session")
def engine(target: FrozenTarget, checkpoint: Path) -> Callable[[Path], Built]:
    def make(folder: Path) -> Built:
        core = EngineCore(
            target.target,
            target.target.new_kv(SLOTS),
            identity=target.identity,
            tokenizer=Tokenizer.from_folder(checkpoint),
            grammars=None,
            context_length=512,
            drafter=load_drafter(str(folder), target.target, target.identity, SLOTS),
            policy=FixedLength(4),
            block_size=4,
            max_running=1,
            max_waiting=1,
        )
        return core, Capabilities(
            target=target.identity,
            model_name="tiny",
            context_length=512,
            vocab_size=320,
            max_prompt_tokens=511,
            lossless="invariant",
            parameters=frozenset(),
            constrained_decoding=False,
            logprobs=False,
            hot_swap=True,
            telemetry=True,
            draft_prob=True,
        )

    return make


def cost_table(*versions: str, verify: float = 20.0, draft: float = 4.0) -> CostTable:
    """Costs of a pass, flat but for rows: a row more costs a tenth of a millisecond."""
    grid = CostGrid((512,), (1, 101), ((verify, verify + 10),))
    return CostTable(verify=grid, draft=dict.fromkeys(versions, CostGrid((512,), (1,), ((draft,),))))

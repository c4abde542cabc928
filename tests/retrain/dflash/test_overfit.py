from __future__ import annotations

from pathlib import Path

import pytest

from redraft.engine.drafters.dflash import DFlashDrafter
from redraft.engine.drafters.dflash_checkpoint import DFlashConfig
from redraft.engine.types import (
    DrafterVersion,
)
from redraft.retrain.config import TrainConfig
from redraft.retrain.dflash.model import DFlashModel
from redraft.retrain.dflash.strategy import DFlashStrategy
from redraft.retrain.features import FeatureCache, FeatureCapture
from redraft.retrain.features_store import MemoryStore
from redraft.retrain.frozen import FrozenTarget
from redraft.retrain.replay import DFlashReplay, walk
from redraft.retrain.trainer import DRAFTER, Trainer

from ..conftest import CPU, answered, make_record, serve

pytestmark = pytest.mark.unit


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
    capture = FeatureCache(
        FeatureCapture(target.target, shape.feature_layers),
        MemoryStore(1 << 24),
        target,
        layers=shape.feature_layers,
        hidden=False,
    )
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

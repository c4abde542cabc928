from __future__ import annotations

from pathlib import Path

import pytest

from redraft.engine.drafters.loading import load_folder, version_of
from redraft.retrain.config import TrainConfig
from redraft.retrain.features import FeatureCache, FeatureCapture
from redraft.retrain.features_store import MemoryStore
from redraft.retrain.frozen import FrozenTarget
from redraft.retrain.paradigms.kinds import load_model
from redraft.retrain.replay import ModelReplay, walk
from redraft.retrain.strategy import BlockStrategy
from redraft.retrain.trainer import DRAFTER, Trainer

from .conftest import CPU, PARADIGMS, answered, make_record, serve

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("paradigm", [*PARADIGMS])
def test_one_sample_is_learnt_to_the_whole_block_in_replay_and_in_the_engine(
    target: FrozenTarget, checkpoint: Path, tmp_path: Path, paradigm: str
) -> None:
    sample = answered(target, checkpoint, seed=5)
    config = TrainConfig(
        steps=150, sequences=1, blocks=64, warmup=10, learning_rate=3e-3, save_every=150, weight_decay=0
    )
    record = make_record(config, target)
    model = PARADIGMS[paradigm](target)
    layers = model.config.feature_layers
    strategy = BlockStrategy(model, target, config, record)
    capture = FeatureCache(
        FeatureCapture(target.target, layers),
        MemoryStore(1 << 24),
        target,
        layers=layers,
        hidden=False,
    )
    Trainer(strategy, [sample], capture, config, tmp_path, record).run()

    ((start, end),) = sample.spans
    reloaded = load_model(tmp_path / DRAFTER, CPU)
    counts = walk(sample, ModelReplay(reloaded, target)(sample), 3)
    assert counts.committed == end - 1 - start
    assert counts.verify_steps == -(-(end - 1 - start) // 4), "a block was not wholly accepted"

    folder = tmp_path / DRAFTER
    serving = load_folder(folder, version_of(folder), target.target, target.identity, 512)
    prompt, answer = list(sample.token_ids[:start]), list(sample.token_ids[start:end])
    served = serve(target, checkpoint, prompt, serving, length=3, stop=answer[-1], most=200)
    assert served.tokens == answer
    assert len(served.steps) == counts.verify_steps

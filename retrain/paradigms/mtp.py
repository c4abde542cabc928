"""Parallel heads as they are trained; the arithmetic is the serving drafter's (`redraft.engine.drafters.mtp`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redraft.engine.drafters.mtp_checkpoint import MtpConfig, check_fits, load, save
from redraft.retrain.config import TrainConfig
from redraft.retrain.data.sample import Sample
from redraft.retrain.frozen import FrozenTarget
from redraft.retrain.modules import Linear, RMSNorm, draw_weights
from redraft.retrain.paradigms.base import BLOCKS_PER_PASS, DraftModel


class MtpModel(DraftModel):
    """Heads of fp32 weights, drawn from ``seed``."""

    title = "Parallel heads"
    card = (
        "Heads that each propose one slot of a block from the target's last hidden state: a baseline. They only "
        "propose: what is served is the target's own. They belong to the one target named below."
    )

    def __init__(self, config: MtpConfig, device: torch.device, seed: int = 0) -> None:
        super().__init__()
        self.config: MtpConfig = config
        self.fc = Linear(2 * config.hidden, config.hidden)
        self.embedding_norm = RMSNorm(config.hidden, config.rms_eps)
        self.hidden_norm = RMSNorm(config.hidden, config.rms_eps)
        self.norm = RMSNorm(config.hidden, config.rms_eps)
        self.heads = nn.ModuleList(Linear(config.hidden, config.hidden) for _ in range(config.block_size - 1))
        draw_weights(self, seed)
        self.to(device)

    @classmethod
    def create(cls, target: FrozenTarget, config: TrainConfig, samples: Sequence[Sample]) -> Self:
        shape = MtpConfig.for_target(target.target.config, target.identity, block_size=config.block_size)
        return cls(shape, target.target.device, config.seed)

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> Self:
        config, tensors = load(folder)
        model = cls(config, device)
        model.load_state_dict(tensors)
        return model

    def save(self, folder: Path, card: str) -> None:
        save(folder, self.config, self.state_dict(), card)

    def check_fits(self, target: FrozenTarget, where: Path) -> None:
        check_fits(self.config, target.target.config, target.identity, where)

    def recipe(self, config: TrainConfig) -> TrainConfig:
        return config.model_copy(update={"block_size": self.config.block_size})

    def taught(self, features: Tensor, ids: Tensor, starts: Tensor, embedding: Tensor, window: int | None) -> Tensor:
        """No block sees more than one feature, so that ``window`` changes nothing."""
        rows = (starts - 1).clamp(min=0)[:, :, None].expand(-1, -1, features.shape[2])
        embedded = self.embedding_norm(embedding[ids.gather(1, starts)])
        fused = self.fc(torch.cat((embedded, self.hidden_norm(features.gather(1, rows))), dim=-1))
        hidden: Tensor = self.norm(torch.stack([fused + F.silu(head(fused)) for head in self.heads], dim=2))
        return hidden

    @torch.inference_mode()
    def proposals(self, features: Tensor, ids: Tensor, starts: Tensor, target: FrozenTarget) -> list[list[int]]:
        drafted: list[list[int]] = []
        for at in torch.split(starts, BLOCKS_PER_PASS):
            hidden = self.taught(features[None], ids[None], at[None], target.embedding, None)[0]
            drafted += target.target.head(hidden.flatten(0, 1)).argmax(-1).view(hidden.shape[:2]).tolist()
        return drafted

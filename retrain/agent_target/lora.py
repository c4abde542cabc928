"""LoRA on a transformers model: fp32 masters of bf16 matrices beside a frozen bf16 base.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021), with PEFT's initialisation and file format.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from redraft.engine.checkpoints.adapter import CONFIG, WEIGHTS
from redraft.retrain.agent_target.recipe import BASE, LINEAR, Recipe


class LoraLinear(nn.Module):
    """``linear`` (in → out, frozen) plus scale · B A x; A (rank, in) and B (out, rank) take part rounded to bf16."""

    def __init__(self, linear: nn.Linear, recipe: Recipe) -> None:
        super().__init__()
        self.linear = linear
        self.scale = recipe.alpha / recipe.rank
        self.dropout = recipe.dropout
        device = linear.weight.device
        self.lora_a = nn.Parameter(torch.empty(recipe.rank, linear.in_features, device=device))
        self.lora_b = nn.Parameter(torch.zeros(linear.out_features, recipe.rank, device=device))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.lora_a.bfloat16().to(x.dtype), self.lora_b.bfloat16().to(x.dtype)
        update: Tensor = F.linear(F.linear(F.dropout(x, self.dropout, self.training), a), b)
        output: Tensor = self.linear(x) + self.scale * update
        return output


def add_lora(model: nn.Module, recipe: Recipe) -> dict[str, LoraLinear]:
    """Freeze the model, put a LoRA around every linear layer of its blocks, and return them by the layers' names."""
    model.requires_grad_(False)
    found = {name: module for name, module in model.named_modules() if name.rpartition(".")[2] in LINEAR}
    added = {}
    for name, linear in found.items():
        parent, _, attribute = name.rpartition(".")
        assert isinstance(linear, nn.Linear)
        added[name] = LoraLinear(linear, recipe)
        setattr(model.get_submodule(parent), attribute, added[name])
    return added


def save_adapter(folder: Path, loras: dict[str, LoraLinear], recipe: Recipe) -> None:
    """Write the adapter as PEFT does, rounded to bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, lora in loras.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = lora.lora_a.detach().bfloat16().cpu().contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = lora.lora_b.detach().bfloat16().cpu().contiguous()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": BASE,
        "r": recipe.rank,
        "lora_alpha": recipe.alpha,
        "lora_dropout": recipe.dropout,
        "target_modules": list(LINEAR),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

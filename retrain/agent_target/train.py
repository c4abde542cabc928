"""Training the adapter: one loop, one device."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from redraft.engine.checkpoints import identity
from redraft.retrain.agent_target.lora import add_lora, save_adapter
from redraft.retrain.agent_target.prepared import Example, Prepared
from redraft.retrain.agent_target.recipe import Recipe
from redraft.retrain.data.errors import DataError
from redraft.retrain.errors import TrainingError
from redraft.retrain.optimizer import adamw
from redraft.retrain.trainer import cosine_with_warmup

_IGNORED = -100
Log = Callable[[dict[str, Any]], None]


def train(prepared: Prepared, base: Path, folder: Path, log: Log) -> dict[str, Any]:
    """Train on ``prepared.train`` and write the adapter; returns what the model card tells of the run.

    The same recipe, data, base and machine give the same adapter but for the order in which a GPU adds.
    """
    if (found := identity(base)) != prepared.identity:
        raise DataError(f"{base} has identity {found}; the data was prepared for {prepared.identity}.")
    recipe = prepared.recipe
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(recipe.seed)
    model = load(base, device)
    loras = add_lora(model, recipe)
    parameters = [parameter for lora in loras.values() for parameter in (lora.lora_a, lora.lora_b)]
    optimizer = adamw(parameters, lr=recipe.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    epochs = [_batches(prepared.train, recipe, Random(f"{recipe.seed} {epoch}")) for epoch in range(recipe.epochs)]
    steps = sum(map(len, epochs))
    warmup = max(1, round(recipe.warmup_share * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine_with_warmup(step, steps, warmup))
    before = held_out_loss(model, prepared, device)
    log({"event": "start", "device": str(device), "steps": steps, "held_out_loss": before})
    started, step, tokens, after = time.perf_counter(), 0, 0, before
    for epoch, batches in enumerate(epochs):
        model.train()
        for batch in batches:
            loss_sum, count = supervised_loss(model, batch, device)
            loss = loss_sum / count
            torch.autograd.backward(loss)
            norm = nn.utils.clip_grad_norm_(parameters, recipe.clip_norm)
            tokens += sum(len(example.ids) for example in batch)
            if step % 10 == 0 or step == steps - 1:
                seen = {"loss": loss.item(), "grad_norm": norm.item()}
                rate, seconds = schedule.get_last_lr()[0], round(time.perf_counter() - started, 2)
                log(
                    {"event": "step", "step": step, **seen, "learning_rate": rate, "tokens": tokens, "seconds": seconds}
                )
                if not all(map(math.isfinite, seen.values())):
                    raise TrainingError(f"the loss is no longer finite at step {step}; lower learning_rate")
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
        after = held_out_loss(model, prepared, device)
        log({"event": "epoch", "epoch": epoch + 1, "held_out_loss": after})
    save_adapter(folder, loras, recipe)
    return {
        "steps": steps,
        "tokens": tokens,
        "seconds": round(time.perf_counter() - started, 1),
        "held_out_loss_before": before,
        "held_out_loss_after": after,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def load(folder: Path, device: torch.device) -> Any:
    """The base in bf16, without dropout of its own."""
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()


@torch.no_grad()
def held_out_loss(model: Any, prepared: Prepared, device: torch.device) -> dict[str, float]:
    """Mean loss a supervised token of the held-out examples, by where they are from."""
    model.eval()
    by_source: dict[str, list[Example]] = {}
    for example in prepared.held_out:
        by_source.setdefault(example.source, []).append(example)
    losses = {}
    for source, examples in sorted(by_source.items()):
        sums = [supervised_loss(model, batch, device) for batch in _batches(examples, prepared.recipe, Random(0))]
        losses[source] = round(sum(loss.item() for loss, _ in sums) / sum(count for _, count in sums), 4)
    return losses


def _batches(examples: Sequence[Example], recipe: Recipe, random: Random) -> list[list[Example]]:
    """Batches of about equally long examples, of at most ``batch_tokens`` with padding, in random order."""
    order = sorted(random.sample(examples, len(examples)), key=lambda example: len(example.ids))
    batches: list[list[Example]] = [[]]
    for example in order:
        if batches[-1] and len(example.ids) * (len(batches[-1]) + 1) > recipe.batch_tokens:
            batches.append([])
        batches[-1].append(example)
    random.shuffle(batches)
    return batches


def supervised_loss(model: Any, batch: Sequence[Example], device: torch.device) -> tuple[Tensor, int]:
    """Sum of the cross-entropy of the supervised tokens, and how many those are; padding is on the right."""
    width = max(len(example.ids) for example in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    labels = torch.full((len(batch), width), _IGNORED)
    for row, example in enumerate(batch):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        for start, end in example.spans:
            labels[row, start:end] = ids[row, start:end]
    ids, targets = ids.to(device), labels[:, 1:].to(device)
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    supervised = targets != _IGNORED
    logits = model.lm_head(hidden[supervised]).float()
    return F.cross_entropy(logits, targets[supervised], reduction="sum"), int(supervised.sum())


def card(prepared: Prepared, run: dict[str, Any], name: str, command: str) -> str:
    """The adapter's model card, in the hub's form."""
    facts = {
        "command": command,
        "commit": prepared.commit,
        "base_identity": prepared.identity,
        "data_sha256": prepared.sha256,
        "examples": prepared.counts,
        "recipe": msgspec.to_builtins(prepared.recipe),
        "run": run,
    }
    return _CARD.format(name=name, facts=json.dumps(facts, indent=2))


_CARD = """---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
library_name: peft
tags: [lora, tool-calling]
---
# {name}

A LoRA that makes SmolLM2-135M-Instruct call tools in the Hermes convention (`<tool_call>`). It is merged into the base
by `redraft models pull {name}`; the sum is exact and rounded to bf16 once, so that every machine gets the same weights.

**Data.** Ground-truth calls, closing texts and refusals of the Berkeley Function-Calling Leaderboard (PyPI `bfcl-eval`,
Apache-2.0), train families only, with Redraft's wording of closing texts and refusals; and plain replies that the base
wrote itself, so that it keeps its manners. No text of another model is in it.

**Licence.** Apache-2.0, as base and data.

**Limits.** A model of 135M parameters: it names tools and copies arguments well, and seldom plans. English only.

```json
{facts}
```
"""

"""EAGLE-3 checkpoints on disk, in the format that SGLang loads as ``LlamaForCausalLMEagle3``.

The first layer is ``midlayer`` and takes embedding and hidden state side by side; further ones are ``layers.1`` and so
on. The embedding is the target's. The head is the target's too, cut to a draft vocabulary, so it is stored only for
others who cannot cut it themselves: `export` writes it out. Layer ids are 0-based: what leaves that layer.

``d2t`` holds how far the target's id of a draft token lies beyond the draft id, ``t2d`` which of the target's tokens
are draft tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from msgspec import Meta, Struct
from torch import Tensor

from redraft.engine.checkpoints.checkpoint import ModelConfig, open_tensors
from redraft.engine.drafters.checkpoint import (
    BlockSize,
    ConfigFile,
    DrafterConfig,
    DrafterError,
    Positive,
    Token,
    check_supported,
    check_target,
    check_tensors,
    read_config,
    read_tensors,
    shape_like,
    shape_of,
    write_config,
    write_tensors,
)

ARCHITECTURE = "LlamaForCausalLMEagle3"

HEAD = "lm_head.weight"
TYPES = {"d2t": "I64", "t2d": "BOOL"}


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(DrafterConfig):
    """What decides an EAGLE-3 drafter's arithmetic; its blocks are those that it was trained to draft."""

    draft_vocab: int

    @classmethod
    def for_target(
        cls, target: ModelConfig, identity: str, *, layers: int, block_size: int, draft_vocab: int
    ) -> Eagle3Config:
        """A drafter with the target's own widths, on features of a low, a middle and a high layer."""
        return cls(
            **shape_like(target),
            layers=layers,
            block_size=block_size,
            draft_vocab=min(draft_vocab, target.vocab),
            feature_layers=low_middle_high(target.layers),
            target=identity,
        )


class _EagleConfig(Struct, frozen=True):
    eagle_aux_hidden_state_layer_ids: Annotated[list[Token], Meta(min_length=1)]
    use_aux_hidden_state: bool = True
    norm_before_fc: bool = False


class _Redraft(Struct, frozen=True):
    target: str = ""
    block_size: BlockSize = 8


class _File(ConfigFile, frozen=True, kw_only=True):
    draft_vocab_size: Positive
    eagle_config: _EagleConfig
    tie_word_embeddings: bool = False
    target_hidden_size: Positive | None = None
    bias: bool = False
    fc_norm: bool | None = None
    use_aux_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    redraft: _Redraft = _Redraft()


def low_middle_high(target_layers: int) -> tuple[int, ...]:
    """The layers that EAGLE-3's own code reads.

    >>> low_middle_high(36), low_middle_high(30)
    ((1, 17, 32), (1, 14, 26))
    """
    return (1, target_layers // 2 - 1, target_layers - 4)


def load_config(folder: Path) -> Eagle3Config:
    """Read ``config.json``; raises `DrafterError` naming what is missing or not supported."""
    config = read_config(folder, ARCHITECTURE, _File)
    eagle = config.eagle_config
    check_supported(
        folder / "config.json",
        {
            "tie_word_embeddings": (config.tie_word_embeddings, False),
            "target_hidden_size": (config.target_hidden_size or config.hidden_size, config.hidden_size),
            "bias": (config.bias, False),
            "fc_norm": (bool(config.fc_norm) or config.use_aux_norm, False),
            "norm_before_fc": (config.norm_before_fc or eagle.norm_before_fc, False),
            "norm_output": (config.norm_output, False),
            "use_aux_hidden_state": (eagle.use_aux_hidden_state, True),
        },
    )
    return Eagle3Config(
        **shape_of(config),
        block_size=config.redraft.block_size,
        draft_vocab=config.draft_vocab_size,
        feature_layers=tuple(eagle.eagle_aux_hidden_state_layer_ids),
        target=config.redraft.target,
    )


def expected_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of such a checkpoint, but for a head of its own."""
    hidden, queries, keys = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.feature_layers) * hidden),
        "midlayer.input_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
        "d2t": (config.draft_vocab,),
        "t2d": (config.vocab,),
    }
    for index, layer in enumerate(layer_names(config.layers)):
        inputs = hidden if index else 2 * hidden
        shapes |= {
            f"{layer}.hidden_norm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (queries, inputs),
            f"{layer}.self_attn.k_proj.weight": (keys, inputs),
            f"{layer}.self_attn.v_proj.weight": (keys, inputs),
            f"{layer}.self_attn.o_proj.weight": (hidden, queries),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.mlp.gate_proj.weight": (config.intermediate, hidden),
            f"{layer}.mlp.up_proj.weight": (config.intermediate, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, config.intermediate),
        }
    return shapes


def layer_names(layers: int) -> list[str]:
    """How tensors of layers begin, from the first to the last."""
    return ["midlayer", *(f"layers.{index}" for index in range(1, layers))]


def check_fits(
    config: Eagle3Config, target: ModelConfig, identity: str, where: Path, context_length: int | None = None
) -> None:
    """Raises `DrafterError` naming the first thing in which drafter and target do not belong together.

    ``context_length`` is what will be served of the target's context; None is all of it.
    """
    check_target(config, target, identity, where, context_length)
    if config.draft_vocab > config.vocab:
        raise DrafterError(f"{where}: draft_vocab_size {config.draft_vocab} is more than the vocabulary.")


def check(folder: Path, target: ModelConfig, identity: str, context_length: int | None = None) -> None:
    """Raises `DrafterError` for what configuration and the headers of the weights tell without reading these."""
    config = load_config(folder)
    check_fits(config, target, identity, folder, context_length)
    check_tensors(folder, _shapes(folder, config), TYPES)


def load(folder: Path) -> tuple[Eagle3Config, dict[str, Tensor]]:
    """Configuration and tensors, checked against each other; raises `DrafterError`."""
    config = load_config(folder)
    tensors = read_tensors(folder, _shapes(folder, config), TYPES)
    if not torch.equal(target_ids(tensors["d2t"]), tensors["t2d"].nonzero()[:, 0]):
        raise DrafterError(
            f"{folder}: d2t and t2d do not name the same tokens, ascending; the draft vocabulary is lost."
        )
    return config, tensors


def save(folder: Path, config: Eagle3Config, tensors: Mapping[str, Tensor], card: str) -> None:
    """Write a checkpoint with its model card; weights are rounded to bf16."""
    own = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "draft_vocab_size": config.draft_vocab,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
        },
        "redraft": {"target": config.target, "block_size": config.block_size},
    }
    write_config(folder, config, card, own)
    shapes = expected_shapes(config)
    if HEAD in tensors:
        shapes[HEAD] = (config.draft_vocab, config.hidden)
    state = {name: tensors[name].detach().cpu() for name in shapes}
    rounded = {name: tensor if name in TYPES else tensor.to(torch.bfloat16) for name, tensor in state.items()}
    write_tensors(folder, rounded, shapes)


def export(folder: Path, out: Path, head: Tensor) -> None:
    """Write the checkpoint in ``folder`` with the target's ``head`` [vocab, hidden], cut to the draft vocabulary.

    Raises `DrafterError`.
    """
    config, tensors = load(folder)
    card = (folder / "README.md").read_text(encoding="utf-8") if (folder / "README.md").exists() else ""
    cut = head.cpu()[target_ids(tensors["d2t"])]
    save(out, config, {HEAD: cut, **tensors}, card)


def target_ids(d2t: Tensor) -> Tensor:
    """The target's ids of all draft tokens, from ``d2t`` [draft tokens] int64."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def vocabulary(ids: Tensor, vocab: int) -> dict[str, Tensor]:
    """``d2t`` and ``t2d`` of a draft vocabulary, from the target's ids [draft tokens] int64, ascending."""
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": t2d}


def _shapes(folder: Path, config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    shapes = expected_shapes(config)
    if HEAD in open_tensors(folder):
        shapes[HEAD] = (config.draft_vocab, config.hidden)
    return shapes

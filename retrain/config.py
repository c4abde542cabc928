"""What decides a training run; a recipe is a YAML file of these keys."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from yaml.constructor import ConstructorError

from redraft.retrain.errors import TrainingError
from redraft.retrain.plain_yaml import NumberLoader


class TrainConfig(BaseModel):
    """Counts are of steps, sequences, blocks and tokens; sizes in bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    steps: int = Field(5000, ge=1, description="Optimizer steps.")
    sequences: int = Field(32, ge=1, le=1 << 16, description="Sequences of a step.")
    blocks: int = Field(48, ge=1, description="Most blocks of a sequence in a step.")
    block_size: int = Field(8, ge=2, le=64, description="Block start plus draft slots.")
    layers: int = Field(3, ge=1, description="The drafter's layers; DFlash reads as many of the target's.")
    mask_token_id: int = Field(0, ge=0, description="DFlash: the token that stands for one still to be drafted.")
    injection: bool = Field(
        True, description="DFlash: features go into every layer as K/V; without, they are rows of input (an ablation)."
    )
    autoregressive: bool = Field(
        False, description="DFlash: a block's tokens are drafted one after another instead of at once (an ablation)."
    )
    draft_vocab: int = Field(
        16384,
        ge=1,
        description="EAGLE-3: how many tokens it can draft, the most frequent of the answers it learns from.",
    )
    context_window: int | None = Field(
        None, ge=1, description="Features that a block sees before its start; unset: all."
    )
    loss: Literal["tokens", "distribution"] = Field(
        "tokens", description="Cross-entropy of the sampled tokens, or divergence from the target's distribution."
    )
    weights: Literal["prefix_decay", "dpace"] = Field("prefix_decay", description="How slots of a block weigh.")
    gamma: float = Field(4.0, gt=0, description="Slots over which prefix_decay falls to 1/e.")
    learning_rate: float = Field(1e-3, gt=0, description="Its peak; it ends at 0 by a half cosine.")
    warmup: int = Field(100, ge=0, description="Steps until the peak.")
    weight_decay: float = Field(0.01, ge=0, description="AdamW's, of matrices only.")
    clip: float = Field(1.0, gt=0, description="Largest norm of a step's gradient.")
    seed: int = Field(0, ge=0, lt=1 << 63, description="Decides initial weights, the order of data and the blocks.")
    save_every: int = Field(500, ge=1, description="Steps between states that a run can resume from.")
    log_every: int = Field(10, ge=1, description="Steps between lines of the log.")
    eval_every: int = Field(500, ge=1, description="Steps between replays of held-out answers.")
    held_out: int = Field(32, ge=0, description="Most held-out samples to replay, which choose the best step; 0: none.")
    pass_tokens: int = Field(
        1 << 17, ge=1, description="Padded context tokens of one pass; a step takes as many passes as it needs."
    )
    cache_bytes: int | None = Field(
        None,
        ge=0,
        description="Budget for features kept between epochs; unset: half of a GPU's free memory, or 1 GiB.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where to train.")
    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="Of computation; weights are kept in fp32.")


class _UniqueKeys(NumberLoader):
    """Refuses a key that is given twice, of which YAML's loader would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise ConstructorError(None, None, f"the key {key.value} is there twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_recipe(path: Path | None, **overrides: Any) -> TrainConfig:
    """The recipe at ``path`` (None: the defaults), with overrides that are not None; raises `TrainingError`."""
    content: Any = {}
    if path is not None:
        try:
            content = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys) or {}  # noqa: S506
        except OSError as error:
            raise TrainingError(f"{path} cannot be read: {error.strerror}") from None
        except yaml.MarkedYAMLError as error:
            line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
            raise TrainingError(f"{path}{line}: not valid YAML: {error.problem}") from None
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise TrainingError(f"{path}: not valid YAML: {str(error).splitlines()[0]}") from None
        if not isinstance(content, dict):
            raise TrainingError(f"{path} must hold keys and values")
    given = {key: value for key, value in overrides.items() if value is not None}
    try:
        return TrainConfig.model_validate({**content, **given}, strict=True)
    except ValidationError as error:
        raise TrainingError("\n".join(_explain(path, problem) for problem in error.errors())) from None


def _explain(path: Path | None, problem: Any) -> str:
    key = ".".join(map(str, problem["loc"]))
    if problem["type"] != "extra_forbidden":
        return f"{path or 'options'}: {key}: {problem['msg']}, not {problem['input']!r}"
    near = difflib.get_close_matches(key, TrainConfig.model_fields, 1)
    return f"{path}: there is no key {key}" + (f"; did you mean {near[0]}?" if near else "")

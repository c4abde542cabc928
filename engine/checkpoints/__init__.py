"""Checkpoints of targets: fetching, finding, checking and identifying them."""

from redraft.engine.checkpoints.adapter import merge
from redraft.engine.checkpoints.checkpoint import (
    Llama3RopeScaling,
    ModelConfig,
    expected_shapes,
    load_config,
    open_tensors,
    validate,
)
from redraft.engine.checkpoints.errors import AdapterError, CheckpointError, ModelNotFoundError, PullError
from redraft.engine.checkpoints.identity import identity
from redraft.engine.checkpoints.models import DEFAULT_MODEL, ModelEntry, list_models, models_dir, resolve, served_name
from redraft.engine.checkpoints.pull import pull
from redraft.engine.checkpoints.safetensors_file import TensorEntry
from redraft.engine.checkpoints.transfer import Progress

__all__ = [
    "DEFAULT_MODEL",
    "AdapterError",
    "CheckpointError",
    "Llama3RopeScaling",
    "ModelConfig",
    "ModelEntry",
    "ModelNotFoundError",
    "Progress",
    "PullError",
    "TensorEntry",
    "expected_shapes",
    "identity",
    "list_models",
    "load_config",
    "merge",
    "models_dir",
    "open_tensors",
    "pull",
    "resolve",
    "served_name",
    "validate",
]

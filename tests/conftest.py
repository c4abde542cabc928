"""Fixtures that more than one folder's tests share: a tiny random checkpoint, and the real default target."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from redraft.engine.checkpoints import DEFAULT_MODEL, resolve


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What is marked ``gpu`` runs wherever there is one."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


Redraft = Callable[..., tuple[int, str, str]]


@pytest.fixture
def redraft(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Redraft:
    """Runs the command; returns its exit status, standard output and standard error."""
    from redraft.ops import cli

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["redraft", *map(str, arguments)])
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        captured = capsys.readouterr()
        return int(leaving.value.code or 0), captured.out, captured.err

    return run


TINY_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": 257,
    "bos_token_id": 256,
    "model_type": "llama",
}

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Any:
    """A tokenizer of the 256 bytes and the two ChatML control tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    return tokenizer


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a small checkpoint of random weights; keyword arguments override its configuration."""

    def make(*, seed: int = 0, scale: float = 0.3, **overrides: Any) -> Path:
        import torch
        from safetensors.torch import save_file

        from redraft.engine.checkpoints.checkpoint import expected_shapes, load_config

        folder = tmp_path_factory.mktemp("checkpoint")
        (folder / "config.json").write_text(json.dumps(TINY_CONFIG | overrides))
        (folder / "chat_template.jinja").write_text(CHATML)
        byte_tokenizer().save(str(folder / "tokenizer.json"))
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            name: (torch.randn(shape, generator=generator) * scale + ("norm" in name)).to(torch.bfloat16)
            for name, shape in expected_shapes(load_config(folder)).items()
        }
        save_file(tensors, folder / "model.safetensors")
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_checkpoint(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint()


@pytest.fixture(scope="session")
def default_target() -> Path:
    """Where the default target was pulled to; `make test` fetches it."""
    return resolve(DEFAULT_MODEL)

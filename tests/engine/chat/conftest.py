"""Tokenizers small enough to train for the tests, and folders that hold them beside a chat template."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = ["Hello there, how are you? I am fine. naïve café 日本語 🙂", '{"name": "f", "arguments": {}}'] * 20
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def _byte_level() -> str:
    """Bytes are tokens, as in SmolLM2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return str(tokenizer.to_str())


def _byte_fallback() -> str:
    """Characters are tokens, and bytes stand in for those it lacks, as in Llama 2."""
    letters = sorted({letter for text in CORPUS for letter in text.replace(" ", "▁") if ord(letter) < 256} | {"▁"})
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    tokenizer = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return str(tokenizer.to_str())


@pytest.fixture(scope="session", params=["byte-level", "byte-fallback"])
def any_definition(request: pytest.FixtureRequest) -> str:
    """The ``tokenizer.json`` of each kind of tokenizer in turn."""
    return _byte_level() if request.param == "byte-level" else _byte_fallback()


@pytest.fixture(scope="session")
def definition() -> str:
    """A byte-level ``tokenizer.json`` with ChatML's control tokens."""
    return _byte_level()


@pytest.fixture(scope="session")
def smollm2_template() -> str:
    """The chat template that the default model is given."""
    return resources.files("redraft.engine.chat").joinpath("smollm2.jinja").read_text(encoding="utf-8")


@pytest.fixture
def make_folder(tmp_path: Path, definition: str) -> Callable[[str], Path]:
    """Returns a function that writes a folder with what chat needs of a checkpoint, and the given template."""

    def make(template: str) -> Path:
        (tmp_path / "tokenizer.json").write_text(definition)
        (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
        (tmp_path / "chat_template.jinja").write_text(template)
        bos = {"__type": "AddedToken", "content": "<|im_start|>"}
        config = {"bos_token": bos, "eos_token": "<|im_end|>", "pad_token": None}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return tmp_path

    return make

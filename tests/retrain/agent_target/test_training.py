"""What is trained is what is merged, and nothing else of the model changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from redraft.engine.checkpoints import identity, merge
from redraft.retrain.agent_target import prepared as files
from redraft.retrain.agent_target.__main__ import main
from redraft.retrain.agent_target.lora import add_lora
from redraft.retrain.agent_target.prepared import Example, Prepared
from redraft.retrain.agent_target.recipe import Recipe
from redraft.retrain.agent_target.train import card, load, supervised_loss, train
from redraft.retrain.data.errors import DataError
from redraft.retrain.errors import TrainingError

pytestmark = pytest.mark.unit
CPU = torch.device("cpu")
RECIPE = Recipe(epochs=12, batch_tokens=32, learning_rate=3e-2, dropout=0.0)
SENTENCE = tuple(range(3, 27))


@dataclass
class Run:
    base: Path
    adapter: Path
    prepared: Prepared
    facts: dict[str, Any]
    log: list[dict[str, Any]]


def _prepared(base: Path, recipe: Recipe = RECIPE) -> Prepared:
    """Sentences whose second half is to be learnt; what follows the first half depends on its first token."""
    examples = tuple(
        Example(
            "bfcl-single",
            (start, *SENTENCE[:8], *(token + start for token in SENTENCE[8 : 12 + start])),
            ((9, 13 + start),),
        )
        for start in range(4)
    )
    return Prepared(recipe, "abc", identity(base), examples, examples[:2], ())


@pytest.fixture(scope="module")
def run(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    torch.set_num_threads(1)
    base = make_checkpoint(scale=0.1)
    adapter = tmp_path_factory.mktemp("adapter")
    prepared = _prepared(base)
    log: list[dict[str, Any]] = []
    return Run(base, adapter, prepared, train(prepared, base, adapter, log.append), log)


def test_training_learns_what_is_supervised(run: Run) -> None:
    before, after = (run.facts[f"held_out_loss_{when}"]["bfcl-single"] for when in ("before", "after"))
    assert before > 4
    assert after < 0.5
    steps = [entry for entry in run.log if entry["event"] == "step"]
    assert steps[-1]["learning_rate"] < steps[0]["learning_rate"] + 1e-9 < RECIPE.learning_rate * 1.01
    assert run.facts["tokens"] == RECIPE.epochs * sum(len(example.ids) for example in run.prepared.train)


def test_the_merged_checkpoint_answers_as_the_trained_model(run: Run, tmp_path: Path) -> None:
    merge(run.base, run.adapter, tmp_path / "merged")
    model = load(run.base, CPU)
    loras = add_lora(model, RECIPE)
    trained = load_file(run.adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name, lora in loras.items():
            lora.lora_a.copy_(trained[f"base_model.model.{name}.lora_A.weight"])
            lora.lora_b.copy_(trained[f"base_model.model.{name}.lora_B.weight"])
        ids = torch.tensor([run.prepared.train[3].ids])
        merged, plain = load(tmp_path / "merged", CPU).float(), load(run.base, CPU).float()
        expected, ours, base = (m(input_ids=ids).logits for m in (model.float(), merged, plain))
    far = (base - expected).abs().max()
    assert (ours - expected).abs().max() < 0.02 * far
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))


def test_only_the_adapter_is_trained_and_every_linear_layer_has_one(run: Run) -> None:
    model = load(run.base, CPU)
    loras = add_lora(model, RECIPE)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable == {f"{name}.{matrix}" for name in loras for matrix in ("lora_a", "lora_b")}
    assert len(loras) == 2 * 7
    assert {parameter.dtype for parameter in model.parameters() if parameter.requires_grad} == {torch.float32}


def test_the_same_seed_gives_the_same_adapter(run: Run, tmp_path: Path) -> None:
    for seed, same in ((RECIPE.seed, True), (RECIPE.seed + 1, False)):
        prepared = _prepared(run.base, msgspec.structs.replace(RECIPE, seed=seed))
        train(prepared, run.base, tmp_path / str(seed), lambda entry: None)
        files_ = [folder / "adapter_model.safetensors" for folder in (run.adapter, tmp_path / str(seed))]
        assert (files_[0].read_bytes() == files_[1].read_bytes()) is same


def test_unsupervised_tokens_have_no_part_in_the_loss(run: Run) -> None:
    model = load(run.base, CPU)
    loss, count = supervised_loss(model, [Example("plain", SENTENCE, ((5, 9), (20, 22)))], CPU)
    logits = model(input_ids=torch.tensor([SENTENCE])).logits[0].float().log_softmax(-1)
    expected = -sum(logits[at - 1, SENTENCE[at]] for at in (5, 6, 7, 8, 20, 21))
    assert count == 6
    assert loss.item() == pytest.approx(expected.item(), rel=1e-2)


def test_padding_changes_nothing(run: Run) -> None:
    model = load(run.base, CPU)
    batch = [Example("plain", SENTENCE, ((5, 9),)), Example("plain", SENTENCE[:9], ((4, 9),))]
    together, count = supervised_loss(model, batch, CPU)
    alone = [supervised_loss(model, [example], CPU) for example in batch]
    assert count == sum(number for _, number in alone) == 9
    assert together.item() == pytest.approx(sum(loss.item() for loss, _ in alone), rel=1e-2)


def test_the_adapter_is_small_and_its_card_says_where_it_is_from(run: Run) -> None:
    tensors = load_file(run.adapter / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    text = card(run.prepared, run.facts, "tiny-agent", "the command")
    facts = json.loads(text.partition("```json\n")[2].partition("```")[0])
    assert facts["data_sha256"] == run.prepared.sha256
    assert facts["base_identity"] == run.prepared.identity
    assert (facts["command"], facts["commit"], facts["recipe"]["rank"]) == ("the command", "abc", 8)


def test_another_base_than_the_data_was_made_for_is_refused(
    run: Run, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"has identity \w{64}; the data was prepared for \w{64}"):
        train(run.prepared, make_checkpoint(seed=9), tmp_path / "out", lambda entry: None)


def test_a_loss_that_is_no_number_ends_the_run(run: Run, tmp_path: Path) -> None:
    prepared = _prepared(run.base, msgspec.structs.replace(RECIPE, learning_rate=1e30, clip_norm=1e30))
    with pytest.raises(TrainingError, match="no longer finite at step"):
        train(prepared, run.base, tmp_path / "out", lambda entry: None)
    assert not (tmp_path / "out").exists()


def test_a_prepared_file_comes_back_as_it_was(run: Run, tmp_path: Path) -> None:
    run.prepared.write(tmp_path / "data")
    assert files.read(tmp_path / "data") == run.prepared
    whole = (tmp_path / "data").read_bytes()
    (tmp_path / "cut").write_bytes(whole[:-20])
    (tmp_path / "changed").write_bytes(whole[:40] + bytes(40) + whole[80:])
    for file in ("cut", "changed", "absent"):
        with pytest.raises(DataError, match=file):
            files.read(tmp_path / file)


def test_the_commands_train_merge_and_say_what_is_wrong(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*arguments: object) -> list[str]:
        monkeypatch.setattr("sys.argv", ["agent_target", *map(str, arguments)])
        main()
        return capsys.readouterr().out.splitlines()

    data, adapter, merged = tmp_path / "data", tmp_path / "adapter", tmp_path / "merged"
    run.prepared.write(data)
    log = [json.loads(line) for line in call("train", data, adapter, "--base", run.base, "--set", "epochs=1")]
    assert [entry["event"] for entry in log] == ["start", "step", "step", "epoch", "end"]
    assert {file.name for file in adapter.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "README.md",
    }
    assert call("merge", run.base, adapter, merged) == [identity(merged)]
    with pytest.raises(SystemExit, match=r"error: .*adapter_config\.json"):
        call("merge", run.base, tmp_path, merged)

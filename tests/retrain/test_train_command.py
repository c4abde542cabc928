from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from redraft.engine.checkpoints import identity
from redraft.engine.drafters.dflash_checkpoint import load, save
from redraft.engine.types import SamplingParams
from redraft.retrain.data.prompts import Prompt
from redraft.retrain.data.responses import Response
from redraft.retrain.data.splits import Split
from redraft.retrain.data.store import Manifest, ResponseWriter, save_manifest, save_prompts
from redraft.retrain.paradigms.dflash import DFlashModel

from .conftest import random_tokens

pytestmark = pytest.mark.unit

Redraft = Callable[..., tuple[int, str, str]]


@pytest.fixture
def saved(drafter: DFlashModel, tmp_path: Path) -> Path:
    """A drafter's folder."""
    save(tmp_path / "drafter", drafter.config, drafter.state_dict(), card="")
    return tmp_path / "drafter"


@pytest.fixture
def data(tmp_path: Path, checkpoint: Path) -> Path:
    """A folder of training data: greedy answers to train and calibrate on, one of each looping."""
    folder = tmp_path / "data"
    splits: tuple[Split, ...] = ("train", "calibrate")
    prompts = [
        Prompt(
            f"{split}{number}",
            "plain",
            f"{split}{number}",
            split,
            f"{split}{number}",
            1,
            tuple(random_tokens(20, number)),
        )
        for split in splits
        for number in range(4)
    ]
    save_prompts(folder, [], prompts)
    writer = ResponseWriter(folder)
    for index, prompt in enumerate(prompts):
        answer = tuple(random_tokens(15, 100 + index))
        writer.add(Response(prompt.id, SamplingParams(temperature=0), answer, "stop", looping=prompt.id.endswith("3")))
    writer.close()
    write_manifest(folder, identity(checkpoint))
    return folder


def write_manifest(folder: Path, target: str) -> None:
    save_manifest(
        folder,
        Manifest(
            command="test",
            commit=None,
            model="tiny",
            chat="",
            target=target,
            sources=("plain",),
            sessions=8,
            sessions_cut=0,
            prompts_repeated=0,
            prompts=8,
            prompt_tokens=160,
            counts={},
        ),
    )


def test_a_drafter_is_trained_resumed_and_evaluated_from_the_command_line(
    redraft: Redraft, data: Path, checkpoint: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("sequences: 2\nlayers: 2\nblock_size: 4\nwarmup: 1\nsave_every: 2\nlog_every: 2\ndevice: cpu\n")
    run = tmp_path / "run"
    train = ("train", "dflash", "--data", data, "--out", run, "--model", checkpoint, "--config", recipe, "--steps", 4)
    train += ("--commit", "c0ffee")
    code, out, err = redraft(*train)
    assert (code, out) == (0, f"{run / 'drafter'}\n"), err
    assert "4/4 loss" in err
    config, _ = load(run / "drafter")
    assert (config.block_size, config.layers, config.target) == (4, 2, identity(checkpoint))
    record = json.loads((run / "provenance.json").read_text())
    assert (record["samples"], record["tokens"]) == (4, 60)
    assert record["command"].startswith("redraft train dflash --data")
    assert record["commit"] == "c0ffee"
    assert len(record["data"]) == 64
    last = json.loads((run / "log.jsonl").read_text().splitlines()[-1])
    assert last["held_out_committed"] == 3 * 14, "what does not loop of the calibrate split"
    assert (run / "best" / "config.json").exists()

    code, _, err = redraft("train", "export", run / "drafter", tmp_path / "other", "--model", checkpoint)
    assert code == 2 and "holds a drafter of kind dflash; SGLang loads it as it is" in err

    code, _, err = redraft(*train)
    assert code == 1
    assert "already holds a run" in err
    assert redraft(*train, "--resume")[0] == 0

    code, out, err = redraft("train", "eval", run, "--data", data, "--model", checkpoint, "--json")
    assert code == 0, err
    rows: list[dict[str, Any]] = json.loads(out)
    pools = {(row["drafter"], row["source"], row["block_length"]): row["committed"] for row in rows}
    assert pools == {
        (drafter, source, length): {"all": 42, "plain": 42, "looping": 14}[source]
        for drafter in ("dflash", "ngram")
        for source in ("all", "plain", "looping")
        for length in (1, 3)
    }
    code, out, _ = redraft("train", "eval", run, "--data", data, "--model", checkpoint)
    assert code == 0
    assert "dflash" in out


def test_another_target_s_answers_are_neither_learnt_from_nor_replayed(
    redraft: Redraft, data: Path, checkpoint: Path, tmp_path: Path, saved: Path
) -> None:
    write_manifest(data, "0" * 64)
    for arguments in (("dflash", "--out", tmp_path / "run"), ("eval", saved)):
        code, out, err = redraft("train", *arguments, "--data", data, "--model", checkpoint)
        assert (code, out) == (1, "")
        assert "was answered by the target 000000000000" in err


def test_what_is_not_there_is_named_without_a_traceback(
    redraft: Redraft, data: Path, checkpoint: Path, tmp_path: Path
) -> None:
    model, out = ("--model", checkpoint), ("--out", tmp_path / "run")
    deep, masked = tmp_path / "deep.yaml", tmp_path / "masked.yaml"
    deep.write_text("layers: 40\n")
    masked.write_text("layers: 2\nmask_token_id: 99999\n")
    for arguments, said in (
        (("dflash", "--data", tmp_path / "none", *out, *model), "holds no training data"),
        (("dflash", "--data", data, *out, *model, "--resume"), "nothing was saved to resume from"),
        (("dflash", "--data", data, *out, *model, "--config", tmp_path / "none.yaml"), "cannot be read"),
        (("dflash", "--data", data, *out, *model, "--config", deep), "layers: 40 are too many for a target of"),
        (("dflash", "--data", data, *out, *model, "--config", masked), "mask_token_id 99999 is outside the vocabulary"),
        (("eval", tmp_path / "run", "--data", data, *model), "run"),
    ):
        code, printed, err = redraft("train", *arguments)
        assert (code, printed) == (1, ""), err
        assert said in err
        assert "unexpected" not in err
        assert err.startswith("error: ")


def test_data_that_nobody_answered_is_neither_learnt_from_nor_replayed(
    redraft: Redraft, data: Path, checkpoint: Path, tmp_path: Path, saved: Path
) -> None:
    for shard in data.glob("responses-*"):
        shard.unlink()
    write_manifest(data, identity(checkpoint))
    code, _, err = redraft("train", "dflash", "--data", data, "--out", tmp_path / "run", "--model", checkpoint)
    assert code == 1
    assert "holds no answers to learn from; have some made: redraft data generate" in err
    code, _, err = redraft("train", "eval", saved, "--data", data, "--model", checkpoint)
    assert code == 1
    assert "holds no greedy answers of the split calibrate" in err


@pytest.mark.filterwarnings("ignore:.* found in sys.modules")
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("redraft.ops.commands.train", ("dflash", "--data", "{file}", "--out", "{file}", "--model", "{model}")),
        ("redraft.retrain.agent_target", ("prepare", "--plain", "{file}", "--base", "{model}", "{file}")),
    ],
)
def test_a_file_in_a_folder_s_place_is_one_line_without_the_command_too(
    module: str, arguments: tuple[str, ...], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    places = {"file": tmp_path / "file", "model": checkpoint}
    monkeypatch.setattr(sys, "argv", [module, *(argument.format(**places) for argument in arguments)])
    with pytest.raises(SystemExit) as leaving:
        runpy.run_module(module, run_name="__main__")
    assert str(leaving.value.code).startswith("error: ")
    assert "file" in str(leaving.value.code)
